"""Measure the memory and messages of this rank in training steps, and set them beside a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.mesh import group_buffers
from mpizero.planning import RankPlan, TrainingPlan
from mpizero.sharding import ShardedModelBase
from mpizero.train.bench.activation_meter import CacheMeter, watch
from mpizero.train.bench.strategy_memory import idle_size
from mpizero.train.machine import proportional

#: Kinds of memory that have a column of their own; the rest of what a rank holds is in the column "buffers".
PARTS = ("parameters", "gradients", "optimizer state", "activations")
_BUFFERS = ("buffers", "exchange buffers", "group buffers")


@dataclass(frozen=True)
class RankRow:
    """Hold the memory and messages of one rank, measured and planned; sizes are in bytes.

    Attributes
    ----------
    rank : int
        The rank's number in the world.
    here : dict of str to int
        The rank's coordinate on every axis of the process grid.
    held, planned : dict of str to int
        Bytes by kind of memory ("parameters", "gradients", "optimizer state", "activations", "buffers"): counted
        where they are allocated, and computed by the plan.
    pss_at_rest, pss_in_step : int
        How much larger the rank's proportional set size is after training than before. ``pss_at_rest`` is measured
        after freed memory has been returned to the system, ``pss_in_step`` before. So the latter includes the memory
        that the activations, working arrays and messages of a step took.
    planned_working : int
        Most bytes that, by the plan, working arrays of blocks and messages take during a step in addition to
        ``planned``.
    sent, planned_sent : int
        Bytes that the rank sends to other ranks in a step: counted in the last step, and planned.
    messages, planned_messages : int
        Number of messages that the rank sends in a step: counted in the last step, and planned.
    """

    rank: int
    here: dict[str, int]
    held: dict[str, int]
    planned: dict[str, int]
    pss_at_rest: int
    pss_in_step: int
    planned_working: int
    sent: int
    planned_sent: int
    messages: int
    planned_messages: int


def measure_steps(
    comm: Communicator,
    placed: Callable[[], AbstractContextManager[ShardedModelBase]],
    feed: Callable[[ShardedModelBase], Iterator[tuple[Any, Any]]],
    steps: int,
) -> dict[str, Any]:
    """Train one step to warm up and ``steps`` steps, and return the figures of this rank.

    Collective over ``comm``. ``placed()`` makes the sharded model in a ``with`` block, ``feed(model)`` yields this
    rank's samples of each step. Keys of the figures are "here" (coordinates on the axes of the process grid), "held"
    (bytes by kind of memory), "pss" (growth of the proportional set size at rest and in a step), "sent" (bytes and
    messages of the last step), "parameters" (their number) and "node" (world rank of the first rank on the same node).
    """
    with comm.split_node(None, name="bench") as host:
        node = host.broadcast_object(comm.rank, tag="bench")
    before = idle_size(comm)
    with placed() as sharded:
        grid, engine = sharded.engine.grid, sharded.engine
        kept = watch(engine) if engine.block_model else CacheMeter()
        stream = feed(sharded)
        sharded.train(*next(stream))  # stages tell each other the shapes of messages once
        for _ in range(steps):
            x, y = next(stream)
            sent = _sent(grid)
            sharded.train(x, y)
        now = _sent(grid)
        comm.barrier("bench")
        in_step = proportional()
        return {
            "here": grid.here._asdict(),
            "held": {**engine.memory.kinds(), **group_buffers(grid), "activations": kept.peak},
            "pss": (idle_size(comm) - before, in_step - before),
            "sent": [b - a for a, b in zip(sent, now, strict=True)],
            "parameters": sharded.parameter_count,
            "node": node,
        }


def ranks_per_node(figures: Sequence[dict[str, Any]]) -> int | None:
    """Return the number of ranks on a node; None if nodes differ. Not collective.

    ``figures`` has what :func:`measure_steps` returned on every rank.
    """
    nodes = [figure["node"] for figure in figures]
    alike = {nodes.count(node) for node in nodes}
    return alike.pop() if len(alike) == 1 else None


def table_rows(figures: Sequence[dict[str, Any]], plan: TrainingPlan) -> tuple[RankRow, ...]:
    """Return measured and planned figures of every rank side by side. Not collective.

    ``figures`` has what :func:`measure_steps` returned on every rank. Activations are left out if the plan
    lacks them, or if another library has them, which :class:`CacheMeter` does not see.
    """
    rows = tuple(_row(figure, planned) for figure, planned in zip(figures, plan.by_rank, strict=True))
    for row in rows if plan.not_counted or plan.unseen else ():
        for held in (row.held, row.planned):
            del held["activations"]
    return rows


def _row(figure: dict[str, Any], plan: RankPlan) -> RankRow:
    (sent, messages), (at_rest, in_step) = figure["sent"], figure["pss"]
    planned = {part: held.mine for part, held in plan.memory.items()}
    return RankRow(
        rank=plan.rank,
        here=figure["here"],
        held=_shown(figure["held"]),
        planned=_shown(planned),
        pss_at_rest=at_rest,
        pss_in_step=in_step,
        planned_working=planned.get("working arrays", 0) + planned.get("messages", 0),
        sent=sent,
        planned_sent=plan.bytes_sent,
        messages=messages,
        planned_messages=plan.messages,
    )


def _shown(held: dict[str, int]) -> dict[str, int]:
    return {**{part: held.get(part, 0) for part in PARTS}, "buffers": sum(held.get(part, 0) for part in _BUFFERS)}


def _sent(grid: ProcessGrid) -> tuple[int, int]:
    counters = [communicator.counters for communicator in (grid.world, *grid.communicators)]
    return sum(c.bytes_sent for c in counters), sum(c.messages for c in counters)
