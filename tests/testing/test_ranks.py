from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from mpizero.errors import RemoteError, StateError
from mpizero.testing import assert_same_as_serial, parallel_assert, run_in_threads
from mpizero.testing.checks import first_difference


def test_each_rank_has_a_thread_and_none_is_left():
    names = run_in_threads(3, lambda comm: (comm.barrier(), threading.current_thread().name)[1])
    assert names == ["rank 0", "rank 1", "rank 2"]
    assert not [t for t in threading.enumerate() if t.name.startswith("rank ")]


def test_the_first_real_error_comes_back_with_its_traceback():
    def work(comm):
        comm.barrier()
        if comm.rank == 2:
            raise OSError("disk full")
        comm.barrier()

    with pytest.raises(OSError, match="disk full") as caught:
        run_in_threads(3, work)
    assert caught.traceback[-1].name == "work"


def test_threads_that_wait_for_one_that_cannot_be_started_end(monkeypatch):
    start = threading.Thread.start

    def refused(thread):
        if thread.name == "rank 2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(StateError, match=r"only 2 of 4 threads have started .*ulimit -u"):
        run_in_threads(4, lambda comm: comm.barrier())
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name.startswith("rank "):
            thread.join(60)
            assert not thread.is_alive()


def test_exits_of_a_thread_are_errors_too():
    with pytest.raises(SystemExit):
        run_in_threads(2, lambda comm: exit(3) if comm.rank else comm.barrier())


def test_what_is_false_on_one_rank_fails_on_all():
    def work(comm):
        with pytest.raises(AssertionError, match="rank 1: only 5; rank 2: false"):
            parallel_assert(comm, comm.rank == 0, "only 5" if comm.rank == 1 else "")
        parallel_assert(comm, np.bool_(True))

    run_in_threads(3, work)


def test_the_same_bits_as_serial_pass():
    def mean(comm):
        rank, size = (comm.rank, comm.size) if comm else (0, 1)
        parts = comm.allgather_object(np.arange(12)[rank::size].sum()) if comm else [np.arange(12).sum()]
        return {"sum": int(sum(parts)), "nan": np.array([np.nan])}

    run_in_threads(4, lambda comm: assert_same_as_serial(mean, comm))


def test_a_different_bit_fails_on_all_ranks_and_is_placed():
    def drift(comm):
        return {"loss": [np.array([1.0, 0.0 if comm is None or comm.rank != 1 else -0.0])]}

    def work(comm):
        with pytest.raises(
            AssertionError, match=r"^rank 1: result\['loss'\]\[0\] differs in 1 of 2 elements, first at 1"
        ):
            assert_same_as_serial(drift, comm)

    run_in_threads(2, work)


def test_another_error_of_one_rank_reaches_all():
    def fails(comm):
        if comm.rank == 1:
            raise ValueError("no such file")
        return 0

    def work(comm):
        expected = ValueError if comm.rank == 1 else RemoteError
        with pytest.raises(expected, match="no such file"):
            assert_same_as_serial(fails, comm)

    run_in_threads(3, work)


@pytest.mark.parametrize(
    ("found", "expected", "message"),
    [
        (np.zeros(2), np.zeros(2, "f4"), r"result is float64\[2\], expected float32\[2\]"),
        (np.zeros(2), np.zeros((2, 1)), r"result is float64\[2\], expected float64\[2, 1\]"),
        ([1], [1, 2], "result has 1 items, expected 2"),
        ({"a": 1}, {"b": 1}, r"result has keys \['a'\], expected \['b'\]"),
        ("x", "y", "result differs in 1 of 1 elements"),
        (None, {1}, "result is None, expected {1}"),
    ],
)
def test_differences_of_kind_are_described(found, expected, message):
    assert re.search(message, first_difference(found, expected))


@pytest.mark.mpi
def test_all_ranks_of_a_job_fail_together(world):
    if world.size > 1:
        with pytest.raises(AssertionError, match="^rank 1: false"):
            parallel_assert(world, world.rank != 1)
    assert_same_as_serial(lambda comm: comm.size * 0 if comm else 0, world)
