"""Define the options of the command line: those that several commands share, and those of the longer commands.

The ``add_`` functions of this file only define options; the function ``run``, their argument, executes the command. So
the parser is made without importing MPI, Numba or HDF5. ``cli/commands.py`` defines the short commands, with the
functions that execute them, and ``cli/bench.py`` the benchmarks.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpizero.errors import ConfigError

if TYPE_CHECKING:
    from mpizero.comm import Communicator
    from mpizero.train.config.schema import RunConfig
    from mpizero.train.config.toml import ConfigDocument

#: What executes a command, given the parsed options: it returns the exit status, or None for success.
Run = Callable[[argparse.Namespace], int | None]
_SIZES = {
    "pipeline": "stages that the model's blocks are cut into",
    "tensor": "ranks that split each layer",
    "context": "ranks that split each sequence",
}


def add_value(parser: Any, name: str, metavar: str, default: Any, meaning: str = "") -> None:
    """Add an option to a parser or a group; its value has the type of ``default``, and its help shows ``default``."""
    description = f"{meaning} (default: %(default)s)".lstrip()
    parser.add_argument(name, metavar=metavar, type=type(default), default=default, help=description)


def add_layout_options(parser: argparse.ArgumentParser, *, schedule: bool = False) -> None:
    """Add ``--pipeline``, ``--tensor``, ``--context``, ``--data`` and ``--order`` to a parser.

    With ``schedule``, add ``--schedule`` and ``--virtual-stages`` too.
    """
    group = parser.add_argument_group("layout over the ranks of mpiexec")
    for name, meaning in _SIZES.items():
        add_value(group, f"--{name}", "N", 1, meaning)
    group.add_argument("--data", metavar="N", type=int, default=-1, help="replicas; -1: all remaining ranks (default)")
    add_value(group, "--order", "A,B,C", "pipeline,tensor,data", "the axes, slowest first")
    if schedule:
        from mpizero.layout import SCHEDULES

        add_value(group, "--schedule", "NAME", "1f1b", ", ".join(SCHEDULES))
        add_value(group, "--virtual-stages", "N", 1, "parts a stage, for interleaved")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, for commands that read a configuration file."""
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="replace a setting of the file; a TOML value, or a bare word; may be given many times. optimizer.name is "
        "sgd, adam, adamw, rmsprop, lion, lamb, muon, soap, l-bfgs, cg or newton-cg",
    )


def add_config(parser: argparse.ArgumentParser, meaning: str, nargs: str | None = None) -> None:
    """Add the argument ``CONFIG.toml``, optional with ``nargs = "?"``, and the option ``--set`` to a parser."""
    parser.add_argument("config", metavar="CONFIG.toml", nargs=nargs, help=meaning)
    add_overrides(parser)


def add_training(parser: argparse.ArgumentParser, meaning: str) -> None:
    """Add ``CONFIG.toml``, ``--set``, ``--resume``, ``--resume-from`` and ``--override`` to a parser."""
    add_config(parser, meaning)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue from the newest checkpoint, on any number of ranks and with any layout; damaged ones are passed "
        "over and moved to earlier/; with one that exists and cannot be opened, end with status 65 and touch nothing",
    )
    parser.add_argument(
        "--resume-from",
        metavar="STEP",
        type=whole_number,
        help="continue from the checkpoint of this step; later ones are moved to earlier/ in the run's folder",
    )
    parser.add_argument(
        "--override",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        dest="changed",
        help="with --resume: change a setting that determines the result, such as optimizer.lr, which is "
        "recorded; may be given many times",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, for commands that can print their result as one line of JSON."""
    parser.add_argument("--json", action="store_true", help="one line for programs")


def whole_number(text: str) -> int:
    """Convert the text of an option to a whole number >= 0.

    Raises
    ------
    argparse.ArgumentTypeError
        If the text is not such a number.
    """
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number >= 0")
    return int(text)


def layout_of(options: argparse.Namespace, **settings: Any) -> Any:
    """Make the :class:`~mpizero.train.config.sections.ParallelSection` that the options describe.

    ``settings`` are settings of that section for which the command has no options, such as ``strategy``.

    Raises
    ------
    ConfigError
        If an option is wrong. The message names the option.
    """
    from mpizero.train.config.sections import ParallelSection

    names = ("pipeline", "tensor", "data", "context", "order", "schedule", "virtual_stages")
    arguments = {name: getattr(options, name) for name in names if hasattr(options, name)}
    with named_as_options():
        return ParallelSection(**arguments, **settings)


@contextmanager
def named_as_options() -> Iterator[None]:
    """Convert an error of the ``with`` block about a setting to a ConfigError about an option of the command line.

    The setting ``parallel.tensor = 3`` becomes ``--tensor 3``.
    """
    from mpizero._util.settings import SettingError

    try:
        yield
    except SettingError as error:
        text = re.sub(r"\bparallel\.(\w+)( =)?", lambda match: f"--{match[1].replace('_', '-')}", error.message)
        raise ConfigError(text) from None


def read_together(options: argparse.Namespace, comm: Communicator) -> tuple[ConfigDocument, RunConfig]:
    """Read the configuration file of a command on rank 0, and parse it on all ranks.

    Collective over ``comm``. The values of ``--set`` and ``--override`` replace settings of the file. If
    ``train.threads`` is not set, it becomes ``options.threads``.

    Raises
    ------
    ConfigError
        If the file cannot be read, or a setting is wrong. The message names the key, file and line, and what is
        allowed.
    """
    from mpizero.comm.agreement import from_rank_0
    from mpizero.train.config.toml import ConfigDocument, parse_config, read_config

    text = from_rank_0(comm, lambda: read_config(options.config))
    changes = [*options.overrides, *getattr(options, "changed", ())]  # those of --override, which only training has
    document = ConfigDocument(options.config, text, changes)
    return document, parse_config(document, options.threads)


def add_train(commands: Any, run: Run) -> None:
    """Add ``mpizero train`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "train",
        help="train a model as a TOML file describes it; runs under mpiexec or srun",
        description="Train a model. Ends with one line of JSON on standard output; metrics, checkpoints and the "
        "marker run_complete go into the run's folder. SIGUSR1, SIGUSR2, SIGTERM, a file STOP in that folder or the "
        "coming end of the job's time: save and exit with status 75.",
        epilog="Example: mpiexec -n 8 python -m mpizero train config.toml --set train.steps=500",
    )
    add_training(parser, "what to train")
    parser.set_defaults(run=run)


def add_generate(commands: Any, run: Run) -> None:
    """Add ``mpizero generate`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "generate",
        help="write text with a trained language model",
        description="Write text, byte by byte. The same seed gives the same text. Under mpiexec the ranks share the "
        "model: each holds its part of the parameters, whatever layout the checkpoint was written by.",
        epilog='Example: python -m mpizero generate run --prompt "def " --length 400',
    )
    parser.add_argument("checkpoint", metavar="RUN_OR_CHECKPOINT", help="a run's folder (newest checkpoint), or one")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="what the text starts with")
    add_value(parser, "--length", "N", 200, "bytes to write")
    add_value(parser, "--temperature", "T", 0.8, "0 takes the likeliest")
    add_value(parser, "--top-k", "K", 40, "choose among the K likeliest; 0: all")
    add_value(parser, "--seed", "S", 0, "of the choices")
    add_layout_options(parser)
    add_value(parser, "--strategy", "NAME", "zero3", "how replicas hold parameters")
    parser.set_defaults(run=run)


def add_plan(commands: Any, run: Run) -> None:
    """Add ``mpizero plan`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "plan",
        help="tell the memory, messages and work of a training on so many ranks, without starting any",
        description="Compute what every rank would hold, send and do. Nothing is started and no model is made: one "
        "block of each kind runs once, to see what it keeps. With --memory-per-node: status 1 if it does not fit.",
        epilog="Example: python -m mpizero plan config.toml --ranks 64 --ranks-per-node 16 --memory-per-node 120GB",
    )
    parser.add_argument("config", metavar="CONFIG.toml", help="what would be trained")
    parser.add_argument("--ranks", metavar="N", type=int, required=True, help="how many there would be")
    parser.add_argument("--ranks-per-node", metavar="K", type=int, help="of one node (default: all on one)")
    add_overrides(parser)
    parser.add_argument("--memory-per-node", metavar="BYTES", help="what a node has: 64e9, 64GB, 60GiB")
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--gflops", metavar="G", type=float, help="of a rank (default: 50)")
    speed.add_argument(
        "--machine", metavar="FILE", help="also expect seconds, on what `mpizero bench machine` has measured"
    )
    parser.add_argument("--timetable", action="store_true", help="print what every stage of a pipeline does when")
    add_json(parser)
    parser.set_defaults(run=run)


def add_doctor(commands: Any, run: Run) -> None:
    """Add ``mpizero doctor`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "doctor",
        help="look at MPI, cores, shared memory, HDF5 and kernels, and say how to mend what is wrong",
        description="Try what training needs. Run it the way you would train, to see what training would see.",
        epilog="Example: mpiexec -n 8 python -m mpizero doctor",
    )
    add_json(parser)
    parser.add_argument(
        "--report",
        action="store_true",
        help="print a block to copy into a report of a fault, without names of users and hosts",
    )
    parser.add_argument(
        "--clean", action="store_true", help="remove shared memory of killed jobs of yours, on every node, if unused"
    )
    parser.set_defaults(run=run)


def add_verify(commands: Any, run: Run) -> None:
    """Add ``mpizero verify`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "verify",
        help="run one training on several layouts and name the first number that differs",
        description="Train a few steps on every layout, compare every bit with one process, and name the first step, "
        "tensor and rank that differ, and the probable cause. Without mpiexec the ranks are threads. Status 1 if a "
        "layout differs. Tensor and context groups are compared with one process that computes in the same tiles; "
        "where none can (groups of 3 ranks), within a tolerance.",
        epilog="Example: python -m mpizero verify config.toml --layouts '2; zero3*4; pipeline=2, data=2; tensor=2'",
    )
    add_config(parser, "what to train")
    parser.add_argument("--layouts", metavar="'A; B'", help="which (default: all kinds on --ranks)")
    parser.add_argument("--ranks", metavar="N", type=int, help="(default: those of mpiexec, else 2 threads)")
    add_value(parser, "--steps", "K", 5)
    parser.add_argument(
        "--tolerance", metavar="T", type=float, help="relative (default: 16 epsilon of the type a doubling of sums)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


_CHECKPOINT = "a run's folder (newest good checkpoint), its checkpoint folder, or one checkpoint"
#: File name endings of each format of ``export``.
EXPORTS = {"safetensors": (".safetensors",), "npz": (".npz",), "hdf5": (".h5", ".hdf5")}
_TYPES = "bfloat16, float16, float32 or float64"


def add_checkpoint(parent: Any, run: Run) -> None:
    """Add ``mpizero checkpoint`` and its subcommands to the commands. Not collective.

    ``run`` gets the parsed options; ``options.tool`` is the name of the chosen subcommand.
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
    parser.set_defaults(tool="inspect")


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
    parser.set_defaults(tool="verify")


def _add_diff(commands: Any) -> None:
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Compare arrays bit by bit, and attributes with the configuration, whatever layouts wrote them. "
        "Status 0: equal; 1: different.",
        epilog="Example: python -m mpizero checkpoint diff run other --arrays-only --tolerance 1e-6",
    )
    parser.add_argument("a", metavar="A", help=_CHECKPOINT)
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
    parser.set_defaults(tool="diff")


def _add_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write arrays into a safetensors, .npz or plain HDF5 file",
        description="Write a checkpoint's parameters into one new file, verified, a block at a time. "
        "parameters/NAME becomes NAME; optimizer arrays keep their names.",
        epilog="Example: python -m mpizero checkpoint export run model.safetensors",
    )
    parser.add_argument("path", metavar="PATH", help=_CHECKPOINT)
    parser.add_argument("out", metavar="OUT", help="the new file")
    parser.add_argument("--format", choices=tuple(EXPORTS), help="of the new file; by default its name tells it")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--parameters-only", action="store_true", help="no optimizer arrays (default)")
    which.add_argument("--state", action="store_true", help="optimizer arrays too")
    which.add_argument("--ema", action="store_true", help="the moving average of the parameters (train.ema)")
    parser.add_argument("--dtype", metavar="TYPE", help=f"convert floating-point arrays: {_TYPES}")
    parser.add_argument("--pattern", metavar="GLOB", help="only arrays whose names fit, with or without parameters/")
    parser.add_argument("--tied", action="store_true", help="tied parameters under their other names, too")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.set_defaults(tool="export")


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
    parser.set_defaults(tool="import")
