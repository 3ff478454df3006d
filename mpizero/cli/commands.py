"""Define the short commands: new, replay, ensemble, report, watch, completion and requeue.

For each command, ``add_COMMAND`` defines its options, and ``run_COMMAND`` imports what it needs and executes it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mpizero._util.text import show
from mpizero.cli.options import Run, add_json, add_training, whole_number
from mpizero.errors import ConfigError, ExitStatus


def add_new(commands: Any, run: Run) -> None:
    """Add ``mpizero new`` to the commands; ``run`` executes it, given the parsed options."""
    from mpizero.tools.projects import listed

    parser = commands.add_parser(
        "new",
        help="write a small project that trains as it is, to begin with",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Write a folder with a configuration, a model, data, tests, batch scripts for Slurm and a README.\n"
        f"Kinds:\n\n{listed()}",
        epilog="Example: mpizero new digits --kind torch && cd digits && cat README.md",
    )
    parser.add_argument("folder", metavar="FOLDER", help="a folder that is new or empty")
    parser.add_argument("--kind", metavar="KIND", help="of project, see above")
    parser.set_defaults(run=run)


def run_new(options: argparse.Namespace) -> None:
    """Write a new project, and print the commands to run next."""
    from mpizero.tools import projects
    from mpizero.tools.projects import KINDS

    if options.kind is None:
        raise ConfigError(f"mpizero new: --kind is missing; {projects.choices()}")
    folder = projects.new_project(options.folder, options.kind)
    show(f"{folder}: {KINDS[options.kind].summary}. Its README.md leads on:")
    for message in projects.missing(options.kind):
        show(f"mpizero: {message}")
    build = KINDS[options.kind].build
    for command in filter(None, (f"cd {shlex.quote(options.folder)}", build, *projects.FIRST_COMMANDS)):
        show(f"  {command}")


def add_replay(commands: Any, run: Run) -> None:
    """Add ``mpizero replay`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "replay",
        help="evaluate the samples of a skipped step again, and tell where the first value is not finite",
        description="Run the samples that a skipped step of `train` has left forward and backward, in one process, and "
        "print the least, the largest and the norm of every block's output and of every gradient.",
        epilog="Example: python -m mpizero replay run/bad_steps/step_00000123",
    )
    parser.add_argument("dump", metavar="DUMP", help="the folder of a bad step, as RUN/bad_steps/step_00000123")
    parser.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="whose parameters to take (default: the run's newest from before the step, else the start values)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run_replay(options: argparse.Namespace) -> None:
    """Evaluate the samples of a skipped step again, and print the result."""
    from mpizero.tools import replay

    result = replay.replay(options.dump, options.checkpoint, lambda line: show(line, sys.stderr))
    show(replay.as_json(result) if options.json else replay.report(result))


def add_ensemble(commands: Any, run: Run) -> None:
    """Add ``mpizero ensemble`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "ensemble",
        help="summarize the members of an ensemble, which may have run as separate jobs",
        description="Read the outcome of every member in RUN, write the summary RUN/ensemble.json, and print it. The "
        "exit status is 0 only if all members are complete.",
        epilog="Example: python -m mpizero ensemble run --members 8",
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of the ensemble")
    parser.add_argument(
        "--members", type=int, metavar="N", help="number of members (default: up to the last with a folder)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run_ensemble(options: argparse.Namespace) -> int:
    """Summarize an ensemble, print the summary, and return the exit status."""
    from mpizero.tools.ensemble import COMPLETE, summarize_members

    summary = summarize_members(options.folder, options.members)
    if options.json:
        show(json.dumps(summary))
    else:
        for one in summary["members"]:
            error = f": {one['error']}" if "error" in one else ""
            show(f"member {one['member']}  {one['status']}{error}")
        for name, statistics in summary["figures"].items():
            show(f"{name}  " + ", ".join(f"{key} {value:.6g}" for key, value in statistics.items()))
    complete = all(one["status"] == COMPLETE for one in summary["members"])
    return int(ExitStatus.OK if complete else ExitStatus.RANK_FAILED)


def add_report(commands: Any, run: Run) -> None:
    """Add ``mpizero report`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "report",
        help="draw what a run, or several, have recorded, as one HTML file that needs nothing else",
        description="Write a page about a run: how it ended, findings in words, curves, seconds by phase and rank, "
        "memory beside its plan, layout, the pipeline's timetable, checkpoints, environment and configuration. Several "
        "runs are drawn over one another, with what differs between their configurations. Runs may be training. Needs "
        "matplotlib (extra plot).",
        epilog="Example: python -m mpizero report run -o run.html",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the folder of a run")
    parser.add_argument("-o", "--output", metavar="FILE", help="what to write (default: report.html in the first RUN)")
    parser.add_argument("--force", action="store_true", help="replace FILE even if it is no report of mpizero")
    parser.set_defaults(run=run)


def run_report(options: argparse.Namespace) -> None:
    """Write the HTML report of one or several runs, and print its path."""
    from mpizero.tools.report.page import report

    show(str(report(options.runs, options.output, force=options.force)))


def add_watch(commands: Any, run: Run) -> None:
    """Add ``mpizero watch`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "watch",
        help="follow a run in a terminal: loss curve, validation, speed, time left, skipped steps, checkpoints",
        description="Show a run that trains, from what it records in its folder, and end when it has ended; Ctrl-C "
        "ends before. Where standard output is no terminal, print a line whenever something is new.",
        epilog="Example: python -m mpizero watch run",
    )
    parser.add_argument("folder", metavar="RUN", help="the folder of a run; it may have recorded nothing yet")
    parser.add_argument("--once", action="store_true", help="show the run as it is now, and end")
    parser.add_argument(
        "--interval", metavar="S", type=float, default=2.0, help="seconds between two looks (default: %(default)g)"
    )
    parser.set_defaults(run=run)


def run_watch(options: argparse.Namespace) -> int:
    """Show the progress of a run in the terminal until it ends, and return the exit status."""
    from mpizero._util.checks import number
    from mpizero._util.settings import check_option
    from mpizero.tools.report.watch import watch

    check_option("--interval", options.interval, number(0.1, 3600.0))
    return watch(options.folder, once=options.once, interval=options.interval)


SHELLS = ("bash", "zsh", "fish")
#: Words of the help for arguments that are files, and for those that are folders.
_FILES = ("CONFIG.toml", "FILE", "FILE.safetensors", "OUT", "PATH")
_FOLDERS = ("CHECKPOINT", "DIR", "DUMP", "FOLDER", "RUN", "RUN_OR_CHECKPOINT")
_SETTING = "SECTION.KEY=VALUE"
#: Functions of the shells that propose settings. bash adds a space after a completed word unless the registered
#: function forbids it.
_OFFER_SETTINGS = {
    "bash": """_mpizero_settings() {{ compgen -W "{settings}" -- "$1"; }}
_mpizero_completion() {{
  _shtab_mpizero "$@"
  if [[ ${{COMPREPLY[0]-}} == *= ]]; then compopt -o nospace; fi
}}""",
    "zsh": "_mpizero_settings() {{ compadd -S '' -- {settings} }}",
}


def add_completion(commands: Any, run: Run) -> None:
    """Add ``mpizero completion`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "completion",
        help="print a script by which a shell completes commands, options, files and settings",
        description="Print a script for a shell to load. It is made of the options of this version, and starts no "
        "Python when it completes. Needs the extra `completion`.",
        epilog="Example: mpizero completion bash > ~/.local/share/bash-completion/completions/mpizero",
    )
    parser.add_argument("shell", choices=SHELLS, help="which shell")
    parser.set_defaults(run=run)


def run_completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Print a script by which the shell ``options.shell`` completes the commands and options of ``parser``.

    Raises
    ------
    ConfigError
        If shtab is not installed.
    """
    try:
        import shtab
    except ImportError:
        raise ConfigError("mpizero completion needs shtab: pip install 'mpizero[completion]'") from None
    known = " ".join(settings())
    offered = {"bash": "_mpizero_settings", "zsh": "_mpizero_settings", "fish": known}
    for action in _actions(parser):
        if action.metavar == _SETTING:
            action.complete = offered  # type: ignore[attr-defined]  # the attribute that shtab reads
        elif action.metavar in (*_FILES, *_FOLDERS):
            action.complete = shtab.FILE if action.metavar in _FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    preamble = _OFFER_SETTINGS.get(options.shell, "").format(settings=known)
    script = shtab.complete(parser, options.shell, preamble=preamble)
    if options.shell == "bash":
        script = script.replace("-F _shtab_mpizero mpizero", "-F _mpizero_completion mpizero")
    sys.stdout.write(script)


def settings() -> list[str]:
    """Return the names of all settings of a configuration file, each as the text ``section.key=`` for ``--set``."""
    from mpizero.train.config.schema import section_kinds

    return sorted({f"{section.title()}.{key.name}=" for section in section_kinds() for key in fields(section)})


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:  # argparse has no public API for its actions; shtab reads this, too
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                command.description = listed.help  # which shells show beside the command: one line
                yield from _actions(command)


def add_requeue(commands: Any, run: Run) -> None:
    """Add ``mpizero requeue`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "requeue",
        help="put this job into the queue again, if its training has to go on",
        description="End a batch script: with the exit status of the training and its arguments, put the job into the "
        "queue again, or say why not. Exit status 0 if so, else 1. With --job only decide: the script acts on 0.",
        epilog='Example: python -m mpizero requeue "$status" config.toml && sleep 60',
    )
    parser.add_argument("status", metavar="STATUS", type=whole_number, help="exit status of the training")
    add_training(parser, "what was trained; or the run's folder")
    parser.add_argument(
        "--max-restarts", metavar="N", type=whole_number, default=50, help="at most so often (default: %(default)s)"
    )
    parser.add_argument(
        "--job", metavar="NAME", help="a job of another batch system than Slurm, by the same name each time"
    )
    parser.set_defaults(run=run)


def run_requeue(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Requeue the job of this batch script if its training has to go on; return 0 if so, else 1.

    With ``--job`` this function only decides: on exit status 0 the batch script must put the job into the queue itself.
    """
    from mpizero.train import stopping
    from mpizero.train.run_folder import RunFolder

    if not (job := options.job or stopping.slurm_job(environment)):
        raise ConfigError("SLURM_JOB_ID is not set: outside of a Slurm batch script requeue needs --job NAME")
    status, reason = options.status, ""
    if status in (ExitStatus.DATA, ExitStatus.CONFIG):  # before the configuration is read: that may have failed
        return _report_not_requeued(status, "it would fail again")
    folder = RunFolder(_checkpoints(options))
    if status == ExitStatus.OK:
        (folder.root / stopping.NOTE).unlink(missing_ok=True)
        return 1
    last = stopping.Session.read(folder.root, job)
    members = sorted(folder.root.glob("member_*/checkpoints"))
    state = stopping.JobState("RUNNING") if options.job else stopping.state_of_job(job)
    session = stopping.Session.after(last, job, status, [folder.checkpoints, *members], state.used)
    restarts = session.restarts if options.job else whole_number(environment.get("SLURM_RESTART_COUNT") or "0")
    if folder.stopped.exists():
        reason = f"stopped by the file {folder.stop_file}"
    elif options.resume_from is not None:
        reason = "--resume-from is for one session, each further one would go back to that step: submit without it"
    elif restarts >= options.max_restarts:
        reason = f"{restarts} restarts are the limit"
    if reason := reason or stopping.why_not_again(session, last, state):
        return _report_not_requeued(status, reason)
    session.write(folder.root)
    show(f"requeue: exit status {status} at {session.latest_checkpoint}, restart {restarts + 1}", sys.stderr)
    if not options.job:
        stopping.requeue(job)
    return int(ExitStatus.OK)


def _report_not_requeued(status: int, reason: str) -> int:
    show(f"requeue: exit status {status}; not requeued: {reason}", sys.stderr)
    return 1


def _checkpoints(options: argparse.Namespace) -> Path:
    """Return the folder of checkpoints of the run whose folder or configuration file ``options.config`` names."""
    from mpizero.train.config.toml import ConfigDocument, parse_config, read_config

    if (folder := Path(options.config)).is_dir():
        inside = folder / "checkpoints"
        return inside if inside.is_dir() else folder
    document = ConfigDocument(options.config, read_config(options.config), [*options.overrides, *options.changed])
    with document.located():
        return Path(parse_config(document, 1).checkpoint.folder)
