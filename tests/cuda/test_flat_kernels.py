"""CUDA twins of the kernels over flat arrays, in the simulator: the CPU twins' bits, on small arrays."""

from __future__ import annotations

import os

import numpy as np
import pytest

# The simulator is chosen when numba is imported; without it these kernels need a GPU.
if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
    pytest.skip("CUDA kernels run under NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

from mpizero import kernels
from mpizero.kernels.cuda.launch import cuda, kernel
from tests.kernels.update_rules import IN_ONE_PASS, UPDATES

DTYPES = (np.float32, np.float64)


def on_both(topic, name, *args):
    """Run a kernel on the GPU's and on the CPU's side; return results and, in turn, what arrays hold afterwards."""
    outcomes = []
    for namespace in (kernels.cuda, kernels.cpu):
        copies = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        result = getattr(getattr(namespace, topic), name)(*copies)
        outcomes.append((result, [a.tobytes() for a in copies if isinstance(a, np.ndarray)]))
    return outcomes


def values(count, size, dtype):
    return list(np.abs(np.random.default_rng(size).standard_normal((count, size))).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UPDATES)
def test_updates_have_the_bits_of_the_cpu(name, dtype):
    slots, scalars = UPDATES[name]
    for size, start, stop in ((0, 0, 0), (1, 0, 1), (9, 2, 8)):
        gpu, cpu = on_both("update", name, *values(2 + slots, size, dtype), np.array(scalars, dtype), start, stop)
        assert gpu == cpu


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_sum_and_update_have_the_bits_of_the_cpu(name, dtype):
    slots, scalars = UPDATES[name]
    rng = np.random.default_rng(0)
    rows_a, rows_b = rng.standard_normal((2, 9)).astype(dtype), rng.standard_normal((3, 12)).astype(dtype)
    for program in ([3], [0, -3], [0, -3, 2, -5, -1, -6], [4, 1, 2, -1, -1]):
        rows = (rows_a, 1, rows_b, 3, np.array(program, np.int32), np.array([3], dtype))
        gpu, cpu = on_both("update", "tree_sum", *rows, np.zeros(8, dtype), 1, 7)
        assert gpu == cpu
        state, one = values(1 + slots, 8, dtype), (np.concatenate([rows_a, rows_b[:, 2:11]]), 1, *rows[4:])
        gpu, cpu = on_both("update", f"{name}_tree", *one, *state, np.array(scalars, dtype), 1, 7)
        assert gpu == cpu


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_and_direction_have_the_bits_of_the_cpu(dtype):
    rows = np.random.default_rng(0).standard_normal((2, 9)).astype(dtype)
    program, divisor = np.array([0, -3, 1, -1], np.int32), np.array([3], dtype)
    hyper = np.array([0.01, 0.9, 0.1, 0.999, 0.001, 0.1, 3.0, 1e-6], dtype)
    arrays = values(4, 8, dtype)
    gpu, cpu = on_both("update", "lamb_direction_tree", rows, 1, program, divisor, *arrays, hyper, 1, 7)
    assert gpu == cpu


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_bits_of_the_canonical_tree(dtype):
    x, y = np.random.default_rng(0).standard_normal((2, 300)).astype(dtype)
    starts, stops = np.array([0, 5, 7, 100, 30]), np.array([300, 5, 8, 228, 95])
    for name, arrays in (("tree_square_sums", (x,)), ("tree_dots", (x, y))):
        gpu, cpu = on_both("reduction", name, *arrays, starts, stops, np.full(5, 9.0))
        assert gpu == cpu
    gpu, cpu = on_both("reduction", "tree_square_sums", x, starts[:0], stops[:0], np.empty(0))
    assert gpu == cpu


def test_threads_that_run_in_turn_stop_at_barriers_and_raise_their_errors(in_turn):
    @kernel("void(f8[::1])")
    def rotated(x):
        kept, i = cuda.shared.array(3, np.float64), cuda.threadIdx.x
        for _ in range(2):
            kept[i] = x[i]
            cuda.syncthreads()
            x[i] = kept[(i + 1) % 3]
            if x[i] < 0:
                raise ValueError("a negative value")
            cuda.syncthreads()

    x = np.arange(3.0)
    rotated(x)
    assert x.tolist() == [2.0, 0.0, 1.0]
    for bad in range(3):
        with pytest.raises(ValueError, match=r"tid=\[\d, 0, 0\].*a negative value"):
            rotated(np.where(np.arange(3) == bad, -1.0, 1.0))
    rotated(x)
    assert x.tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_value_that_is_not_finite_is_found(dtype):
    for bad in ([], [4], [3, 8], [0]):
        x = np.ones(9, dtype)
        x[bad] = np.nan
        for name in ("all_finite", "first_nonfinite"):
            gpu, cpu = on_both("reduction", name, x)
            assert gpu == cpu


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_arrays_have_the_bits_of_the_cpu(dtype):
    arrays, out = np.random.default_rng(0).standard_normal((8, 3, 7)).astype(dtype), np.zeros((3, 4), dtype)
    for name, terms in (("add_two", 2), ("add_four", 4), ("add_eight", 8)):
        gpu, cpu = on_both("reduction", name, *arrays[:terms], 2, out)
        assert gpu == cpu


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_are_split_and_joined(dtype):
    matrix, parts, ranges = np.arange(15, dtype=dtype).reshape(3, 5), np.zeros(17, dtype), columns_in_parts()
    gpu, cpu = on_both("layers", "split_columns", matrix, ranges, parts)
    assert gpu == cpu
    gpu, cpu = on_both("layers", "join_columns", np.arange(17, dtype=dtype), ranges, matrix)
    assert gpu == cpu


def columns_in_parts():
    """Columns 0, 3 and 4 of a matrix with three rows go to a matrix at 8, and columns 1 and 2 to one at 0."""
    return np.array([[0, 1, 8, 3], [1, 2, 0, 2], [3, 2, 9, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranges_are_packed_and_unpacked(dtype):
    source, target = np.arange(12, dtype=dtype), np.zeros(12, dtype)
    starts, sizes = np.array([9, 2, 4]), np.array([3, 0, 4])
    for name in ("pack", "unpack"):
        gpu, cpu = on_both("layers", name, source, starts, sizes, target)
        assert gpu == cpu
    gpu, cpu = on_both("layers", "scale", source, np.array([0.1], dtype))
    assert gpu == cpu


def test_casts_have_the_bits_of_the_cpu():
    numbers = [0.0, -0.0, 1.0, -1.5, 65504.0, 65520.0, 1e9, 6e-8, 3e-8, 2.9e-8, 1e-40, 0.1, np.inf, -np.inf, 2049.0]
    x = np.array(numbers, np.float32)
    halves = np.array([0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x8001, 0xFC00], np.uint16)
    for name in ("bfloat16", "float16"):
        gpu, cpu = on_both("layers", f"to_{name}", x, np.zeros(x.size, np.uint16))
        assert gpu == cpu
        gpu, cpu = on_both("layers", f"from_{name}", halves, np.zeros(halves.size, np.float32))
        assert gpu == cpu
        nan = np.zeros(1, np.uint16)
        getattr(kernels.cuda.layers, f"to_{name}")(np.array([np.nan], np.float32), nan)
        back = np.zeros(1, np.float32)
        getattr(kernels.cuda.layers, f"from_{name}")(nan, back)
        assert np.isnan(back[0])


def test_the_wrong_number_of_arguments_or_dimensions_is_refused_by_name():
    with pytest.raises(TypeError, match="scale takes 2 arguments"):
        kernels.cuda.layers.scale(np.ones(3))
    with pytest.raises(TypeError, match="x must have 1 dimension"):
        kernels.cuda.layers.scale(np.ones((3, 3)), np.ones(1))


@pytest.mark.parametrize("size", [0, 1, 300])
def test_compressed_messages_have_the_bits_of_the_cpu(size):
    x, residual = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)
    x[size // 2 : size // 2 + 9] = 0.5  # equal magnitudes
    blocks = -(-size // kernels.cpu.update.COMPRESSION_BLOCK)
    encoded = np.zeros(blocks, np.float32), np.zeros(size, np.int8)
    gpu, cpu = on_both("update", "int8_encode", x, residual, *encoded)
    assert gpu == cpu
    kernels.cpu.update.int8_encode(x, residual.copy(), *encoded)
    gpu, cpu = on_both("update", "int8_decode", *encoded, np.ones(size, np.float32))
    assert gpu == cpu
    for count in {0, min(1, size), size // 7, size}:
        counts = np.zeros(kernels.cpu.update.COUNTERS, np.int64)
        picked = np.zeros(count, np.int32), np.zeros(count, np.float32)
        (_, gpu), (_, cpu) = on_both("update", "top_encode", x, np.zeros_like(x), counts, *picked)
        assert gpu[:2] + gpu[3:] == cpu[:2] + cpu[3:]  # what counters hold afterwards means nothing
        kernels.cpu.update.top_encode(x, residual.copy(), counts, *picked)
        gpu, cpu = on_both("update", "top_decode", *picked, np.ones(size, np.float32))
        assert gpu == cpu
