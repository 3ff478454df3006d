"""Batches read ahead are those read on demand; the thread is bounded, ends, and hides no error."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mpizero import data
from mpizero.errors import ConfigError, DataError
from mpizero.testing import run_in_threads


class Counted(data.ArraySource):
    """A source that tells of its reads, and fails in the read of a sample."""

    def __init__(self, length, bad=-1):
        super().__init__(np.arange(length), -np.arange(length))
        self.done, self.bad, self.threads = threading.Semaphore(0), bad, set()

    def read(self, indices):
        self.done.release()
        self.threads.add(threading.current_thread().name)
        if self.bad in indices:
            raise DataError(f"sample {self.bad}: gone")
        return super().read(indices)


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mpizero-read-ahead")]


@pytest.mark.parametrize("steps", [None, 9])
def test_the_same_batches_come_from_the_other_thread(ranks, steps):
    def run(comm):
        found = []
        for prefetch in (0, 1, 3):
            source = Counted(20)
            with data.batches(source, ranks(comm), 6, seed=4, steps=steps, consumed=7, prefetch=prefetch) as stream:
                found.append([(next(stream)[0].tolist(), stream.consumed, stream.epoch) for _ in range(9)])
            assert any(name.startswith("mpizero-read-ahead") for name in source.threads) == bool(prefetch)
        assert found[0] == found[1] == found[2]

    run_in_threads(3, run)
    assert not readers()


def test_the_thread_is_a_bounded_number_of_batches_ahead_and_ends(ranks):
    source = Counted(100)
    stream = data.batches(source, ranks(), 5, prefetch=3)
    next(stream)
    assert all(source.done.acquire(timeout=60) for _ in range(5))  # the first batch twice
    assert not source.done.acquire(timeout=0.05)
    stream.close()
    stream.close()
    assert not readers()
    before = data.batches(source, ranks(), 5, consumed=5)
    assert next(stream)[0].tolist() == next(before)[0].tolist()  # goes on after close
    stream.close()
    assert len(list(data.batches(source, ranks(), 5, steps=4, prefetch=9))) == 4
    assert not readers()


def test_an_error_is_raised_where_its_batch_is_asked_for(ranks):
    order = data.sample_order(0, 20, 20, 0)
    stream = data.batches(Counted(20, bad=order[13]), ranks(), 5, prefetch=4)
    assert [next(stream)[0].size for _ in range(2)] == [5, 5]
    with pytest.raises(DataError, match="gone"):
        next(stream)
    assert stream.consumed == 10
    assert not readers()


def test_the_depth_is_a_whole_number(ranks, numbers):
    with pytest.raises(ConfigError, match="prefetch=-1"):
        data.batches(numbers(5), ranks(), 2, prefetch=-1)
