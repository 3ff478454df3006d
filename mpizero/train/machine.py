"""Query facts about this machine and this process: processor, libraries, shared memory, GPUs, memory in use.

``mpizero doctor``, ``mpizero bench`` and the benchmark scripts print these facts, and a run records them. The memory of
a process is measured as resident size, peak of the resident size, and proportional set size, which divides the size of
shared memory by the number of processes that map it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import platform
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpizero._util.text import installed_version
from mpizero.checkpoint.format import hdf5_version
from mpizero.comm import Communicator
from mpizero.comm.startup import mpi_facts, versions
from mpizero.errors import ConfigError, MpizeroError
from mpizero.guard.reports import SHARED_FOLDER
from mpizero.kernels.matmul import library
from mpizero.sharding.exactness import numpy_builds

if TYPE_CHECKING:
    from mpizero.kernels.machine_code import CacheFolder


def host() -> str:
    """Return this node's host name.

    Not collective.
    """
    return socket.gethostname()


def cores() -> list[int]:
    """Return the numbers of the CPU cores on which this process may run.

    Not collective.
    """
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def processor() -> str:
    """Return the name of the processor's model.

    Not collective.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next(filter(None, names), "") or platform.processor() or platform.machine()


def described() -> str:
    """Return the processor's name, this process's number of cores and the loaded MPI library as one line of text.

    Not collective.
    """
    mpi, count = mpi_facts() if "mpi4py.MPI" in sys.modules else None, len(cores())
    return f"{processor()}, {count} core{'s' * (count != 1)}" + (f", {mpi.vendor} {mpi.version}" if mpi else "")


def blas() -> str:
    """Return the name of the BLAS that NumPy has loaded, with the processor core that it is optimized for.

    If another library computes the matrix products of layers, its name is added. Not collective.

    Raises
    ------
    ConfigError
        If ``MPIZERO_BLAS`` names a library that cannot be used.
    """
    from threadpoolctl import threadpool_info

    np.dot(np.ones((2, 2)), np.ones((2, 2)))
    beside = library()
    other = f"; {beside.applies_to} by {beside.name}" if beside is not None else ""
    return (", ".join(numpy_builds(threadpool_info())) or "unknown to threadpoolctl") + other


def hdf5(comm: Communicator) -> str | None:
    """Describe the installed h5py, and whether it is built with MPI; return None if it is not installed.

    Not collective.
    """
    if importlib.util.find_spec("h5py") is None:
        return None
    from mpizero.checkpoint.writer import check_available

    try:
        check_available(comm)
    except ConfigError:
        return (
            f"h5py {installed_version('h5py')} without MPI: checkpoints are written directly, each rank its own bytes"
        )
    except ImportError as error:
        return None if "h5py" in str(error) else f"h5py cannot be loaded: {error}"
    return f"h5py {installed_version('h5py')} with MPI"


def try_reduction(comm: Communicator) -> tuple[int, float]:
    """Sum the rank numbers over all ranks; return the sum, and the median seconds of a small reduction.

    Collective over ``comm``.
    """
    buffer = np.array([comm.rank], dtype=np.int64)
    comm.allreduce(buffer, tag="doctor")
    scratch, times = np.zeros(1, dtype=np.int64), []
    for _ in range(20):
        started = time.perf_counter()
        comm.allreduce(scratch, tag="doctor")
        times.append(time.perf_counter() - started)
    return int(buffer[0]), sorted(times)[len(times) // 2]


#: Calls of MPI after which :func:`try_message` no longer counts.
MOST_CALLS = 500


def try_message(comm: Communicator, nbytes: int = 1 << 20, pause: float = 0.01) -> int | None:
    """Send ``nbytes`` from each node to the next; return after how many calls of MPI the last message has arrived.

    Collective over ``comm``. Between two calls a rank sleeps for ``pause`` seconds, in place of computing. The result
    is ``MOST_CALLS + 1`` if a message has not arrived after :data:`MOST_CALLS`, and None if there is only one node.
    """
    with comm.split_node(name="doctor") as node, comm.split(min(node.rank, 1), name="doctor") as leaders:
        count, nodes = 0, leaders.size if node.rank == 0 else 1
        if nodes > 1:
            to, source = ((leaders.rank + step) % nodes for step in (1, -1))
            counts = [[nbytes * (rank == peer) for rank in range(nodes)] for peer in (to, source)]
            send, recv = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)
            request = leaders.ialltoallv(send, counts[0], recv, counts[1], "doctor")
            while count < MOST_CALLS and not request.test():
                count += 1
                time.sleep(pause)
            request.wait()
        return max(comm.allgather_object(count + 1 if nodes > 1 else 0)) or None


_WINDOW = 1 << 16


def try_shared_memory(comm: Communicator) -> str:
    """Write a part of a shared window on every rank, and read all parts; return an error message, or "".

    Collective over ``comm``.
    """
    with comm.split_node(name="doctor") as node:
        try:
            shared = node.allocate_shared(_WINDOW * node.size)
        except MpizeroError as error:
            return str(error)
        parts = shared.buffer.reshape(node.size, _WINDOW)
        parts[node.rank] = node.rank + 1
        node.node_barrier(shared)
        wrong = [rank for rank in range(node.size) if not (parts[rank] == rank + 1).all()]
        del parts
        node.node_barrier(shared)
        shared.close()
    return f"does not see what ranks {wrong} of its node wrote" if wrong else ""


def shared_space() -> tuple[int, int] | None:
    """Return the free and the total bytes of the file system for shared memory; None if they are unknown.

    Not collective.
    """
    try:
        space = os.statvfs(SHARED_FOLDER)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize


def try_kernel() -> tuple[str, CacheFolder | None, float]:
    """Compile and run one kernel; return an error message, the folder of compiled kernels, and the seconds it took.

    Not collective. The message is "" if there is no error. The folder is None if an exception was raised.
    """
    from mpizero.kernels import cpu, machine_code

    started = time.perf_counter()
    try:
        folder = machine_code.find_folder(machine_code.cpu_identity())
        if not os.access(folder.path, os.W_OK | os.X_OK):
            return f"{folder.path} cannot be written", folder, 0.0
        x = np.arange(5, dtype=np.float32)
        y = np.empty_like(x)
        cpu.layers.relu(x - 2, y)
    except Exception as error:  # whatever a broken compiler or disk may raise is the result
        return f"{type(error).__name__}: {error}", None, 0.0
    wrong = "" if y.tolist() == [0, 0, 0, 1, 2] else f"a kernel computes {y.tolist()} instead of [0, 0, 0, 1, 2]"
    return wrong, folder, time.perf_counter() - started


def devices() -> tuple[int, str]:
    """Return the number of GPUs that ``device = "cuda"`` can use, and, if that is 0, the reason.

    Not collective.
    """
    from mpizero.kernels.gpu import available_gpus

    return available_gpus()


def why_through_host(comm: Communicator, local_rank: int) -> str:
    """Return the reason why messages between GPUs are sent through host memory; "" if they are sent directly.

    Collective over ``comm``. ``local_rank`` is this rank's number inside its node.
    """
    from mpizero.comm.p2p import prove
    from mpizero.kernels.gpu import open_device

    return prove(comm, lambda: open_device(local_rank))


def torch_build() -> tuple[str, str]:
    """Return the version of the installed PyTorch, and that of CUDA for which it is built; "" for one that is missing.

    Not collective; PyTorch is not imported.
    """
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        with suppress(OSError):
            text = Path(folder, "version.py").read_text(encoding="utf-8")
            version = re.search(r"""^__version__.*?['"](.+)['"]""", text, re.MULTILINE)
            cuda = re.search(r"""^cuda\b.*= *['"](.+)['"]""", text, re.MULTILINE)
            return version[1] if version else "of unknown version", cuda[1] if cuda else ""
    return "", ""


def gpus() -> tuple[int, list[str]]:
    """Return the number of NVIDIA GPUs that the driver shows, and the installed Python packages that can use them.

    Not collective.
    """
    packages = [name for name in ("cupy", "numba_cuda") if importlib.util.find_spec(name) is not None]
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, packages
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0, packages
    return count.value, packages


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """Return the versions of Python, of mpizero and of the libraries that mpizero uses, by name. Not collective.

    The result is cached, so the caller must not change it.
    """
    mpi = mpi_facts() if "mpi4py.MPI" in sys.modules else None
    try:
        product = blas()
    except ConfigError as error:
        product = str(error)
    return {
        **versions(),
        "mpi": "none" if mpi is None else f"{mpi.vendor} {mpi.version}",
        "hdf5": hdf5_version(),
        "blas": product,
    }


def machine(threads: int, device: str, job: str, bits: str) -> dict[str, Any]:
    """Return a dict of the processor's name, this process's number of cores, and all arguments by their names.

    Not collective.
    """
    return {
        "processor": processor(), "cores": len(cores()), "threads": threads, "device": device, "job": job, "bits": bits
    }  # fmt: skip


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

    After the block, this number is the growth in bytes. Not collective. If the kernel does not let a process reset its
    peak (``/proc/self/clear_refs``), the peak since the start of the process is used instead.
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

    After the block, this number is the growth in bytes. Not collective. The kernel records no peak of the proportional
    set size, so a thread reads the size every ``every`` seconds.
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
