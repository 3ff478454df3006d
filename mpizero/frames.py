"""Find the line of the user's own code in a traceback, so that error messages can name it."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

#: Environment variable; set to anything but 0, errors that end a job or are shown by Jupyter print all their frames.
TRACEBACK = "MPIZERO_TRACEBACK"

#: Folder of this package, as it may stand in the file names of code objects: with symbolic links and resolved.
_PACKAGE = tuple({f"{path}{os.sep}" for path in (Path(__file__).parent, Path(__file__).resolve().parent)})
#: Folders of Python's standard library and of the commands that packages install; nothing is imported to find them,
#: because a rank that fails may have no file left to open.
_LIBRARY = f"{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"
_PYTHON = tuple(
    os.path.join(path, "")
    for path in (os.path.dirname(os.__file__), *(f"{sys.exec_prefix}/{own}" for own in (_LIBRARY, "bin", "local/bin")))
)
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
#: File name of code compiled from a string: the ``__init__`` of a dataclass, but also a program given to ``python -c``.
_GENERATED = "<string>"


class Line(NamedTuple):
    """Describe one frame of a traceback: its file, line number and function."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        """Return "file:line in function"."""
        return f"{Path(self.file).name}:{self.number} in {self.function}"


def is_users(file: str) -> bool:
    """Tell whether a source file is the user's: outside of Python, of mpizero and of all installed packages."""
    others = (*_PACKAGE, *_PYTHON, "<frozen", "<mapped")
    return not file.startswith(others) and not any(part in file for part in _INSTALLED)


def users_line(trace: TracebackType | None) -> Line | None:
    """Return the innermost frame of a traceback that is in the user's own code, or None.

    If there is none because the user's program is itself an installed package, the frame that calls mpizero is
    returned. The result is None if no such frame exists, for example inside a command such as ``mpizero train``.
    """
    lines = list(_lines(trace))
    if own := [line for line in lines if is_users(line.file)]:
        return own[-1]
    entry = next((place for place, line in enumerate(lines) if line.file.startswith(_PACKAGE)), 0)
    caller = lines[entry - 1] if entry else None
    return caller if caller and any(part in caller.file for part in _INSTALLED) else None


def stacklevel() -> int:
    """Return the ``stacklevel`` with which ``warnings.warn`` of the caller names the line of the user's code.

    If there is none, the warning names the line that called mpizero.
    """
    files: list[str] = []
    frame = sys._getframe().f_back
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    users = (depth for depth, file in enumerate(files) if is_users(file) and file != _GENERATED)
    callers = (depth for depth, file in enumerate(files) if not file.startswith(_PACKAGE))
    return 1 + next(users, next(callers, 0))


def _lines(trace: TracebackType | None) -> Iterator[Line]:
    while trace is not None:
        code, module = trace.tb_frame.f_code, trace.tb_frame.f_globals
        if code.co_filename != _GENERATED or "__file__" not in module:
            yield Line(code.co_filename, trace.tb_lineno, code.co_name)
        trace = trace.tb_next


def shows_all() -> bool:
    """Tell whether the environment variable ``MPIZERO_TRACEBACK`` asks for whole tracebacks."""
    return os.environ.get(TRACEBACK, "0") not in ("", "0")


def rendered(error: BaseException) -> list[str]:
    """Return the lines that IPython and Jupyter print for an error: the line of the user's code, then the message.

    If no line of the user's code is found, or ``MPIZERO_TRACEBACK`` is set, they are the whole traceback.
    """
    line = users_line(error.__traceback__)
    if line is None or shows_all():
        return "".join(traceback.format_exception(error)).splitlines()
    shown = traceback.format_list([traceback.FrameSummary(*line)])[0].splitlines()
    return [*shown, f"{type(error).__name__}: {error}", f"(lines inside of mpizero: {TRACEBACK}=1)"]
