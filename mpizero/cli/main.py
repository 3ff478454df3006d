"""Run the command line: ``python -m mpizero COMMAND``.

Every command imports the libraries that it needs when it runs: importing MPI, Numba and the others takes about a
second, for which help and completion would wait, and in which ``mpizero train`` would not yet catch a scheduler's stop
signals.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mpizero._util.launch import BY_ANY, is_first, unclear
from mpizero._util.text import accept_all_characters, mpizero_version, show, wants_colour
from mpizero.cli import bench, commands
from mpizero.cli import options as parsers
from mpizero.cli.options import Run, layout_of, named_as_options, read_together
from mpizero.errors import ConfigError, ExitStatus, MpizeroError
from mpizero.train.stopping import JobContext, StopSignals

if TYPE_CHECKING:
    from mpizero.comm import Communicator


class InputOutputError(MpizeroError):
    """Report that the operating system has failed to read or write something."""

    status = ExitStatus.INPUT_OUTPUT


class Interrupted(MpizeroError):  # noqa: N818 - what the user wanted
    """Report that the user has pressed Ctrl-C; the exit status is 130, as in a shell."""

    status = cast("ExitStatus", 130)


class _Parser(argparse.ArgumentParser):
    """Parse the command line; print usage errors and help on rank 0 only, and exit with status 78 on bad usage."""

    def error(self, message: str) -> NoReturn:
        if is_first(os.environ):
            self.print_usage(sys.stderr)
            print(f"{self.prog}: error: {message}", file=sys.stderr)
        raise SystemExit(int(ExitStatus.CONFIG))

    def _print_message(self, message: str, file: Any = None) -> None:
        if message and is_first(os.environ):
            super()._print_message(message, file)


def main(arguments: Sequence[str] | None = None, comm: Communicator | None = None) -> int:
    """Run a command, and return its exit status.

    Collective over ``comm``. By default ``comm`` has all processes that the launcher has started. Errors that the user
    can correct are then printed as one line on standard error by one rank; any other error prints its traceback and
    ends the job. With a given ``comm``, whose ranks may be threads, errors are raised instead.
    """
    from mpizero.guard import guard

    accept_all_characters()
    options = build_parser().parse_args(arguments)
    options.comm, options.world, options.threads = comm, partial(_world, comm), _threads()
    if comm is None:
        guard.current().install(keep=True)
    try:
        with _one_line_errors():
            status: int = options.run(options) or int(ExitStatus.OK)
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has seen enough; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitStatus.INPUT_OUTPUT)
    return status


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Convert operating system errors and Ctrl-C in a ``with`` block to errors that are printed on one line."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped from the keyboard") from None
    except OSError as error:
        if isinstance(error, MpizeroError | BrokenPipeError):
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise InputOutputError(f"{where}{error.strerror or error}") from error


def _on_first_rank(work: Run, options: argparse.Namespace) -> int | None:
    """Run ``work`` on rank 0 only, for commands that need one process, and return the exit status.

    Other ranks return None immediately, and MPI is not initialized. Under mpiexec, this function prints errors itself,
    because ``mpizero.guard``, which otherwise prints them and ends the job, would try to reach the other ranks.
    """
    if not (is_first(os.environ) if options.comm is None else options.comm.rank == 0):
        return None
    if options.comm is not None or not any(os.environ.get(name) for name in BY_ANY):
        return work(options)
    try:
        with _one_line_errors():
            if text := unclear(os.environ):
                raise ConfigError(text)
            return work(options)
    except MpizeroError as error:
        from mpizero.guard.reports import user_message, write_stderr

        write_stderr(f"{user_message(error)}\n")
        return int(error.status)


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands and their options.

    Not collective.
    """
    parser = _Parser(
        prog="mpizero",
        description="Train models that do not fit one process, over MPI, with the same bits on any number of ranks.",
        epilog="Exit status: 0 done; 1 something differs or is wrong, or an error of Python; 65 bad data or "
        "checkpoint; 70 a rank failed; 74 input/output; 75 stopped early, "
        "and saved; 76 hang or mismatch; 78 bad configuration or usage.",
    )
    parser.add_argument("--version", action="version", version=f"mpizero {mpizero_version()}")
    kinds = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parsers.add_train(kinds, _train)
    parsers.add_generate(kinds, _generate)
    parsers.add_plan(kinds, partial(_on_first_rank, _plan))
    parsers.add_verify(kinds, _verify)
    parsers.add_doctor(kinds, _doctor)
    commands.add_new(kinds, partial(_on_first_rank, commands.run_new))
    commands.add_replay(kinds, partial(_on_first_rank, commands.run_replay))
    commands.add_ensemble(kinds, partial(_on_first_rank, commands.run_ensemble))
    commands.add_report(kinds, partial(_on_first_rank, commands.run_report))
    commands.add_watch(kinds, partial(_on_first_rank, commands.run_watch))
    commands.add_requeue(kinds, partial(_on_first_rank, lambda options: commands.run_requeue(options, os.environ)))
    bench.add_command(kinds)
    parsers.add_checkpoint(kinds, partial(_on_first_rank, _checkpoint))
    complete = partial(_on_first_rank, lambda options: commands.run_completion(options, parser))
    commands.add_completion(kinds, complete)
    return parser


def _train(options: argparse.Namespace) -> int:
    with StopSignals() as signals:  # from here on: loading libraries takes seconds
        status = _train_until_stopped(options, signals, time.monotonic())
        signals.ignore()
    return status


def _train_until_stopped(options: argparse.Namespace, signals: StopSignals, started: float) -> int:
    comm = options.world()
    if options.changed and not options.resume and options.resume_from is None:
        raise ConfigError(f"--override {options.changed[0]}: is for a run that is resumed; use --set, or add --resume")
    document, config = read_together(options, comm)

    from mpizero.cli.train import train_document
    from mpizero.train.loop import Preempted

    try:
        with document.located():
            result = train_document(
                document,
                config,
                comm,
                resume=options.resume,
                resume_from=options.resume_from,
                overridden=[change.partition("=")[0].strip() for change in options.changed],
                context=JobContext(signals, started, os.environ),
            )
    except Preempted as stop:
        if comm.rank == 0:
            print(f"mpizero: {stop}", file=sys.stderr, flush=True)
        return int(stop.status)
    if comm.rank == 0:
        print(json.dumps(result, allow_nan=False), flush=True)
    return int(ExitStatus.OK)


def _generate(options: argparse.Namespace) -> None:
    from mpizero._util.checks import whole
    from mpizero._util.settings import check_option
    from mpizero.tools.generate import Sampling, open_language_model, write

    check_option("--length", options.length, whole())
    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, seed=options.seed)
    layout = layout_of(options, strategy=options.strategy)
    from threadpoolctl import threadpool_limits

    comm, threads = options.world(), options.threads
    with (
        threadpool_limits(threads),
        named_as_options(),
        open_language_model(options.checkpoint, comm, layout, threads) as model,
    ):
        write(model, os.fsencode(options.prompt), options.length, sampling, comm)


def _plan(options: argparse.Namespace) -> int:
    from mpizero.tools.plan import command
    from mpizero.tools.plan.command import DEFAULT_RATE, PlanRequest, parse_bytes, plan
    from mpizero.tools.plan.time import read_machine
    from mpizero.train.config.toml import ConfigDocument, parse_config, read_config

    limit = None if options.memory_per_node is None else parse_bytes(options.memory_per_node)
    machine = None if options.machine is None else read_machine(options.machine)
    rate = DEFAULT_RATE if options.gflops is None else options.gflops * 1e9
    request = PlanRequest(options.ranks, options.ranks_per_node, limit, rate, machine)
    document = ConfigDocument(options.config, read_config(options.config), options.overrides)
    with document.located():
        result = plan(parse_config(document, options.threads), request)
        text = command.as_json(result) if options.json else command.report(result, with_timetable=options.timetable)
    show(text)
    if result.missing:
        show(f"mpizero: {result.refusal}", sys.stderr)
    return int(bool(result.missing))


def _verify(options: argparse.Namespace) -> int:
    comm = options.world()
    document, config = read_together(options, comm)

    from mpizero.tools.verify.command import verify

    with document.located():
        return verify(config, comm, options)


def _checkpoint(options: argparse.Namespace) -> int | None:
    from mpizero.cli import checkpoint

    return checkpoint.run(options)


def _doctor(options: argparse.Namespace) -> int:
    from mpizero.tools import doctor

    comm = None
    try:
        comm = _launched_world() if options.comm is None else options.comm
        findings = doctor.examine(comm, options.threads, os.environ, clean=options.clean)
    except ConfigError as error:  # MPI sees each rank as a job of its own: only the first prints
        if comm is not None:
            raise
        findings = [doctor.alone(error)]
    speaks, size = (is_first(os.environ), 1) if comm is None else (comm.rank == 0, comm.size)
    if options.report:
        text = doctor.bug_report(comm, findings, os.environ)
    elif options.json:
        text = doctor.as_json(findings, size)
    else:
        text = doctor.report(findings, colour=wants_colour(sys.stdout, os.environ))
    if speaks:
        print(text, flush=True)
    return doctor.exit_status(findings)


def _world(comm: Communicator | None) -> Communicator:
    """Return ``comm``, the argument of :func:`main`; for None, a communicator of all processes that were launched."""
    if comm is not None:
        return comm
    try:
        return _launched_world()
    except ConfigError as error:
        if is_first(os.environ):  # not the rank of MPI: the launcher may be that of another MPI
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(int(error.status)) from None


def _launched_world() -> Communicator:
    from mpizero.comm.startup import world

    return world()


def _threads() -> int:
    """Return the number of threads of a rank from OMP_NUM_THREADS, at most 1024; 1 if that is no number above 0."""
    value = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return min(int(value), 1024) if value.isdecimal() and int(value) > 0 else 1
