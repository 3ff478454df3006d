"""One rank of a job that must go on, or must not, started by test_liveness.py under mpiexec.

``liveness_program.py KIND FOLDER``
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time

from tests.faults.started import FOLDER, KIND

if KIND.startswith("old_libc"):
    del os.memfd_create

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero import checkpoint  # noqa: E402
from mpizero.checkpoint import LocalArray  # noqa: E402
from mpizero.comm.mpi import MpiCommunicator  # noqa: E402
from mpizero.guard import guard  # noqa: E402
from mpizero.guard.remote_status import RemoteStatus  # noqa: E402
from mpizero.guard.watchdog import Watchdog  # noqa: E402

WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
#: Instead of two minutes, for what the ranks of a job must never be ended for.
guard.current().patience = 0.5


def part(*ranks):
    """Make an mpizero communicator of some ranks by MPI alone; the others make none."""
    group = WORLD.Get_group().Incl(ranks)
    made = WORLD.Create_group(group) if RANK in ranks else None
    return made and MpiCommunicator(made, name="part")


def train(comm, steps=20, seconds=0.01):
    for _ in range(steps):
        comm.barrier("gradients")
        time.sleep(seconds)


# ---------------------------------------------------------------------------------------------- what cannot be had


def _trains():
    with MpiCommunicator(WORLD) as comm, Watchdog(comm, timeout=60.0):
        train(comm)


def old_libc_and_a_rank_leaves():
    comm = MpiCommunicator(WORLD)
    train(comm)
    if RANK == 1:
        sys.exit(0)
    comm.barrier("gradients")


def old_libc_and_nowhere_to_write():
    """Refuse every temporary file, on one rank the thread and what stands on the board too."""

    def refuse(*_, **__):
        raise FileNotFoundError(2, "No usable temporary directory found")

    tempfile.mkstemp = tempfile.TemporaryFile = tempfile.gettempdir = refuse
    if RANK == 1:
        start = threading.Thread.start

        def start_few(thread):
            if thread.name.startswith("mpizero"):
                raise RuntimeError("can't start new thread")
            start(thread)

        threading.Thread.start = start_few
    _trains()


def one_rank_without_a_board():
    """Let what is made for the board and the doors raise on one rank, amid what the others do together."""
    import mpizero.guard.remote_status as peers

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    if RANK == 1:
        peers.open_status_table = peers.RemoteStatus = refuse
    _trains()


# ---------------------------------------------------------------------------------------------- some of the ranks


def part_stalls():
    """Let a rank that shares a model with another one sleep; rank 0 makes no communicator at all."""
    if RANK == 0:
        time.sleep(100)
    pair = WORLD.Create_group(WORLD.Get_group().Incl((1, 2)))
    config = mz.ShardingConfig(comm=pair)
    model = mz.DDPModel(
        mz.FunctionModel({"w": np.ones(6)}, lambda p, batch: (1.0, {"w": np.ones(6)}, float(len(batch[0])))), config
    )
    x = np.ones((4, 1))
    model.train(x, x)
    with Watchdog(config.communicator, timeout=2.0):  # it sees no step but one in which a rank is missing
        if RANK == 2:
            time.sleep(100)
        model.train(x, x)


def overlapping_parts():
    """Rank 1 belongs to two pairs, and waits in one for rank 2, which has left; rank 0 is at work."""
    first = part(0, 1) if RANK < 2 else None
    second = part(1, 2) if RANK else None
    for comm in filter(None, (first, second)):
        train(comm)
    if RANK == 2:
        sys.exit(0)
    if RANK == 1:
        second.barrier("one more")
    time.sleep(100)


def part_ends_first():
    """End well on the ranks of one model long before those of another one; rank 4 makes none, and sleeps."""
    if RANK < 4:
        comm = part(0, 1) if RANK < 2 else part(2, 3)
        train(comm, 20 if RANK < 2 else 300)
    else:
        time.sleep(2)


def part_is_refused():
    """Raise what the user has to mend on all ranks of one model, while another one trains."""
    comm = part(0, 1) if RANK < 2 else part(2, 3)
    train(comm)
    if RANK >= 2:
        raise mz.errors.ConfigError("planted")
    train(comm, 400, 0.1)


# ---------------------------------------------------------------------------------------------- the end of a program


def other_program_at_the_end():
    comm = MpiCommunicator(WORLD)
    train(comm)
    if RANK == 0:
        subprocess.run(["sleep", "1.5"], check=True)


def closed_doors():
    """Stand on nodes of one rank that cannot ask each other, and let one work on alone."""
    guard.current().host = f"node{RANK}"
    RemoteStatus.read = lambda self: {}
    other_program_at_the_end()


def waits_for_a_message():
    comm = MpiCommunicator(WORLD)
    train(comm)
    if RANK == 0:
        comm.recv(np.empty(3), 1)


# ---------------------------------------------------------------------------------------------- a stopped job


def stopped_job():
    """Wait for one another all the time, while all processes are stopped for longer than the timeout."""
    comm = MpiCommunicator(WORLD)
    with Watchdog(comm, timeout=8.0, grace=1.0):
        go_on = np.ones(1)
        while go_on[0]:
            comm.barrier("gradients")
            (FOLDER / f"ready-{RANK}").touch()
            go_on[0] = not (FOLDER / "finish").exists()
            comm.allreduce(go_on, "min")


# ---------------------------------------------------------------------------------------------- files


def files():
    """Save with a fault that the environment plants in the second save."""
    comm = MpiCommunicator(WORLD)
    mine = [LocalArray(f"a{i}", (8,), np.dtype(float), ((4 * RANK, np.ones(4)),)) for i in range(8)]
    checkpoint.write(FOLDER / "before", mine, {}, comm)
    with Watchdog(comm, timeout=3.0):
        checkpoint.write(FOLDER / "saved", mine, {}, comm)


globals()[KIND]()
