"""Matrix products by this package's kernel: right, and of the same bits whatever stands around an element."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from mpizero.errors import ConfigError
from mpizero.kernels import jit
from mpizero.kernels import matmul as multiply
from mpizero.kernels.matmul import DEPTH, KernelProducts, matmul, memory_size, product

pytestmark = pytest.mark.skipif(not multiply.fuses(), reason="needs a compiler, and a CPU that fuses")
LENGTHS = (0, 1, 2, 7, 12, 16, 31, 33, 64, 100)


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setattr(multiply, "library", KernelProducts)


def matrix(rng, rows, columns, dtype, order=0):
    """A random matrix whose rows, columns or neither are contiguous, alone or inside of a larger one."""
    wide = rng.standard_normal((2 * rows + 3, 3 * columns + 5)).astype(dtype)
    high = rng.standard_normal((columns + 3, rows + 5)).astype(dtype)
    inside = wide[1 : rows + 1, 2 : columns + 2], high[1 : columns + 1, 2 : rows + 2].T
    return (inside[0].copy(), inside[1].copy(order="F"), *inside, wide[: 2 * rows : 2, : 3 * columns : 3])[order]


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_products_of_all_shapes_and_orders_are_right(dtype):
    rng = np.random.default_rng(0)
    for _ in range(300):
        rows, depth, columns = rng.choice(LENGTHS, 3)
        a, b = (matrix(rng, *shape, dtype, rng.integers(5)) for shape in ((rows, depth), (depth, columns)))
        expected, bound = a.astype("d") @ b.astype("d"), 4 * depth * np.finfo(dtype).eps
        around = np.full((rows + 1, columns + 3), np.nan, dtype)
        for out in (None, np.full((rows, columns), np.nan, dtype), around[1:, 2 : columns + 2], around.T[2:-1, 1:].T):
            found = matmul(a, b, out)
            assert out is None or found is out
            np.testing.assert_allclose(found, expected, rtol=0, atol=bound * 4)
        assert np.isnan(around[0]).all()
        assert np.isnan(around[:, [0, 1, -1]]).all()


@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("depth", [1, 40, DEPTH + 300])
def test_each_term_is_added_in_ascending_order_with_one_rounding(dtype, depth):
    """The oracle fuses in numbers of more digits, which rounds twice: hardly ever otherwise for float32."""
    rng = np.random.default_rng(depth)
    a, b = matrix(rng, 5, depth, "f"), matrix(rng, depth, 37, "f", 1)
    if dtype == "d":  # few digits, so that products are exact
        a, b = (np.round(x.astype("d") * 2**20) for x in (a, b))
    total = None
    for start in range(0, depth, DEPTH):
        part = np.zeros((5, 37), dtype)
        for p in range(start, min(start + DEPTH, depth)):
            part = (np.longdouble(a[:, p, None]) * np.longdouble(b[p]) + part).astype(dtype)
        total = part if total is None else total + part
    assert matmul(a, b).tobytes() == total.tobytes()


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_bits_depend_on_nothing_around_an_element(dtype):
    rng = np.random.default_rng(3)
    a, b = matrix(rng, 67, 300, dtype), matrix(rng, 300, 101, dtype)
    whole = matmul(a, b)
    for rows in (slice(0, 1), slice(5, 9), slice(40, 67), slice(3, 60, 7)):
        assert matmul(a[rows], b).tobytes() == whole[rows].tobytes()
    for columns in (slice(0, 1), slice(30, 35), slice(64, 101), slice(2, 90, 9)):
        assert matmul(a, b[:, columns]).tobytes() == whole[:, columns].tobytes()
    for left in (a, np.asfortranarray(a)):
        for right in (b, np.asfortranarray(b)):
            assert matmul(left, right).tobytes() == whole.tobytes()
            assert matmul(right.T, left.T).T.tobytes() == whole.tobytes()
    offset = np.empty(a.size + 1, dtype)[1:].reshape(a.shape)
    offset[...] = a
    assert matmul(offset, b).tobytes() == whole.tobytes()


@pytest.mark.parametrize("shape", [(1200, 64, 70), (64, 64, 1200), (1100, 130, 1101)])
def test_bits_do_not_depend_on_threads_or_blocks(shape, monkeypatch):
    rows, depth, columns = shape
    rng = np.random.default_rng(0)
    a, b = matrix(rng, rows, depth, "f"), matrix(rng, depth, columns, "f")
    alone = np.concatenate([matmul(a[start : start + 50], b) for start in range(0, rows, 50)])
    used = []
    run = jit.run_tasks
    monkeypatch.setattr(jit, "run_tasks", lambda tasks, n: used.append(n) or run(tasks, n))
    monkeypatch.setattr(multiply, "_WORTH_A_THREAD", 1 << 21)  # so that small products are divided
    for threads in (1, 2, 3):
        monkeypatch.setattr(jit, "_blas_threads", lambda threads=threads: lambda: threads)
        assert matmul(a, b).tobytes() == alone.tobytes()
    assert used == [2, 2] if rows * depth * columns < 6 << 20 else [2, 3]


@pytest.mark.parametrize("shape", [(37, 50, 300), (300, 50, 37), (150, 64, 129)])
def test_a_long_product_lets_messages_progress_between_its_parts_with_the_same_bits(shape, monkeypatch):
    rows, depth, columns = shape
    rng, calls = np.random.default_rng(0), []
    a, b = rng.standard_normal((depth, rows)).astype("f").T, rng.standard_normal((depth, columns)).astype("f")
    expected = matmul(a, b)
    assert matmul(a, b, between=lambda: calls.append("")).tobytes() == expected.tobytes()
    assert not calls, "it is short"
    monkeypatch.setattr(multiply, "_LONG", rows * depth * columns // 5)
    assert matmul(a, b, between=lambda: calls.append("")).tobytes() == expected.tobytes()
    assert len(calls) == 5
    out = np.zeros((rows, columns + 3), "f")
    matmul(a, b, out[:, 3:], lambda: calls.append(""))
    assert (out[:, 3:] == expected).all()
    assert not out[:, :3].any()


def test_there_are_as_many_threads_as_for_numpy():
    gc.collect()  # models that other tests have left would give their threads back in between
    for threads in (1, 2):
        with threadpool_limits(threads, user_api="blas"):
            assert multiply.threads_for(1 << 30) == threads
            assert multiply.threads_for(1 << 21) == 1


def test_nothing_but_fitting_matrices_of_floats_is_multiplied():
    single, kernel = np.ones((4, 4), "f"), KernelProducts()
    for a, b, out in (
        (single, single.astype("d"), single.copy()),
        (single, single, single.astype("d")),
        (single.astype("i"), single.astype("i"), single.astype("i")),
        (single, single[:3], single.copy()),
        (single, single, np.ones((4, 5), "f")),
    ):
        assert not kernel.product(a, b, out)
    with pytest.raises(ValueError, match="matmul"):
        matmul(single, single[:3])
    assert matmul(single.astype(int), single.astype(int)).tolist() == [[4] * 4] * 4
    assert matmul(single, np.ones(4, "f")).tolist() == [4] * 4


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_the_kernel_in_plain_python_computes_the_same_product(dtype):
    rng = np.random.default_rng(0)
    for order in range(4):
        a, b, out = matrix(rng, 30, 35, dtype, order), matrix(rng, 35, 41, dtype, order), np.empty((30, 41), dtype)
        assert product.python(a, b, out, np.empty(memory_size(30, 35, b.shape[1], a.itemsize), dtype))
        np.testing.assert_allclose(out, matmul(a, b), rtol=0, atol=200 * np.finfo(dtype).eps)


def test_a_cpu_that_does_not_fuse_is_named_where_the_kernel_is_asked_for(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("MPIZERO_BLAS", "mpizero")
    monkeypatch.setattr(multiply, "fuses", lambda: False)
    with pytest.raises(ConfigError, match="MPIZERO_BLAS=mpizero: this CPU has no fused multiply-add"):
        multiply.library.__wrapped__()
