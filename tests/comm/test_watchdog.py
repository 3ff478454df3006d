"""The watchdog inside one process; what it does to a whole job is in tests/faults."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from mpizero.comm.watchdog import Watchdog
from mpizero.errors import CollectiveError, ConfigError, PeerFailure
from mpizero.testing import run_in_threads


@pytest.mark.parametrize("setting", ["timeout", "grace"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number_of_seconds(setting, seconds):
    with pytest.raises(ConfigError, match=f"watchdog {setting} = {seconds}"):
        run_in_threads(1, lambda comm: Watchdog(comm, **({"timeout": 1.0} | {setting: seconds})))


def test_threads_that_wait_too_long_are_told_which_call_and_who_is_where():
    gate = threading.Event()

    def train(comm):
        with Watchdog(comm, timeout=0.2):
            comm.barrier("first")
            if comm.rank == 1:
                gate.wait(20)
            try:
                comm.allreduce(np.zeros(3), tag="gradients")
            except PeerFailure as error:
                gate.set()
                return error.__cause__
        return None

    waiting, late = run_in_threads(2, train)
    assert isinstance(waiting, CollectiveError)
    assert waiting is late
    text = str(waiting)
    assert text.startswith("[rank 0] allreduce #2 'gradients' of ")
    assert "rank 0 at test_watchdog.py:" in text
    assert "rank 1 at " in text


def test_slow_ranks_are_left_alone():
    def train(comm):
        with Watchdog(comm, timeout=0.5):
            for step in range(4):
                time.sleep(0.2 * (step % 2 == comm.rank))
                comm.barrier()
        return comm.trace.sequence

    assert run_in_threads(2, train) == [4, 4]


def test_it_leaves_no_thread_and_no_file_behind(tmp_path):
    def train(comm):
        with Watchdog(comm, timeout=5.0, folder=tmp_path):
            assert sorted(p.name for p in tmp_path.iterdir()) == ["hang-rank00000.txt"]
            limit = time.monotonic() + 5
            while not (tmp_path / "heartbeat-rank00000.json").exists():
                assert time.monotonic() < limit
                time.sleep(0.01)

    before = threading.active_count()
    run_in_threads(1, train)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


@pytest.mark.mpi
def test_it_watches_and_lets_go_over_mpi(world):
    for _ in range(3):
        with Watchdog(world, timeout=30.0):
            world.barrier()
