"""One rank of a job that meets a fault, started by test_faults.py under mpiexec.

``program.py FAULT FOLDER VICTIM [RANKS_PER_NODE]``; with the last, ranks believe they are on several nodes.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
import time

from mpizero.guard import guard, status
from tests.faults.started import FOLDER, KIND, note_fault

FAULT, VICTIM = KIND, int(sys.argv[3])
#: Not /dev/shm: here stands what this job leaves, and nothing of others.
guard.scratch_folders = status.scratch_folders = lambda: iter([str(FOLDER)])
guard.install_in_job()


def launched_rank():
    return int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


if FAULT == "raise_before_mpi" and launched_rank() == VICTIM:
    raise ValueError("planted")

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from mpizero.comm.agreement import all_ranks  # noqa: E402
from mpizero.comm.mpi import MpiCommunicator  # noqa: E402
from mpizero.errors import ConfigError, DataError  # noqa: E402
from mpizero.guard.watchdog import Watchdog  # noqa: E402

if FAULT == "config_error_before_communicator":
    raise ConfigError("[optimizer] lr = nan: must be a finite number > 0")
if FAULT == "raise_in_setup" and MPI.COMM_WORLD.rank == VICTIM:
    raise ValueError("planted")
if FAULT == "data_error_in_setup" and MPI.COMM_WORLD.rank == VICTIM:
    raise DataError("planted")

if len(sys.argv) > 4:
    guard.current().host = f"node{MPI.COMM_WORLD.rank // int(sys.argv[4])}"
COMM = MpiCommunicator(MPI.COMM_WORLD)


def raise_error():
    raise ValueError("planted")


def raise_chain():
    try:
        raise KeyError("cause")
    except KeyError as error:
        raise ValueError("planted") from error


def raise_in_thread():
    """Fail in a thread in which mpizero is at work."""
    from mpizero.testing import adjoint_test

    threading.Thread(target=adjoint_test, args=[lambda _: raise_error(), None, 0.0, 0.0], name="worker").start()


def raise_at_exit():
    atexit.register(raise_error)
    sys.exit(0)


def raise_data_error():
    raise DataError("planted")


def segfault():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)


def hold_the_lock():
    sum(itertools.repeat(0))  # a loop in C that never gives the interpreter lock away


#: What the victim does in the middle of training.
FAULTS = {
    "raise": raise_error,
    "chain": raise_chain,
    "thread": raise_in_thread,
    "atexit": raise_at_exit,
    "data_error": raise_data_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": segfault,
    "interrupt": lambda: signal.raise_signal(signal.SIGINT),
    "exit_0": lambda: sys.exit(0),
    "sleep": lambda: time.sleep(100),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "lock": hold_the_lock,
}


def leave_while_the_others_compute():
    """Ask for a status that is not 0 on one rank, while the others neither communicate nor end."""
    if COMM.rank == VICTIM:
        sys.exit(3)
    time.sleep(100)


def go_on_after_an_error_in_a_thread_of_the_program():
    for turn in range(COMM.size):  # Python writes a report in pieces, between which those of another rank would come
        if COMM.rank == turn:
            thread = threading.Thread(target=raise_error, name="host's")
            thread.start()
            thread.join()
            time.sleep(0.3)
        COMM.barrier()


def go_on_after_a_caught_exit():
    """Catch a SystemExit, work on together, and end well while rank 0 still has something to do."""
    with contextlib.suppress(SystemExit):
        sys.exit(3)
    COMM.barrier()
    if COMM.rank == 0:
        time.sleep(4)


def train(steps=1000, watchdog=None):
    """Train; from step 5 on, in which the victim meets its fault, under a watchdog: it sees no step of slow ranks."""
    for step in range(steps):
        guard.set_context(step=step, phase="forward")
        if step == 5:
            if watchdog is not None:
                watchdog.start()
            if COMM.rank == VICTIM and FAULT in FAULTS:
                note_fault()
                FAULTS[FAULT]()
        COMM.barrier("gradients")
        if step >= 5:
            time.sleep(0.005)


def train_with_sums_on_their_way():
    """Train ZeRO-2 without shared memory; the victim meets its fault between the start and the end of an exchange."""
    import mpizero as mz  # what starts a fault before MPI must not wait for this

    config = mz.ShardingConfig(comm=COMM, micro_batch=1, share_node_memory=False)
    network = mz.nn.GPT(dim=32, layers=2, heads=2, sequence=16, vocabulary=32)
    model = mz.distribute(network, mz.AdamW(lr=1e-3), strategy="zero2", config=config)
    reducer = model._engine.reducer
    finish = reducer.finish

    def meet():
        if model._engine.step_number == 3 and reducer._queue and COMM.rank == VICTIM:
            FAULTS[FAULT.removesuffix("_amid_sums")]()
        finish()

    reducer.finish = meet
    ids = np.zeros((2, 16), int)
    for _ in range(1000):
        model.train(ids, ids)


def fail_together():
    if FAULT == "config_error_everywhere":
        raise ConfigError("[optimizer] lr = nan: must be a finite number > 0")
    if FAULT == "bug_everywhere":
        raise ValueError("planted")
    with all_ranks(COMM):
        if COMM.rank == VICTIM:
            raise DataError("planted") if FAULT == "agreed_data_error" else ValueError("planted")


def end_well():
    COMM.barrier()
    if FAULT == "end_with_finalize":
        COMM.close()
        MPI.Finalize()
    elif FAULT == "end_of_part_of_the_ranks":
        part = COMM.split(COMM.rank % 2)
        if COMM.rank % 2 == 1:
            time.sleep(1.5 if COMM.rank == VICTIM else 0.0)
            part.barrier()


def main():
    if FAULT.endswith("everywhere") or FAULT.startswith("agreed"):
        fail_together()
    elif FAULT.startswith("end"):
        end_well()
    elif FAULT == "leave_past_our_communicators":
        if COMM.rank == VICTIM:
            sys.exit(0)
        MPI.COMM_WORLD.Barrier()
    elif FAULT == "leave_while_the_others_compute":
        leave_while_the_others_compute()
    elif FAULT.startswith("go_on_after"):
        globals()[FAULT]()
    elif FAULT == "all_hold_the_lock":
        with Watchdog(COMM, timeout=0.3, grace=0.2):
            hold_the_lock()
    elif FAULT in {"sleep", "stop", "lock"}:
        train(watchdog=Watchdog(COMM, timeout=1.5, folder=FOLDER / "watch" if len(sys.argv) > 4 else None))
    elif FAULT == "watched":
        with Watchdog(COMM, timeout=60.0):
            train(100)
    elif FAULT.endswith("_amid_sums"):
        train_with_sums_on_their_way()
    elif FAULT == "interrupt_the_launcher":
        (FOLDER / "ready").touch()
        train()
    else:
        train()


main()
