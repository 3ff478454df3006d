"""Watch this rank and the other ranks from one thread that calls no MPI, and end the job if they cannot go on.

The thread is a :class:`Supervisor`, which runs the periodic checks of the process. The :class:`Heartbeat` writes the
status of this rank to the status tables, several times a second. :class:`MismatchWatch` compares the calls of the ranks
of a node. :class:`LinkWatch` writes a message when another host is silent. :func:`watch_arrival` ends the job if not
all ranks join in making a communicator. :class:`EarlyExit` decides whether the other ranks can finish without a rank
that has reached the end of its program. The last functions describe a call that does not return, for a report.

[Note: stopped time] The time in which a process is stopped (SIGSTOP, ``scontrol suspend``, a paused machine) must not
count as waiting time, although the clock continues. If a job is suspended, its ranks stop and resume at slightly
different moments. If the supervisor's thread wakes far too late, the process was stopped, and :meth:`Supervisor.since`
does not count that time. If only one rank is stopped, the supervisors of the other ranks notice it.

[Note: no channel yet] Making a communicator is itself collective, and MPI does not tell which ranks take part. The
startup table shows which ranks of this node take part. The table does not show ranks of other nodes, but a timeout ends
the job even if only ranks of other nodes are missing.

[Note: who may go on] While this rank waits at the end of its program, other ranks may work as long as they like: pack
files, run other programs, train with one another. The job is ended only if another rank cannot finish without this one.
Another rank cannot finish if it waits in a collective, or is in a training step, in which this rank must take part too.
Another rank cannot finish either if it waits for a message and no rank of the job is working any more. A rank whose
status cannot be read, because its node does not reply, counts as working.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from mpizero.errors import CollectiveMismatch
from mpizero.guard.call_trace import MAKING, CallRecord, CallTrace, CommunicatorEntry, CommunicatorRegistry, mismatch
from mpizero.guard.remote_status import MESSAGES, RemoteStatus, StatusGroups
from mpizero.guard.reports import rank_ranges, ranks_text, write_stderr
from mpizero.guard.status import StatusRecord, all_stacks, current_frame, describe_stack, innermost_line
from mpizero.types import Array

#: Seconds between two checks, unless a listener asks for shorter ones.
TICK = 0.25
#: Name of the supervisor's thread.
HEARTBEAT = "mpizero-heartbeat"
#: If more than so many ticks, and so many seconds, pass between two checks, the process was stopped.
_LATE_TICKS, _LATE = 3, 0.5
#: Most stops that are kept separately; older ones are merged.
_STOPS = 32


#: A function that is called with ``time.monotonic()``. It returns for how many seconds it need not be called again, or
#: None if it wants to be called at every tick.
Listener = Callable[[float], float | None]


class Supervisor:
    """Call functions (listeners) periodically, in a daemon thread that ends when the last listener is removed.

    Each listener is called with the present ``time.monotonic()``.

    A listener can return the number of seconds until its next call. So a process can have a watchdog for each of
    hundreds of ranks that are its threads, at little cost.

    If a listener raises, a warning is printed once, and the listener is still called periodically: a failing check must
    not end the run.

    [Note: copies] Another thread may change a dictionary or list while this one looks through it. ``list(d)`` and
    ``list(d.values())`` copy it in one go. ``tuple(d)`` does not: it allocates the tuple after it has begun, so that
    garbage may be collected in between, and a finalizer, or a thread that runs meanwhile, changes ``d``.
    """

    def __init__(self) -> None:
        self._listeners: dict[Listener, float] = {}
        self._next: dict[Listener, float] = {}
        self._changing = threading.RLock()  # what is collected meanwhile may remove a listener of its own
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._stops: list[tuple[float, float]] = []
        self._warned = False

    @property
    def tick(self) -> float:
        """Seconds from one round of calls of the listeners to the next: the least ``tick`` with which one was added."""
        return min(list(self._listeners.values()), default=TICK)  # [Note: copies]

    @property
    def is_running(self) -> bool:
        """True while the supervisor's thread runs; False also if it could not start, at the user's limit of threads."""
        return self._thread is not None and self._thread.is_alive()

    def add(self, listener: Listener, tick: float = TICK) -> None:
        """Call ``listener(now)`` from now on, in the supervisor's thread: at least every ``tick`` seconds.

        After a call that returned a number, that many seconds pass before the next call.
        """
        with self._changing:
            self._listeners[listener] = tick
            self._next.pop(listener, None)
            if not self.is_running:
                self._stop = threading.Event()
                thread = threading.Thread(target=self._run, args=(self._stop,), name=HEARTBEAT, daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError as error:  # this user may have no more threads
                    self.warn_once(error)

    def remove(self, listener: Listener) -> None:
        """Stop calling the function ``listener``; a second call does nothing."""
        with self._changing:
            self._listeners.pop(listener, None)
            self._next.pop(listener, None)
            thread, last = self._thread, not self._listeners
            if last:
                self._thread = None
                self._stop.set()
        if last and thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join(1.0)

    def stop(self) -> None:
        """Stop calling all listeners (functions); the supervisor's thread then ends."""
        for listener in list(self._listeners):
            self.remove(listener)

    def since(self, moment: float, now: float) -> float:
        """Return the seconds from ``moment`` to ``now``, without the time in which the process was stopped.

        ``moment`` and ``now`` are times of ``time.monotonic()``.
        """
        stopped = sum(min(seconds, end - moment) for end, seconds in tuple(self._stops) if end > moment)
        return max(0.0, now - moment - stopped)

    def warn_once(self, error: BaseException) -> None:
        """Print a warning that part of the supervision does not work on this rank; a second call does nothing."""
        if not self._warned:
            self._warned = True
            write_stderr(f"mpizero: stuck or missing ranks may not be noticed here: {type(error).__name__}: {error}\n")

    def _run(self, stop: threading.Event) -> None:
        last = time.monotonic()
        while not stop.wait(self.tick):
            now = time.monotonic()
            self._note(last, now)
            last = now
            for listener in [one for one in list(self._listeners) if self._next.get(one, now) <= now]:
                try:
                    pause = listener(now) or 0.0
                    with self._changing:
                        if listener in self._listeners:  # it may have been removed meanwhile
                            self._next[listener] = now + pause
                except Exception as error:
                    self.warn_once(error)

    def _note(self, last: float, now: float) -> None:
        late = max(_LATE_TICKS * self.tick, _LATE)
        if now - last > late:
            stops = [*self._stops, (now, now - last - late)]
            if len(stops) > _STOPS:  # the two oldest become one
                (_, first), (end, second), *rest = stops
                stops = [(end, first + second), *rest]
            self._stops = stops


#: Seconds at one bytecode instruction after which the main thread counts as waiting.
_STILL = 0.5
#: Seconds between two reads of the main thread's stack, each of which costs it most of a millisecond. When the thread
#: stops at an instruction, its stack is read at once, and then again at this interval: it may have reached the same
#: instruction on another path.
_LOOK = 1.0
#: Most ranges of ranks that a record lists for a communicator that is being made; if there are more, it lists none.
_RANGES = 200
#: Most characters of a tag that a record has.
_TAG_LIMIT = 80

_LIBRARY_CALL = re.compile(
    r"([A-Za-z_][\w.]*)\.((?:Neighbor_|neighbor_)?(?:[Aa]ll)?"
    r"(?:[Bb]arrier|[Bb]cast|[Rr]educe|[Gg]atherv?|[Ss]catterv?|[Tt]oallv?|[Rr]educe_scatter(?:_block)?|[Ee]?[Ss]can))\("
)


def library_call(frame: FrameType, world: Any) -> str:
    """Return the name of the mpi4py collective on ``world`` that ``frame`` is calling directly; "" if it calls none.

    ``world`` is mpi4py's COMM_WORLD. Users may call mpi4py themselves. Such a call is in no trace, and a compiled
    method has no frame. So the source text of the frame's current instruction is read, and the object whose method the
    instruction calls is compared with ``world``.
    """
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2
    line, _, column, end = positions[index] if 0 <= index < len(positions) else (None, None, None, None)
    if line is None or column is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, line).encode()[column:end].decode(errors="replace")
    match = _LIBRARY_CALL.match(text)
    if not match:
        return ""
    first, *rest = match[1].split(".")
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in rest:  # by dictionaries only: no property of the user's objects may run in this thread
        value = getattr(value, "__dict__", {}).get(name)
    return f"{match[2]} of COMM_WORLD" if type(value) is type(world) and value == world else ""


def calls_in_progress(register: CommunicatorRegistry, since: Callable[[float], float]) -> list[list[Any]]:
    """Return the communicator calls in progress, each as [key, communicator, sequence, operation, tag, seconds].

    ``register`` lists the communicators of this process. ``key`` identifies the communicator, ``communicator`` is its
    name, ``sequence`` the number of the collective in it, and ``seconds`` how long the call has lasted. ``since(t)``
    returns the seconds since the ``time.monotonic()`` t. A long tag, such as a path, is cut at its start, because its
    end names the file.
    """
    return [
        [e.key, e.trace.name, e.trace.sequence, e.trace.operation, _end_of(e.trace.tag), since(entered)]
        for e in list(register.live)
        if (entered := e.trace.entered)
    ]


def _end_of(tag: str) -> str:
    return tag if len(tag) <= _TAG_LIMIT else f"...{tag[3 - _TAG_LIMIT :]}"


def transfers_in_progress(traces: Iterable[CallTrace], since: Callable[[float], float]) -> list[list[Any]]:
    """Return the files that are being read or written, each as [name, bytes so far, seconds since the last bytes].

    ``since(t)`` returns the seconds since the ``time.monotonic()`` t.
    """
    return [[t.what, t.bytes, since(t.moved)] for trace in traces for t in tuple(trace.transfers)]


class Heartbeat:
    """Write the status record of this rank periodically to its status tables, which other ranks read.

    A status record is a dictionary that a rank writes about itself. The function ``context`` returns further entries of
    the record, such as the training step. The :class:`Supervisor` calls :meth:`look` periodically.
    """

    def __init__(
        self,
        statuses: StatusGroups,
        register: CommunicatorRegistry,
        supervisor: Supervisor,
        context: Callable[[], dict[str, Any]],
    ) -> None:
        self.statuses = statuses
        self.register = register
        self.listeners: list[Callable[[StatusRecord], None]] = []
        self.extra_entries: StatusRecord = {}
        self.last_record: StatusRecord = {}
        self._supervisor = supervisor
        self._context = context
        self._watched = threading.main_thread().ident or 0
        self._requested: list[str] = []
        self._spot: tuple[int, int] = (0, 0)
        self._since = time.monotonic()
        self._stack, self._looked = "", float("-inf")
        self._looked_at: tuple[int, int] = (0, 0)
        self._writing = threading.RLock()

    def look(self, now: float) -> None:
        """Write the current status record, then call each of ``listeners`` with it; ``now`` is ``time.monotonic()``."""
        record = self.beat(now)
        for listener in list(self.listeners):
            listener(record)

    def refresh_stack(self) -> None:
        """Make the next status record read the main thread's stack again, even if it was read recently."""
        self._looked = float("-inf")

    def beat(self, now: float | None = None) -> StatusRecord:
        """Write the current status record, and return it."""
        with self._writing:
            self.last_record = record = self.record(time.monotonic() if now is None else now)
            self.statuses.write(record)
        return record

    def record(self, now: float) -> StatusRecord:
        """Return the current status record of this rank: its source line, its calls in progress, and further entries.

        ``now`` is the present ``time.monotonic()``.
        """

        def since(moment: float) -> float:
            return self._supervisor.since(moment, now)

        frame = current_frame(self._watched)
        spot = (id(frame), frame.f_lasti) if frame else (0, 0)
        moved = spot != self._spot
        if moved:
            self._spot, self._since = spot, now
        if now - self._looked >= _LOOK or (not moved and spot != self._looked_at):
            self._stack, self._looked = describe_stack(all_stacks().get(self._watched) or innermost_line(frame)), now
            self._looked_at = (0, 0) if moved else spot
        record: StatusRecord = {"beat": now, "place": self._stack, "still": since(self._since), "pid": os.getpid()}
        # The frame may be gone at any moment; an error here must not end the run.
        with suppress(Exception):
            mpi = sys.modules.get("mpi4py.MPI")
            stands = frame is not None and mpi is not None and record["still"] >= _STILL
            record["library"] = library_call(frame, mpi.COMM_WORLD) if frame and mpi and stands else ""
        record["calls"] = calls_in_progress(self.register, since)
        entries = list(self.register.live)
        making = {e.key: rank_ranges(sorted(e.members)) for e in entries if e.trace.operation == MAKING}
        record["making"] = {key: ranges if len(ranges) <= _RANGES else [] for key, ranges in making.items()}
        record["transfers"] = transfers_in_progress([entry.trace for entry in list(self.register.live)], since)
        if self.statuses.remote and any(call[5] >= _PATIENCE for call in record["calls"]):
            messages = self.statuses.count_messages(now)
            record["transfers"].append([messages.what, messages.bytes, since(messages.moved)])
        record["joint_tasks"] = [
            [e.key, e.trace.joint_tasks, what, since(begun)]
            for e in list(self.register.live)
            for what, begun in [e.trace.present_task]
            if what
        ]
        record["marks"] = self.register.progress()
        if requested := self._requested_records():
            record["records"] = requested
        return record | self.extra_entries | self._context()

    def _requested_records(self) -> dict[str, list[CallRecord]]:
        """Return the last calls on each communicator for which a rank of the node has requested them, by its key."""
        requested = self.statuses.requested_keys()
        self._requested = [*requested, *(key for key in self._requested if key not in requested)][: len(requested) + 1]
        entries = filter(None, map(self.register.find, self._requested))
        return {entry.key: entry.trace.records() for entry in entries}


#: Seconds in a call after which a rank counts as waiting. At each tick a rank compares its calls with those of the next
#: 4 other ranks of its node, or 8 if it is waiting. If it compared with all, the cost of a node would grow with the
#: square of its ranks.
_PATIENCE = 0.2
_RUNNING, _WAITING = 4, 8
#: Seconds to wait until the other ranks have written their calls.
_ANSWER = 1.0


class MismatchWatch:
    """Compare this rank's calls with those of the other ranks of its node, in the heartbeat's thread.

    Parameters
    ----------
    heartbeat : Heartbeat
        Provides the status tables and the registry of communicators. The caller adds :meth:`look` to the heartbeat's
        listeners.
    end : callable
        Ends the job because of an error; does not return.
    """

    def __init__(self, heartbeat: Heartbeat, end: Callable[[CollectiveMismatch], None]) -> None:
        self._heartbeat = heartbeat
        self._statuses: StatusGroups = heartbeat.statuses
        self._register: CommunicatorRegistry = heartbeat.register
        self._end = end
        self._reported: set[str] = set()
        self._next = -1

    def look(self, record: StatusRecord) -> None:
        """End the job if a rank of this node has made different calls; ``record`` is this rank's status record.

        A status record is what a rank writes about itself.
        """
        waits = any(call[5] >= _PATIENCE for call in record["calls"])
        if (key := self._differing(_WAITING if waits else _RUNNING)) and (error := self._explain(key)):
            self._end(error)

    def explain(self, trace: CallTrace) -> CollectiveMismatch | None:
        """Return the error that says how the ranks' calls on the communicator of ``trace`` differ.

        Returns None if the calls are the same or the communicator is not open. Because the caller raises the error,
        :meth:`look` no longer ends the job for differing calls on this communicator.
        """
        entry = next((entry for entry in self._register.live if entry.trace is trace), None)
        error = None if entry is None else self._explain(entry.key)
        if entry is not None and error is not None:
            self._reported.add(entry.key)
        return error

    def search(self, seconds: float) -> CollectiveMismatch | None:
        """Look for differing calls of ranks for up to ``seconds``, because other ranks may still write their calls.

        Returns the error that says how the calls differ; None if no difference is found.
        """
        self._heartbeat.beat()
        limit = time.monotonic() + seconds
        while not (key := self._differing(None)) and time.monotonic() < limit:
            time.sleep(0.01)
        return self._explain(key) if key else None

    def ignore(self, trace: CallTrace) -> None:
        """Stop reporting mismatches on the communicator of ``trace`` and on communicators of subsets of its ranks.

        The caller raises the error of the mismatch instead.
        """
        self._reported.update(entry.key for entry in self._register.inside(trace))

    def _differing(self, limit: int | None) -> str:
        """Return the key of a communicator on which another rank of the node has made different calls; "" if none.

        The key is a string that identifies the communicator on all of its ranks.

        With ``limit`` at most that many other ranks are compared in one call. Successive calls continue with the next
        ranks, the first call with those after this rank, so that the ranks of a node together compare all ranks in each
        round of calls of the heartbeat's thread.
        """
        others = [rank for rank in self._statuses.ranks if rank != self._statuses.rank]
        if limit is not None and len(others) > limit:
            if self._next < 0:
                self._next = sum(rank < self._statuses.rank for rank in others)
            others, self._next = (others[self._next :] + others)[:limit], (self._next + limit) % len(others)
        traces = {entry.key: entry.trace for entry in (*self._register.live, *self._register.closed.values())}
        for rank in others:
            record = self._statuses.read_one(rank)
            for key, (started, number) in (record or {}).get("marks", {}).items():
                if key in traces and key not in self._reported and traces[key].number_at(started) not in (None, number):
                    return str(key)
        return ""

    def _explain(self, key: str) -> CollectiveMismatch | None:
        """Request the last calls on the communicator with this key from all ranks of the node, and compare them.

        Returns the error that says how the calls differ; None if no difference is found.
        """
        entry = self._register.find(key)
        if entry is None:
            return None
        expected = set(entry.members).intersection(self._statuses.ranks)
        self._statuses.request_records(key)
        self._heartbeat.beat()
        limit = time.monotonic() + _ANSWER
        while True:
            records = self._statuses.read()
            answers = {rank: s["records"][key] for rank, s in records.items() if key in s.get("records", {})}
            if expected.issubset(answers) or time.monotonic() > limit:
                return mismatch(
                    entry.trace.name, {rank: [CallRecord(*r) for r in calls] for rank, calls in answers.items()}
                )
            time.sleep(0.01)


#: Seconds without a word from a host until this is told; seconds until the host is asked, whose servers then show that
#: the link works; and seconds between two looks.
_SILENCE, _ASK, LOOK_AT_LINKS = 10.0, 5.0, 1.0
#: Most hosts that a report names.
_HOSTS = 8


class LinkWatch:
    """Write a message when another host becomes silent while this rank waits in a call, and when it answers again.

    A host is silent if no byte moves of the messages of this rank's node, and none of the host's status servers
    answers, for ten seconds. So neither a slow link nor a host whose ranks compute is silent. Nothing is written about
    a host that has never answered, such as one behind a firewall. Of the ranks that have made a communicator together,
    only the lowest one watches. The queries take up to a second, so :meth:`look` is called in a thread of its own.

    Parameters
    ----------
    heartbeat : Heartbeat
        Provides this rank's status record and the status groups.
    supervisor : Supervisor
        Tells how long the process was stopped; does not call :meth:`look`.
    tell : callable
        Writes a text to standard error.
    """

    def __init__(self, heartbeat: Heartbeat, supervisor: Supervisor, tell: Callable[[str], None]) -> None:
        self._heartbeat, self._supervisor, self._tell = heartbeat, supervisor, tell
        self._silent: dict[str, float] = {}  # the hosts that were told of, and when
        self._asked: set[RemoteStatus] = set()

    def look(self, now: float) -> None:
        """Ask other hosts that may be silent; write which have become silent, and which have answered again.

        Hosts are asked at the first call, when no bytes of messages have moved for some seconds, and while one is
        silent.
        """
        record, statuses = self._heartbeat.last_record, self._heartbeat.statuses
        call = max(record["calls"], key=lambda entry: float(entry[5]), default=None)
        transfers = [(t, s["age"]) for s in with_age(statuses.read()).values() for t in s.get("transfers", ())]
        quiet = min([call[5] if call else 0.0, *(t[2] + age for t, age in transfers if t[0] == MESSAGES)])
        for remote in filter(lambda one: one.leads, statuses.remote):
            asks = remote not in self._asked or not self._silent.keys().isdisjoint(remote.hosts)
            if asks or max(self._ages(remote, quiet, now).values()) > _ASK:
                self._asked.add(remote)
                remote.read()
            if back := {host for host, told in self._silent.items() if remote.answered.get(host, told) > told}:
                seconds = _SILENCE + max(self._supervisor.since(self._silent.pop(host), now) for host in back)
                text = f"{hosts_text(remote.hosts, back)} answers again, after {seconds:.0f} s"
                self._tell(f"{text}; TCP may take as long again to repeat what was lost")
            ages = {host: age for host, age in self._ages(remote, quiet, now).items() if host in remote.answered}
            if call and (lost := {host for host, age in ages.items() if age >= _SILENCE}.difference(self._silent)):
                self._silent |= dict.fromkeys(lost, now)
                text = f"no word from {hosts_text(remote.hosts, lost)} for {max(map(ages.__getitem__, lost)):.0f} s"
                where = f"waiting in {describe_call_entry(call)} at {record['place']}"
                self._tell(f"{text}, neither bytes of messages nor an answer by TCP: {where}")

    def _ages(self, remote: RemoteStatus, quiet: float, now: float) -> dict[str, float]:
        """Return for how long each other host has been silent, if no bytes have moved for ``quiet`` seconds."""
        never = float("-inf")
        return {h: min(quiet, self._supervisor.since(remote.answered.get(h, never), now)) for h in remote.hosts}


def hosts_text(ranks: Mapping[str, Sequence[int]], hosts: Iterable[str]) -> str:
    """Return ``hosts`` as text with their ranks, such as "node7 (ranks 4-7)"; ``ranks`` are the ranks of each host."""
    names = sorted(hosts, key=lambda host: ranks[host][0])
    more = f" and {len(names) - _HOSTS} more hosts" if len(names) > _HOSTS else ""
    return ", ".join(f"{host} ({ranks_text(ranks[host])})" for host in names[:_HOSTS]) + more


#: Default timeout in seconds, also that of a configuration.
ARRIVAL_PATIENCE = 600.0
#: Value that a rank gives to the reduction of :func:`agree_range` while it makes a communicator: above all exit values.
JOINS = 2**62 + 1


def range_of(value: int = JOINS) -> Array:
    """Return [value, -value], whose minimum over ranks is the least value and the negative of the greatest value."""
    return np.array([value, -value], np.int64)


@contextmanager
def watch_arrival(
    entry: CommunicatorEntry,
    supervisor: Supervisor,
    timeout: float | None,
    records: Callable[[], dict[int, StatusRecord]],
    end: Callable[[str], None],
) -> Iterator[None]:
    """End the job if the ``with`` block, in which the ranks make a communicator, lasts longer than ``timeout``.

    Parameters
    ----------
    entry : CommunicatorEntry
        The communicator that is being made.
    supervisor : Supervisor
        The supervisor whose thread checks the time.
    timeout : float or None
        Seconds that the block may last; None for no limit.
    records : callable
        Returns the known status records by rank, that of this rank included.
    end : callable
        Ends the job; it is called with the report.
    """

    def look(now: float) -> None:
        since = supervisor.since(begun, now)
        if timeout is not None and trace.entered and since > timeout:
            call = [entry.key, trace.name, 0, MAKING, "", since]
            known = with_age(records())
            end("\n".join(describe_stuck_call(call, entry.members, known, {}, timeout, supervisor.tick)))

    trace = entry.trace
    trace.operation, trace.entered = MAKING, time.monotonic()
    begun = trace.entered
    if timeout is not None:
        supervisor.add(look, min(TICK, timeout / 10))
    try:
        yield
    finally:
        trace.operation, trace.entered = "", 0.0
        if timeout is not None:
            supervisor.remove(look)


#: Seconds that others must have waited for this rank before its exit counts as early.
BLOCKED = 1.0
#: Seconds after which ranks that all wait for messages count as stuck.
EXIT_PATIENCE = 120.0
#: Seconds in which the other ranks must end too when this rank ends with an exit status other than 0.
_ALONE = 2.0
#: Seconds between two checks, and the most seconds that one pause counts, since the process may have been stopped.
_LOOK_FOR_EXITS, _COUNTED = 0.1, 0.5
#: Operations in which a rank waits for one message.
_MESSAGES = ("isend", "irecv")


def waits_for_this_rank(register: CommunicatorRegistry, other: int, record: StatusRecord) -> str:
    """Return a text on the call in which rank ``other`` waits for this rank; "" if it does not wait for this rank.

    Not collective. ``register`` lists this rank's communicators; ``record`` is the last status record of ``other``,
    what that rank has written about itself.
    """
    known = register.counts()
    for key, name, sequence, operation, tag, since in record["calls"]:
        if since >= BLOCKED and sequence > known.get(key, sequence):
            label = f" {tag!r}" if tag else ""
            return f"rank {other} waits in {operation} #{sequence}{label} of {name!r} at {record['place']}"
    for key, ended, what, since in record["joint_tasks"]:
        entry = register.find(key)
        if since >= BLOCKED and entry is not None and entry.trace.joint_tasks <= ended:
            return f"rank {other} is in {what} {ended + 1} of {entry.trace.name!r} at {record['place']}"
    if record.get("library") and record["still"] >= 2 * BLOCKED:
        return f"rank {other} waits in {record['library']} at {record['place']}"
    return ""


@dataclass
class EarlyExit:
    """Wait at the end of this rank's program for the other ranks; end the job if they cannot finish without this rank.

    Attributes
    ----------
    statuses, register : StatusGroups, CommunicatorRegistry
        The status tables and the communicators of this process.
    status : object
        Exit status that the program has requested by ``sys.exit``; 0 and None are success.
    patience : float
        Seconds after which ranks that all wait for messages count as stuck.
    end : callable
        Ends the job; it is called with the reason.
    """

    statuses: StatusGroups
    register: CommunicatorRegistry
    status: Any
    patience: float
    end: Callable[[str], None]
    _looked: float = 0.0

    def look(self, waited: float) -> bool:
        """End the job if other ranks cannot finish without this one; else return False. Not collective.

        ``waited`` is the number of seconds since this rank has reached the end of its program. :func:`agree_range`
        calls this method as its ``give_up``, and goes on waiting because the result is False.
        """
        if waited - self._looked >= _LOOK_FOR_EXITS:
            self._looked = waited
            if reason := self.reason_to_end(waited):
                self.end(reason)
        return False

    def reason_to_end(self, waited: float) -> str:
        """Return why the other ranks cannot finish without this one; "" if they can. Not collective.

        ``waited`` is the number of seconds since this rank has reached the end of its program.
        """
        if waited < BLOCKED:
            return ""
        records = self.statuses.read_all(rarely=True)
        known = self.statuses.read_startup_table() | records
        for rank in sorted(set(known).difference({self.statuses.rank})):
            record = known[rank]
            if reason := waits_for_this_rank(self.register, rank, record) or self._awaits(rank, record):
                return reason
        if not self.statuses.groups:
            return ""
        if waited > _ALONE and self.status not in (None, 0):
            return f"with exit status {self.status!r}, and the others go on"
        return self._standstill(records)

    def wait(self) -> None:
        """Wait until no other rank of this node is working or starting, as the startup table says. Not collective.

        The startup table is a file for ranks of the node that have made no communicator of all ranks yet.
        """
        begun = time.monotonic()
        while self.statuses.others_work(waited := time.monotonic() - begun):
            self.look(waited)
            time.sleep(_LOOK_FOR_EXITS)

    def _awaits(self, other: int, record: StatusRecord) -> str:
        """Return a text on a communicator that rank ``other`` waits to make with this rank; "" if there is none.

        ``record`` is the last status record of rank ``other``, what that rank has written about itself.
        """
        known = self.register.counts()
        making, this_rank = record.get("making", {}), self.statuses.rank
        for key, name, _, operation, _, since in record["calls"]:
            lasts = operation == MAKING and since >= BLOCKED
            if lasts and key not in known and any(first <= this_rank <= last for first, last in making.get(key, ())):
                return f"rank {other} is {MAKING} {name!r} with it at {record['place']}"
        return ""

    def _standstill(self, records: Mapping[int, StatusRecord]) -> str:
        """Return a text on a rank that waits for a message which no rank can send any more; "" without such a rank.

        No rank can send if all ranks of the waiting ranks' communicators wait for messages or have reached the end of
        their programs.
        """
        waiting = {rank: members for rank, s in records.items() if (members := self._messages_of(s))}
        idle = {self.statuses.rank, *waiting, *(rank for rank, s in records.items() if s["state"] == "leaving")}
        if not waiting or not idle.issuperset(*waiting.values()):
            return ""
        rank = min(waiting)
        return f"rank {rank} waits for a message at {records[rank]['place']}, and nobody is at work any more"

    def _messages_of(self, record: StatusRecord) -> tuple[int, ...]:
        """Return the world ranks of the communicator on which a rank waits too long for a message.

        ``record`` is what the rank has written about itself, its status record. Returns () if it does not wait too long
        for a message.
        """
        for key, _, _, operation, _, since in record["calls"]:
            if operation in _MESSAGES and since > self.patience and (entry := self.register.find(key)):
                return entry.members
        return ()


def agree_range(
    mpi: Any, controls: Sequence[Any], value: int, give_up: Callable[[float], bool]
) -> tuple[int, int] | None:
    """Return the least and the greatest ``value`` over all ranks of ``controls``; None if waiting was stopped.

    Collective over each of the mpi4py communicators ``controls``. ``mpi`` is the module ``mpi4py.MPI``. ``give_up`` is
    called regularly with the seconds waited so far, and returns True to stop waiting. A rank that is making a
    communicator takes part in this reduction with :func:`range_of`, so the reduction of a rank that fails meanwhile
    completes.
    """
    send, recv = range_of(value), np.empty((len(controls), 2), np.int64)
    rows = zip(controls, recv, strict=True)
    requests = [c.Iallreduce([send, mpi.INT64_T], [row, mpi.INT64_T], mpi.MIN) for c, row in rows]
    waited, last, pause = 0.0, time.monotonic(), 20e-6
    while not mpi.Request.Testall(requests):
        now = time.monotonic()
        waited, last = waited + min(now - last, _COUNTED), now
        if give_up(waited):
            return None
        time.sleep(pause)
        pause = min(1.5 * pause, 5e-3)
    least, opposite = recv.min(axis=0)
    return int(least), -int(opposite)


#: A rank counts as silent if it has written no status record for so many ticks (periods), and for so many seconds.
_SILENT_TICKS = 8
_MIN_SILENCE = 0.5


def with_age(records: Mapping[int, StatusRecord]) -> dict[int, StatusRecord]:
    """Return ``records`` (what ranks have written about themselves), each with "age", the seconds since then."""
    now, wall = time.monotonic(), time.time()
    return {rank: s | {"age": wall - s["wall"] if "wall" in s else now - s["beat"]} for rank, s in records.items()}


def describe_stuck_call(
    call: Sequence[Any],
    members: Sequence[int],
    known: Mapping[int, StatusRecord],
    hosts: Mapping[int, str],
    timeout: float,
    tick: float,
) -> list[str]:
    """Return the lines of the report on a call that lasts too long: the missing ranks, then the status of each rank.

    Parameters
    ----------
    call : list
        The call as [key, communicator, sequence, operation, tag, seconds], an entry of "calls" in a status record.
    members : sequence of int
        World ranks of the communicator.
    known : dict
        Status records by rank, with their age (see :func:`with_age`).
    hosts : dict
        Names of the other hosts by world rank, as far as they are known.
    timeout, tick : float
        The timeout of the call, and the time between two writes of a status record, both in seconds.
    """
    key, _, sequence, operation = call[:4]
    unknown = [r for r in members if r not in known]
    if operation == MAKING:
        missing = [r for r in members if r in known and key not in known[r]["marks"]]
        differing = []
        strange = f"nothing known of {ranks_text(unknown)} (without mpizero, or on another node)"
    else:
        missing = [r for r in members if r in known and known[r]["marks"].get(key, (sequence, 0))[0] < sequence]
        others = {r: c for r in members if r in known for c in known[r]["calls"] if c[0] == key and c[2] == sequence}
        differing = [r for r, c in others.items() if c[3] != operation]
        by_host: dict[str, list[int]] = {}
        for rank in unknown:
            by_host.setdefault(hosts.get(rank, "another node"), []).append(rank)
        strange = f"no answer from {hosts_text(by_host, by_host)}"
    verdict = [f"{ranks_text(missing)} not in it"] if missing else []
    verdict += [f"{ranks_text(differing)} in another operation"] if differing else []
    verdict += [strange] if unknown else []
    if not verdict:
        verdict = ["all ranks are in it: counts or types differ, or the library is stuck"]
    lasted = f"{call[5]:.1f} s (timeout {timeout:g} s)"
    head = f"stuck: {describe_call_entry(call)} has lasted {lasted}: {'; '.join(verdict)}"
    names = {rank: f"rank {rank} on {hosts[rank]}" if rank in hosts else f"rank {rank}" for rank in sorted(known)}
    return [head, *(f"  {name}: {_describe_record(known[rank], tick)}" for rank, name in names.items())]


def _describe_record(record: StatusRecord, tick: float) -> str:
    context = ", ".join(f"{name} {record[name]}" for name in ("step", "phase") if name in record)
    waits = [f"in {describe_call_entry(c)} for {c[5] + record['age']:.1f} s" for c in record["calls"]]
    doing = {"leaving": "at the end of the program", "failed": "failing"}.get(record["state"], "at work")
    files = [
        f"{what}, {nbytes} bytes so far, the last {seconds + record['age']:.1f} s ago"
        for what, nbytes, seconds in record.get("transfers", ())
    ]
    what = ", ".join([*waits, *files]) or (f"in {record['library']}" if record.get("library") else doing)
    if is_silent(record, tick):
        what = f"silent for {record['age']:.1f} s (stopped, or holding the interpreter lock); last seen {what}"
    return f"{what} at {record['place']}{f' ({context})' if context else ''}"


def is_silent(record: StatusRecord, tick: float) -> bool:
    """Tell whether ``record``, the last status record of a rank, is so old that the rank must be stopped or stuck.

    ``tick`` is the number of seconds between two writes of a record. A rank that is writing a report is not silent:
    meanwhile it queries other nodes, and writes no record.
    """
    return not record.get("reports") and bool(record["age"] > max(_SILENT_TICKS * tick, _MIN_SILENCE))


def describe_call_entry(call: Sequence[Any]) -> str:
    """Return a call, given as [key, communicator, sequence, operation, tag, seconds], as text for a report."""
    _, name, sequence, operation, tag, _ = call
    if operation == MAKING:
        return f"{operation} {name!r}"
    return f"{operation} #{sequence}{f' {tag!r}' if tag else ''} of {name!r}"
