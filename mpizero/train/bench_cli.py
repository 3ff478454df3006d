"""The commands ``mpizero bench``: their options, and what they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpizero.errors import ExitStatus
from mpizero.train.options import add_layout_options, layout_of, named_as_options

if TYPE_CHECKING:
    from mpizero.comm import Communicator


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add the command, which ``run`` executes. Not collective."""
    parser = commands.add_parser("bench", help="measure", description="Measure.")
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_memory(kinds)
    _add_checkpoint(kinds)
    for kind in kinds.choices.values():
        kind.set_defaults(run=run)


def _add_memory(kinds: Any) -> None:
    memory = kinds.add_parser(
        "memory",
        help="memory and bytes sent of every strategy, from real training steps",
        description="Train a few steps with every strategy, with memory shared on the node and private; print the "
        "formula, the library's own count, what the system has measured, and the bytes sent, beside each other. With "
        "--pipeline, --tensor or --context: of every rank of that layout, activations and messages too.",
        epilog="Example: mpiexec -n 8 python -m mpizero bench memory --pipeline 2 --tensor 2 --strategy zero1",
    )
    memory.add_argument("--parameters", metavar="P", type=float, default=64e6, help="at least (default: 64e6)")
    memory.add_argument(
        "--strategies", "--strategy", metavar="A,B", help="(default: ddp,zero1,zero2,zero3; zero1 for a layout)"
    )
    memory.add_argument("--memory", choices=("shared", "private", "both"), default="both", help="(default: both)")
    memory.add_argument("--steps", metavar="N", type=int, default=2, help="training steps each (default: %(default)s)")
    memory.add_argument("--json", action="store_true", help="one line for programs")
    add_layout_options(memory, schedule=True)
    memory.add_argument(
        "--micro-batches", metavar="M", type=int, help="of a replica and step, for a layout (default: 2 a stage)"
    )
    memory.set_defaults(measure=_memory)


def _add_checkpoint(kinds: Any) -> None:
    saved = kinds.add_parser(
        "checkpoint",
        help="speed and memory of saves and loads, beside the same bytes written, read and copied raw",
        description="Write and read checkpoints, and in turn the same bytes without any care: one file by pwrite and "
        "fsync, pread into warm memory, a copy in memory. Works in a folder of its own, which is removed.",
        epilog="Example: mpiexec -n 8 python -m mpizero bench checkpoint --bytes 1e9 --folder /scratch",
    )
    saved.add_argument("--bytes", metavar="B", type=float, default=1e9, help="of all ranks (default: 1e9)")
    saved.add_argument(
        "--backend", choices=("direct", "mpio", "all"), default="all", help="(default: all that are installed)"
    )
    saved.add_argument("--repeat", metavar="N", type=int, default=6, help="repetitions (default: %(default)s)")
    saved.add_argument("--folder", metavar="DIR", default=".", help="on the file system to measure (default: here)")
    saved.add_argument("--json", action="store_true", help="one line for programs")
    saved.set_defaults(measure=_checkpoint)


def run(options: argparse.Namespace, world: Callable[[], Communicator]) -> int:
    """Measure what the options say on all ranks of ``world()``, print it, and return the exit status.

    Collective over all processes.
    """
    status: int = options.measure(options, world)
    return status


def _memory(options: argparse.Namespace, world: Callable[[], Communicator]) -> int:
    from mpizero.train import bench, bench_layout

    layout = layout_of(options)
    strategies = options.strategies or ("zero1" if layout.splits_model else ",".join(bench.STRATEGIES))
    request = bench.MemoryRequest.parse(options.parameters, strategies, options.memory, options.steps)
    comm = world()
    with named_as_options():
        layout.check_ranks(comm.size)
    if layout.splits_model:
        count = 2 * layout.pipeline if options.micro_batches is None else options.micro_batches
        with named_as_options():
            tables = bench_layout.measure_layout(bench_layout.LayoutRequest(request, layout, count), comm, _tell)
        text = bench_layout.as_json(tables) if options.json else bench_layout.report(tables)
    else:
        rows = bench.measure_memory(request, comm, _tell)
        text = bench.as_json(rows) if options.json else bench.table(rows)
    if comm.rank == 0:
        print(text, flush=True)
    return int(ExitStatus.OK)


def _checkpoint(options: argparse.Namespace, world: Callable[[], Communicator]) -> int:
    from mpizero.train import bench_checkpoint as bench

    comm = world()
    request = bench.CheckpointRequest.parse(options.bytes, options.backend, options.repeat, options.folder, comm)
    figures = bench.measure_checkpoint(request, comm, _tell)
    if comm.rank == 0:
        print(bench.as_json(figures) if options.json else bench.report(figures), flush=True)
    return int(ExitStatus.OK)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
