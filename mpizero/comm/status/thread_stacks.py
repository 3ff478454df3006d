"""Read the stacks of the threads of this process.

[Note: no frames] The frames of another thread must not be followed from one to the next: between two steps that thread
goes on, and CPython 3.11 has been seen to hand out memory of a frame that was gone. ``faulthandler`` looks at all
stacks in one call during which no other thread runs, and says what it saw as text.

[Note: no collection] ``sys._current_frames`` makes objects while it holds a lock of the interpreter, so a garbage
collection may begin in it (CPython issue 106883, mended in later releases). If a finalizer then lets other threads
run, and one of them starts or ends a thread or calls the same function, it waits for that lock and keeps the
interpreter's: the process stands still for ever. And what is being told of may be gone when it goes on. Hence no
collection while it runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from mpizero.comm.status.scratch_files import anonymous_file
from mpizero.frames import Line, is_users

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) .*:")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')

_COMM = str(Path(__file__).resolve().parents[1]) + os.sep

#: Held where collections are turned off and on again, by several threads of one process.
_LOOKING = threading.Lock()


def current_frame(thread: int) -> FrameType | None:
    """Return the innermost frame of the thread with this ``threading.get_ident``, None if there is none.

    Not collective. See [Note: no collection], and [Note: no frames] for what must not be done with it.
    """
    with _LOOKING:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if enabled:
                gc.enable()


def all_stacks() -> dict[int, list[Line]]:
    """Return the lines that every thread is in, the innermost first, by ``threading.get_ident``.

    Not collective. At most 100 lines of at most 100 threads, which is all that ``faulthandler`` tells; nothing where
    there is no file for it to write to.
    """
    text = ""
    with contextlib.suppress(OSError), anonymous_file() as file:
        faulthandler.dump_traceback(file)
        text = os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
    found: dict[int, list[Line]] = {}
    lines: list[Line] = []
    for row in text.splitlines():
        if thread := _THREAD.fullmatch(row):
            lines = found[int(thread[1], 16)] = []
        elif line := _LINE.fullmatch(row):
            lines.append(Line(line[1], int(line[2]), line[3]))
    return found


def innermost_line(frame: FrameType | None) -> list[Line]:
    """Return the line of one frame, which is all that is known where :func:`stacks` knows nothing. Not collective."""
    return [] if frame is None else [Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)]


def describe_stack(stack: Sequence[Line]) -> str:
    """Describe the line of the user's own code that a thread is in, and the line of a library beneath it."""
    inner = next((line for line in stack if not line.file.startswith(_COMM)), None)
    outer = next((line for line in stack if is_users(line.file)), None)
    lines = [outer] if inner is outer else [outer, inner]
    return " > ".join(str(line) for line in lines if line is not None)
