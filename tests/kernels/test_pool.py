from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from mpizero.kernels import jit
from mpizero.kernels.cpu import layers, losses, update
from mpizero.kernels.jit import DividedKernel

DIVIDED = {
    f"{module.__name__.rpartition('.')[2]}.{name}": kernel
    for module in (layers, losses)
    for name, kernel in vars(module).items()
    if isinstance(kernel, DividedKernel)
}


def arguments(kernel, rows, dtype):
    """Random arguments of ``kernel``, whose divided arrays have ``rows`` on the first axis, and other axes 32."""
    rng = np.random.default_rng(0)
    found = []
    for i, parameter in enumerate(kernel.signature.parameters[: len(kernel.__signature__.parameters)]):
        shape = (rows if i in kernel.divided else 32, 32)[: parameter.ndim]
        if parameter.dtype == "i8":
            found.append(rng.integers(32, size=shape))
        else:
            found.append(rng.uniform(0.5, 2, shape).astype(dtype if parameter.dtype == "T" else parameter.dtype))
    return found


@pytest.mark.parametrize("name", DIVIDED)
def test_kernels_whose_rows_are_divided_between_threads_give_the_same_bits(name, monkeypatch):
    kernel, used = DIVIDED[name], []
    alone, shared = arguments(kernel, 101, "f"), arguments(kernel, 101, "f")
    kernel(*alone)
    monkeypatch.setattr(jit, "_WORTH_A_THREAD", 16)
    monkeypatch.setattr(jit, "_blas_threads", lambda: lambda: 3)
    monkeypatch.setattr(jit, "run_tasks", lambda tasks, threads: (used.append(threads), [task() for task in tasks]))
    kernel(*shared)
    assert used == [3]
    assert [x.tobytes() for x in shared] == [x.tobytes() for x in alone]


def test_tasks_may_have_tasks_of_their_own():
    done = []
    inner = [lambda: done.append(1)] * 3
    jit.run_tasks([lambda: jit.run_tasks(inner, 2)] * 5, 2)
    assert len(done) == 15


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(threads):
    size = 3 * jit.BLOCK + 77
    rng = np.random.default_rng(0)
    w, g = rng.standard_normal((2, size)).astype(np.float32)
    expected, hyper = w.copy(), np.array([0.1, 0.01], np.float32)
    update.sgd(expected, g, hyper, 5, size - 3)
    jit.run_range(update.sgd, (w, g, hyper), 5, size - 3, threads)
    assert w.tobytes() == expected.tobytes()


def test_blocks_are_cut_at_fixed_places_and_cover_the_range():
    seen, lock = [], threading.Lock()

    def record(start, stop):
        with lock:
            seen.append((start, stop))

    jit.run_range(record, (), 10, 10 + 2 * jit.BLOCK + 1, threads=3)
    first = 10 + jit.BLOCK
    second = first + jit.BLOCK
    assert sorted(seen) == [(10, first), (first, second), (second, second + 1)]


def test_an_error_in_any_thread_is_raised():
    def fail(start, stop):
        if start:
            raise ArithmeticError("block failed")

    with pytest.raises(ArithmeticError, match="block failed"):
        jit.run_range(fail, (), 0, 4 * jit.BLOCK, threads=2)


def test_what_does_not_fit_is_told_of_whole_arrays(monkeypatch):
    monkeypatch.setattr(jit, "_WORTH_A_THREAD", 16)
    monkeypatch.setattr(jit, "_blas_threads", lambda: lambda: 3)
    with pytest.raises(TypeError, match=r"gelu: y must be .*, got float64 of shape \(101,\)"):
        layers.gelu(np.ones(101, np.float32), np.ones(101))
    with pytest.raises(TypeError, match="gelu takes 2 arguments"):
        layers.gelu(np.ones(101, np.float32))


def test_a_blas_with_threads_of_another_library_is_asked_through_threadpoolctl(monkeypatch):
    """OpenBLAS built with OpenMP does not know the limit until its next product; old versions name no symbols."""
    limits = iter((3, 2))

    class Controller:
        threading_layer, check_symbols = "openmp", ("openblas_get_num_threads",)
        num_threads = property(lambda self: next(limits))

    found = SimpleNamespace(select=lambda user_api: SimpleNamespace(lib_controllers=[Controller()]))
    monkeypatch.setattr("threadpoolctl.ThreadpoolController", lambda: found)
    asked = jit._blas_threads.__wrapped__()
    assert (asked(), asked()) == (3, 2)
