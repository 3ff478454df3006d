"""Read lines that a running job appends to a file, by looking at the file again and again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class GrowingFile:
    """Read the new lines of JSON in a file each time that it is asked.

    A file that is replaced, or cut, is read from its start again, as after a resume. Nothing but reading is needed, so
    that it works on network file systems, too.

    Parameters
    ----------
    path : Path
        The file; it need not exist yet.

    Attributes
    ----------
    lines : list of dict
        All lines so far; those that are damaged are left out.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._identity = path, 0, (0, 0)
        self._rest = b""
        self.lines: list[dict[str, Any]] = []

    def look(self) -> bool:
        """Read what is new; return whether anything is."""
        try:
            with self._path.open("rb") as file:
                found = self._path.stat()
                if (found.st_dev, found.st_ino) != self._identity or found.st_size < self._offset:
                    had = bool(self.lines)
                    self._identity, self._offset, self._rest = (found.st_dev, found.st_ino), 0, b""
                    self.lines = []
                else:
                    had = False
                file.seek(self._offset)
                more = file.read()
        except FileNotFoundError:
            had, more = bool(self.lines), b""
            self._offset, self._rest, self.lines = 0, b"", []
        self._offset += len(more)
        *whole, self._rest = (self._rest + more).split(b"\n")
        for line in whole:
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict):
                self.lines.append(values)
        return had or bool(whole)
