"""Fail in the ways in which a part can fail on a GPU, to show how each is told and that it costs only itself."""

from __future__ import annotations

import os
import signal

from gpu_checking.report import Report


class OutOfMemoryError(MemoryError):
    """Has the name and the base class of CuPy's exception."""


def crash(report: Report, small: bool) -> None:
    """End by a signal, as a process does whose driver crashes."""
    report.figure("found", "something, before the crash")
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(report: Report, small: bool) -> None:
    """Wait for ever, as a process does whose GPU never answers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    report.figure("found", "something, before it hung")
    while True:
        signal.pause()


def memory(report: Report, small: bool) -> None:
    """Raise what CuPy raises if the GPU's memory is too small."""
    with report.attempt("an allocation"):
        raise OutOfMemoryError("Out of memory allocating 109,951,162,777,600 bytes")


def broken(report: Report, small: bool) -> None:
    """Import what no machine has."""
    import no_such_package_anywhere  # noqa: F401
