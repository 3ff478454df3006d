"""Format a plan as a table for people, and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.text import PREFIXES, amount, columns
from mpizero.layout.schedules import timetable
from mpizero.planning import PARTS, PURPOSES, RankPlan
from mpizero.planning.time_floors import TimeFloors
from mpizero.sharding.partition import exactness
from mpizero.train.doctor.check_result import counted
from mpizero.train.plan import PlannedRun
from mpizero.types import BlockModel

#: The most columns that a printed timetable has.
_COLUMNS = 150


def report(plan: PlannedRun, *, with_timetable: bool = False) -> str:
    """Format the plan as text for people; add the pipeline's timetable if ``with_timetable``."""
    parts = [_head(plan), _memory(plan), _messages(plan), _work(plan)]
    if plan.floors is not None:
        parts.append(_seconds(plan, plan.floors))
    if with_timetable and plan.simulation is not None:
        unit = plan.simulation.makespan / _COLUMNS
        parts.append(timetable(plan.simulation, None if _short(plan) else unit))
    parts += [f"warning: {warning}" for warning in plan.warnings]
    return "\n\n".join(parts)


def _short(plan: PlannedRun) -> bool:
    """Tell whether the timetable is short enough for one line if its shortest instruction is one column wide."""
    simulation = plan.simulation
    assert simulation is not None
    shortest = min(end - start for events in simulation.events for _, start, end in events if end > start)
    return simulation.makespan / shortest <= _COLUMNS / 4


def _head(plan: PlannedRun) -> str:
    training, config = plan.training, plan.config
    grains, nodes = training.grains, len(training.node_bytes)
    where = f"on {nodes} node{'s' if nodes > 1 else ''}"
    if config.parallel.splits_model:
        where = f"{training.ranks} ranks {where}"
    return (
        f"{config.model.described} with {plan.parameter_count:,} {np.dtype(training.model.dtype).name} parameters, "
        f"{config.optimizer.name}; "
        f"{config.parallel.describe(training.ranks)}; {where}\n"
        f"{training.global_batch} samples a step in {grains.described(config.train.accumulate)}\n"
        f"results: {exactness(training.tiles, training.within_rounding)}"
    )


class _Row(NamedTuple):
    """Hold one line of a table: the rank with the largest figures among the ranks of a stage and of some parts.

    ``parts`` has the first and the last number of neighbouring parts that have the same ``figures``. Parts are numbered
    by tensor rank, then context rank.
    """

    stage: int
    parts: tuple[int, int]
    rank: RankPlan
    figures: Mapping[str, int]


def _rows(plan: PlannedRun, figures: Callable[[RankPlan], Mapping[str, int]]) -> list[_Row]:
    """Find, for each stage and each tensor and context part, the rank with the largest sum of ``figures``.

    Neighbouring parts of a stage with equal figures become one line of the table.
    """
    found: dict[tuple[int, int], RankPlan] = {}
    for rank in plan.training.by_rank:
        kind = rank.here.pipeline, rank.here.tensor * plan.training.axes.context + rank.here.context
        if kind not in found or sum(figures(rank).values()) > sum(figures(found[kind]).values()):
            found[kind] = rank
    rows: list[_Row] = []
    for (stage, part), rank in sorted(found.items()):
        row = _Row(stage, (part, part), rank, figures(rank))
        if rows and (rows[-1].stage, rows[-1].figures) == (stage, row.figures):
            rows[-1] = rows[-1]._replace(parts=(rows[-1].parts[0], part))
        else:
            rows.append(row)
    return rows


def _name(plan: PlannedRun, row: _Row) -> str:
    axes, (first, last) = plan.training.axes, row.parts
    names = [f"stage {row.stage}"] if axes.pipeline > 1 else []
    if axes.tensor * axes.context > 1:
        several = f"{first} to {last}" if first < last else str(first)
        split = " x ".join(axis for axis in ("tensor", "context") if getattr(axes, axis) > 1)
        names.append(f"{split} part {several}")
    return ", ".join(names)


def _memory(plan: PlannedRun) -> str:
    rows = _rows(plan, lambda rank: {part: held.mine for part, held in rank.memory.items()})
    text = _table(plan, "memory of the fullest rank", rows, PARTS)
    nodes, windows, untried = plan.training.node_bytes, plan.training.node_windows, plan.training.not_counted
    node = max(nodes, key=lambda n: nodes[n])
    beside = f"{unseen}, " if (unseen := plan.training.unseen) else ""
    tried = "activations and working arrays were found by trying one block of each kind"
    if plan.config.train.device != "cpu":
        text += "\n" + _table(plan, "on the GPU of the fullest rank", _rows(plan, lambda r: r.device_memory), PARTS)
        text += (
            "\nranks that share a GPU add up; not counted there: CUDA itself, memory that CuPy keeps, operands in 16 "
            "bits, and that attention takes more scores at once than the block that was tried"
        )
    return (
        f"{text}\nfullest node ({node}): {amount(nodes[node])}B, of it {amount(windows[node])}B in shared windows "
        "(/dev/shm)\n"
        + (f"not counted: arrays of the model's own passes ({untried}); Python and its libraries" if untried else "")
        + ("" if untried else f"not counted: {beside}Python and its libraries; {tried}")
    )


def _messages(plan: PlannedRun) -> str:
    rows = _rows(plan, lambda rank: {purpose: sent.bytes for purpose, sent in rank.sent.items()})
    text = _table(plan, "bytes that the busiest rank sends a step", rows, PURPOSES, _message_count)
    return f"{text}\nall ranks together {amount(sum(rank.bytes_sent for rank in plan.training.by_rank))}B"


def _message_count(rank: RankPlan) -> tuple[str, str]:
    return "messages", f"{rank.messages:,}"


def _work(plan: PlannedRun) -> str:
    training = plan.training
    lines = [_operations(plan)]
    if (simulation := plan.simulation) is not None:
        shares = ", ".join(f"{100 * share:.1f} %" for share in simulation.idle)
        caches = ", ".join(map(str, simulation.caches))
        lines.append(
            f"{simulation.schedule.name} with {training.micro_batches} micro-batches a replica: bubble "
            f"{100 * simulation.bubble_share:.1f} % of the step; stages idle {shares}; caches held {caches}"
        )
    return "\n".join(lines)


def _operations(plan: PlannedRun) -> str:
    every = [rank.operations for rank in plan.training.by_rank]
    if any(work is None for work in every):
        blocks = isinstance(plan.training.model, BlockModel)
        reason = "a layer does not count its operations (operations(shape) of mpizero.nn.Layer)"
        return f"work: not known, {reason if blocks else plan.training.not_counted}"
    counts = [work or 0 for work in every]
    most, simulation, rate = max(counts), plan.simulation, plan.training.rate
    seconds = most / rate if simulation is None else simulation.makespan
    source = "--gflops" if plan.request.machine is None else "--machine"
    return (
        f"work a step: {amount(sum(counts))}FLOP, the busiest rank {amount(most)}FLOP; at {rate / 1e9:.4g} GFLOP/s a "
        f"rank ({source}) products alone take {seconds:.3g} s"
    )


def _seconds(plan: PlannedRun, floors: TimeFloors) -> str:
    """Format the predicted time of a step, and of its phases on the slowest rank."""
    machine, rank = floors.machine, floors.slowest
    parts = floors.by_rank[rank]
    whole = sum(parts.values())
    rows = [[phase, f"{1e3 * taken:.3f}", f"{100 * taken / whole:.1f} %"] for phase, taken in parts.items() if taken]
    return (
        f"expected step on {machine.host} as measured {machine.date} by {counted(machine.ranks, 'rank')}: "
        f"{1e3 * whole:.4g} ms, {plan.training.global_batch / whole:.4g} samples/s; the slowest rank ({rank}), ms\n"
        f"{columns([*rows, ['all', f'{1e3 * whole:.3f}', '']])}\n"
        "not counted: what layers do besides products (norms, activations, softmax), and Python between them"
    )


def _table(
    plan: PlannedRun,
    title: str,
    rows: Sequence[_Row],
    columns: Sequence[str],
    last: Callable[[RankPlan], tuple[str, str]] | None = None,
) -> str:
    """Format a table of bytes, in a unit that suits the largest number.

    ``last``, called with the plan of a line's rank, returns the title and the cell of a last column.
    """
    present = [column for column in columns if any(column in row.figures for row in rows)]
    largest = max(sum(row.figures.values()) for row in rows)
    scale, prefix = next(((s, p) for s, p in PREFIXES if largest >= 10 * s), PREFIXES[-1])
    digits = 0 if scale == 1.0 else 1
    lines = [["", "rank", *present, "all", *([last(rows[0].rank)[0]] if last else [])]]
    for row in rows:
        figures = [*(row.figures.get(column, 0) for column in present), sum(row.figures.values())]
        cells = [f"{figure / scale:,.{digits}f}" for figure in figures]
        lines.append([_name(plan, row), str(row.rank.rank), *cells, *([last(row.rank)[1]] if last else [])])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    if not widths[0]:
        lines, widths = [line[1:] for line in lines], widths[1:]
    text = ("  ".join(_aligned(line, widths, left=bool(lines[0][0] == ""))) for line in lines)
    return "\n".join([f"{title}, {prefix}B", *text])


def _aligned(cells: Sequence[str], widths: Sequence[int], *, left: bool) -> list[str]:
    found = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return [cells[0].ljust(widths[0]), *found[1:]] if left else found


def as_json(plan: PlannedRun) -> str:
    """Format the plan as one line of JSON for programs."""
    return json.dumps(dict(_figures(plan)), allow_nan=False)


def _figures(plan: PlannedRun) -> Iterator[tuple[str, Any]]:
    training = plan.training
    yield "parameter_count", plan.parameter_count
    yield "axes", dict(training.axes.sizes)
    yield "strategy", plan.config.parallel.strategy
    yield "tiles", training.tiles
    yield "within_rounding", list(training.within_rounding)
    yield "grains", {"count": training.grains.count, "samples": training.grains.size}
    yield "ranks", [_rank(rank) for rank in training.by_rank]
    nodes, windows = training.node_bytes, training.node_windows
    yield "nodes", [{"node": n, "bytes": nodes[n], "window_bytes": windows[n]} for n in sorted(nodes)]
    yield "not_counted", training.not_counted or None
    yield "unseen", training.unseen or None
    yield "pipeline", _pipeline(plan)
    yield "expected", _expected(plan)
    yield "idle_ranks", list(training.idle)
    yield "warnings", list(plan.warnings)
    yield "memory_per_node", plan.request.memory_per_node
    yield "fits", not plan.missing


def _expected(plan: PlannedRun) -> dict[str, Any] | None:
    if (floors := plan.floors) is None:
        return None
    whole = sum(floors.by_rank[floors.slowest].values())
    rates = {"seconds": whole, "samples_per_second": plan.training.global_batch / whole, "rank": floors.slowest}
    return {**rates, "ranks": list(floors.by_rank)}


def _rank(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "node": rank.node,
        **rank.here._asdict(),
        "bytes": rank.bytes,
        "memory": {part: held._asdict() for part, held in rank.memory.items()},
        "device_memory": rank.device_memory,
        "bytes_sent": rank.bytes_sent,
        "messages": rank.messages,
        "sent": {purpose: sent._asdict() for purpose, sent in rank.sent.items()},
        "samples": rank.samples,
        "micro_batches": rank.micro_batches,
        "operations": rank.operations,
        "caches": rank.caches,
    }


def _pipeline(plan: PlannedRun) -> dict[str, Any] | None:
    if (simulation := plan.simulation) is None:
        return None
    return {
        "schedule": simulation.schedule.name,
        "micro_batches": plan.training.micro_batches,
        "seconds": simulation.makespan,
        "bubble_share": simulation.bubble_share,
        "idle": list(simulation.idle),
        "caches": list(simulation.caches),
    }
