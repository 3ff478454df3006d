"""Report a collective that does not return, with the source line of every rank, and end the job.

[Note: two stages] Stage 1 of a :class:`Watchdog` is the supervisor's thread. When a call of a communicator lasts longer
than the timeout, the thread reads the status tables, reports the missing ranks and the source line of every rank, and
aborts the job. Stage 1 works if one waiting rank can get Python's interpreter lock; ranks inside MPI do not hold the
lock. Stage 2 is a kernel timer that needs no lock, a :class:`LockTimer`. The supervisor's thread restarts the timer
regularly. If some code holds the lock too long, the timer expires: its signal writes the stacks of all threads and ends
the process, and the launcher ends the other ranks.

[Note: processor time] A timer on the wall clock would end every job that was stopped and resumed, because the thread
that restarts the timer did not run meanwhile. So :class:`LockTimer` counts the processor time of the main thread, which
does not advance in a stopped process. This timer does not notice a thread that sleeps while it holds the lock; the
watchdogs of the other ranks notice such a thread.

[Note: bytes that move] A rank that waits for another rank's file transfer is not stuck as long as bytes are read or
written, however slowly. So the timeout of a call begins again whenever any rank reads or writes bytes
(:meth:`.CallTrace.transfer`), and whenever bytes of messages move between a rank of the call's communicator and another
host ([Note: bytes of messages] in guard/remote_status.py). The messages of other ranks do not count: a part of the job
that goes on must not hide that another part is stuck.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TextIO

from mpizero._util.launch import OPEN_MPI
from mpizero.errors import CollectiveError, ConfigError, ExitStatus
from mpizero.guard import guard
from mpizero.guard.call_trace import CallTrace, CommunicatorRegistry
from mpizero.guard.guard import ProcessSetting, ask_for_stacks, show_stacks_on_request
from mpizero.guard.heartbeat import (
    HEARTBEAT,
    TICK,
    calls_in_progress,
    describe_call_entry,
    describe_stuck_call,
    is_silent,
    transfers_in_progress,
    with_age,
)
from mpizero.guard.remote_status import MESSAGES
from mpizero.guard.reports import write_stderr
from mpizero.guard.status import StatusRecord, all_stacks, describe_stack

#: Seconds for silent ranks to write their stacks before the job ends.
_STACKS = 0.5


class WatchedCommunicator(Protocol):
    """Define the interface of a communicator for its watchdog: rank and size, call traces, and a way to end the job."""

    rank: int
    size: int
    trace: CallTrace

    def traces(self) -> Sequence[CallTrace]:
        """Return the traces of the ranks that run in this process."""

    def abort(self, error: BaseException | None = None) -> None:
        """End every rank of the job, because of ``error``."""


class Watchdog:
    """End the job when one call of any communicator of this process lasts longer than ``timeout``.

    Use it as a context manager, or call :meth:`start` and :meth:`stop`. Each rank makes a watchdog of its own. A
    watchdog adds no cost to a call: communicators record anyway when they enter a call, and one thread reads the
    records. Two kinds of time do not count towards the timeout: time in which the process was stopped, and time in
    which bytes of files or messages move. With an InMemoryCommunicator, a call that lasts too long ends the group of
    threads by :meth:`Communicator.abort`, and does not end the process.

    Parameters
    ----------
    comm : Communicator
        Any communicator of this process. If it is an MpiCommunicator, all MpiCommunicators of the process are watched.
    timeout : float
        The most seconds that a call may last: more than ranks ever wait for one another in a correct run.
    grace : float
        If the watchdog's thread cannot run, this process is ended after ``timeout + grace`` seconds of processor time
        (stage 2 of [Note: two stages]); over MPI only.
    folder : path or None
        Folder that all nodes see. The status of every rank is written to it, for nodes that do not reply by TCP, and so
        are the stacks of stage 2 (``hang-rank00003.txt``). If ``folder`` is None or not writable, stacks go to standard
        error.

    Raises
    ------
    ConfigError
        If ``timeout`` or ``grace`` is not a positive number.
    """

    def __init__(
        self,
        comm: WatchedCommunicator,
        timeout: float,
        *,
        grace: float = 10.0,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (("timeout", timeout), ("grace", grace)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"watchdog {name} = {value!r}: must be a positive number of seconds")
        self._comm = comm
        self._timeout = timeout
        self._grace = grace
        self._folder = Path(folder).absolute() if folder is not None else None
        self._guard = guard.current()
        self._register = self._guard.register
        self._running = self._shared = False
        self._rank = comm.rank
        self._moved = self._restarted = 0.0
        self._timer: LockTimer | None = None
        self._log: TextIO | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to watch the communicator calls of this process."""
        self._shared = self._guard.is_registered(self._comm.trace)
        self._rank = self._guard.rank if self._shared else self._comm.rank
        if not self._shared:  # one rank, or ranks that are threads of this process
            self._register = CommunicatorRegistry()
            self._register.add(self._comm.trace, range(self._comm.size), self._comm.rank)
        self._open_log()
        if self._shared:
            if self._guard.shows_stacks or show_stacks_on_request():
                self._guard.shows_stacks = True
                self._announce("stacks")
            self._timer = LockTimer(self._log or sys.__stderr__ or 2)
        self._running = True
        self._guard.supervisor.add(self._look, min(TICK, self._timeout / 10))
        if self._timer is not None and self._guard.supervisor.is_running:  # else nothing would restart it
            self._timer.restart(self._timeout + self._grace)

    def stop(self) -> None:
        """Stop the watchdog and remove its files; a second call does nothing."""
        if not self._running:
            return
        self._running = False
        self._guard.supervisor.remove(self._look)
        # Stacks are shown as long as there are communicators: a late signal of another rank would kill this one.
        if self._timer is not None:
            self._timer.close()
        if self._log is not None:
            self._log.close()
            with contextlib.suppress(OSError):
                Path(self._log.name).unlink(missing_ok=True)
                self._path(self._rank).unlink(missing_ok=True)
            self._log = None

    def _announce(self, what: str) -> None:
        """Set the entry ``what`` of this rank's status record to True, and write the record.

        A status record is a dictionary that a rank writes about itself.

        "stacks" says that this rank shows its stacks on request, "reports" that it has begun to report a stuck call.
        """
        if (heartbeat := self._guard.heartbeat) is not None:
            heartbeat.extra_entries[what] = True
            try:
                heartbeat.beat()
            except Exception as error:  # a failure of the supervision must not end the run
                self._guard.supervisor.warn_once(error)

    def _open_log(self) -> None:
        if self._folder is None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._log = open(self._folder / f"hang-rank{self._rank:05d}.txt", "w")  # noqa: SIM115 (kept open)
        except OSError as error:
            self._folder = None
            self._guard.supervisor.warn_once(error)

    # ------------------------------------------------------------------ in the supervisor's thread

    def _look(self, now: float) -> float | None:
        """End the job if a call lasts too long.

        If ranks are threads of this process, return the seconds until a call can last too long; else return None.
        """
        if not self._running or self._guard.ending:
            return None
        if self._timer is not None and now - self._restarted > min(self._timeout, self._grace, 10.0) / 4:
            self._restarted = now
            self._timer.restart(self._timeout + self._grace)
        if self._folder is not None:
            self._write_status()
        calls = calls_in_progress(self._register, lambda moment: self._guard.supervisor.since(moment, now))
        for call in calls:
            if call[5] > self._timeout and not self._bytes_move(call, now):
                self._end(call)
                return None
        return None if self._shared else self._timeout - max((call[5] for call in calls), default=0.0)

    def _bytes_move(self, call: list[Any], now: float) -> bool:
        """Tell whether bytes of files or messages have moved within the timeout, see [Note: bytes that move].

        The time of the last movement found is stored. Status records (what ranks write about themselves, with the bytes
        that they have moved) are read again only when that time is longer ago than the timeout.
        """
        since = self._guard.supervisor.since
        if self._moved and since(self._moved, now) <= self._timeout:
            return True
        transfers = transfers_in_progress(self._comm.traces(), lambda moment: since(moment, now))
        if self._shared:
            members = self._members(call)
            transfers += [
                [*t[:2], t[2] + record["age"]]
                for rank, record in self._records(members).items()
                for t in record.get("transfers", ())
                if rank in members or t[0] != MESSAGES
            ]
        quiet = min((seconds for _, _, seconds in transfers), default=math.inf)
        self._moved = now - quiet if quiet <= self._timeout else 0.0
        return quiet <= self._timeout

    def _members(self, call: list[Any]) -> tuple[int, ...]:
        return next((entry.members for entry in self._register.live if entry.key == call[0]), ())

    def _end(self, call: list[Any]) -> None:
        name = describe_call_entry(call)
        if self._shared:
            try:
                self._announce("reports")
                members = self._members(call)
                records, tick = self._records(members), self._guard.supervisor.tick
                hosts = self._guard.statuses.hosts
                lines = describe_stuck_call(call, members, records, hosts, self._timeout, tick)
                if not records.keys() >= set(members) and self._guard.launcher == OPEN_MPI:
                    lines.append(f"  {OPEN_MPI} may stay until that node answers: end it by two Ctrl-C, or scancel")
            except Exception as failure:  # the job ends all the same
                lines = [f"stuck: {name} has lasted {call[5]:.1f} s; no more is known: {failure!r}"]
            text = self._guard.with_prefix("\n".join(lines))
            if self._guard.should_report():
                write_stderr(text)
                self._ask_silent()
            self._guard.end_job("", ExitStatus.HANG)
        stacks = all_stacks()
        where = "; ".join(
            f"{t.name} at {describe_stack(stacks.get(t.ident or 0, ()))}"
            for t in threading.enumerate()
            if t is not threading.current_thread() and t.name != HEARTBEAT
        )
        lasted = f"[rank {self._comm.rank}] {name} has lasted {call[5]:.1f} s"
        self._comm.abort(CollectiveError(f"{lasted}; threads: {where}"))

    def _path(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"heartbeat-rank{rank:05d}.json"

    def _write_status(self) -> None:
        """Write this rank's status record to the common folder, where other nodes can read it; ignore file errors.

        A status record is a dictionary that a rank writes about itself.
        """
        path, heartbeat = self._path(self._rank), self._guard.heartbeat
        record = heartbeat.last_record if heartbeat is not None and self._shared else {}
        with contextlib.suppress(OSError):
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(record | {"beat": 0.0, "wall": time.time()}))
            temporary.replace(path)

    def _records(self, members: tuple[int, ...]) -> dict[int, StatusRecord]:
        """Return the status records of all ranks that can be read, by rank, each with its age in seconds.

        A status record is a dictionary that a rank writes about itself. Records of this node's ranks are read from its
        status tables (shared memory); those of other ranks of ``members`` from the common folder and from the status
        servers of other nodes.
        """
        groups = self._guard.statuses
        records = groups.read()
        for rank in members if self._folder is not None else ():
            if rank not in records:
                with contextlib.suppress(OSError, ValueError):
                    records[rank] = json.loads(self._path(rank).read_text())
        if any(rank not in records for rank in members):
            records |= groups.read_all()  # nodes that do not answer take seconds: those of this node are read after
        return with_age(records)

    def _ask_silent(self) -> None:
        """Ask each rank of this node whose status record is old to write its stacks, which even a stuck rank can do.

        A rank writes its status record, a dictionary about itself, several times a second unless it is stuck or
        stopped.
        """
        requested = 0
        for rank, record in self._records(()).items():
            if rank != self._rank and record.get("stacks") and is_silent(record, self._guard.supervisor.tick):
                write_stderr(self._guard.with_prefix(f"rank {rank} is asked for its stacks (process {record['pid']}):"))
                with contextlib.suppress(OSError):
                    ask_for_stacks(record["pid"])
                    requested += 1
        time.sleep(_STACKS if requested else 0.0)


#: A signal above those that C libraries and debuggers use.
_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 11


class LockTimer:
    """Write the stacks of all threads to ``file`` and kill the process if :meth:`restart` is not called in time.

    The timer runs from the first :meth:`restart` on, and counts the processor time of the main thread. The timer needs
    Linux and a signal that no other code handles; otherwise it does nothing.
    """

    def __init__(self, file: TextIO | int) -> None:
        self._library: Any = None
        self._timer = ctypes.c_void_p()
        main = threading.main_thread().ident
        if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) < 8 or main is None:
            return
        with contextlib.suppress(ValueError, OSError, AttributeError, RuntimeError):
            if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
                return
            library = _with_timers()
            leave = _stacks_to().hold(file)
            clock = ctypes.c_int(time.pthread_getcpuclockid(main))
            event = _Event(None, _SIGNAL, 0)
            if library.timer_create(clock, ctypes.byref(event), ctypes.byref(self._timer)) == 0:
                self._library, self._leave = library, leave
            else:
                leave()

    def restart(self, seconds: float) -> None:
        """Make the timer expire after ``seconds`` of processor time of the main thread, counted from now."""
        if self._library is not None:
            full_seconds = int(seconds)
            times = _Times(0, 0, full_seconds, max(1, int((seconds - full_seconds) * 1e9)))
            self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def close(self) -> None:
        """Delete the timer; a second call does nothing."""
        library, self._library = self._library, None
        if library is not None:
            library.timer_delete(self._timer)
            self._leave()


class _Event(ctypes.Structure):
    """Define the C structure ``struct sigevent``: the signal that a timer sends when it expires."""

    _fields_ = (("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("how", ctypes.c_int), ("_", ctypes.c_byte * 48))


class _Times(ctypes.Structure):
    """Define the C structure ``struct itimerspec``: when a timer expires."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "first", "first_ns"))


@functools.cache
def _stacks_to() -> ProcessSetting[TextIO | int]:
    """Return the process-wide setting that names the file to which the timer's signal writes the stacks."""

    def register(file: TextIO | int) -> None:
        faulthandler.register(_SIGNAL, file=file, all_threads=True, chain=True)

    return ProcessSetting(register, lambda: faulthandler.unregister(_SIGNAL))


def _with_timers() -> Any:
    """Return the C library that contains the function ``timer_create``; before glibc 2.34 that is librt."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "timer_create") else ctypes.CDLL("librt.so.1")
