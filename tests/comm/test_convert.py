from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import mpizero as mz
from mpizero._util.launch import BY_ANY, RANK_PROCESS, is_several, mark, standing
from mpizero.comm import InMemoryCommunicator, as_communicator
from mpizero.errors import ConfigError


def test_self_becomes_a_communicator_of_one_that_does_everything():
    comm = as_communicator("self")
    assert (comm.rank, comm.size, comm.shares_memory) == (0, 1, True)
    comm.allgather(np.arange(3), out := np.empty(3, np.int64))
    assert out.tolist() == [0, 1, 2]
    assert comm.counters.bytes_sent == 0


def test_one_of_ours_is_passed_through():
    comm = InMemoryCommunicator.group(1)[0]
    assert as_communicator(comm) is comm


@pytest.mark.parametrize("wrong", [3, "world", object(), [None]])
def test_anything_else_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match=f"got {type(wrong).__name__}"):
        as_communicator(wrong)


@pytest.mark.mpi
def test_an_mpi_communicator_is_split_never_used_itself_and_nothing_is_all_ranks_of_the_launcher():
    from mpi4py import MPI

    for given in (MPI.COMM_WORLD, None)[: MPI.COMM_WORLD.size]:  # None is this process alone where there is one rank
        comm = as_communicator(given)
        assert (comm.rank, comm.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        assert MPI.Comm.Compare(comm.mpi, MPI.COMM_WORLD) == MPI.CONGRUENT
        comm.close()
    with pytest.raises(TypeError, match="live mpi4py intracommunicator"):
        as_communicator(MPI.COMM_NULL)


@pytest.mark.mpi
def test_everything_that_takes_a_communicator_takes_nothing_for_all_ranks(tmp_path):
    from mpi4py import MPI

    import mpizero as mz
    from mpizero import checkpoint

    size = MPI.COMM_WORLD.size
    folder = MPI.COMM_WORLD.bcast(str(tmp_path))
    with mz.ShardingConfig(micro_batch=1) as config, mz.DDPModel(mz.nn.MLP(3, (4,), 2), config) as model:
        assert (model.world_size, config.communicator.size) == (size, size)
        model.save_model(f"{folder}/step_00000001")
    model = mz.distribute(mz.nn.MLP(3, (4,), 2), mz.SGD(lr=0.1))
    assert model.world_size == size
    model.close()
    with checkpoint.open_checkpoint(f"{folder}/step_00000001") as reader:
        assert reader._comm.size == size
    assert mz.testing.adjoint_test(lambda x: x, lambda y: y, np.ones(2), np.ones(2)) == 0.0
    report = mz.testing.compare_layouts(
        lambda comm: mz.nn.MLP(3, (4,), 2, dtype="float64"), [(np.ones((4, 3)), np.zeros(4, int))], [str(size)]
    )
    assert [verdict.ranks for verdict in report.verdicts] == [1, size]


@pytest.mark.slow
def test_without_a_launcher_nothing_is_one_process_and_loads_no_mpi():
    code = (
        "import sys; import mpizero as mz; print(mz.ShardingConfig().communicator.size, 'mpi4py.MPI' in sys.modules, "
        "sys.excepthook is sys.__excepthook__)"
    )
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "SLURM"))}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=alone)
    assert found.stdout.split() == ["1", "False", "True"]


def test_processes_of_torchrun_do_not_train_alone_each(monkeypatch):
    for name in (*BY_ANY, "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"torchrun has started 4 processes.*mpiexec -n 4 python.*comm=\"self\""):
        _ = mz.Mesh().communicator
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert mz.Mesh().size == 1


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "3"}, True),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"}, True),
        ({"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.7.0"}, True),  # it does not say how many: MPI is asked
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, False),  # a batch script's own process
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, True),  # srun; refused where each sees itself alone
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "PMI_RANK": "0", "PMI_SIZE": "1"}, False),  # mpiexec in it
        ({"PMI_RANK": "0", "PMI_SIZE": "3", "PMI_FD": "999"}, False),  # cut off from its launcher
    ],
)
def test_what_launchers_say_tells_whether_there_are_several_ranks(environment, several):
    assert is_several(environment) is several


def test_a_program_of_a_rank_is_told_by_what_the_rank_leaves_it():
    ours = {"PMI_RANK": "0", "PMI_SIZE": "3", "PMIX_NAMESPACE": "job"}
    here = mark(ours)
    assert is_several(ours | {RANK_PROCESS: here})
    parents = here.replace(str(os.getpid()), "1", 1)
    assert not is_several(ours | {RANK_PROCESS: parents})
    assert is_several(ours | {"PMIX_NAMESPACE": "mpiexec started by a rank", RANK_PROCESS: parents})


@pytest.mark.parametrize(("mpi", "program"), [("MPI", True), ("-", False)])
def test_a_program_that_outlives_its_rank_is_told_by_what_the_rank_had_loaded(mpi, program):
    cut = {"PMI_RANK": "0", "PMI_SIZE": "3", "PMI_FD": "999"}
    found = standing(cut | {RANK_PROCESS: f"4194304 {mpi} - - - 0 3 999 - - 12345"})
    assert (found.rank, found.program) == (False, program)
    assert "process 4194304" in found.text
