"""Write the status of this rank to the status boards several times a second, without MPI."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from types import FrameType
from typing import Any

from mpizero.comm.failure_report import rank_ranges
from mpizero.comm.recording.call_trace import MAKING, CallRecord, CallTrace
from mpizero.comm.recording.registry import CommunicatorRegistry
from mpizero.comm.status.peer_groups import PeerGroups
from mpizero.comm.status.status_board import Slot
from mpizero.comm.status.thread_stacks import all_stacks, current_frame, describe_stack, innermost_line
from mpizero.comm.supervision.supervisor import Supervisor

#: Seconds at one bytecode instruction after which the main thread counts as waiting.
_STILL = 0.5
#: Seconds between two reads of the main thread's stack, each of which costs it most of a millisecond. When it stops at
#: an instruction, its stack is read at once, and then again as often: it may have come to the same one another way.
_LOOK = 1.0
#: Most ranges of ranks that a slot lists for a communicator that is being made; if there are more, it lists none.
_RANGES = 200
#: Most characters of a tag that a slot has.
_SHOWN = 80

_LIBRARY_CALL = re.compile(
    r"([A-Za-z_][\w.]*)\.((?:Neighbor_|neighbor_)?(?:[Aa]ll)?"
    r"(?:[Bb]arrier|[Bb]cast|[Rr]educe|[Gg]atherv?|[Ss]catterv?|[Tt]oallv?|[Rr]educe_scatter(?:_block)?|[Ee]?[Ss]can))\("
)


def library_call(frame: FrameType, world: Any) -> str:
    """Return the name of the mpi4py collective on ``world`` that ``frame`` is calling directly; "" if it calls none.

    ``world`` is mpi4py's COMM_WORLD. Users may call mpi4py themselves. Such a call is in no trace, and a compiled
    method has no frame. So the source text of the frame's current instruction is read, and the object on which it calls
    a collective is compared with ``world``.
    """
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2
    line, _, column, end = positions[index] if 0 <= index < len(positions) else (None, None, None, None)
    if line is None or column is None:
        return ""
    text = linecache.getline(frame.f_code.co_filename, line).encode()[column:end].decode(errors="replace")
    found = _LIBRARY_CALL.match(text)
    if not found:
        return ""
    first, *rest = found[1].split(".")
    value = frame.f_locals.get(first, frame.f_globals.get(first))
    for name in rest:  # by dictionaries only: no property of the user's objects may run in this thread
        value = getattr(value, "__dict__", {}).get(name)
    return f"{found[2]} of COMM_WORLD" if type(value) is type(world) and value == world else ""


def calls_in_progress(register: CommunicatorRegistry, since: Callable[[float], float]) -> list[list[Any]]:
    """Return the communicator calls in progress, each as [key, communicator, sequence, operation, tag, seconds].

    ``key`` identifies the communicator, ``communicator`` is its name, ``sequence`` the number of the collective in it,
    and ``seconds`` how long the call has lasted. ``since(t)`` returns the seconds since the ``time.monotonic()`` t. Of
    a long tag, such as a path, the end stays, which names the file.
    """
    return [
        [e.key, e.trace.name, e.trace.sequence, e.trace.operation, _end_of(e.trace.tag), since(entered)]
        for e in tuple(register.live)
        if (entered := e.trace.entered)
    ]


def _end_of(tag: str) -> str:
    return tag if len(tag) <= _SHOWN else f"...{tag[3 - _SHOWN :]}"


def transfers_in_progress(traces: Iterable[CallTrace], since: Callable[[float], float]) -> list[list[Any]]:
    """Return the files that are being read or written, each as [name, bytes so far, seconds since the last bytes].

    ``since(t)`` returns the seconds since the ``time.monotonic()`` t.
    """
    return [[t.what, t.bytes, since(t.moved)] for trace in traces for t in tuple(trace.transfers)]


class Heartbeat:
    """Write the status slot of this rank to its status boards at every tick of the supervisor.

    A status slot is a dictionary that a rank writes about itself. ``context`` is a function that returns further
    entries of the slot, such as the training step.
    """

    def __init__(
        self,
        peers: PeerGroups,
        register: CommunicatorRegistry,
        supervisor: Supervisor,
        context: Callable[[], dict[str, Any]],
    ) -> None:
        self.peers = peers
        self.register = register
        self.listeners: list[Callable[[Slot], None]] = []
        self.extra_entries: Slot = {}
        self.last_slot: Slot = {}
        self._supervisor = supervisor
        self._context = context
        self._watched = threading.main_thread().ident or 0
        self._asked: list[str] = []
        self._spot: tuple[int, int] = (0, 0)
        self._since = monotonic()
        self._place, self._looked = "", float("-inf")
        self._looked_at: tuple[int, int] = (0, 0)
        self._writing = threading.RLock()

    def look(self, now: float) -> None:
        """Write the current status slot, then call each of ``listeners`` with it; ``now`` is ``time.monotonic()``."""
        slot = self.beat(now)
        for listener in tuple(self.listeners):
            listener(slot)

    def refresh_place(self) -> None:
        """Make the next status slot read the main thread's stack again, even if it was read recently."""
        self._looked = float("-inf")

    def beat(self, now: float | None = None) -> Slot:
        """Write the current status slot, and return it."""
        with self._writing:
            self.last_slot = slot = self.slot(monotonic() if now is None else now)
            self.peers.write(slot)
        return slot

    def slot(self, now: float) -> Slot:
        """Return the current status slot of this rank: its present source line, its calls in progress, and more.

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
            self._place, self._looked = describe_stack(all_stacks().get(self._watched) or innermost_line(frame)), now
            self._looked_at = (0, 0) if moved else spot
        slot: Slot = {"beat": now, "place": self._place, "still": since(self._since), "pid": os.getpid()}
        # The frame may be gone at any moment; an error here must not end the run.
        with contextlib.suppress(Exception):
            mpi = sys.modules.get("mpi4py.MPI")
            stands = frame is not None and mpi is not None and slot["still"] >= _STILL
            slot["library"] = library_call(frame, mpi.COMM_WORLD) if frame and mpi and stands else ""
        slot["calls"] = calls_in_progress(self.register, since)
        entries = tuple(self.register.live)
        making = {e.key: rank_ranges(sorted(e.members)) for e in entries if e.trace.operation == MAKING}
        slot["making"] = {key: ranges if len(ranges) <= _RANGES else [] for key, ranges in making.items()}
        slot["transfers"] = transfers_in_progress([entry.trace for entry in tuple(self.register.live)], since)
        slot["joint_tasks"] = [
            [e.key, e.trace.joint_tasks, what, since(begun)]
            for e in tuple(self.register.live)
            for what, begun in [e.trace.present_task]
            if what
        ]
        slot["marks"] = self.register.marks()
        if asked := self._asked_for():
            slot["records"] = asked
        return slot | self.extra_entries | self._context()

    def _asked_for(self) -> dict[str, list[CallRecord]]:
        """Return, by key, the last calls on each communicator for which a rank of the node has requested them."""
        asked = self.peers.requested_keys()
        self._asked = [*asked, *(key for key in self._asked if key not in asked)][: len(asked) + 1]
        entries = filter(None, map(self.register.find, self._asked))
        return {entry.key: entry.trace.records() for entry in entries}
