from __future__ import annotations

import threading

import numpy as np
import pytest

from mpizero.kernels import pool
from mpizero.kernels.cpu import optimizer


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same_bits(threads):
    size = 3 * pool.BLOCK + 77
    rng = np.random.default_rng(0)
    w, g = rng.standard_normal((2, size)).astype(np.float32)
    expected, hyper = w.copy(), np.array([0.1, 0.01], np.float32)
    optimizer.sgd(expected, g, hyper, 5, size - 3)
    pool.run(optimizer.sgd, (w, g, hyper), 5, size - 3, threads)
    assert w.tobytes() == expected.tobytes()


def test_blocks_are_cut_at_fixed_places_and_cover_the_range():
    seen, lock = [], threading.Lock()

    def record(start, stop):
        with lock:
            seen.append((start, stop))

    pool.run(record, (), 10, 10 + 2 * pool.BLOCK + 1, threads=3)
    first = 10 + pool.BLOCK
    second = first + pool.BLOCK
    assert sorted(seen) == [(10, first), (first, second), (second, second + 1)]


def test_an_error_in_any_thread_is_raised():
    def fail(start, stop):
        if start:
            raise ArithmeticError("block failed")

    with pytest.raises(ArithmeticError, match="block failed"):
        pool.run(fail, (), 0, 4 * pool.BLOCK, threads=2)
