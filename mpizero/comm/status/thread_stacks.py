"""Read the stacks of the threads of this process.

[Note: no frames] Code must not walk the frames of another thread by ``f_back``: that thread keeps running, and CPython
3.11 has been seen to return freed memory as a frame. Instead ``faulthandler`` is used. It writes all stacks as text in
one call, during which no other thread runs.

[Note: no collection] ``sys._current_frames`` creates objects while it holds a lock of the interpreter, so a garbage
collection may begin inside of it (CPython issue 106883, fixed in later releases). If a finalizer then lets another
thread run, and that thread starts or ends a thread or calls the same function, the two threads wait for each other: a
deadlock. Frames may also be freed meanwhile. So the garbage collector is switched off while the function runs.
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

from mpizero._util.text import Line, is_users
from mpizero.comm.status.scratch_files import anonymous_file

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) .*:")
_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')

_COMM = str(Path(__file__).resolve().parents[1]) + os.sep

#: Held while the garbage collector is off.
_LOOKING = threading.Lock()


def current_frame(thread: int) -> FrameType | None:
    """Return the innermost frame of the thread whose ``threading.get_ident()`` is ``thread``; None if there is none.

    The caller must not read the frame's ``f_back``, see [Note: no frames]. See also [Note: no collection].
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
    """Return the stack of every thread, innermost line first, by the thread's ``threading.get_ident()``.

    At most 100 threads are returned, and at most 100 lines of each: the limits of ``faulthandler``. The result is empty
    if no temporary file can be made.
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
    """Return the current line of ``frame`` as a stack of one line; an empty list if ``frame`` is None.

    This replaces the result of :func:`all_stacks` if that is empty.
    """
    return [] if frame is None else [Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)]


def describe_stack(stack: Sequence[Line]) -> str:
    """Return a stack as text: the innermost line of user code, and the innermost line outside mpizero's ``comm``."""
    inner = next((line for line in stack if not line.file.startswith(_COMM)), None)
    outer = next((line for line in stack if is_users(line.file)), None)
    lines = [outer] if inner is outer else [outer, inner]
    return " > ".join(str(line) for line in lines if line is not None)
