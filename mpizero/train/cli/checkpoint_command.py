"""Define ``mpizero checkpoint``: inspect, verify, compare, export and import checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpizero._util.text import show
from mpizero.errors import CheckpointDamagedError, CheckpointError, ConfigError, ExitStatus
from mpizero.train.cli.options import add_json

if TYPE_CHECKING:
    from mpizero.checkpoint.inspect import ListedCheckpoint

_PATH = "a run's folder (newest good checkpoint), its checkpoint folder, or one checkpoint"
#: File name endings of each format of ``export``.
_ENDINGS = {"safetensors": (".safetensors",), "npz": (".npz",), "hdf5": (".h5", ".hdf5")}
_TYPES = "bfloat16, float16, float32 or float64"


def add_command(parent: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero checkpoint`` and its subcommands to the commands. Not collective.

    ``run`` gets the parsed options; ``options.tool`` is the function that executes the chosen subcommand.
    """
    parser = parent.add_parser(
        "checkpoint",
        help="look into checkpoints; check, compare, export and import them",
        description="Look into checkpoints, check, compare, export and import them. One process is enough; under "
        "mpiexec rank 0 does the work.",
    )
    parser.set_defaults(run=run)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_export(commands)
    _add_import(commands)


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, or which checkpoints a run has",
        description="Tell what a checkpoint holds; of a run or a checkpoint folder, list all checkpoints, damaged ones "
        "too. Arrays are read only for --statistics.",
        epilog="Example: python -m mpizero checkpoint inspect run/checkpoints/step_00000100 --pattern '*.weight'",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint; or a run's folder, or its checkpoint folder")
    parser.add_argument("--arrays", action="store_true", help="a table of all arrays")
    parser.add_argument("--statistics", action="store_true", help="with smallest, largest and mean value and norm")
    parser.add_argument("--pattern", metavar="GLOB", help="only arrays whose names fit, with or without parameters/")
    add_json(parser)
    parser.set_defaults(tool=_inspect)


def _add_verify(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        help="read all of a checkpoint, and compare every checksum",
        description="Compare manifest, sizes, the checksum of every block, and what HDF5 says of the arrays. Status 65 "
        "and the name of the array if anything is damaged.",
        epilog="Example: python -m mpizero checkpoint verify run --all",
    )
    parser.add_argument("path", metavar="PATH", help="a checkpoint, or a run: its newest checkpoint, good or not")
    parser.add_argument("--all", action="store_true", help="all checkpoints of a run")
    parser.set_defaults(tool=_verify)


def _add_diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Compare arrays bit by bit, and attributes with the configuration, whatever layouts wrote them. "
        "Status 0: equal; 1: different.",
        epilog="Example: python -m mpizero checkpoint diff run other --arrays-only --tolerance 1e-6",
    )
    parser.add_argument("a", metavar="A", help=_PATH)
    parser.add_argument("b", metavar="B", help="the same of the other")
    parser.add_argument(
        "--tolerance",
        metavar="T",
        type=float,
        default=0.0,
        help="values count as equal that differ by at most T, absolutely or relative to the larger (default: 0)",
    )
    parser.add_argument("--pattern", metavar="GLOB", help="compare only arrays whose names fit")
    parser.add_argument("--arrays-only", action="store_true", help="leave attributes and configuration out")
    add_json(parser)
    parser.set_defaults(tool=_diff)


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write arrays into a safetensors, .npz or plain HDF5 file",
        description="Write a checkpoint's parameters into one new file, verified, a block at a time. "
        "parameters/NAME becomes NAME; optimizer arrays keep their names.",
        epilog="Example: python -m mpizero checkpoint export run model.safetensors",
    )
    parser.add_argument("path", metavar="PATH", help=_PATH)
    parser.add_argument("out", metavar="OUT", help="the new file")
    parser.add_argument("--format", choices=tuple(_ENDINGS), help="of the new file; by default its name tells it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--parameters-only", action="store_true", help="no optimizer arrays (default)")
    which.add_argument("--state", action="store_true", help="optimizer arrays too")
    which.add_argument("--ema", action="store_true", help="the moving average of the parameters (train.ema)")
    parser.add_argument("--dtype", metavar="TYPE", help=f"convert floating-point arrays: {_TYPES}")
    parser.add_argument("--pattern", metavar="GLOB", help="only arrays whose names fit, with or without parameters/")
    parser.add_argument("--tied", action="store_true", help="tied parameters under their other names, too")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.set_defaults(tool=_export)


def _add_import(commands: Any) -> None:
    parser = commands.add_parser(
        "import",
        help="make a checkpoint of a safetensors file",
        description="Write a checkpoint with the tensors of a file. With --like or --config names, shapes and types "
        "are checked, and `generate` and `train --resume` can take it.",
        epilog="Example: python -m mpizero checkpoint import model.safetensors run/checkpoints/step_00000000 "
        "--config config.toml --map 'h.*=blocks.*' --transpose '*.weight'",
    )
    parser.add_argument("file", metavar="FILE.safetensors", help="the tensors")
    parser.add_argument("out", metavar="OUT", help="the new checkpoint, a folder")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--like", metavar="CHECKPOINT", help="take model, configuration and step from this one")
    model.add_argument("--config", metavar="CONFIG.toml", help="the model is that of this configuration, at step 0")
    parser.add_argument(
        "--map",
        metavar="OLD=NEW",
        action="append",
        default=[],
        help="a tensor's name and the parameter it is; * in both stands for the same text; may be given many times",
    )
    parser.add_argument(
        "--transpose", metavar="NAME", nargs="+", action="extend", default=[], help="parameters whose axes are reversed"
    )
    parser.add_argument("--drop", metavar="NAME", nargs="+", action="extend", default=[], help="tensors left out")
    parser.add_argument("--dtype", metavar="TYPE", help=f"convert floating-point tensors: {_TYPES}")
    parser.add_argument("--force", action="store_true", help="replace the checkpoint OUT if it exists")
    parser.set_defaults(tool=_import)


# ------------------------------------------------------------------ commands


def _inspect(options: argparse.Namespace) -> int:
    from mpizero import checkpoint
    from mpizero.checkpoint.inspect import find_folder, is_checkpoint, listing
    from mpizero.train.checkpoints import report

    path = Path(options.path)
    if is_checkpoint(path):
        with checkpoint.open_checkpoint(path, "self") as reader:
            held = report.describe(reader, options)
        show(report.as_json(held) if options.json else report.description(held))
        return int(ExitStatus.OK)
    found = listing(find_folder(path))
    if options.arrays or options.statistics or options.pattern is not None:
        raise ConfigError(f"{path}: arrays are those of one checkpoint; give one, as {found[-1].path}")
    show(report.listing_json(found) if options.json else report.listing_text(found))
    return int(ExitStatus.OK)


def _verify(options: argparse.Namespace) -> int:
    from mpizero.checkpoint.inspect import find_folder, is_checkpoint, listing

    path = Path(options.path)
    if is_checkpoint(path):
        _verify_one(str(path))
        return int(ExitStatus.OK)
    found = listing(find_folder(path))
    damaged: list[str] = []
    for listed in found if options.all else found[-1:]:
        _verify_listed(listed, damaged)
    if damaged:
        raise CheckpointError(f"{len(damaged)} of {len(found) if options.all else 1} not sound: {'; '.join(damaged)}")
    return int(ExitStatus.OK)


def _verify_listed(listed: ListedCheckpoint, damaged: list[str]) -> None:
    try:
        _verify_one(listed.path)
    except CheckpointError as error:
        show(f"{listed.path}: {'damaged' if isinstance(error, CheckpointDamagedError) else 'unreadable'}")
        damaged.append(str(error))


def _verify_one(path: str) -> None:
    from mpizero import checkpoint
    from mpizero._util.text import amount
    from mpizero.train.events import ByteProgress

    with checkpoint.open_checkpoint(path, "self") as reader:
        count, name = len(reader.arrays), reader.name
        total = sum(dtype.itemsize * _size(shape) for shape, dtype in reader.arrays.values())
    started = time.perf_counter()
    with ByteProgress(total, "verify") as progress:
        nbytes = checkpoint.verify(name, progress)
    seconds = time.perf_counter() - started
    speed = f"{amount(nbytes)}B in {seconds:.3g} s, {nbytes / seconds / 1e9:.2f} GB/s"
    show(f"{path}: sound: {count} arrays, {speed}")


def _size(shape: tuple[int, ...]) -> int:
    from math import prod

    return prod(shape)


def _diff(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from mpizero import checkpoint
    from mpizero._util.checks import number
    from mpizero.checkpoint.inspect import compare, find_checkpoint, matches
    from mpizero.train.checkpoints import report
    from mpizero.train.config.checks import check_option
    from mpizero.train.events import ByteProgress

    check_option("--tolerance", options.tolerance, number())
    names = [str(find_checkpoint(Path(path))) for path in (options.a, options.b)]
    with ExitStack() as stack:
        a, b = (stack.enter_context(checkpoint.open_checkpoint(name, "self")) for name in names)
        sizes = (_size(s) * t.itemsize for path, (s, t) in a.arrays.items() if matches(path, options.pattern))
        progress = stack.enter_context(ByteProgress(sum(sizes), "diff"))
        found = compare(a, b, options.tolerance, options.pattern, progress)
    if options.arrays_only:
        found = replace(found, attributes={})
    show(report.difference_json(names, found) if options.json else report.difference_text(names, found))
    return int(ExitStatus.OK) if found.equal else 1


def _format_of(out: str) -> str:
    """Return the export format ("safetensors", "npz" or "hdf5") that belongs to the ending of a file's name."""
    found = next((form for form, endings in _ENDINGS.items() if out.lower().endswith(endings)), None)
    if found is None:
        known = ", ".join(ending for endings in _ENDINGS.values() for ending in endings)
        raise ConfigError(
            f"{out}: the name tells no format: end it with one of {known}, or give --format {'|'.join(_ENDINGS)}"
        )
    return found


def _export(options: argparse.Namespace) -> int:
    from mpizero import checkpoint
    from mpizero._util.text import amount
    from mpizero.checkpoint.convert import export, export_bytes
    from mpizero.checkpoint.inspect import find_checkpoint
    from mpizero.train.events import ByteProgress

    form = options.format or _format_of(options.out)
    path = find_checkpoint(Path(options.path))
    selection = {"state": options.state, "ema": options.ema, "dtype": options.dtype, "pattern": options.pattern}
    with checkpoint.open_checkpoint(path, "self") as reader:
        total = export_bytes(reader, state=options.state, pattern=options.pattern)
        with ByteProgress(total, "export") as progress:
            written = {"tied": options.tied, "replace": options.force, "report": progress}
            items = export(reader, options.out, form, **selection, **written)
    size = sum(item.nbytes for item in items)
    show(f"{options.out}: {len(items)} arrays, {amount(size)}B, from {path}")
    return int(ExitStatus.OK)


def _import(options: argparse.Namespace) -> int:
    from mpizero.checkpoint.convert import ImportRules, TensorFile, write_imported
    from mpizero.train.checkpoints import importing

    names = [(old, new) for old, _, new in (given.partition("=") for given in options.map)]
    rules = ImportRules(names=names, drop=options.drop, transpose=options.transpose, dtype=options.dtype)
    with TensorFile(options.file) as source:
        if options.like is not None:
            model = importing.like(options.like)
        elif options.config is not None:
            model = importing.described(options.config)
        else:
            model = importing.CheckpointTemplate(source.attributes, None)
        arrays = write_imported(
            source, options.out, model.attributes, rules, expected=model.expected, replace=options.force
        )
    show(f"{options.out}: {len(arrays)} arrays, from {options.file}")
    return int(ExitStatus.OK)
