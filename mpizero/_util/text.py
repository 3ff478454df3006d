"""Print and format text for users, find the user's line of code in a traceback, and find versions of packages.

:func:`printable` escapes control characters, so that any text can be printed safely. :func:`users_line` finds the line
of the user's own code in a traceback, so that error messages can name it. Further functions format numbers, ages and
tables; :func:`write_atomic` writes a file.

Versions of installed packages are read from the names of their metadata folders, which contain name and version (PEP
376). Importing ``importlib.metadata`` instead would take 30 ms of processor time, which is a second for 64 ranks on two
cores. This module imports nothing slow, because :mod:`mpizero.errors` imports it.
"""

from __future__ import annotations

import io
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import NamedTuple, TextIO
from unicodedata import category

#: Unicode categories that are escaped: control characters (escape sequences begin with one), invisible formatting marks
#: (which reverse the direction of writing, or hide in names), halves of surrogate pairs, line and paragraph separators,
#: and code points that are private or not assigned.
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_UNUSUAL = re.compile(r"[^ -~]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str, keep: str = "") -> str:
    r"""Return ``text`` with control characters and invisible characters escaped.

    Letters, marks, symbols and spaces of all scripts stay. The escapes have the syntax of JSON and TOML (``\n``,
    ``\u001b``, ``\U000e0001``). Backslashes are not escaped, so a text that already contains escapes, such as a JSON
    document, keeps its meaning.

    Parameters
    ----------
    text : str
        Anything: names, keys, values, messages of other libraries.
    keep : str
        Characters that are not escaped, such as ``"\n"`` in a report of several lines.
    """
    return _UNUSUAL.sub(lambda match: match[0] if match[0] in keep else _escaped(match[0]), text)


def _escaped(character: str) -> str:
    if category(character) not in _ESCAPED:
        return character
    code = ord(character)
    return _SHORT.get(character) or (f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}")


def notice(text: str) -> None:
    """Write one line to standard error: "mpizero: " and ``text`` with its control characters escaped."""
    print(f"mpizero: {printable(text)}", file=sys.stderr, flush=True)


@lru_cache(maxsize=64)
def notice_once(text: str) -> None:
    """Write a line to standard error, unless this process has written the same line before."""
    notice(text)


def show(text: str, file: TextIO | None = None) -> None:
    """Print a report or a line to standard output, or to ``file``, with control characters escaped."""
    print(printable(text, keep="\n"), file=file, flush=True)


def accept_all_characters() -> None:
    """Make standard output and error escape the characters that their encoding lacks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def wants_colour(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Tell whether to write colours to a stream: True for terminals, unless an environment variable says otherwise.

    ``NO_COLOR``, if not empty, forbids colours, and ``FORCE_COLOR`` asks for them in any stream; ``TERM=dumb`` is a
    terminal without colours. Ranks of Open MPI get none, because Open MPI gives them a terminal even if the output of
    the job goes to a file.
    """
    if environment.get("NO_COLOR") or environment.get("FORCE_COLOR"):
        return not environment.get("NO_COLOR")
    return environment.get("TERM") != "dumb" and "OMPI_COMM_WORLD_RANK" not in environment and stream.isatty()


#: Environment variable; if it is set to anything but 0, errors that end a job or are shown by Jupyter print all frames.
TRACEBACK = "MPIZERO_TRACEBACK"

#: Folder of the library, as it may stand in the file names of code objects: with symbolic links and resolved.
PACKAGE = tuple({f"{path}{os.sep}" for path in (Path(__file__).parents[1], Path(__file__).resolve().parents[1])})
#: Folders of Python's standard library and of the commands that packages install; nothing is imported to find them,
#: because a rank that fails may have no file left to open.
_LIBRARY = f"{sys.platlibdir}/python{sys.version_info[0]}.{sys.version_info[1]}"
_PYTHON = tuple(
    os.path.join(path, "")
    for path in (os.path.dirname(os.__file__), *(f"{sys.exec_prefix}/{end}" for end in (_LIBRARY, "bin", "local/bin")))
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
    others = (*PACKAGE, *_PYTHON, "<frozen", "<mapped")
    return not file.startswith(others) and not any(part in file for part in _INSTALLED)


def users_line(trace: TracebackType | None) -> Line | None:
    """Return the innermost frame of a traceback that is in the user's own code, or None.

    If there is no such frame, the frame that calls mpizero is returned, provided that its file is in an installed
    package, because the user's program may be one. Otherwise the result is None, for example in a command such as
    ``mpizero train``.
    """
    lines = list(_lines(trace))
    if of_user := [line for line in lines if is_users(line.file)]:
        return of_user[-1]
    entry = next((position for position, line in enumerate(lines) if line.file.startswith(PACKAGE)), 0)
    caller = lines[entry - 1] if entry else None
    return caller if caller and any(part in caller.file for part in _INSTALLED) else None


def stacklevel() -> int:
    """Return the ``stacklevel`` with which ``warnings.warn`` of the caller names the line of the user's code.

    If no user's code is on the stack, the warning names the line that called mpizero.
    """
    files: list[str] = []
    frame = sys._getframe().f_back
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    users = (depth for depth, file in enumerate(files) if is_users(file) and file != _GENERATED)
    callers = (depth for depth, file in enumerate(files) if not file.startswith(PACKAGE))
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

    If no line of the user's code is found, or ``MPIZERO_TRACEBACK`` is set, the lines of the whole traceback are
    returned.
    """
    line = users_line(error.__traceback__)
    if line is None or shows_all():
        return "".join(traceback.format_exception(error)).splitlines()
    frame = traceback.format_list([traceback.FrameSummary(*line)])[0].splitlines()
    return [*frame, f"{type(error).__name__}: {error}", f"(lines inside of mpizero: {TRACEBACK}=1)"]


PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def amount(value: float) -> str:
    """Format a number with four digits and a prefix such as "k" or "M" ("1.5 G"); the caller appends the unit."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= s), PREFIXES[-1])
    return f"{value / scale:.4g} {prefix}"


def age(seconds: float) -> str:
    """Format an age such as "3 h ago", in the largest unit (s, min, h, d) of which it has at least two."""
    scale, unit = next(((s, u) for s, u in _AGES if seconds >= 2 * s), _AGES[-1])
    return f"{max(0, seconds) / scale:.0f} {unit} ago"


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Format rows of cells as a table; the columns with the indices ``left`` are left-aligned, others right-aligned."""
    return joined(aligned(rows, left))


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Format rows of cells as the lines of a table, aligned as by :func:`columns`; the lines are not joined."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def list_few(names: Sequence[str]) -> str:
    """List at most five names, and say how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def joined(lines: Iterable[str]) -> str:
    """Join lines to one text; control characters and line breaks inside a line are escaped."""
    return "\n".join(map(printable, lines))


def duration(seconds: float) -> str:
    """Format a length of time: "2.5 ms", "3.2 s", "5 min 20 s", "3 h 5 min" or, from 48 h on, "2 d 3 h"."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, left = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {left} min" if hours else f"{minutes} min {rest} s"
    return f"{hours // 24} d {hours % 24} h"


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file atomically: a reader finds all of ``data`` or the old file, even if this process is killed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.tmp")  # threads may be ranks
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def installed_version(name: str) -> str | None:
    """Return the version of the package ``name``, or None if it is not installed. Not collective.

    Examples
    --------
    >>> from mpizero._util.text import installed_version
    >>> import numpy
    >>> installed_version("numpy") == numpy.__version__
    True
    """
    return _versions(tuple(sys.path)).get(_normalized(name))


def mpizero_version() -> str:
    """Return the version of this library, or "0+unknown" in a source tree that is not installed. Not collective."""
    return installed_version("mpizero") or "0+unknown"


@cache
def _versions(folders: tuple[str, ...]) -> dict[str, str]:
    """Return the version of each package with metadata in one of ``folders``; if several have it, the first counts."""
    versions: dict[str, str] = {}
    for folder in folders:
        with suppress(OSError):
            for entry in os.listdir(folder or "."):
                described, kind = os.path.splitext(entry)
                if kind in (".dist-info", ".egg-info") and "-" in described:
                    name, version = described.split("-")[:2]
                    versions.setdefault(_normalized(name), version)
    return versions


def _normalized(name: str) -> str:
    """Return a package's name in its normalized form, which is equal for all spellings (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
