"""Let several programs that are compared (contenders) take turns on one machine, and time them.

A benchmark starts all *teams*; a team is the processes of one contender. The processes connect to the benchmark and
wait. The benchmark then lets one team at a time work, while the others sleep in a read from the socket. So contenders
are measured within seconds of each other, in the same state of the machine. Messages are lines of JSON over a Unix
socket, because every contender's Python interpreter supports that.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness.jobs import Job, Mpi, environment_of

#: Seconds that a team has to start or to reply.
PATIENCE = 900.0

T = TypeVar("T")
K = TypeVar("K")


class TeamError(SystemExit):
    """Raised when a process of a team has ended or does not reply; the message has the end of the team's output."""


def serve(path: str, rank: int, actions: Mapping[str, Callable[..., Any]]) -> None:
    """Run as one process of a team: call the functions that the benchmark asks for, until it closes the connection.

    ``path`` is that of the benchmark's socket. The functions in ``actions``, by the names that the benchmark uses, are
    called with keyword arguments only, and must return values that JSON can hold.
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

    ``commands(path)`` returns the commands to start; ``ranks`` processes must call :func:`serve` with this path, that
    of a socket. ``environment`` has variables besides those of :func:`environment_of` for one thread.
    """

    def __init__(
        self, name: str, ranks: int, commands: Callable[[str], Sequence[Sequence[str]]],
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="turns-")
        self._log = Path(self._folder.name) / "log"
        self._streams: dict[int, Any] = {}
        self.pids: dict[int, int] = {}
        with socket.socket(socket.AF_UNIX) as listener, self._log.open("wb") as log:
            path = str(Path(self._folder.name) / "socket")
            listener.bind(path)
            listener.listen(ranks)
            listener.settimeout(0.2)
            self._jobs = [Job(command, log, log, environment) for command in commands(path)]
            try:
                self._welcome(listener, ranks)
            except BaseException:
                self.close()
                raise

    def _welcome(self, listener: socket.socket, ranks: int) -> None:
        until = time.monotonic() + PATIENCE
        while len(self._streams) < ranks:
            if any(job.process.poll() is not None for job in self._jobs):
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
        """Call the function ``do`` with ``order`` as arguments in all processes at once; return the results by rank."""
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
            with contextlib.suppress(OSError):
                stream.close()
        for job in self._jobs:
            job.wait(30.0)
            job.end()
        self._folder.cleanup()

    def __enter__(self) -> Team:
        """Return this team."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call :meth:`close`."""
        self.close()


def team_of(script: str, mpiexec: str, ranks: int, *words: str, name: str = "ranks", **more: Any) -> Team:
    """Start a script with this Python and the options ``words`` as a team of ranks; ``--socket`` names the socket."""
    return Team(name, ranks, lambda path: [Mpi(mpiexec).command(ranks, [script, *words, "--socket", path])], **more)


def team_of_processes(name: str, ranks: int, python: str, words: Sequence[str], environment: Mapping[str, str]) -> Team:
    """Start a script as a team without MPI, with torchrun's variables of the environment, which PyTorch reads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    variables |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))

    def commands(path: str) -> list[list[str]]:
        numbers = [(f"RANK={rank}", f"LOCAL_RANK={rank}") for rank in range(ranks)]
        return [["env", *number, python, *words, "--socket", path] for number in numbers]

    return Team(name, ranks, commands, variables | dict(environment))


def teams_in_turns(
    rounds: int, starts: Mapping[str, Callable[[], Team]], warmup: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Start a team for each name, ask it to "prepare", and let all take turns of ``steps`` steps after ``warmup``.

    Return by name the seconds of a turn on the slowest rank, in each round, and what rank 0 has said when it prepared.
    """
    with contextlib.ExitStack() as stack:
        teams, said = {}, {}
        for name, start in starts.items():
            tell(f"{name} starts")
            teams[name] = stack.enter_context(start())
            said[name] = teams[name].ask("prepare")[0]
        seconds = alternate(
            rounds, list(teams), lambda name: float(max(teams[name].ask("turn", warmup=warmup, steps=steps)))
        )
    return seconds, said


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


def timed(step: Callable[[], Any], barrier: Callable[[], Any] = lambda: None, warmup: int = 0, steps: int = 1) -> float:
    """Call ``step`` ``warmup`` times, then ``steps`` times between two barriers; return the seconds between these."""
    for _ in range(warmup):
        step()
    barrier()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    barrier()
    return time.perf_counter() - started


def has_module(python: str, module: str, environment: Mapping[str, str] | None = None) -> bool:
    """Tell whether an interpreter can import a module."""
    command, given = [python, "-c", f"import {module}"], environment_of() | dict(environment or {})
    return subprocess.run(command, env=given, capture_output=True, check=False).returncode == 0


def bytes_sent() -> int:
    """Return the bytes that this host's network interfaces have sent so far."""
    files = (path / "statistics" / "tx_bytes" for path in Path("/sys/class/net").iterdir() if path.name != "lo")
    return sum(int(file.read_text()) for file in files if file.exists())


def tell(line: str) -> None:
    """Print a line about the progress to standard error."""
    print(line, file=sys.stderr, flush=True)
