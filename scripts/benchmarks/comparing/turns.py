"""Programs that take turns: started once, idle while others are measured, so that neighbours see the same machine.

The benchmark starts every *team* (the processes of one contender), which connect to it and wait; it then tells one
team at a time what to do, and the others sleep in a read. Messages are JSON lines over a Unix socket, which every
contender's interpreter has, whatever else it has.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

#: Seconds that a team has to start or to answer.
PATIENCE = 900.0


class TeamError(Exception):
    """A contender ended, or did not answer; the message has the end of what it wrote."""


def serve(path: str, rank: int, actions: Mapping[str, Callable[..., Any]]) -> None:
    """Be one process of a team: do what the benchmark says until it says that this was all.

    Parameters
    ----------
    path : str
        The socket of the benchmark.
    rank : int
        Of this process in its team.
    actions : mapping of str to callable
        What it can do; arguments come as keywords, results must be fit for JSON.
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
    """The processes of one contender.

    Parameters
    ----------
    name : str
        For messages.
    ranks : int
        How many processes connect.
    commands : callable
        ``commands(path)`` returns the commands to start, given the socket's path.
    environment : mapping
        Of the commands.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        commands: Callable[[str], Sequence[Sequence[str]]],
        environment: Mapping[str, str],
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
                subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
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
            connection.close()  # the stream keeps it
            told = json.loads(stream.readline())
            self._streams[told["rank"]], self.pids[told["rank"]] = stream, told["pid"]

    def ask(self, do: str, **order: Any) -> list[Any]:
        """Let all processes do something at once; return their answers by rank.

        Raises
        ------
        TeamError
            If one of them has ended or does not answer.
        """
        answers = []
        try:
            for stream in self._streams.values():
                _say(stream, {"do": do, **order})
            for rank in sorted(self._streams):
                line = self._streams[rank].readline()
                if not line:
                    raise TeamError(self._told(f"ended in {do!r}"))
                answers.append(json.loads(line))
        except OSError as error:
            raise TeamError(self._told(f"{do!r}: {error}")) from error
        return answers

    def _told(self, what: str) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"{self.name} {what}; the end of what it wrote:", *lines[-25:]])

    def close(self) -> None:
        """Let the processes end, and end those that do not."""
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
        """Close it."""
        self.close()


def in_turns(rounds: int, names: Sequence[str], measure: Callable[[str], float]) -> dict[str, list[float]]:
    """Measure every name once a round, each round beginning with another one; return the figures by name."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            found[name].append(measure(name))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def pss(pid: int) -> int:
    """Return the proportional set size of a process in bytes: a page that k processes map counts 1/k."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup has no Pss")


def one_thread(root: Path) -> dict[str, str]:
    """Return an environment in which every numerical library takes one thread, and ``root`` can be imported."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | dict.fromkeys(threads, "1") | {"PYTHONPATH": os.pathsep.join(paths)}


def beside(python: str, program: str) -> str:
    """Return the program of an interpreter's own environment, or the one on the path."""
    own = Path(python).with_name(program)
    return str(own) if own.exists() else program
