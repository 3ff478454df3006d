"""Measure the memory of a process: its size, its peak, and its part of the memory that it shares with others."""

from __future__ import annotations

import gc
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def allocated() -> int:
    """Return the bytes of heap and private mappings of this process, as the limit RLIMIT_DATA counts them."""
    return _kilobytes(Path("/proc/self/status"), "VmData")


def peak_resident() -> int:
    """Return the largest resident size that this process has had, in bytes (shared pages counted in full)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident() -> int:
    """Return the resident size of this process now, in bytes (shared pages counted in full)."""
    return _kilobytes(Path("/proc/self/status"), "VmRSS") or peak_resident()


def proportional(pid: int | str = "self") -> int:
    """Return the proportional set size of a process in bytes: each shared page counts 1/k where k processes map it.

    Not collective. The sum over a node's ranks is the memory that they use together. If the kernel has no file
    ``/proc/PID/smaps_rollup``, the resident size of this process is returned.
    """
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss") or resident()


@contextmanager
def peak_growth() -> Iterator[list[int]]:
    """Measure the largest growth of the resident size during a ``with`` block; yield a list with one number.

    After the block the number is that growth in bytes. Not collective. If the kernel does not let a process reset its
    peak (``/proc/self/clear_refs``), the peak since the process started is taken in place of the block's.
    """
    grown = [0]
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident()
    try:
        yield grown
    finally:
        peak = _kilobytes(Path("/proc/self/status"), "VmHWM") or peak_resident()
        grown[0] = max(0, peak - before)


@contextmanager
def proportional_growth(every: float = 0.002) -> Iterator[list[int]]:
    """Measure the largest growth of :func:`proportional` during a ``with`` block; yield a list with one number.

    After the block the number is that growth in bytes. Not collective. The kernel records no peak of the proportional
    set size, so a thread reads it every ``every`` seconds.
    """
    grown, done = [0], threading.Event()
    before = proportional()

    def look() -> None:
        while not done.wait(every):
            grown[0] = max(grown[0], proportional() - before)

    watcher = threading.Thread(target=look, name="proportional set size", daemon=True)
    watcher.start()
    try:
        yield grown
    finally:
        done.set()
        watcher.join()


def release_free_memory() -> None:
    """Return freed memory to the system, so that a measurement counts only memory in use."""
    import ctypes

    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; other C libraries return pages by themselves
    if trim is not None:
        trim(0)


def _kilobytes(path: Path, field: str) -> int:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return 0
