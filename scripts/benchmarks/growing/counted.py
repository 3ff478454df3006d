"""Compare what ranks count in a training (bytes of memory, bytes sent, messages) with what `mpizero plan` computes."""

from __future__ import annotations

from typing import Any

from mpizero.tools.bench.memory import LayoutRequest, LayoutTable, measure_layout
from mpizero.tools.bench.strategies import MemoryRequest
from mpizero.train.config.schema import ParallelSection

#: The layouts: number of ranks, and sizes of the axes; the remaining ranks are replicas.
LAYOUTS: tuple[tuple[int, dict[str, int]], ...] = (
    (4, {}),
    (4, {"pipeline": 2}),
    (4, {"tensor": 2}),
    (8, {}),
    (8, {"pipeline": 2, "tensor": 2}),
)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
PARAMETERS, MICRO_BATCHES = 400_000, 4


def rows(layout: dict[str, int]) -> list[dict[str, Any]]:
    """Train with every strategy, once with shared and once with private memory, and compare counts with the plan.

    ``layout`` has the sizes of the axes ("pipeline", "tensor"). Return one row for each training (see :func:`_row`) on
    rank 0. Collective over all ranks of the job.
    """
    from mpizero.comm.startup import world

    memory = MemoryRequest(PARAMETERS, STRATEGIES, (True, False), 1)
    request = LayoutRequest(memory, ParallelSection(**layout), MICRO_BATCHES)
    with world() as comm:
        return [_row(table) for table in measure_layout(request, comm)]


def _row(table: LayoutTable) -> dict[str, Any]:
    """Return a row of results for one training on all its ranks.

    Its keys are "layout" and "memory" (texts), "sent" (bytes), "messages", and "wrong": how many of the ranks' counts
    (bytes sent, messages, bytes of each kind of memory) differ from the plan.
    """
    wrong = 0
    for rank in table.rows:
        wrong += rank.sent != rank.planned_sent
        wrong += rank.messages != rank.planned_messages
        wrong += sum(rank.held[part] != rank.planned.get(part, 0) for part in rank.held)
    sent, messages = sum(rank.sent for rank in table.rows), sum(rank.messages for rank in table.rows)
    return {"layout": table.layout, "memory": table.memory, "sent": sent, "messages": messages, "wrong": wrong}
