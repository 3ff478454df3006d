"""Give XLA's CPU client a fixed number of threads, and refuse one that has started with more.

[Note: threads of XLA] JAX starts its CPU client when it first computes, and the client keeps as many threads as the
environment variable ``PJRT_NPROC`` says then; without it, as many as the process may use cores, on every rank of the
node. Neither ``OMP_NUM_THREADS`` nor the ``intra_op_parallelism_threads`` of ``XLA_FLAGS`` changes that. The threads
that compute are named ``tf_XLAEigen``, by which they are counted on Linux.
"""

from __future__ import annotations

import os
from pathlib import Path

from mpizero.errors import ConfigError

_SETTING, _NAME = "PJRT_NPROC", "tf_XLAEigen"


def fix_threads(threads: int | None = None) -> None:
    """Let XLA start with this number of threads, unless it has started. Not collective.

    None stands for the value of ``PJRT_NPROC``, else that of ``OMP_NUM_THREADS``, else 1.
    """
    if threads is None:
        given = os.environ.get(_SETTING) or os.environ.get("OMP_NUM_THREADS", "1")
        threads = int(given) if given.isdecimal() and int(given) else 1
    if not running_threads():
        os.environ[_SETTING] = str(threads)


def running_threads() -> int:
    """Return how many threads XLA computes with; 0 if it has not started, or on systems other than Linux."""
    found = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            found += task.read_text(encoding="utf-8").strip() == _NAME
        except OSError:  # the thread has ended
            continue
    return found


def require_threads(threads: int) -> None:
    """Let XLA start with ``threads`` threads, or raise an error if it has started with more. Not collective.

    Raises
    ------
    ConfigError
        If XLA runs with more threads.
    """
    found = running_threads()
    if not found:
        fix_threads(threads)
    elif found > threads:
        raise ConfigError(
            f"JAX has started with {found} threads on this rank, the configuration has threads={threads}: import "
            f"mpizero.adapters.jax before JAX computes anything, or set {_SETTING}={threads} for the job"
        )
