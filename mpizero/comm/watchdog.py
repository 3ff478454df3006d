"""A collective that does not return is reported with the line of every rank, and ends the job.

[Note: two stages] Stage 1 is the guard's heartbeat thread: once a call of a communicator has lasted longer than the
timeout, it reads the board, says which ranks are missing and where every rank stands, and aborts. It needs Python's
interpreter lock on one waiting rank, which ranks inside MPI do not hold. Stage 2 is a timer of ``faulthandler``, a C
thread that needs no lock: as long as the heartbeat lives it is put off; when the lock is held too long it writes the
stacks of all threads and exits with status 1, and the launcher ends the other ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from mpizero.comm import guard
from mpizero.comm.board import Board, Slot
from mpizero.comm.communicator import Communicator
from mpizero.comm.heartbeat import HEARTBEAT, TICK, Heartbeat
from mpizero.comm.lastwords import ranks_text, write
from mpizero.comm.register import Register
from mpizero.comm.stacks import place, stacks
from mpizero.errors import CollectiveError, ConfigError, ExitStatus

#: Heartbeats of silence after which a rank counts as stopped.
_SILENT_TICKS = 8
_MIN_SILENCE = 0.5
#: Seconds for a silent rank to write its stacks before the job ends.
_STACKS = 0.5


class Watchdog:
    """Ends the job when one call of any communicator of this process lasts longer than ``timeout``.

    A context manager, or :meth:`start` and :meth:`stop`; every rank makes its own. Costs nothing per call: the
    communicators note when they enter a call anyway, and a sleeping thread looks at that note. SIGUSR2 makes a process
    write the stacks of its threads while one is running. With an in-process communicator the call that lasts too
    long breaks the group by :meth:`Communicator.abort` instead of ending the process.

    Parameters
    ----------
    comm : Communicator
        Any communicator of this process; over MPI all of the process are watched.
    timeout : float
        Seconds; longer than the longest time ranks may legally wait for one another.
    grace : float
        Stage 2 comes ``timeout + grace`` seconds after the last sign of life of this process.
    folder : path or None
        Folder that all nodes see, for the lines of ranks on nodes that cannot be asked (see :mod:`.elsewhere`) and the
        stacks of stage 2 (``hang-rank00003.txt``). None: stacks go to standard error.

    Raises
    ------
    ConfigError
        If ``timeout`` or ``grace`` is not a positive number.
    """

    def __init__(
        self, comm: Communicator, timeout: float, *, grace: float = 10.0, folder: str | os.PathLike[str] | None = None
    ) -> None:
        for name, value in (("timeout", timeout), ("grace", grace)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"watchdog {name} = {value!r}: must be a positive number of seconds")
        self._comm = comm
        self._timeout = timeout
        self._grace = grace
        self._folder = Path(folder) if folder is not None else None
        self._guard = guard.current()
        self._heartbeat: Heartbeat | None = None
        self._shared = False
        self._rank = 0
        self._armed = 0.0
        self._log: TextIO | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start to watch. Not collective."""
        self._shared = self._guard.heartbeat is not None and self._guard.follows(self._comm.trace)
        self._rank = self._guard.rank if self._shared else self._comm.rank
        if self._shared:
            self._heartbeat = self._guard.heartbeat
        else:  # one rank, or ranks that are threads of this process
            register = Register()
            register.add(self._comm.trace, range(self._comm.size))
            self._heartbeat = Heartbeat(Board((0,), 0, None), register, dict, None, threading.get_ident())
        assert self._heartbeat is not None
        self._heartbeat.tick = min(TICK, self._timeout / 10)
        self._heartbeat.listeners.append(self._look)
        with contextlib.suppress(ValueError, OSError, AttributeError):  # standard error replaced by a file-like object
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__ or 2, all_threads=True)
            self._heartbeat.notes["stacks"] = True
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._log = open(self._folder / f"hang-rank{self._rank:05d}.txt", "w")  # noqa: SIM115 (kept open)
        self._arm(time.monotonic())
        self._heartbeat.beat() if self._shared else self._heartbeat.start()

    def stop(self) -> None:
        """Stop to watch and remove what was written; a second call does nothing. Not collective."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is None:
            return
        heartbeat.listeners.remove(self._look)
        if self._shared:
            heartbeat.tick = TICK
        else:
            heartbeat.stop()
        if not self._guard.ending:
            faulthandler.cancel_dump_traceback_later()
        # SIGUSR2 stays registered: without it a late signal of another rank would kill this one.
        if self._log is not None:
            self._log.close()
            Path(self._log.name).unlink(missing_ok=True)
            self._path(self._rank).unlink(missing_ok=True)
            self._log = None

    # ------------------------------------------------------------------ in the heartbeat's thread

    def _look(self, slot: Slot) -> None:
        if self._heartbeat is None or self._guard.ending:
            return
        if slot["beat"] - self._armed > min(self._timeout, self._grace, 10.0) / 4:
            self._arm(slot["beat"])
        if self._folder is not None:
            self._publish(slot)
        for call in slot["calls"]:
            if call[5] > self._timeout:
                self._end(slot, call)
                return

    def _arm(self, now: float) -> None:
        self._armed = now
        file = self._log or sys.__stderr__
        with contextlib.suppress(ValueError, OSError, AttributeError):
            faulthandler.dump_traceback_later(self._timeout + self._grace, exit=True, file=file or 2)

    def _end(self, slot: Slot, call: list[Any]) -> None:
        if self._shared:
            text = self._guard.lines("\n".join(self._report(call)))
            if self._guard.speaks():
                write(text)
                self._ask_silent()
            self._guard.end_job("", ExitStatus.HANG)
        found = stacks()
        where = "; ".join(
            f"{t.name} at {place(found.get(t.ident or 0, ()))}"
            for t in threading.enumerate()
            if t is not threading.current_thread() and t.name != HEARTBEAT
        )
        error = CollectiveError(f"[rank {self._comm.rank}] {_call(call)} has lasted {call[5]:.1f} s; threads: {where}")
        self._comm.abort(error)

    def _path(self, rank: int) -> Path:
        assert self._folder is not None
        return self._folder / f"heartbeat-rank{rank:05d}.json"

    def _publish(self, slot: Slot) -> None:
        """Write the slot where other nodes see it; a full or slow folder is not a fault of the training."""
        own = self._path(self._rank)
        with contextlib.suppress(OSError):
            temporary = own.with_suffix(".new")
            temporary.write_text(json.dumps(slot | {"beat": 0.0, "wall": time.time()}))
            temporary.replace(own)

    def _slots(self, members: tuple[int, ...]) -> dict[int, Slot]:
        """Every slot that can be read, with the seconds since it was written."""
        slots = self._guard.board.read() if self._guard.board else {}
        for rank in members if self._folder is not None else ():
            if rank not in slots:
                with contextlib.suppress(OSError, ValueError):
                    slots[rank] = json.loads(self._path(rank).read_text())
        if self._guard.elsewhere is not None and any(rank not in slots for rank in members):
            slots = self._guard.elsewhere.read() | slots
        now, wall = time.monotonic(), time.time()
        return {rank: s | {"age": wall - s["wall"] if "wall" in s else now - s["beat"]} for rank, s in slots.items()}

    def _report(self, call: list[Any]) -> list[str]:
        """Lines for the call that lasts too long: what is missing, then where every rank stands."""
        key, _, sequence, operation = call[:4]
        members = next((e.members for e in self._guard.register.live if e.key == key), ())
        slots = self._slots(members)
        missing = [r for r in members if r in slots and slots[r]["marks"].get(key, (sequence, 0))[0] < sequence]
        unknown = [r for r in members if r not in slots]
        others = {r: c for r in members if r in slots for c in slots[r]["calls"] if c[0] == key and c[2] == sequence}
        differing = [r for r, c in others.items() if c[3] != operation]
        verdict = [f"{ranks_text(missing)} not in it"] if missing else []
        verdict += [f"{ranks_text(differing)} in another operation"] if differing else []
        verdict += [f"nothing known of {ranks_text(unknown)} (another node)"] if unknown else []
        if not verdict:
            verdict = ["all ranks are in it: counts or types differ, or the library is stuck"]
        head = f"stuck: {_call(call)} has lasted {call[5]:.1f} s (timeout {self._timeout:g} s): {'; '.join(verdict)}"
        return [head, *(f"  rank {rank}: {self._stand(slot)}" for rank, slot in sorted(slots.items()))]

    def _stand(self, slot: Slot) -> str:
        context = ", ".join(f"{name} {slot[name]}" for name in ("step", "phase") if name in slot)
        calls = [f"in {_call(c)} for {c[5] + slot['age']:.1f} s" for c in slot["calls"]]
        doing = {"leaving": "at the end of the program", "failed": "failing"}.get(slot["state"], "at work")
        what = ", ".join(calls) or (f"in {slot['library']}" if slot.get("library") else doing)
        if self._is_silent(slot):
            what = f"silent for {slot['age']:.1f} s (stopped, or holding the interpreter lock); last seen {what}"
        return f"{what} at {slot['place']}{f' ({context})' if context else ''}"

    def _ask_silent(self) -> None:
        """Let ranks of this node that hold the interpreter lock write their stacks: the signal needs no lock."""
        asked = 0
        for rank, slot in self._slots(()).items():
            if rank != self._rank and slot.get("stacks") and self._is_silent(slot):
                with contextlib.suppress(OSError):
                    os.kill(slot["pid"], signal.SIGUSR2)
                    asked += 1
        time.sleep(_STACKS if asked else 0.0)

    def _is_silent(self, slot: Slot) -> bool:
        return bool(slot["age"] > max(_SILENT_TICKS * self._tick(), _MIN_SILENCE))

    def _tick(self) -> float:
        return self._heartbeat.tick if self._heartbeat is not None else TICK


def _call(call: list[Any]) -> str:
    """Describe an entry of a slot's calls: key, communicator, sequence, operation, tag, seconds."""
    _, name, sequence, operation, tag, _ = call
    return f"{operation} #{sequence}{f' {tag!r}' if tag else ''} of {name!r}"
