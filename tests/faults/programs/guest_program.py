"""A host program with an optimizer of mpizero in it, started by test_embedding.py under mpiexec.

``guest_program.py KIND FOLDER``; what the process has of hooks, handlers, threads, sockets and allocator options is
written down before, during and after, by each rank into ``seen-RANK.json``.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mpi4py  # noqa: E402
import numpy as np  # noqa: E402

from tests.faults.started import FOLDER, KIND

if "single" in KIND:
    mpi4py.rc.thread_level = "single"

from mpi4py import MPI  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
#: MiB of the blocks that :func:`keeps_large_blocks` takes.
SIZES = itertools.count(10, 5)


def hosts_own_hook(kind, error, trace):
    """Tell of an error as the host does."""
    print(f"host: {kind.__name__}: {error}", flush=True)


def hosts_own_end():
    print("host: end", flush=True)


def sockets():
    """Sockets of this process that listen, and those with a name: what others could reach it by."""
    inodes = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)}
    mine = {text[8:-1] for text in inodes if text.startswith("socket:[")}
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{name}").read_text().splitlines()]
    listening = sorted(row[1] for row in rows if len(row) > 9 and row[3] == "0A" and row[9] in mine)
    unix = [row.split() for row in Path("/proc/self/net/unix").read_text().splitlines()]
    return listening, sorted(row[7] for row in unix if len(row) > 7 and row[6] in mine)


def handlers():
    """The signals that this process catches or ignores, as the system knows them."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return {name: value for name, _, value in (row.partition(":\t") for row in rows) if name in ("SigCgt", "SigIgn")}


def keeps_large_blocks():
    """Whether glibc takes a block of more than 8 MiB from the heap instead of a mapping of its own.

    Each is larger than the last: by itself glibc does so once a block of that size was freed.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    block = libc.malloc(next(SIZES) << 20)
    flags = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
    libc.free(block)
    return not flags & 2  # IS_MMAPPED


def state():
    return {
        "excepthook": sys.excepthook is hosts_own_hook,
        "unraisablehook": sys.unraisablehook is sys.__unraisablehook__,
        "thread hook": threading.excepthook is threading.__excepthook__,
        "exit": type(sys.exit).__name__ == "builtin_function_or_method",
        "atexit": atexit._ncallbacks(),
        "handlers": handlers(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "sockets": sockets(),
        "keeps": keeps_large_blocks(),
        "environment": sorted(name for name in os.environ if name.startswith("MPIZERO")),
        "files": sorted(path.name for path in Path("/dev/shm").glob(f"mpizero-*{os.getppid()}*")),
    }


def network():
    import mpizero as mz

    return mz.nn.MLP(3, (8,), 2, dtype="float64")


def train(comm, steps=3, **settings):
    """Train a model; return what the process looked like meanwhile, and the hash of the parameters."""
    import mpizero as mz

    with mz.ShardingConfig(comm=comm, micro_batch=1, **settings) as config, mz.ZeRO2Model(network(), config) as model:
        optimizer = mz.ZeRO2Optimizer(mz.AdamW(lr=0.01), config)
        optimizer.set_model(model)
        for step in range(steps):
            model.train(np.full((2, 3), step + 1.0 + model.rank), np.zeros(2, np.int64))
        return state(), model.parameters_sha256()


def sleep_until(*names):
    """Sleep until the other ranks have written these files: who waits in a call of MPI takes a core meanwhile."""
    while not all((FOLDER / name).exists() for name in names):
        time.sleep(0.02)


def settle():
    """Train alone, by names that begin no supervised life: what NumPy and Numba register stays in the process."""
    from mpizero.nn.models import MLP
    from mpizero.optim import AdamW
    from mpizero.sharding.config import ShardingConfig
    from mpizero.sharding.model import distribute

    with ShardingConfig(comm="self", embedded=True) as config:
        model = distribute(MLP(3, (8,), 2, dtype="float64"), AdamW(lr=0.01), config=config)
        model.train(np.ones((2, 3)), np.zeros(2, np.int64))
        model.close()


def told(**seen):
    (FOLDER / f"seen-{RANK}.json").write_text(json.dumps(seen))


def host(**settings):
    """Train on all ranks, or on the first two of three while the last works without mpizero."""
    part = "part" in KIND
    comm = WORLD.Split(int(RANK < 2), RANK) if part else WORLD
    if part and RANK >= 2:
        for _ in range(20):
            comm.allreduce(1)
            time.sleep(0.01)
        assert "mpizero" not in sys.modules
        sleep_until("seen-0.json", "seen-1.json")
        WORLD.Barrier()
        return
    if KIND.startswith("environment"):
        import mpizero  # noqa: F401

        assert state()["excepthook"], "the import has taken the process already"
    settle()
    comm.Barrier()
    before = state()
    comm.Barrier()
    during, sha256 = train(comm, **settings)
    comm.Barrier()
    told(before=before, during=during, after=state(), sha256=sha256)
    if part:
        WORLD.Barrier()


def watched():
    """Train twice: what the first time leaves of NumPy's and Numba's is there before the second."""
    first = state()
    imported, _ = train(WORLD)
    WORLD.Barrier()
    before = state()
    WORLD.Barrier()
    during, sha256 = train(WORLD)
    WORLD.Barrier()
    told(first=first, imported=imported, before=before, during=during, after=state(), sha256=sha256)


def errors():
    """Meet errors of one rank, each of which both ranks of the communicator catch; the others are at work."""
    import mpizero as mz

    comm = WORLD.Split(int(RANK < 2), RANK)
    if RANK < 2:
        caught = []
        with (
            mz.ShardingConfig(comm=comm, micro_batch=1, embedded=True) as config,
            mz.DDPModel(network(), config, optimizer=mz.SGD(0.01)) as model,
        ):
            for x in (np.zeros((2, 3 - RANK)), np.full((2, 3), RANK)):
                try:
                    model.train(x, np.zeros(2, np.int64))
                    caught.append("nothing")
                except mz.errors.MpizeroError as error:
                    caught.append(type(error).__name__)
        (FOLDER / f"caught-{RANK}").write_text(" ".join(caught))
    sleep_until("caught-0", "caught-1")
    WORLD.Barrier()


def on_the_last_rank(act, done="done"):
    """Let rank 1 act while the other sleeps."""
    if RANK == 1:
        act()
        (FOLDER / done).touch()
    sleep_until(done)


def start_programs(name, shell):
    """Start a program, and fork; write what the first sees of ranks and hooks, and the fork of ranks."""
    import mpizero as mz

    code = "import mpizero as m, sys; print(m.ShardingConfig().communicator.size, sys.excepthook is sys.__excepthook__)"
    command = f"{sys.executable} -c '{code}'" if shell else [sys.executable, "-c", code]
    found = subprocess.run(command, shell=shell, stdout=subprocess.PIPE, text=True, check=False, timeout=60).stdout
    if (process := os.fork()) == 0:
        signal.alarm(60)
        os._exit(mz.ShardingConfig().communicator.size + 10)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    (FOLDER / name).write_text(json.dumps([*found.split(), status]))


def child():
    """Start a program, and fork, on a rank; neither is one."""
    import mpizero as mz

    with mz.ShardingConfig(comm=WORLD):
        pass
    config = mz.ShardingConfig()
    assert config.communicator.size == WORLD.Get_size()
    on_the_last_rank(lambda: start_programs("child", shell=True))
    WORLD.Barrier()


def child_of_guest_and_of_closed():
    """Start programs on a rank that was never watched over, and is so no more."""
    import mpizero as mz

    for guest in (True, False):
        with mz.ShardingConfig(embedded=guest) as config:
            assert config.communicator.size == WORLD.Get_size()
        assert "MPIZERO_RANK_PROCESS" not in os.environ
        on_the_last_rank(lambda guest=guest: start_programs(f"child-{guest}", shell=guest), f"done-{guest}")
        WORLD.Barrier()


def job_of_rank():
    """Start a job of its own on a rank."""
    from mpizero._util.launch import job_name

    code = "import os; from mpizero._util.launch import is_rank, job_name; from mpi4py import MPI;"
    code += "print(MPI.COMM_WORLD.Get_size(), is_rank(os.environ), job_name(os.environ))"
    names = {job_name(os.environ)}
    for _ in range(2):
        command = [Path(sys.executable).with_name("mpiexec"), "-n", "1", sys.executable, "-c", code]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        size, rank, name = ended.stdout.split()
        assert (size, rank) == ("1", "True")
        names.add(name)
    assert len(names) == 3
    WORLD.Barrier()


def own_signal():
    """Handle SIGUSR2 from before the model is made, then from after another is."""
    import mpizero as mz

    called = []

    def call():
        before = len(called)
        os.kill(os.getpid(), signal.SIGUSR2)
        while len(called) == before:  # Python calls the handler soon
            time.sleep(0.001)

    def handle(name):
        signal.signal(signal.SIGUSR2, lambda number, frame: called.append(name))

    for name in ("before", "after"):
        if name == "before":
            handle(name)
        with (
            mz.ShardingConfig(comm=WORLD, micro_batch=1, timeout=60) as config,
            mz.DDPModel(network(), config, optimizer=mz.SGD(0.01)),
        ):
            if name == "after":
                handle(name)
            call()
        call()
    print(" ".join(called), flush=True)  # one write: ranks share the output


def hosts_hook_speaks():
    import mpizero as mz

    with mz.ShardingConfig(comm=WORLD) as config:
        config.communicator.barrier()
        if RANK == 1:
            raise ValueError("planted")
        config.communicator.barrier()


def main():
    sys.excepthook = hosts_own_hook
    atexit.register(hosts_own_end)
    if KIND.startswith("guest"):
        host(embedded=True)
    elif KIND.startswith("environment"):
        host()
    else:
        globals()[KIND]()


main()
