"""Write down what a part finds, at once, so that a part that crashes later loses nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """Raised by a part that cannot run here; the message says why."""


class Report:
    """Append findings to a file, a line of JSON each, and write them to standard output."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _write(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        verdict = "" if row["ok"] is None else "ok  " if row["ok"] else "WRONG  "
        print(f"{verdict}{row['name']}: {row['figure']}", flush=True)

    def figure(self, name: str, text: object) -> None:
        """Write a figure, which is neither right nor wrong."""
        self._write({"name": name, "ok": None, "figure": str(text)})

    def check(self, name: str, right: bool, text: object) -> None:
        """Write the outcome of a check, with its figure; one that is not right makes the part's verdict WRONG."""
        self._write({"name": name, "ok": bool(right), "figure": str(text)})

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Write an exception of the block as a check that is not right, and go on after the block."""
        import traceback

        try:
            yield
        except Skipped:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an exception says that memory was too small, whatever library raised it."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__


def timed(work: Any, *args: Any) -> tuple[float, Any]:
    """Call ``work(*args)``; return the seconds that it took, and its result."""
    begun = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - begun, result
