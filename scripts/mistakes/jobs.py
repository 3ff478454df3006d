"""Make mistakes with the ranks that take part in a job: some come late, leave early or do something else."""

from __future__ import annotations

import sys
import threading
import time

import case

import mpizero as mz


def network() -> mz.nn.MLP:
    """Return a small MLP, not yet sharded."""
    return mz.nn.MLP(4, (8,), 2, dtype="float32")


@case.mistake("left early", "rank 0 is making the communicator 'world' with it", status=70, ranks=(2, 4))
def a_model_on_one_rank():
    """Make a model on rank 0 only, while the other ranks end the program."""
    if case.rank() == 0:
        mz.ZeRO2Model(network(), mz.ShardingConfig())


@case.mistake("stuck: making the communicator 'world'", "not in it", "rank 1: at work", status=76, ranks=(2, 4))
def a_model_on_one_rank_while_others_work():
    """Make a model on rank 0 only, while the other ranks go on with other work."""
    if case.rank() == 0:
        mz.ZeRO2Model(network(), mz.ShardingConfig(timeout=3.0))
    while True:
        time.sleep(0.1)


@case.mistake("stuck: making the communicator 'world'", "in Barrier of COMM_WORLD", status=76, ranks=(2, 4))
def a_barrier_of_the_user_beside_a_model():
    """Call MPI's Barrier on the other ranks while rank 0 makes a model."""
    from mpi4py import MPI

    if case.rank() == 0:
        mz.ZeRO2Model(network(), mz.ShardingConfig(timeout=3.0))
    MPI.COMM_WORLD.Barrier()


@case.mistake("FileNotFoundError", "missing.npz", status=70, ranks=(2, 4))
def an_error_before_the_configuration():
    """Raise an error on one rank before its configuration is made."""
    import numpy as np

    if case.rank() == 1:
        np.load("missing.npz")
    mz.ZeRO2Model(network(), mz.ShardingConfig())


@case.mistake("left early", "is making the communicator 'world' with it", status=70, ranks=(2, 4))
def a_good_exit_before_the_model():
    """Call sys.exit(0) on one rank before the model is made."""
    if case.rank() == 1:
        sys.exit(0)
    mz.ZeRO2Model(network(), mz.ShardingConfig())


@case.mistake("ConfigError", "learning_rate=-1.0: expected a finite number > 0", status=78, ranks=(2, 4))
def settings_that_are_wrong_on_one_rank():
    """Give one rank an invalid setting."""
    mz.ZeRO2Model(network(), mz.ShardingConfig(learning_rate=-1.0 if case.rank() == 1 else 0.1))


@case.mistake(
    "ArgumentError", 'comm must be an mpi4py communicator, an mpizero Communicator, "self"', status=78, ranks=(2, 4)
)
def a_communicator_by_a_wrong_name():
    """Pass ShardingConfig(comm="world") to mean all ranks."""
    mz.ZeRO2Model(network(), mz.ShardingConfig(comm="world"))


@case.mistake("ArgumentError", "live mpi4py intracommunicator", status=78, ranks=(2, 4))
def a_communicator_that_was_freed():
    """Make a model on a communicator that was freed."""
    comm = case.world().Split(0, case.rank())
    comm.Free()
    mz.ZeRO2Model(network(), mz.ShardingConfig(comm=comm))


@case.mistake("left early", "rank 0 is making the communicator 'world' with it", status=70, ranks=(2, 4))
def a_checkpoint_opened_on_one_rank():
    """Open a checkpoint on rank 0 only, without comm="self"."""
    if case.rank() == 0:
        mz.checkpoint.open_checkpoint("run/model")


@case.mistake("ConfigError", "MPI has been finalized", 'comm="self"', status=78, ranks=(2, 4))
def a_model_after_the_end_of_mpi():
    """Make a model after MPI.Finalize()."""
    from mpi4py import MPI

    MPI.Finalize()
    mz.ZeRO2Model(network(), mz.ShardingConfig())


@case.mistake("DataError", "in thread 'trainer'", "samples of shape (4,) on rank 0 and", status=65, ranks=(2, 4))
def an_error_in_a_thread_that_trains():
    """Train in a thread, with an error on one rank while all main threads wait."""
    model = mz.ZeRO2Model(network(), mz.ShardingConfig(timeout=20.0))
    x, y = case.samples()

    def train() -> None:
        model.train(x[:, : 3 if case.rank() == 1 else 4], y)

    thread = threading.Thread(target=train, name="trainer")
    thread.start()
    thread.join()


@case.mistake("ConfigError", "embedded='yes': expected True or False", status=78)
def a_guest_by_a_word():
    """Pass ShardingConfig(embedded="yes") instead of True."""
    mz.ShardingConfig(embedded="yes")


@case.mistake(
    "ConfigError", "MPIZERO_EMBEDDED='yes'", status=78, environment={"MPIZERO_EMBEDDED": "yes"}, names_line=False
)
def a_guest_by_a_wrong_variable():
    """Set MPIZERO_EMBEDDED=yes instead of 1."""
    mz.ZeRO2Model(network(), mz.ShardingConfig())
