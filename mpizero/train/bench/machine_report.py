"""Format the measurements of a machine as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from mpizero._util.text import Measurement, amount, columns
from mpizero.planning.machine_file import Machine, MessageSpeed
from mpizero.train.doctor.check_result import counted


def report(machine: Machine) -> str:
    """Return all measurements of a machine as tables, for people."""
    parts = [_head(machine), _streams(machine), _products(machine)]
    if machine.messages:
        parts.append(_messages(machine))
    if machine.files:
        parts.append(_files(machine))
    return "\n\n".join(parts)


def as_json(machine: Machine) -> str:
    """Return all measurements of a machine as one line of JSON."""
    return json.dumps({"benchmark": "machine", **asdict(machine)}, allow_nan=False)


def _head(machine: Machine) -> str:
    where = f"{counted(machine.ranks, 'rank')} on {counted(machine.nodes, 'node')}"
    return (
        f"{machine.host} ({machine.cpu}): {where}, {counted(machine.threads, 'thread')} each, "
        f"{machine.blas}; medians of {machine.repeat} interleaved repetitions, with the range"
    )


def _range(measured: Measurement, scale: float) -> str:
    return f"{measured.least * scale:.3g}-{measured.most * scale:.3g}"


def _rates(work: float, measured: Measurement, unit: float) -> list[str]:
    """Format two cells of a table: ``work`` divided by the median of the seconds, and the range of such rates.

    ``work`` is the number of bytes or operations done in the measured seconds. Rates are printed in multiples of
    ``unit``, 1e9 for GB/s.
    """
    return [
        f"{work / measured.median / unit:.1f}",
        f"{work / measured.most / unit:.1f}-{work / measured.least / unit:.1f}",
    ]


def _streams(machine: Machine) -> str:
    size = machine.streams[0].elements * machine.streams[0].itemsize
    rows = [["", "reads", "writes", "one rank", "", "each of all", "", "own kernel", "x plain", ""]]
    for s in machine.streams:
        own = f"{s.nbytes / s.own_every.median / 1e9:.1f}"
        ratio = [f"{s.ratio_every.median:.2f}", _range(s.ratio_every, 1)]
        cells = [*_rates(s.nbytes, s.one, 1e9), *_rates(s.nbytes, s.every, 1e9)]
        rows.append([s.name, str(s.reads), str(s.writes), *cells, own, *ratio])
    return (
        f"passes over memory, arrays of {amount(size)}B, GB/s of a rank: plain ones, alone and at once; the library's "
        f"kernel at once, and its time by the plain pass's\n{columns(rows)}"
    )


def _products(machine: Machine) -> str:
    rows = [["", "", "batch", "rows", "inner", "columns", "one rank", "", "each of all", ""]]
    for p in machine.products:
        cells = [*_rates(p.operations, p.one, 1e9), *_rates(p.operations, p.every, 1e9)]
        sizes = [str(n) for n in (p.batch, p.rows, p.inner, p.columns)]
        rows.append([p.name, p.form, *sizes, *cells])
    one, every = machine.rate(1) / 1e9, machine.rate(machine.ranks_per_node) / 1e9
    return (
        f"{machine.dtype} products, GFLOP/s of a rank\n{columns(rows, (0, 1))}\nGEMM rate, the four linear maps of a "
        f"block with their gradients at their fastest: {one:.1f} for one rank, {every:.1f} for each of all"
    )


def _messages(machine: Machine) -> str:
    rows = [["", "", "bytes", "sent", "µs", "range", "MB/s"]]
    rows += [
        [m.operation, m.where, f"{m.nbytes:,}", f"{m.sent:,}", f"{m.seconds.median * 1e6:.1f}", *_speed(m)]
        for m in sorted(machine.messages, key=lambda m: (m.operation, m.where))
    ]
    return f"messages, the slowest rank's time\n{columns(rows, (0, 1))}"


def _speed(message: MessageSpeed) -> Iterator[str]:
    yield _range(message.seconds, 1e6)
    yield f"{message.sent / message.seconds.median / 1e6:.1f}" if message.sent else ""


def _files(machine: Machine) -> str:
    rows = [["", "bytes", "ms", "range", "MB/s"]]
    for f in machine.files:
        speed = f"{f.nbytes / f.seconds.median / 1e6:.0f}"
        rows.append([f.operation, f"{f.nbytes:,}", f"{f.seconds.median * 1e3:.1f}", _range(f.seconds, 1e3), speed])
    return f"one file by all ranks\n{columns(rows)}"
