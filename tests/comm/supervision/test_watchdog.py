"""The watchdog inside one process; what it does to a whole job is in tests/faults."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from mpizero.comm import InMemoryCommunicator
from mpizero.errors import CollectiveError, ConfigError, PeerFailure
from mpizero.guard import call_trace, heartbeat
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
from mpizero.guard.remote_status import MESSAGES, StatusGroup, StatusGroups
from mpizero.guard.watchdog import Watchdog
from mpizero.testing import run_in_threads


@pytest.mark.parametrize("setting", ["timeout", "grace"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_positive_number_of_seconds(setting, seconds):
    with pytest.raises(ConfigError, match=f"watchdog {setting} = {seconds}"):
        run_in_threads(1, lambda comm: Watchdog(comm, **({"timeout": 1.0} | {setting: seconds})))


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes only where a test sets it."""
    clock = SimpleNamespace(now=float(int(time.monotonic())))
    monkeypatch.setattr(call_trace, "monotonic", lambda: clock.now)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: clock.now))
    return clock


def watching(comm, **settings):
    """Return a watchdog that looks when a test says so."""
    watchdog, supervisor = Watchdog(comm, 10.0, **settings), Supervisor()
    supervisor.add = lambda *_: None
    alone = {"ending": False, "is_registered": lambda trace: False, "heartbeat": None}
    watchdog._guard = SimpleNamespace(supervisor=supervisor, **alone)
    watchdog.start()
    return watchdog


def test_threads_that_wait_too_long_are_told_which_call_and_who_is_where():
    gate = threading.Event()

    def train(comm):
        comm.barrier("first")
        with Watchdog(comm, timeout=0.2):
            if comm.rank == 1:
                gate.wait(60)
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


def test_slow_ranks_are_left_alone_because_the_time_of_each_call_counts_by_itself(clock):
    comm, _ = InMemoryCommunicator.group(2)
    watchdog = watching(comm)
    for _ in range(3):
        comm.trace.entered = clock.now  # as if it were in a call
        clock.now += 9.0
        assert watchdog._look(clock.now) == 1.0, "so many seconds are left"
        comm.trace.entered = 0.0
        clock.now += 9.0
        assert watchdog._look(clock.now) == 10.0
    comm.trace.entered = clock.now
    clock.now += 11.0
    watchdog._look(clock.now)
    with pytest.raises(PeerFailure, match=r"has lasted 11\.0 s"):
        comm.barrier()


def test_who_waits_for_one_that_writes_is_left_alone_while_bytes_come(clock):
    comm, other = InMemoryCommunicator.group(2)
    watchdog = watching(comm)
    comm.trace.entered = clock.now
    with other.trace.transfer("writing") as advance:
        for _ in range(4):
            advance(1)
            clock.now += 9.0
            watchdog._look(clock.now)
        clock.now += 2.0
        watchdog._look(clock.now)
    with pytest.raises(PeerFailure, match=r"has lasted 38\.0 s"):
        comm.barrier()


def test_of_a_long_path_in_a_report_the_name_of_the_file_stays():
    path = f"/scratch/{'long/' * 20}run/.tmp-step_00000002/state.h5"
    trace = SimpleNamespace(name="world", sequence=2, operation="hdf5 close", tag=path, entered=1.0)
    ((*_, shown, _),) = calls_in_progress(SimpleNamespace(live=[SimpleNamespace(key=0, trace=trace)]), lambda then: 0.0)
    assert len(shown) == 80
    assert shown.endswith("run/.tmp-step_00000002/state.h5")


def test_it_leaves_no_file_behind(tmp_path, clock):
    watchdog = watching(InMemoryCommunicator.group(1)[0], folder=tmp_path)
    watchdog._look(clock.now)
    assert sorted(os.listdir(tmp_path)) == ["hang-rank00000.txt", "heartbeat-rank00000.json"]
    watchdog.stop()
    assert os.listdir(tmp_path) == []


def test_watchdogs_of_many_threads_share_one_thread_which_looks_at_no_frames_and_ends_with_the_last(monkeypatch):
    frames, looked, look = [], threading.Semaphore(0), Watchdog._look
    for name in ("heartbeat.current_frame", "heartbeat.all_stacks", "watchdog.all_stacks"):
        monkeypatch.setattr(f"mpizero.guard.{name}", frames.append)
    monkeypatch.setattr(Watchdog, "_look", lambda watchdog, now: (look(watchdog, now), looked.release())[0])

    def train(comm):
        with Watchdog(comm, timeout=60.0):
            comm.barrier()
            threads = [one for one in threading.enumerate() if one.name == HEARTBEAT and one not in before]
            assert looked.acquire(timeout=60)
            comm.barrier()
        return threads

    before = threading.enumerate()
    (thread,) = set(itertools.chain(*run_in_threads(16, train)))
    thread.join(60)
    assert not thread.is_alive()
    assert not frames


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
    assert all(looked.acquire(timeout=60) for _ in range(3))
    supervisor.remove(look)
    assert capfd.readouterr().err.count("OSError: planted") == 1


@pytest.mark.parametrize("use", [lambda s, look: s.tick, Supervisor.remove, lambda s, look: s.stop()])
def test_listeners_may_come_and_go_when_garbage_is_collected_at_any_moment(use):
    """Garbage is collected at one allocation after the other of what the supervisor does."""
    supervisor, keep = Supervisor(), lambda now: None

    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            supervisor.add(lambda now: None, 3600.0)

    thresholds = gc.get_threshold()
    try:
        for moment in range(12):
            supervisor.add(keep, 3600.0)
            gc.collect()
            gc.disable()
            Garbage()
            gc.set_threshold(gc.get_count()[0] + moment)
            gc.enable()
            use(supervisor, keep)
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    gc.collect()
    supervisor.stop()
    assert not supervisor._listeners


def test_a_listener_that_wants_no_call_for_some_time_gets_none_until_it_is_added_anew():
    """Such as the watchdogs of threads that are far from their limit."""
    ticks, looks = threading.Semaphore(0), threading.Semaphore(0)

    def rarely(now):
        looks.release()
        return 3600.0

    supervisor = Supervisor()
    supervisor.add(lambda now: ticks.release(), 0.01)
    for _ in range(2):
        supervisor.add(rarely, 0.01)
        assert looks.acquire(timeout=60)
        assert all(ticks.acquire(timeout=60) for _ in range(5))
        assert not looks.acquire(blocking=False)
        supervisor.remove(rarely)
    supervisor.stop()


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
        watchdog = Watchdog(comm, timeout=60.0)
        monkeypatch.setattr(watchdog._guard, "is_registered", lambda trace: True)  # as over MPI
        monkeypatch.setattr(watchdog._guard, "supervisor", Supervisor())
        if not threads:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        with watchdog:
            return armed.wait(60 if threads else 0)

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
            leave.wait(60)

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
                assert entered.wait(60)
                assert sorted(transfer.what for transfer in trace.transfers) == ["another", "one"]
        assert entered.wait(60)
        assert [transfer.what for transfer in trace.transfers] == ["another"]
    finally:
        leave.set()
        thread.join(60)
    assert trace.transfers == ()


@pytest.mark.mpi
def test_it_watches_and_lets_go_over_mpi(world):
    for _ in range(3):
        with Watchdog(world, timeout=60.0):
            world.barrier()


def test_ranks_of_this_node_are_looked_at_after_those_that_do_not_answer(clock):
    """A rank that writes four times a second is not silent because another node has kept its reader waiting."""

    def nobody_answers():
        clock.now += 30.0
        return {}

    here = SimpleNamespace(ranks=(0, 1), read=lambda: {rank: {"beat": clock.now} for rank in (0, 1)})
    statuses, watchdog = StatusGroups(), watching(InMemoryCommunicator.group(1)[0])
    statuses.groups = [StatusGroup((0, 1, 2), None, here, SimpleNamespace(read=nobody_answers))]
    watchdog._guard = SimpleNamespace(statuses=statuses)
    assert {rank: record["age"] for rank, record in watchdog._records((0, 1, 2)).items()} == {0: 0.0, 1: 0.0}


def test_a_rank_that_reports_is_not_silent():
    slot = {"age": 60.0}
    assert is_silent(slot, 0.25)
    assert not is_silent(slot | {"reports": True}, 0.25)


@pytest.mark.parametrize(
    ("what", "moving"), [(MESSAGES, [True, False, False]), ("writing state.h5", [True, True, True])]
)
def test_bytes_of_a_rank_restart_the_clock_of_its_calls_and_those_of_files_that_of_all(clock, what, moving):
    """A slow link is not stuck, and a part of a job that goes on does not hide that another part is."""
    records = {0: {"beat": clock.now}, 1: {"beat": clock.now, "transfers": [[what, 9, 0.1]]}}

    def moves(members):
        watchdog = watching(InMemoryCommunicator.group(1)[0])
        watchdog._guard.statuses = SimpleNamespace(read=lambda: records, read_all=lambda: records)
        watchdog._shared = True
        watchdog._register = SimpleNamespace(live=[SimpleNamespace(key="key", members=members)])
        return watchdog._bytes_move(["key", "world", 1, "barrier", "", 30.0], clock.now)

    assert [moves(members) for members in ((0, 1), (0, 2), (0,))] == moving
    records[1]["transfers"][0][2] = 15.0
    assert not moves((0, 1))


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

    def told_by(self, clock, last):
        """What is told until second ``last`` by looks at every second: pairs of a second and a text."""
        watched = SimpleNamespace(statuses=SimpleNamespace(remote=[self], read=dict), last_record={})
        watch = LinkWatch(watched, Supervisor(), lambda text: self.told.append((self.now, text)))
        for self.now in map(float, range(1, last + 1)):
            call = ["key", "world", 4, "allreduce", "gradients", self.now]
            record = {"place": "train.py:7 in main", "calls": [call] if self.waits(self.now) else []}
            watched.last_record, transfer = record, [MESSAGES, 1, self.now - self.moved(self.now)]
            watched.statuses.read = lambda transfer=transfer: {0: {"beat": clock.now, "transfers": [transfer]}}
            watch.look(self.now)
        return self.told


def test_a_silent_host_is_told_of_once_with_what_waits_and_once_when_it_answers_again(clock):
    link = Link(lambda host, now: host == "c" or not 2 < now < 63)
    (first, lost), (second, back) = link.told_by(clock, 200)
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
def test_of_a_host_that_answers_or_sends_or_is_not_waited_for_nothing_is_told(clock, link):
    assert link.told_by(clock, 100) == []


def test_hosts_are_asked_rarely_while_they_answer(clock):
    link = Link(lambda host, now: True)
    link.told_by(clock, 100)
    assert link.queries < 100 / 5
