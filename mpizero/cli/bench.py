"""Define the commands ``mpizero bench``: their options and their output."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from mpizero.cli.options import (
    add_config,
    add_json,
    add_layout_options,
    add_value,
    layout_of,
    named_as_options,
    read_together,
)
from mpizero.errors import ConfigError

if TYPE_CHECKING:
    from mpizero.comm import Communicator


def add_command(commands: Any) -> None:
    """Add ``mpizero bench`` and its benchmarks to the commands. Not collective."""
    parser = commands.add_parser("bench", help="measure", description="Measure.")
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_memory(kinds)
    _add_checkpoint(kinds)
    _add_machine(kinds)
    _add_step(kinds)


def _add_memory(kinds: Any) -> None:
    memory = kinds.add_parser(
        "memory",
        help="memory and bytes sent of every strategy, from real training steps",
        description="Train a few steps with every strategy, with memory shared on the node and private; print the "
        "formula, the library's own count, what the system has measured, and the bytes sent, beside each other. With "
        "--pipeline, --tensor or --context: of every rank of that layout, activations and messages too. With "
        "CONFIG.toml: the same of its model, data and layout.",
        epilog="Example: mpiexec -n 8 python -m mpizero bench memory --pipeline 2 --tensor 2 --strategy zero1",
    )
    add_config(memory, "measure its model and layout", "?")
    memory.add_argument("--parameters", metavar="P", type=float, help="at least (default: 64e6)")
    memory.add_argument(
        "--strategies", "--strategy", metavar="A,B", help="(default: ddp,zero1,zero2,zero3; zero1 for a layout)"
    )
    memory.add_argument("--memory", choices=("shared", "private", "both"), default="both", help="(default: both)")
    add_value(memory, "--steps", "N", 2, "training steps each")
    add_json(memory)
    add_layout_options(memory, schedule=True)
    memory.add_argument(
        "--micro-batches", metavar="M", type=int, help="of a replica and step, for a layout (default: 2 a stage)"
    )
    memory.set_defaults(run=_memory)


def _add_checkpoint(kinds: Any) -> None:
    saved = kinds.add_parser(
        "checkpoint",
        help="speed and memory of saves and loads, beside the same bytes written, read and copied raw",
        description="Write and read checkpoints, and in turn the same bytes without any care: one file by pwrite and "
        "fsync, pread into warm memory, a copy in memory. Works in a folder of its own, which is removed.",
        epilog="Example: mpiexec -n 8 python -m mpizero bench checkpoint --bytes 1e9 --folder /scratch",
    )
    add_config(saved, "as many bytes as its checkpoints have", "?")
    saved.add_argument("--bytes", metavar="B", type=float, help="of all ranks (default: 1e9)")
    saved.add_argument(
        "--backend", choices=("direct", "mpio", "all"), default="all", help="(default: all that are installed)"
    )
    add_value(saved, "--repeat", "N", 6, "repetitions")
    saved.add_argument("--folder", metavar="DIR", default=".", help="on the file system to measure (default: here)")
    add_json(saved)
    saved.set_defaults(run=_checkpoint)


def _add_machine(kinds: Any) -> None:
    machine = kinds.add_parser(
        "machine",
        help="speed of memory, matrix products, messages and files; stored in a machine file",
        description="Measure what this machine can do: passes over memory with the reads and writes of training's own, "
        "matrix products of the shapes of a transformer, each on one rank alone and on all at once; collectives by "
        "size; a file. Stores the figures in a machine file, which plan and bench step read.",
        epilog="Example: mpiexec -n 8 python -m mpizero bench machine config.toml --output machine.json",
    )
    add_config(machine, "take the shapes of its gpt and its grains", "?")
    shapes = {"dim": 256, "batch": 8, "sequence": 128}
    for name, default in shapes.items():
        machine.add_argument(f"--{name}", metavar="N", type=int, help=f"instead of CONFIG.toml (default: {default})")
    machine.add_argument("--heads", metavar="N", type=int, help="instead of CONFIG.toml (default: dim / 64)")
    machine.add_argument(
        "--elements", metavar="N", type=float, default=1 << 24, help="of an array in memory (default: 2^24)"
    )
    machine.add_argument(
        "--largest", metavar="B", type=float, default=1 << 23, help="bytes of the largest message (default: 2^23)"
    )
    machine.add_argument(
        "--file-bytes", metavar="B", type=float, default=128e6, help="of the file; 0: no file (default: 128e6)"
    )
    machine.add_argument("--folder", metavar="DIR", default=".", help="on the file system to measure (default: here)")
    add_value(machine, "--repeat", "N", 7, "repetitions")
    add_value(machine, "--output", "FILE", "machine.json", "the machine file")
    add_json(machine)
    machine.set_defaults(run=_machine)


def _add_step(kinds: Any) -> None:
    step = kinds.add_parser(
        "step",
        help="where the time of a training step goes, phase by phase",
        description="Train some steps as CONFIG.toml says and tell what each took: forward, backward, sums of "
        "gradients, optimizer, publication of parameters, and waiting for other ranks; with --machine beside what the "
        "machine allows. Every other step runs without tracing, which shows what tracing costs. Nothing is saved.",
        epilog="Example: mpiexec -n 8 python -m mpizero bench step config.toml --machine machine.json --trace t.json",
    )
    add_config(step, "what to train")
    add_value(step, "--steps", "N", 10, "traced steps")
    add_value(step, "--warm-up", "N", 3, "steps before")
    step.add_argument("--machine", metavar="FILE", help="what `mpizero bench machine` has measured, for floors")
    step.add_argument(
        "--trace", metavar="FILE", help="also draw the traced steps, one row a rank, for Perfetto or chrome://tracing"
    )
    add_json(step)
    step.set_defaults(run=_step)


def _memory(options: argparse.Namespace) -> None:
    from mpizero.tools.bench import memory as layout_memory
    from mpizero.tools.bench import strategies as strategy_memory
    from mpizero.train.config.sections import STRATEGIES

    layout = layout_of(options)
    strategies = options.strategies or ("zero1" if layout.splits_model else ",".join(STRATEGIES))
    parameters = 64e6 if options.parameters is None else options.parameters
    request = strategy_memory.MemoryRequest.parse(parameters, strategies, options.memory, options.steps)
    if options.config is not None:
        _config_memory(options, request, layout, options.world())
        return
    _refuse_overrides(options)
    comm = options.world()
    with named_as_options():
        layout.check_ranks(comm.size)
    if layout.splits_model:
        count = 2 * layout.pipeline if options.micro_batches is None else options.micro_batches
        with named_as_options():
            tables = layout_memory.measure_layout(layout_memory.LayoutRequest(request, layout, count), comm, _tell)
        text = layout_memory.layout_json(tables) if options.json else layout_memory.layout_report(tables)
    else:
        rows = strategy_memory.measure_memory(request, comm, _tell)
        text = strategy_memory.strategies_json(rows) if options.json else strategy_memory.strategies_table(rows)
    _print(comm, text)


def _config_memory(options: argparse.Namespace, request: Any, layout: Any, comm: Communicator) -> None:
    """Measure the memory and messages of training the configuration's model, and print them."""
    from mpizero.tools.bench import memory as layout_memory

    for name, value in (("parameters", options.parameters), ("micro_batches", options.micro_batches)):
        if value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value:g}: {options.config} describes model and batch; use --set"
            )
    if layout != type(layout)():
        raise ConfigError(
            f"{options.config} describes the layout: use --set parallel.pipeline=2 in place of --pipeline 2"
        )
    document, config = read_together(options, comm)
    with document.located():
        chosen = None if options.strategies is None else request.strategies
        tables = layout_memory.measure_config(config, chosen, request.shared, request.steps, comm, _tell)
    _print(comm, layout_memory.layout_json(tables) if options.json else layout_memory.layout_report(tables))


def _refuse_overrides(options: argparse.Namespace) -> None:
    if options.overrides:
        raise ConfigError(f"--set {options.overrides[0]}: needs a CONFIG.toml")


def _checkpoint(options: argparse.Namespace) -> None:
    from mpizero.tools.bench import checkpoint

    comm = options.world()
    request = checkpoint.CheckpointRequest.parse(
        _checkpoint_bytes(options, comm), options.backend, options.repeat, options.folder, comm
    )
    result = checkpoint.measure_checkpoint(request, comm, _tell)
    _print(comm, checkpoint.as_json(result) if options.json else checkpoint.report(result))


def _checkpoint_bytes(options: argparse.Namespace, comm: Communicator) -> float:
    """Return how many bytes to save: the option ``--bytes``, or the checkpoint size of the configuration's model."""
    from mpizero.comm.agreement import all_ranks
    from mpizero.tools.bench.checkpoint import LEAST
    from mpizero.tools.bench.memory import checkpoint_bytes

    if options.config is None:
        _refuse_overrides(options)
        return 1e9 if options.bytes is None else float(options.bytes)
    if options.bytes is not None:
        raise ConfigError(f"--bytes {options.bytes:g}: {options.config} describes the model; leave one of them out")
    document, config = read_together(options, comm)
    with document.located(), all_ranks(comm):
        return float(max(checkpoint_bytes(config), LEAST))


def _machine(options: argparse.Namespace) -> None:
    from mpizero.tools.bench import machine

    comm = options.world()
    shapes = _shapes(options, comm)
    arguments: dict[str, Any] = {name: getattr(options, name) for name in ("folder", "output", "repeat", "threads")}
    arguments |= {name: _count(options, name) for name in ("elements", "largest", "file_bytes")}
    result = machine.measure_machine(machine.MachineRequest(shapes=shapes, **arguments), comm, _tell)
    _print(comm, machine.as_json(result) if options.json else machine.report(result))


def _step(options: argparse.Namespace) -> None:
    from mpizero.comm.agreement import from_rank_0
    from mpizero.tools.bench import step
    from mpizero.tools.plan.time import read_machine

    comm = options.world()
    document, config = read_together(options, comm)
    machine = None
    if options.machine is not None:
        machine = from_rank_0(comm, lambda: read_machine(options.machine), "bench step")
    with document.located():
        request = step.StepRequest(options.steps, options.warm_up, machine, options.trace)
        result = step.measure_step(request, config, comm, _tell)
    _print(comm, step.as_json(result) if options.json else step.report(result))


def _shapes(options: argparse.Namespace, comm: Communicator) -> Any:
    """Return the shapes of the matrix products to measure: from the configuration file, else from the options.

    If there is a configuration file, its ``train.threads`` is stored in ``options.threads``.
    """
    from mpizero.tools.bench.machine import ProductShapes

    arguments = {name: getattr(options, name) for name in ("dim", "batch", "sequence", "heads")}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if options.config is None:
        _refuse_overrides(options)
        dim = arguments.get("dim", ProductShapes.dim)
        return ProductShapes(**{"heads": max(1, dim // 64) if dim % 64 == 0 else 1, **arguments})
    if arguments:
        name, value = next(iter(arguments.items()))
        raise ConfigError(f"--{name} {value}: {options.config} gives the shapes; use --set, or leave one of them out")
    document, config = read_together(options, comm)
    options.threads = config.train.threads
    with document.located():
        return ProductShapes.of(config)


def _count(options: argparse.Namespace, name: str) -> int:
    """Convert the value of an option such as 64e6 to a whole number, or raise :class:`ConfigError`."""
    value = getattr(options, name)
    if not 0 <= value <= 1e15:
        raise ConfigError(f"--{name.replace('_', '-')} {value}: must be a number from 0 to 1e15")
    return int(value)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(comm: Communicator, text: str) -> None:
    if comm.rank == 0:
        print(text, flush=True)
