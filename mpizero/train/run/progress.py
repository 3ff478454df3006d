"""Show progress on rank 0: a bar on a terminal, a short line now and then in a log file."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

from mpizero.text import printable

#: Seconds between two lines if the output is not a terminal; the first and the last step are always shown.
QUIET_SECONDS = 10.0


class Progress:
    """Show the progress of training steps on one output stream.

    Parameters
    ----------
    steps : int
        Number of the last step.
    active : bool
        False on every rank but the first: nothing is shown.
    stream : TextIO, optional
        Default: standard error, so that standard output keeps to the result.
    """

    def __init__(self, steps: int, *, active: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._steps, self._active, self._spoken = steps, active, float("-inf")
        self._bar: Any = None

    def begin(self, done: int = 0) -> None:
        """Start the progress bar, on a terminal; ``done`` is the number of steps that an earlier run has made."""
        if self._active and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._steps, initial=done, file=self._stream, unit="step", dynamic_ncols=True)

    def step(self, step: int, figures: dict[str, str]) -> None:
        """Show that a step is done, with its figures."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update(1)
            return
        now = time.monotonic()
        if now - self._spoken >= QUIET_SECONDS or step == self._steps:
            self._spoken = now
            self._write(f"step {step}/{self._steps}  " + "  ".join(f"{k} {v}" for k, v in figures.items()))

    def say(self, message: str) -> None:
        """Write a message as one line above the bar; line breaks and control characters in it are escaped."""
        if self._active:
            self._write(f"mpizero: {printable(message)}")

    def close(self) -> None:
        """End the bar, which stays visible."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _write(self, line: str) -> None:
        try:
            if self._bar is not None:
                self._bar.write(line, file=self._stream)
            else:
                self._stream.write(line + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            # A closed terminal must not end a training run.
            self._active = False


class ByteProgress:
    """Show a progress bar over bytes on a terminal, and nothing otherwise; a call advances it by some bytes.

    Parameters
    ----------
    total : int
        Number of all bytes.
    label : str
        Text before the bar.
    stream : TextIO, optional
        Default: standard error.
    """

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        stream = stream if stream is not None else sys.stderr
        self._bar: Any = None
        if stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total, desc=label, file=stream, unit="B", unit_scale=True, dynamic_ncols=True, leave=False
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, count: int) -> None:
        """Tell that ``count`` more bytes are done."""
        if self._bar is not None:
            self._bar.update(count)
