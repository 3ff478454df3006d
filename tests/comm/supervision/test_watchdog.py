"""The watchdog inside one process; what it does to a whole job is in tests/faults."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpizero.errors import CollectiveError, ConfigError, PeerFailure
from mpizero.guard.call_trace import CallTrace, CommunicatorRegistry
from mpizero.guard.heartbeat import (
    HEARTBEAT,
    LinkWatch,
    MismatchWatch,
    Supervisor,
    calls_in_progress,
    describe_stuck_call,
    is_silent,
)
from mpizero.guard.remote_status import MESSAGES
from mpizero.guard.watchdog import Watchdog
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


def test_of_a_long_path_in_a_report_the_name_of_the_file_stays():
    path = f"/scratch/{'long/' * 20}run/.tmp-step_00000002/state.h5"
    trace = SimpleNamespace(name="world", sequence=2, operation="hdf5 close", tag=path, entered=1.0)
    ((*_, shown, _),) = calls_in_progress(SimpleNamespace(live=[SimpleNamespace(key=0, trace=trace)]), lambda then: 0.0)
    assert len(shown) == 80
    assert shown.endswith("run/.tmp-step_00000002/state.h5")


@pytest.mark.slow
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


def test_watchdogs_of_many_threads_share_one_thread_which_looks_at_no_frames(monkeypatch):
    def look(*_):
        raise AssertionError("frames were looked at")

    monkeypatch.setattr("mpizero.guard.heartbeat.current_frame", look)
    monkeypatch.setattr("mpizero.guard.heartbeat.all_stacks", look)
    monkeypatch.setattr("mpizero.guard.watchdog.all_stacks", look)

    def train(comm):
        with Watchdog(comm, timeout=5.0):
            comm.barrier()
            names = [thread.name for thread in threading.enumerate()]
            time.sleep(0.3)  # it looks at least once
            comm.barrier()
        return names.count(HEARTBEAT)

    before = threading.active_count()
    assert run_in_threads(16, train) == [1] * 16
    assert threading.active_count() == before


@pytest.mark.slow
def test_threads_that_wait_for_one_that_writes_are_left_alone_while_bytes_come():
    def save(comm):
        with Watchdog(comm, timeout=1.5):
            if comm.rank == 1:
                with comm.trace.transfer("writing") as advance:
                    for _ in range(6):
                        time.sleep(0.4)
                        advance(1)
            comm.barrier()
        return True

    assert run_in_threads(2, save) == [True, True]


@pytest.mark.parametrize(
    ("looks", "lived"),
    [
        ([0.0, 0.2, 0.4, 0.6], 0.6),
        ([0.0, 0.2, 100.2, 100.4], 0.9),  # stopped for 99.8 s, of which half a second counts
        ([0.0, 0.2, 50.2, 50.4, 150.4], 1.4),
    ],
)
def test_time_in_which_the_process_was_stopped_does_not_count(looks, lived):
    supervisor = Supervisor()
    supervisor._listeners[lambda _: None] = 0.1
    for last, now in itertools.pairwise(looks):
        supervisor._note(last, now)
    assert supervisor.since(0.0, looks[-1]) == pytest.approx(lived)
    assert supervisor.since(looks[-1], looks[-1] + 0.1) == pytest.approx(0.1)


def test_many_stops_are_not_forgotten():
    supervisor = Supervisor()
    for number in range(100):
        supervisor._note(10.0 * number, 10.0 * number + 9.0)
    assert supervisor.since(0.0, 999.0) == pytest.approx(999.0 - 100 * (9.0 - 0.75))


def test_a_listener_that_raises_is_reported_once_and_asked_again(capfd):
    looked = threading.Semaphore(0)

    def look(now):
        looked.release()
        raise OSError("planted")

    supervisor = Supervisor()
    supervisor.add(look, 0.01)
    assert all(looked.acquire(timeout=20) for _ in range(3))
    supervisor.remove(look)
    assert capfd.readouterr().err.count("OSError: planted") == 1


def test_watchdogs_of_threads_that_are_far_from_their_limit_are_not_called():
    ticks, looks = threading.Semaphore(0), []

    def rarely(now):
        looks.append(now)
        return 3600.0

    supervisor = Supervisor()
    supervisor.add(rarely, 0.01)
    supervisor.add(lambda now: ticks.release(), 0.01)
    assert all(ticks.acquire(timeout=20) for _ in range(5))
    assert len(looks) == 1
    supervisor.remove(rarely)
    supervisor.add(rarely, 0.01)
    assert all(ticks.acquire(timeout=20) for _ in range(5))
    supervisor.stop()
    assert len(looks) == 2, "once more, because it was added anew"

    def wait(comm):
        watchdog = Watchdog(comm, timeout=500.0)
        watchdog.start()
        watchdog._guard.supervisor.remove(watchdog._look)  # called below instead
        found = watchdog._look(time.monotonic())
        if comm.rank == 0:
            comm.trace.entered = time.monotonic() - 200.0  # as if it were in a call
            found = found, watchdog._look(time.monotonic())
        watchdog.stop()
        return found

    (quiet, waiting), other = run_in_threads(2, wait)
    assert quiet == other == 500.0
    assert 295.0 < waiting < quiet, "less is left; seconds in which the process stood still do not count"


def test_the_ranks_of_a_node_share_out_whose_calls_they_compare():
    seen = []
    peers = [SimpleNamespace(ranks=range(3, 40), rank=rank, read_one=seen.append) for rank in range(3, 40)]
    register = CommunicatorRegistry()
    watches = [MismatchWatch(SimpleNamespace(statuses=one, register=register), print) for one in peers]
    for watch in watches:
        watch.look({"calls": []})
    assert {rank: seen.count(rank) for rank in seen} == dict.fromkeys(range(3, 40), 4)
    seen.clear()
    for _ in range(9):
        watches[5].look({"calls": []})
    assert sorted(seen) == [rank for rank in range(3, 40) if rank != 8], "in turn, each once"


@pytest.mark.parametrize("threads", [True, False])
def test_only_where_its_thread_runs_can_the_timer_end_a_process(monkeypatch, threads):
    """Nobody puts the timer off where no thread can be started: a process that computes would be killed."""
    armed = threading.Event()

    class Timer:
        def __init__(self, file):
            pass

        def restart(self, seconds):
            armed.set()

        def close(self):
            pass

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    def train(comm):
        monkeypatch.setattr("mpizero.guard.watchdog.LockTimer", Timer)
        watchdog = Watchdog(comm, timeout=5.0)
        monkeypatch.setattr(watchdog._guard, "is_registered", lambda trace: True)  # as over MPI
        monkeypatch.setattr(watchdog._guard, "supervisor", Supervisor())
        if not threads:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        with watchdog:
            return armed.wait(20 if threads else 0)

    assert run_in_threads(1, train) == [threads]


@pytest.mark.parametrize("at_the_end", [False, True])
def test_files_of_two_threads_are_told_of_as_long_as_they_are_read_or_written(at_the_end):
    """One thread comes in between another's look at what is going on and its note of that."""

    class Slow(CallTrace):
        @property
        def transfers(self):
            value, self.looked = self.going_on, getattr(self, "looked", None)
            if self.looked is not None:
                self.looked()
            return value

        @transfers.setter
        def transfers(self, value):
            self.going_on = value

    def another():
        with trace.transfer("another"):
            entered.set()
            leave.wait(20)

    def interrupt():
        trace.looked = None
        thread.start()
        entered.wait(0.2)  # it has to wait where the first one is not to be disturbed

    trace, entered, leave = Slow("world"), threading.Event(), threading.Event()
    thread = threading.Thread(target=another)
    try:
        if not at_the_end:
            trace.looked = interrupt
        with trace.transfer("one"):
            if at_the_end:
                trace.looked = interrupt
            else:
                assert entered.wait(20)
                assert sorted(transfer.what for transfer in trace.transfers) == ["another", "one"]
        assert entered.wait(20)
        assert [transfer.what for transfer in trace.transfers] == ["another"]
    finally:
        leave.set()
        thread.join(20)
    assert trace.transfers == ()


@pytest.mark.mpi
def test_it_watches_and_lets_go_over_mpi(world):
    for _ in range(3):
        with Watchdog(world, timeout=30.0):
            world.barrier()


def test_ranks_of_this_node_are_looked_at_after_those_that_do_not_answer():
    """A rank that writes four times a second is not silent because another node has kept its reader waiting."""

    def work(comm):
        watchdog = Watchdog(comm, timeout=1.0)
        slots = {0: {}, 1: {}}

        def read():
            return {rank: slot | {"beat": time.monotonic()} for rank, slot in slots.items()}

        def read_all():
            time.sleep(0.1)
            return read()

        watchdog._guard = SimpleNamespace(statuses=SimpleNamespace(read=read, read_all=read_all))
        return max(slot["age"] for slot in watchdog._records((0, 1, 2)).values())

    (oldest,) = run_in_threads(1, work)
    assert oldest < 0.05


def test_a_rank_that_reports_is_not_silent():
    slot = {"age": 60.0}
    assert is_silent(slot, 0.25)
    assert not is_silent(slot | {"reports": True}, 0.25)


def test_bytes_of_messages_restart_the_clock_of_a_call_of_their_rank_and_of_no_other():
    """A slow link is not stuck, and a part of a job that goes on does not hide that another part is."""

    def work(comm):
        records = {0: {"beat": time.monotonic()}, 1: {"beat": time.monotonic(), "transfers": [[MESSAGES, 9, 0.1]]}}
        statuses = SimpleNamespace(read=lambda: records, read_all=lambda: records)

        def moves(members):
            watchdog = Watchdog(comm, timeout=20.0)
            watchdog._guard = SimpleNamespace(supervisor=Supervisor(), statuses=statuses)
            watchdog._shared = True
            watchdog._register = SimpleNamespace(live=[SimpleNamespace(key="key", members=members)])
            return watchdog._bytes_move(["key", "world", 1, "barrier", "", 30.0], time.monotonic())

        before = [moves(members) for members in ((0, 1), (0, 2), (0,))]
        records[1]["transfers"][0][2] = 25.0
        return before, moves((0, 1))

    assert run_in_threads(1, work) == [([True, False, False], False)]


def test_a_report_names_the_host_that_does_not_answer_and_those_of_the_ranks_that_do():
    call = ["key", "world", 3, "barrier", "step", 12.0]
    record = {"age": 0.1, "marks": {"key": [3, 0]}, "calls": [call], "state": "working", "place": "train.py:7 in main"}
    hosts = {1: "b", 2: "c", 4: "b"}
    head, *lines = describe_stuck_call(call, range(5), {0: record, 2: record, 3: record}, hosts, 10.0, 0.25)
    assert head.endswith("has lasted 12.0 s (timeout 10 s): no answer from b (ranks 1, 4)")
    assert [line.partition(":")[0] for line in lines] == ["  rank 0", "  rank 2 on c", "  rank 3"]
    assert all(line.endswith("at train.py:7 in main") for line in lines)


class Link:
    """Rank 0 waits since second 0 for hosts b and c; a schedule says what answers and which bytes move at a second."""

    leads, hosts = True, {"b": [2, 5], "c": [3]}

    def __init__(self, answers, moved=lambda now: 0.0, waits=lambda now: True):
        self.answers, self.moved, self.waits = answers, moved, waits
        self.answered, self.told, self.queries = {}, [], 0

    def read(self):
        self.queries += 1
        self.answered |= {host: self.now for host in self.hosts if self.answers(host, self.now)}

    def told_by(self, last):
        """What is told until second ``last`` by looks at every second: pairs of a second and a text."""
        heartbeat = SimpleNamespace(statuses=SimpleNamespace(remote=[self], read=dict), last_record={})
        watch = LinkWatch(heartbeat, Supervisor(), lambda text: self.told.append((self.now, text)))
        for self.now in map(float, range(1, last + 1)):
            call = ["key", "world", 4, "allreduce", "gradients", self.now]
            record = {"place": "train.py:7 in main", "calls": [call] if self.waits(self.now) else []}
            heartbeat.last_record = record
            age, beat = self.now - self.moved(self.now), time.monotonic()
            heartbeat.statuses.read = lambda beat=beat, age=age: {0: {"beat": beat, "transfers": [[MESSAGES, 1, age]]}}
            watch.look(self.now)
        return self.told


def test_a_silent_host_is_told_of_once_with_what_waits_and_once_when_it_answers_again():
    link = Link(lambda host, now: host == "c" or not 2 < now < 63)
    (first, lost), (second, back) = link.told_by(200)
    assert (first, second) == (11.0, 63.0)
    assert lost.startswith("no word from b (ranks 2, 5) for 10 s")
    assert lost.endswith("waiting in allreduce #4 'gradients' of 'world' at train.py:7 in main")
    assert back.startswith("b (ranks 2, 5) answers again, after 62 s")


@pytest.mark.parametrize(
    "link",
    [
        Link(lambda host, now: True),  # a rank computes
        Link(lambda host, now: now < 2, moved=lambda now: now),  # a slow link, on which answers come late
        Link(lambda host, now: now < 2 or now % 9 == 0),  # a link that loses what is sent, and a cut of nine seconds
        Link(lambda host, now: False),  # a firewall
        Link(lambda host, now: now < 2, waits=lambda now: False),
    ],
)
def test_of_a_host_that_answers_or_sends_or_is_not_waited_for_nothing_is_told(link):
    assert link.told_by(100) == []


def test_hosts_are_asked_rarely_while_they_answer():
    link = Link(lambda host, now: True)
    link.told_by(100)
    assert link.queries < 100 / 5
