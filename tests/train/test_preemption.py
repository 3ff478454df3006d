"""Requests to stop: whoever hears of one first, all ranks stop after the same step and give the same reason."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from mpizero.comm import InMemoryCommunicator
from mpizero.testing import parallel_assert, run_in_threads
from mpizero.train.preemption import StopRequests, Verdict
from mpizero.train.signals import SIGNALS, StopSignals

THREADS = [1, 2, 3, 4, 8]


def stopped_at(comm, asked):
    """Train up to nine steps while rank r is asked to stop in step ``asked[r]``; return the step and the reason."""
    step = 0
    stop = StopRequests(comm, lambda: f"request {comm.rank}" if step >= asked.get(comm.rank, 99) else "")
    verdict = Verdict.GO_ON
    while step < 9 and verdict is Verdict.GO_ON:
        step += 1
        stop.ask()
        verdict = stop.answer()
    return step, stop.reason


@pytest.mark.parametrize("ranks", THREADS)
def test_one_rank_s_request_stops_all_at_the_same_step_for_its_reason(ranks):
    victim = ranks - 1
    assert run_in_threads(ranks, lambda comm: stopped_at(comm, {victim: 4})) == [(4, f"request {victim}")] * ranks


@pytest.mark.mpi
def test_one_rank_s_request_stops_all_processes_at_the_same_step(world):
    for victim in range(world.size):
        found = stopped_at(world, {victim: 3})
        parallel_assert(world, found == (3, f"request {victim}"), f"{victim=} {found}")
    parallel_assert(world, stopped_at(world, {}) == (9, ""))


@pytest.mark.mpi
def test_a_signal_to_one_process_stops_all_with_its_name_and_a_second_changes_nothing(world):
    victim = world.size - 1
    with StopSignals() as signals:
        stop = StopRequests(world, lambda: signals.reason(world.rank))
        if world.rank == victim:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
                os.kill(os.getpid(), number)
        stop.ask()
        parallel_assert(world, stop.answer() is Verdict.STOP)
        parallel_assert(world, stop.reason == f"SIGTERM on rank {victim}", stop.reason)


def test_of_several_requests_the_lowest_rank_s_is_told():
    assert run_in_threads(4, lambda comm: stopped_at(comm, {3: 2, 1: 2, 2: 2})) == [(2, "request 1")] * 4


def test_a_request_lasts_until_it_is_asked_for():
    """A source that has spoken once is not asked again: what it saw may be gone."""
    (comm,) = InMemoryCommunicator.group(1)
    answers = iter(["now", "", ""])
    stop = StopRequests(comm, lambda: next(answers))
    for _ in range(3):
        stop.ask()
        assert stop.answer() is Verdict.STOP
    assert stop.reason == "now"


def test_a_failure_outweighs_a_wish_to_stop():
    def work(comm):
        stop = StopRequests(comm, lambda: "request")
        if comm.rank == 1:
            stop.fail()
        stop.ask()
        return stop.answer()

    assert run_in_threads(3, work) == [Verdict.FAIL] * 3


def test_background_work_has_ended_when_it_has_on_every_rank():
    def work(comm):
        stop, seen = StopRequests(comm), []
        for step in range(3):
            stop.ask(busy=comm.rank >= step)
            assert stop.answer() is Verdict.GO_ON
            seen.append(stop.all_finished)
        return seen

    assert run_in_threads(3, work) == [[False, False, False]] * 3
    assert run_in_threads(2, work) == [[False, False, True]] * 2


def test_an_answer_without_a_question_is_refused():
    (comm,) = InMemoryCommunicator.group(1)
    with pytest.raises(RuntimeError, match="call ask"):
        StopRequests(comm).answer()


def test_handlers_are_put_back():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    with StopSignals():
        assert all(signal.getsignal(number) != before[number] for number in SIGNALS)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before


def test_an_ending_process_ignores_stop_signals_to_its_last_moment():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with StopSignals() as signals:
            signals.ignore()
            os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.name == ""
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in SIGNALS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_the_main_thread_nothing_is_caught():
    before = signal.getsignal(signal.SIGUSR1)
    found = []

    def work():
        with StopSignals():
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before]
