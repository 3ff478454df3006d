"""Show progress on rank 0: by a bar on a terminal, by few lines in a log file."""

from __future__ import annotations

import sys
import time
from typing import Any, Self, TextIO

from mpizero._util.text import printable

#: Seconds between two lines if the output is not a terminal: at least the first number, then a twentieth of the run's
#: time so far, but no more than the second. A day has about 360 lines. The first and the last step are always shown.
LEAST_SECONDS, MOST_SECONDS = 10.0, 300.0


class Progress:
    """Show the progress of training steps on one output stream.

    Parameters
    ----------
    steps : int
        Number of the last step.
    active : bool
        Whether to show anything; true on rank 0 only.
    stream : TextIO, optional
        The output stream. Default: standard error, because standard output is for the result.
    """

    def __init__(self, steps: int, *, active: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._steps, self._active, self._started, self._next = steps, active, time.monotonic(), float("-inf")
        self._bar: Any = None

    def begin(self, done: int = 0) -> None:
        """Start the bar if the stream is a terminal; ``done`` is the number of steps that an earlier run has made."""
        if self._active and self._stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._steps, initial=done, file=self._stream, unit="step", dynamic_ncols=True)

    def step(self, step: int, figures: dict[str, str]) -> None:
        """Show that step ``step`` is done, with its figures: texts by name."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update(1)
            return
        now = time.monotonic()
        if now >= self._next or step == self._steps:
            self._next = now + min(MOST_SECONDS, max(LEAST_SECONDS, (now - self._started) / 20))
            self._write(f"step {step}/{self._steps}  " + "  ".join(f"{k} {v}" for k, v in figures.items()))

    def say(self, message: str) -> None:
        """Write a message as one line, above the bar if there is one; its control characters are escaped."""
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
    """Show a progress bar that counts bytes if ``stream`` is a terminal, else nothing. A call advances the bar.

    Parameters
    ----------
    total : int
        Number of bytes at the end.
    label : str
        Text before the bar.
    stream : TextIO, optional
        The output stream. Default: standard error.
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, count: int) -> None:
        """Advance the bar by ``count`` bytes."""
        if self._bar is not None:
            self._bar.update(count)
