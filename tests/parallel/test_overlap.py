"""Messages that are on their way while ranks compute: begun ahead, waited for in time, and gone after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import MpizeroError
from mpizero.testing import parallel_assert, run_in_threads
from tests.parallel.models import MEMORIES, PRIVATE, part, sharded
from tests.parallel.spreads import gpt, texts, with_traps


def begun(store: Any) -> int:
    """Collectives of the peers that have begun."""
    return int(store.grid.peers.trace.started)


def values(lent: Any) -> list[float]:
    """All values of lent parameters, taken name by name as layers do."""
    if isinstance(lent, np.ndarray):
        return list(lent.reshape(-1).tolist())
    return [value for name in sorted(lent) for value in values(lent[name])]


@pytest.mark.parametrize("memory", MEMORIES[1:])
def test_the_next_unit_comes_while_one_is_lent(memory: dict[str, Any]) -> None:
    """Every order of units, announced or not, lends the same values."""

    def lend(comm: Any, orders: Sequence[Sequence[tuple[int, int | None]]]) -> list[list[tuple[int, Any]]]:
        model, _ = sharded("zero3", comm, mz.nn.MLP(6, (7, 5, 4), 3), **memory)
        found = []
        with model:
            store = model.engine.store
            units = store.layout.units
            for order in orders:
                rows = []
                for number, following in order:
                    before = begun(store)
                    with store.unit(units[number], None if following is None else units[following]) as lent:
                        rows.append((begun(store) - before, values(lent)))
                found.append(rows)
        return found

    plain: list[tuple[int, int | None]] = [(0, None), (1, None), (2, None), (2, None), (0, None)]
    announced: list[tuple[int, int | None]] = [(0, 1), (1, 2), (2, 2), (2, 0), (0, None)]
    mistaken: list[tuple[int, int | None]] = [(0, 3), (1, 3), (2, None), (2, 1), (0, None)]
    for alone, ahead, wrong in run_in_threads(4, lambda comm: lend(comm, (plain, announced, mistaken))):
        assert [count for count, _ in alone] == [1, 1, 1, 1, 1]
        assert [count for count, _ in ahead] == [2, 1, 1, 1, 0]
        assert [row for _, row in alone] == [row for _, row in ahead] == [row for _, row in wrong]


def after_a_failure(comm: Any, strategy: str, what: str, memory: dict[str, Any]) -> tuple[str, str]:
    """Hashes of a training in which a layer of rank 0's samples raises once, and of one without."""
    ((x, y),) = texts(1, 6)
    hashes = []
    for armed in ({"what": what, "first": 0}, {}):
        switch = dict(armed)
        model, _ = sharded(strategy, comm, with_traps(gpt(), {"blocks.1": switch}), micro_batch=2, **memory)
        with model:
            if switch:
                with pytest.raises((ArithmeticError, MpizeroError), match="trap in"):
                    model.train(*part(comm, x, y))
                switch.clear()
            for _ in range(2):
                model.train(*part(comm, x, y))
            hashes.append(model.parameters_sha256())
    return hashes[0], hashes[1]


@pytest.mark.parametrize("what", ["forward", "input", "weights"])
def test_a_step_that_fails_leaves_nothing_on_its_way(what: str) -> None:
    for strategy, memory in (("zero3", PRIVATE), ("zero3", MEMORIES[2]), ("zero2", MEMORIES[2])):
        for failed, clean in run_in_threads(4, lambda comm, s=strategy, m=memory: after_a_failure(comm, s, what, m)):
            assert failed == clean


@pytest.mark.mpi
def test_a_step_that_fails_leaves_nothing_on_its_way_between_processes(world: Any) -> None:
    for strategy, what in (("zero3", "forward"), ("zero3", "weights"), ("zero1", "input")):
        failed, clean = after_a_failure(world, strategy, what, PRIVATE)
        parallel_assert(world, failed == clean, f"{strategy} {what}")
