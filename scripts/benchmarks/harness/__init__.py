"""Run several programs that are compared (contenders) alternately on one machine.

A benchmark starts all *teams*; a team is the processes of one contender. The processes connect to the benchmark and
wait. The benchmark then lets one team at a time work, while the others sleep in a read from the socket. So contenders
are measured within seconds of each other, in the same state of the machine. Messages are lines of JSON over a Unix
socket, because every contender's Python interpreter supports that.
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
    """Return a parser with the options that several benchmarks have; ``doc`` is the description in its help.

    ``rounds`` is the default of ``--rounds``; 0 leaves the option out. ``mpiexec`` and ``json`` say whether to add the
    options of these names, and with ``mpiexec`` the hidden options of processes that the benchmark starts.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        made.add_argument("--rounds", type=positive, default=rounds, help="(default: %(default)s)")
    if mpiexec:
        made.add_argument("--mpiexec", default=beside(sys.executable, "mpiexec"))
        made.add_argument("--be", help=argparse.SUPPRESS)
        made.add_argument("--socket", help=argparse.SUPPRESS)
    if json:
        made.add_argument("--json", action="store_true", help="print one JSON document instead of the tables")
    return made


def positive(text: str) -> int:
    """Return the value of an option that must be a whole number of 1 or more."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def chosen(option: str, text: str, known: Iterable[str], bare: Callable[[str], str] = str) -> list[str]:
    """Return the names in ``text``, the comma-separated value of an option.

    End the script if ``bare(name)``, what a name has besides numbers, is not ``known``.
    """
    names = [name for name in text.split(",") if name]
    if unknown := sorted(set(map(bare, names)) - set(known)):
        sys.exit(f"{option}: unknown {', '.join(unknown)}; expected {', '.join(known)}")
    return names


def output_of(command: Sequence[str], status: Container[int] = (0,)) -> str:
    """Run a command with one thread in each process, and return its standard output.

    If its exit status is not in ``status``, end the script.
    """
    done = subprocess.run(command, env=environment_of(1), capture_output=True, text=True, check=False)
    if done.returncode not in status:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


def result_of(mpiexec: str, ranks: int, *words: str) -> Any:
    """Run ``words`` with this Python as an MPI job, and return the JSON document in the last line that it prints."""
    return json.loads(output_of([mpiexec, "-n", str(ranks), sys.executable, *words]).splitlines()[-1])


class TeamError(Exception):
    """Raised when a process of a team has ended or does not reply; the message has the end of the team's output."""


def serve(path: str, rank: int, actions: Mapping[str, Callable[..., Any]]) -> None:
    """Run as one process of a team: call the functions that the benchmark asks for, until it closes the connection.

    Parameters
    ----------
    path : str
        Path of the benchmark's socket.
    rank : int
        Number of this process in its team.
    actions : mapping of str to callable
        The functions by the names that the benchmark uses. They are called with keyword arguments only, and must
        return values that JSON can hold.
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
    """Start the processes of one contender (a program that is compared), and call functions in them.

    Parameters
    ----------
    name : str
        Name of the contender in messages.
    ranks : int
        Number of processes that will connect to the socket; each must call :func:`serve`.
    commands : callable
        ``commands(path)`` returns the commands to start. ``path`` is the path of the socket.
    environment : mapping
        Environment variables of the commands, in addition to those of :func:`environment_of` for one thread.
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
                    env=environment_of(1) | dict(environment or {}),
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
        """Call the function ``do`` with the arguments ``order`` in all processes at once; return the results by rank.

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
        """Close the connections, so that the processes end, and kill those that have not ended after 30 seconds."""
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
        """Return this team."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call :meth:`close`."""
        self.close()


def alternate(
    rounds: int, names: Sequence[K], measure: Callable[[K], T], *, warm_up: int = 0, quiet: bool = False
) -> dict[K, list[T]]:
    """Call ``measure(name)`` for every name in each round; return the values of all rounds by name.

    Each round begins with another name. First ``warm_up`` rounds run whose values are dropped. With ``quiet=True`` no
    progress is printed.
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
    """Print a line about the progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def environment_of(threads: int) -> dict[str, str]:
    """Return this process's environment, changed so that BLAS has ``threads`` and Python imports this checkout."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | dict.fromkeys(variables, str(threads)) | {"PYTHONPATH": os.pathsep.join(paths)}


def beside(python: str, program: str) -> str:
    """Return the path of ``program`` in the folder of the interpreter ``python``; if it is not there, its bare name."""
    own = Path(python).with_name(program)
    return str(own) if own.exists() else program
