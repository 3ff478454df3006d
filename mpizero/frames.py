"""Find the lines of a stack that are the user's own, and show errors of this package by them."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

#: Set to anything but 0, errors that end a job, or are shown by Jupyter, keep their whole traceback.
TRACEBACK = "MPIZERO_TRACEBACK"

#: Of this package, as code objects have it: maybe by way of a link.
_PACKAGE = tuple({f"{path}{os.sep}" for path in (Path(__file__).parent, Path(__file__).resolve().parent)})
#: Of Python itself, and of the commands that packages bring.
_PYTHON = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib", "scripts"))
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
#: The file of functions that were made of text: the ``__init__`` of a dataclass, but also a program of ``python -c``.
_GENERATED = "<string>"


class Line(NamedTuple):
    """Describe one line of a stack."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        """Give "file:line in function"."""
        return f"{Path(self.file).name}:{self.number} in {self.function}"


def is_users(file: str) -> bool:
    """Tell whether a file is neither of this package, nor of Python, nor of an installed package. Not collective."""
    return not file.startswith((*_PACKAGE, *_PYTHON, "<frozen")) and not any(part in file for part in _INSTALLED)


def users_line(trace: TracebackType | None) -> Line | None:
    """Return the innermost line of a traceback that is the user's own. Not collective.

    Where the user's program is an installed package, too, that is its line which calls this package. None where there
    is none: under a command of this package.
    """
    lines = list(_lines(trace))
    if own := [line for line in lines if is_users(line.file)]:
        return own[-1]
    entry = next((place for place, line in enumerate(lines) if line.file.startswith(_PACKAGE)), 0)
    caller = lines[entry - 1] if entry else None
    return caller if caller and any(part in caller.file for part in _INSTALLED) else None


def _lines(trace: TracebackType | None) -> Iterator[Line]:
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals
        if code.co_filename != _GENERATED or "__file__" not in module:
            yield Line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next


def shows_all() -> bool:
    """Tell whether :data:`TRACEBACK` asks for all frames. Not collective."""
    return os.environ.get(TRACEBACK, "0") not in ("", "0")


def rendered(error: BaseException) -> list[str]:
    """Return the lines by which IPython and Jupyter show an error: the user's own line first. Not collective."""
    line = users_line(error.__traceback__)
    if line is None or shows_all():
        return "".join(traceback.format_exception(error)).splitlines()
    shown = traceback.format_list([traceback.FrameSummary(*line)])[0].splitlines()
    return [*shown, f"{type(error).__name__}: {error}", f"(lines inside of mpizero: {TRACEBACK}=1)"]
