"""Requests to stop: whoever hears of one first, all ranks stop after the same step and give the same reason."""

from __future__ import annotations

import errno
import faulthandler
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from mpizero.comm import InMemoryCommunicator
from mpizero.errors import ConfigError, ExitStatus
from mpizero.testing import parallel_assert, run_in_threads
from mpizero.train.stopping import (
    SIGNALS,
    Limit,
    StopDecision,
    StopFile,
    StopRequests,
    StopSignals,
    WallTime,
    slurm_limit,
)
from tests.train.conftest import until


def stopped_at(comm, asked):
    """Train up to nine steps while rank r is asked to stop in step ``asked[r]``; return the step and the reason."""
    step = 0
    stop = StopRequests(comm, lambda: f"request {comm.rank}" if step >= asked.get(comm.rank, 99) else "")
    decision = StopDecision.GO_ON
    while step < 9 and decision is StopDecision.GO_ON:
        step += 1
        stop.ask()
        decision = stop.answer()
    return step, stop.reason


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_requests_stop_all_at_the_same_step_for_the_reason_of_the_lowest_rank(ranks):
    for asked, step in (({ranks - 1: 4}, 4), (dict.fromkeys(range(ranks // 3, ranks), 2), 2)):
        found = run_in_threads(ranks, lambda comm, asked=asked: stopped_at(comm, asked))
        assert found == [(step, f"request {min(asked)}")] * ranks


@pytest.mark.mpi
def test_a_signal_to_one_process_stops_all_with_its_name_and_a_second_changes_nothing(world):
    victim = world.size - 1
    with StopSignals() as signals:
        stop = StopRequests(world, lambda: signals.reason(world.rank))
        if world.rank == victim:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
                os.kill(os.getpid(), number)
        stop.ask()
        parallel_assert(world, stop.answer() is StopDecision.STOP)
        parallel_assert(world, stop.reason == f"SIGTERM on rank {victim}", stop.reason)


def test_a_request_lasts_until_it_is_asked_for():
    """A source that has spoken once is not asked again: what it saw may be gone."""
    (comm,) = InMemoryCommunicator.group(1)
    answers = iter(["now", "", ""])
    stop = StopRequests(comm, lambda: next(answers))
    for _ in range(3):
        stop.ask()
        assert stop.answer() is StopDecision.STOP
    assert stop.reason == "now"


def test_a_failure_outweighs_a_wish_to_stop():
    def work(comm):
        stop = StopRequests(comm, lambda: "request")
        if comm.rank == 1:
            stop.fail()
        stop.ask()
        return stop.answer()

    assert run_in_threads(3, work) == [StopDecision.FAIL] * 3


def test_background_work_has_ended_when_it_has_on_every_rank():
    def work(comm):
        stop, seen = StopRequests(comm), []
        for step in range(3):
            stop.ask(busy=comm.rank >= step)
            assert stop.answer() is StopDecision.GO_ON
            seen.append(stop.all_finished)
        return seen

    assert run_in_threads(3, work) == [[False, False, False]] * 3
    assert run_in_threads(2, work) == [[False, False, True]] * 2


def test_an_answer_without_a_question_is_refused():
    (comm,) = InMemoryCommunicator.group(1)
    with pytest.raises(RuntimeError, match="call ask"):
        StopRequests(comm).answer()


def handlers():
    return {number: signal.getsignal(number) for number in SIGNALS}


@pytest.fixture(autouse=True)
def handlers_of_before():
    """Put the handlers back that were there before a test."""
    before = handlers()
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def ended_by(number):
    """How a fork of this program ends by a signal."""
    process = os.fork()
    if not process:
        os.kill(os.getpid(), number)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_free_signal_asks_for_a_stop_and_ends_a_fork_of_the_program_as_without_the_handlers(
    number, handlers_of_before
):
    """A pool of processes ends its workers by SIGTERM and waits for them."""
    with StopSignals() as signals:
        assert all(handlers()[each] != handlers_of_before[each] for each in SIGNALS)
        assert ended_by(number) == -number
        assert signals.name == ""
        os.kill(os.getpid(), number)
    assert signals.reason(3) == f"{number.name} on rank 3"
    assert handlers() == handlers_of_before
    signal.signal(number, lambda number, frame: os._exit(7))
    with StopSignals():
        assert ended_by(number) == 7


def test_a_signal_of_the_programs_own_stays_its_own():
    own = []
    signal.signal(signal.SIGUSR2, lambda number, frame: own.append("before"))
    with StopSignals() as signals:
        signal.signal(signal.SIGUSR1, lambda number, frame: own.append("meanwhile"))
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR2)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.name == ""
    assert own == ["before", "meanwhile"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which signals are handled in C")
def test_nor_is_one_taken_that_the_program_handles_in_c(tmp_path):
    with (tmp_path / "stacks").open("w+") as file:
        faulthandler.register(signal.SIGUSR2, file)
        try:
            with StopSignals() as signals:
                pass
            os.kill(os.getpid(), signal.SIGUSR2)
            assert signals.name == ""
            file.seek(0)
            assert "test_preemption.py" in file.read()
        finally:
            faulthandler.unregister(signal.SIGUSR2)


def test_an_ending_process_ignores_stop_signals_to_its_last_moment():
    with StopSignals() as signals:
        signals.ignore()
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signals.name == ""
    assert set(handlers().values()) == {signal.SIG_IGN}


def test_outside_the_main_thread_nothing_is_caught(handlers_of_before):
    found = []

    def work():
        with StopSignals():
            found.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [handlers_of_before]


class Clock:
    """A clock that stands until it is set."""

    now = 1000.0

    def __call__(self):
        return self.now


#: A minute, a tenth of a short time, what is given, also if it is short.
@pytest.mark.parametrize(
    ("reserve", "total", "kept"), [(None, 36000, 60), (None, 100, 10), (25.0, 36000, 25), (0.5, 100, 0.5)]
)
def test_time_is_kept_for_saving(reserve, total, kept):
    clock = Clock()
    time_left = WallTime([Limit("train.time_limit", total), Limit("Slurm's", 2 * total)], reserve, clock)
    clock.now += total - kept - 0.01
    assert time_left.reason() == ""
    clock.now += 0.02
    assert f"the time limit (train.time_limit: {kept:.0f} s left, {kept:.0f} s kept" in time_left.reason()


def test_twice_the_longest_step_and_save_are_kept_where_that_is_more():
    clock = Clock()
    time_left = WallTime([Limit("Slurm's", 3600)], None, clock)
    for seconds in (1, 50, 2):
        time_left.worked(seconds)
        time_left.saved(2 * seconds)
    assert time_left.reserve == 2 * (50 + 100)
    clock.now += 3301
    assert "Slurm's" in time_left.reason()
    without = WallTime([])
    without.worked(1e9)
    assert without.reason() == ""


JOB = {"SLURM_JOB_ID": "7"}


def unasked(job):
    raise AssertionError("squeue was asked")


@pytest.mark.parametrize(
    ("environment", "answer", "left"),
    [
        ({}, unasked, None),
        (JOB | {"SLURM_JOB_END_TIME": "1500"}, unasked, 500),
        *((JOB, text, left) for text, left in (("1-02:03:04", 93784), ("59:59", 3599), ("0:09", 9))),
        *((JOB, answer, None) for answer in ("UNLIMITED", "", ConfigError("squeue: there is none"))),
    ],
)
def test_slurm_says_when_its_job_ends(monkeypatch, environment, answer, left):
    def ask(job):
        assert job == "7"
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("mpizero.train.stopping.time", SimpleNamespace(time=lambda: 1000.0))
    limit = slurm_limit(environment, answer if callable(answer) else ask)
    assert (limit and limit.left) == left


def test_the_stop_file_is_looked_for_at_most_once_a_second(tmp_path):
    clock, path = Clock(), tmp_path / "STOP"
    stop = StopFile(path, clock)
    assert stop.reason() == ""
    path.touch()
    clock.now += 0.9
    assert stop.reason() == ""
    clock.now += 0.2
    assert stop.reason() == f"the file {path}"


def test_a_look_for_the_stop_file_that_fails_is_a_no_and_is_told_once(tmp_path, monkeypatch):
    clock, path, told = Clock(), tmp_path / "STOP", []
    stop = StopFile(path, clock, told.append)

    def refuse(*given, **named):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refuse)
        for _ in range(3):
            clock.now += 2
            assert stop.reason() == ""
    assert told == [f"the file {path} cannot be looked for: {os.strerror(errno.ESTALE)}; training goes on"]
    path.touch()
    clock.now += 2
    assert stop.reason() == f"the file {path}"


def catches(process: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_signals_from_the_loading_of_libraries_to_the_end_do_no_harm(mpizero):
    """The first comes as soon as it can be caught, the last while Python takes itself apart."""
    process = mpizero.start_training(0)

    def ends_of_signals():
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        return process.poll() is not None

    until(lambda: catches(process.pid, signal.SIGTERM), pause=0.001)
    until(ends_of_signals, pause=0.002)
    outcome = mpizero.finish(process, ExitStatus.PREEMPTED)
    assert re.search(r"stopped by SIGUSR1 on rank 0 after step \d+: saved", outcome.err), outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_a_run_stops_before_its_time_ends_and_can_go_on(on_threads):
    limit = ("train.steps=100000", "checkpoint.every=0", "train.time_limit=1000", "train.time_reserve=999.999")
    stopped = on_threads.train(2, *limit, status=ExitStatus.PREEMPTED)
    assert "stopped by the time limit (train.time_limit: " in stopped.err
    done = on_threads.metrics()[-1]["step"]
    assert [path.name for path in (on_threads.folder / "run" / "checkpoints").iterdir()] == [f"step_{done:08d}"]
    resumed = on_threads.train(1, f"train.steps={done + 1}", flags=["--resume"])
    assert resumed.result["steps"] == done + 1, resumed.err
