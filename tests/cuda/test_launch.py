"""What a launch on a GPU passes to numba-cuda, and where: CuPy, numba and the GPU are stood for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from mpizero.kernels.cuda import launch
from mpizero.kernels.gpu import Gpus


class Memory:
    """An array on the GPU."""

    def __init__(self, values):
        self.values, self.ndim, self.size = values.copy(), values.ndim, values.size

    def get(self, out):
        out[...] = self.values


@launch.kernel("void(const T[::1], i8[::1], T[::1], u8)")
def doubled(x, counts, y, key):
    y[: x.size] = 2 * x
    counts[0] = x.size


@pytest.fixture
def launches(monkeypatch):
    """Launch kernels in Python; return a list of their (blocks, threads, stream) and types of scalars."""
    found, current = [], SimpleNamespace(ptr=0)

    class Dispatcher:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, configuration):
            def run(*args):
                found.append((configuration, type(args[-1])))
                self.kernel.python(*(array.values for array in args[:-1]), args[-1])

            return run

    stream = SimpleNamespace(get_current_stream=lambda: current)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(asarray=Memory, cuda=stream))
    monkeypatch.setattr(launch, "gpus", Gpus)
    monkeypatch.setattr(doubled, "_compiled", None)
    monkeypatch.setattr(doubled, "dispatcher", lambda: Dispatcher(doubled))
    monkeypatch.setattr(launch, "load_or_compile", lambda *args: None)
    monkeypatch.setattr(doubled, "_loaded", set())
    of_numba = SimpleNamespace(external_stream=lambda number: number, as_cuda_array=lambda array, sync: array)
    monkeypatch.setattr(launch, "cuda", of_numba)
    return found, current


def test_a_kernel_runs_on_the_stream_on_which_cupy_computes(launches):
    """Numba's own default, 0, is another stream where the environment asks for one default stream a thread."""
    found, current = launches
    arrays = [Memory(np.ones(5)), Memory(np.zeros(1, np.int64)), Memory(np.zeros(5))]
    for current.ptr in (0, 2, 94_000):
        doubled(*arrays, 7)
    assert [configuration[2] for configuration, _ in found] == [1, 2, 94_000]
    assert {kind for _, kind in found} == {np.uint64}


def test_host_arrays_are_copied_there_and_back_what_is_not_const(launches):
    x, counts, y = np.arange(5.0), np.zeros(1, np.int64), Memory(np.zeros(5))
    doubled(x, counts, y, 0)
    assert np.array_equal(y.values, 2 * x)
    assert counts[0] == 5
    assert np.array_equal(x, np.arange(5.0))


@pytest.mark.parametrize("size", [0, 10_000, 1 << 20])
def test_a_block_has_as_many_threads_in_every_launch(launches, size):
    """Sums over the threads of a block have the same bits; numba warns where there are fewer than 128 blocks."""
    found, _ = launches
    doubled(Memory(np.zeros(size, np.float32)), np.zeros(1, np.int64), Memory(np.zeros(size, np.float32)), 0)
    ((blocks, threads, _), _), *_ = found
    assert threads == launch.THREADS
    assert 128 <= blocks <= launch.BLOCKS
