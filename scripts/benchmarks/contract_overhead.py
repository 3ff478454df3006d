"""Measure how long a training step takes to check that all ranks call the same collectives (the contract).

    mpiexec -n 2 python scripts/benchmarks/contract_overhead.py [--rounds 30] [--steps 100] [--hidden 64 64]

Steps with and without the contract alternate. Both train a small model, whose step of about 1 ms calls the same
collectives as a large one. Without the contract, `CallTrace.begin` only counts calls, and `mismatch_term` is 0. The
printed overhead is the ratio of the times with and without the contract in the same round: median over the rounds, and
quartiles. On a busy machine use many short rounds, and look at the times of the fastest twentieth of the rounds. The
last printed figure does not depend on other programs: it is the processor time of the contract's calls in a step, in
percent of a step of 1 ms.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.comm.mpi import MpiCommunicator
from mpizero.guard.call_trace import CallTrace


def count_only(self: CallTrace, call: tuple[Any, ...]) -> int:
    """Count a call without recording it, and return its number; replaces ``CallTrace.begin``."""
    sequence = self.started = self.started + 1
    return sequence


class Switch:
    """Switch the contract (the check that all ranks call the same collectives) on and off."""

    def __init__(self) -> None:
        self.begin, self.number = CallTrace.begin, MpiCommunicator.mismatch_term

    def set(self, on: bool) -> None:
        """Install the real methods of the contract if ``on``, else methods that only count calls."""
        CallTrace.begin = self.begin if on else count_only
        MpiCommunicator.mismatch_term = self.number if on else lambda self: 0


def seconds(model: Any, x: Any, y: Any, steps: int) -> float:
    """Train ``steps`` steps, and return the mean seconds of one."""
    started = time.perf_counter()
    for _ in range(steps):
        model.train(x, y)
    return (time.perf_counter() - started) / steps


def processor_seconds(work: Callable[[], object], times: int = 2000, rounds: int = 25) -> float:
    """Return the processor time of one call of ``work``, in seconds: the least mean of ``times`` calls in a round."""
    found = []
    for _ in range(rounds):
        started = time.thread_time()
        for _ in range(times):
            work()
        found.append((time.thread_time() - started) / times)
    return min(found)


def records(work: Callable[[], object]) -> int:
    """Call ``work``, and return how many collectives are recorded in it."""
    begin, made = CallTrace.begin, []
    CallTrace.begin = lambda self, call: made.append(call) or begin(self, call)
    try:
        work()
    finally:
        CallTrace.begin = begin
    return len(made)


def cost_of_a_step(comm: MpiCommunicator, calls: float) -> float:
    """Return the processor time, in seconds, in which the contract records and compares the calls of a step."""
    trace, call = CallTrace("cost"), ("allreduce", "cost", "f", 1000, "sum")
    record = processor_seconds(lambda: trace.begin(call)) - processor_seconds(lambda: count_only(trace, call))
    return calls * record + processor_seconds(comm.mismatch_term)


def main() -> None:
    """Measure the overhead of the contract, and print one line on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 64])
    parser.add_argument("--model", default="ZeRO2Model", help="a data-parallel class of mpizero")
    options = parser.parse_args()
    comm, switch = MpiCommunicator(MPI.COMM_WORLD), Switch()
    config = mz.ShardingConfig(comm=comm, micro_batch=options.batch // comm.size)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((options.batch, 64)).astype(np.float32), rng.integers(0, 10, options.batch)
    with getattr(mz, options.model)(mz.nn.MLP(64, options.hidden, 10, seed=0), config) as model:
        seconds(model, x, y, 50)
        before = sum(e.trace.started for e in _followed())
        recorded = records(lambda: seconds(model, x, y, 10)) / 10
        calls = (sum(e.trace.started for e in _followed()) - before) / 10
        ratios: list[float] = []
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(options.rounds):
            for on in (True, False) if turn % 2 else (False, True):
                switch.set(on)
                times[on].append(seconds(model, x, y, options.steps))
            ratios.append(times[True][-1] / times[False][-1])
        switch.set(True)
        cost = cost_of_a_step(comm, recorded)
        if comm.rank == 0:
            low, middle, high = statistics.quantiles(ratios, n=4)
            fastest = {on: sorted(found)[len(found) // 20] for on, found in times.items()}
            middle_bare = 1e6 * statistics.median(times[False])
            print(
                f"{MPI.get_vendor()[0]}, {comm.size} ranks, {options.model}: {middle_bare:.0f} µs "
                f"a step without, {calls:.0f} collectives a step, {recorded:.0f} of them recorded; "
                f"with the contract {100 * (middle - 1):+.2f} % "
                f"(quartiles {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f} %, {options.rounds} rounds of "
                f"{options.steps} steps); the fastest twentieth: {1e6 * fastest[False]:.1f} µs without, "
                f"{1e6 * (fastest[True] - fastest[False]):+.1f} µs with; the calls alone: "
                f"{1e6 * cost:.2f} µs of processor time, {0.1 * 1e6 * cost:.2f} % of a step of 1 ms"
            )


def _followed() -> list[Any]:
    from mpizero.guard import guard

    return guard.current().register.live


if __name__ == "__main__":
    main()
