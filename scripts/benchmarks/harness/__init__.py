"""Run contenders alternately on one machine: parse options, start processes, time rounds.

A benchmark starts all *teams*; a team is the processes of one contender. They connect to the benchmark and wait. It
then lets one team at a time work, while the others sleep in a read, so that contenders that follow each other see the
same machine. Messages are lines of JSON over a Unix socket, because every contender's interpreter supports that.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

#: Seconds that a team has to start or to reply.
PATIENCE = 900.0
#: The root of this checkout.
ROOT = Path(__file__).resolve().parents[3]

T = TypeVar("T")
K = TypeVar("K")


def parser(doc: str, *, rounds: int = 0, mpiexec: bool = False, json: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that several benchmarks have; ``rounds`` is their default number."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        made.add_argument("--rounds", type=int, default=rounds, help="(default: %(default)s)")
    if mpiexec:
        made.add_argument("--mpiexec", default=beside(sys.executable, "mpiexec"))
        made.add_argument("--be", help=argparse.SUPPRESS)
        made.add_argument("--socket", help=argparse.SUPPRESS)
    if json:
        made.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")
    return made


def chosen(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names that an option lists; end the script if one is unknown."""
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"{option}: unknown {', '.join(unknown)}; expected {', '.join(known)}")
    return names


def output_of(command: Sequence[str], status: Container[int] = (0,)) -> str:
    """Run a command, with one thread a process, and return its standard output; end the script if it fails."""
    done = subprocess.run(command, env=one_thread(), capture_output=True, text=True, check=False)
    if done.returncode not in status:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def result_of(mpiexec: str, ranks: int, *words: str) -> Any:
    """Run an MPI job with this Python, and return the JSON document in the last line that it prints."""
    return json.loads(output_of([mpiexec, "-n", str(ranks), sys.executable, *words]).splitlines()[-1])


class TeamError(Exception):
    """Raised when a contender ended or did not reply; the message has the end of its output."""


def serve(path: str, rank: int, actions: Mapping[str, Callable[..., Any]]) -> None:
    """Run as one process of a team: perform the actions that the benchmark asks for, until it closes the connection.

    Parameters
    ----------
    path : str
        Path of the benchmark's socket.
    rank : int
        Number of this process in its team.
    actions : mapping of str to callable
        The actions by name; arguments come as keywords, and results must be values for JSON.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw", encoding="utf-8")
        _say(stream, {"rank": rank, "pid": os.getpid()})
        for line in stream:
            order = json.loads(line)
            _say(stream, actions[order.pop("do")](**order))


def _say(stream: Any, value: Any) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


class Team:
    """Start the processes of one contender, and let them perform actions.

    Parameters
    ----------
    name : str
        Name of the contender in messages.
    ranks : int
        Number of processes that connect.
    commands : callable
        ``commands(path)`` returns the commands to start, given the socket's path.
    environment : mapping
        Environment variables of the commands, besides those of :func:`one_thread`.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        commands: Callable[[str], Sequence[Sequence[str]]],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="turns-")
        folder = Path(self._folder.name)
        self._log = folder / "log"
        self._streams: dict[int, Any] = {}
        self.pids: dict[int, int] = {}
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            path = str(folder / "socket")
            listener.bind(path)
            listener.listen(ranks)
            listener.settimeout(0.2)
            self._jobs = [
                subprocess.Popen(
                    command,
                    env=one_thread() | dict(environment or {}),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
                for command in commands(path)
            ]
            try:
                self._welcome(listener, ranks)
            except BaseException:
                self.close()
                raise

    def _welcome(self, listener: socket.socket, ranks: int) -> None:
        until = time.monotonic() + PATIENCE
        while len(self._streams) < ranks:
            if any(job.poll() is not None for job in self._jobs):
                raise TeamError(self._told("ended before it began"))
            if time.monotonic() > until:
                raise TeamError(self._told(f"did not start within {PATIENCE:.0f} s"))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(PATIENCE)
            stream = connection.makefile("rw", encoding="utf-8")
            connection.close()  # the stream keeps the connection open
            told = json.loads(stream.readline())
            self._streams[told["rank"]], self.pids[told["rank"]] = stream, told["pid"]

    def ask(self, do: str, **order: Any) -> list[Any]:
        """Let all processes perform the action ``do`` at once, and return their results by rank.

        Raises
        ------
        TeamError
            If a process has ended or does not reply.
        """
        replies = []
        try:
            for stream in self._streams.values():
                _say(stream, {"do": do, **order})
            for rank in sorted(self._streams):
                line = self._streams[rank].readline()
                if not line:
                    raise TeamError(self._told(f"ended in {do!r}"))
                replies.append(json.loads(line))
        except OSError as error:
            raise TeamError(self._told(f"{do!r}: {error}")) from error
        return replies

    def _told(self, what: str) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"{self.name} {what}; the end of what it wrote:", *lines[-25:]])

    def close(self) -> None:
        """Close the connections, so that the processes end, and kill those that do not."""
        for stream in self._streams.values():
            stream.close()
        for job in self._jobs:
            try:
                job.wait(timeout=30)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        """Return the team."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the team."""
        self.close()


def alternate(
    rounds: int, names: Sequence[K], measure: Callable[[K], T], *, warm_up: int = 0, quiet: bool = False
) -> dict[K, list[T]]:
    """Measure every name once in each round, and return the values by name; each round begins with another name.

    Before these, ``warm_up`` rounds run that are not kept. With ``quiet`` the progress is not printed.
    """
    found: dict[K, list[T]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            value = measure(name)
            found[name] += [value] * (number >= 0)
        if number >= 0 and not quiet:
            tell(f"round {number + 1} of {rounds}")
    return found


def tell(line: str) -> None:
    """Print a line about the progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def one_thread() -> dict[str, str]:
    """Return environment variables with which numerical libraries use one thread, and this checkout is imported."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | dict.fromkeys(threads, "1") | {"PYTHONPATH": os.pathsep.join(paths)}


def beside(python: str, program: str) -> str:
    """Return the path of a program beside an interpreter; its bare name, to be searched in PATH, if it is not there."""
    own = Path(python).with_name(program)
    return str(own) if own.exists() else program
