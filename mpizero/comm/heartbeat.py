"""The daemon thread that writes on the board where this rank stands; it calls no MPI."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Any

from mpizero.comm.board import Board, Slot
from mpizero.comm.register import Register
from mpizero.comm.stacks import frame_of, place, stacks
from mpizero.comm.trace import Record

#: Seconds between two entries on the board, unless a watchdog asks for more.
TICK = 0.25
#: Seconds in which a main thread at the same instruction is taken to stand still.
_STILL = 0.5
#: Seconds between two looks at the stack of a main thread that goes on: each costs it most of a millisecond.
_LOOK = 1.0
#: Name of the thread.
HEARTBEAT = "mpizero-heartbeat"

_LIBRARY_CALL = re.compile(
    r"([A-Za-z_][\w.]*)\.((?:Neighbor_|neighbor_)?(?:[Aa]ll)?"
    r"(?:[Bb]arrier|[Bb]cast|[Rr]educe|[Gg]atherv?|[Ss]catterv?|[Tt]oallv?|[Rr]educe_scatter(?:_block)?|[Ee]?[Ss]can))\("
)


def library_call(frame: FrameType, world: Any) -> str:
    """Name the collective over ``world`` that ``frame`` calls by itself, past our communicators; "" if it does not.

    Such a call is invisible in the traces, and the frame of a compiled method does not exist; but the source text of
    the current instruction is known, and so is the object that its dotted name means.
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
    for name in rest:  # by dictionaries only: a property of the user's must not run in this thread
        value = getattr(value, "__dict__", {}).get(name)
    return f"{found[2]} of COMM_WORLD" if type(value) is type(world) and value == world else ""


class Heartbeat:
    """Writes this rank's slot every ``tick`` seconds, then asks the listeners whether something is wrong.

    ``thread`` is the one whose line is reported (default: the main thread), ``context`` gives further entries of the
    slot, ``world`` is mpi4py's COMM_WORLD.
    """

    def __init__(
        self,
        board: Board,
        register: Register,
        context: Callable[[], dict[str, Any]],
        world: Any,
        thread: int | None = None,
    ) -> None:
        self.board = board
        self.register = register
        self.tick = TICK
        self.listeners: list[Callable[[Slot], None]] = []
        self.notes: Slot = {}
        self._context = context
        self._world = world
        self._watched = thread or threading.main_thread().ident or 0
        self._asked: list[str] = []
        self._spot: tuple[int, int] = (0, 0)
        self._since = monotonic()
        self._place, self._looked = "", float("-inf")
        self._writing = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=HEARTBEAT, daemon=True)

    def start(self) -> None:
        """Write the first slot and start the thread. Not collective."""
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a second call does nothing. Not collective."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def beat(self) -> Slot:
        """Write the slot of this moment. Not collective."""
        with self._writing:
            slot = self.slot()
            self.board.write(slot)
        return slot

    def slot(self) -> Slot:
        """Describe where the main thread stands now."""
        now = monotonic()
        frame = frame_of(self._watched)
        spot = (id(frame), frame.f_lasti) if frame else (0, 0)
        moved = spot != self._spot
        if moved:
            self._spot, self._since = spot, now
        if not moved or now - self._looked >= _LOOK:
            self._place, self._looked = place(stacks().get(self._watched, ())), now
        slot: Slot = {"beat": now, "place": self._place, "still": now - self._since, "pid": os.getpid()}
        # A caught exception's frame may be gone at any moment; the board is a courtesy and never a fault of its own.
        with contextlib.suppress(Exception):
            slot["library"] = library_call(frame, self._world) if frame and slot["still"] >= _STILL else ""
        slot["calls"] = [
            [e.key, e.trace.name, e.trace.sequence, e.trace.operation, e.trace.tag[:80], now - entered]
            for e in tuple(self.register.live)
            if (entered := e.trace.entered)
        ]
        slot["duties"] = [
            [e.key, e.trace.duties, what, now - since]
            for e in tuple(self.register.live)
            for what, since in [e.trace.duty]
            if what
        ]
        slot["marks"] = self.register.marks()
        if asked := self._asked_for():
            slot["records"] = asked
        return slot | self.notes | self._context()

    def _asked_for(self) -> dict[str, list[Record]]:
        """Return the last calls of the communicators that a rank has asked for last."""
        if (key := self.board.asked()) and key not in self._asked:
            self._asked = [key, *self._asked[:1]]
        entries = filter(None, map(self.register.find, self._asked))
        return {entry.key: entry.trace.records() for entry in entries}

    def _run(self) -> None:
        while not self._stop.wait(self.tick):
            slot = self.beat()
            for listener in tuple(self.listeners):
                listener(slot)
