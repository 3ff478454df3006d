"""Memory that is refused to one rank ends the call on all of them, with an error that says what it was for."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpizero as mz
from mpizero.comm import as_communicator
from mpizero.errors import OutOfMemoryError, RemoteError
from mpizero.sharding.params import Memory
from mpizero.testing import run_in_threads

KINDS = ("parameters", "gradients", "optimizer state")
#: Elements that no address space has room for: the refusal is the system's own.
FAR_TOO_MUCH = 2**58


@pytest.fixture
def refusing(monkeypatch):
    """Let the system refuse memory of a kind to this thread."""
    local, right = threading.local(), np.zeros

    def zeros(shape, dtype=float):
        return right(FAR_TOO_MUCH if getattr(local, "refused", False) else shape, dtype)

    private = Memory.private

    def asked(self, kind, shape, dtype):
        local.refused = kind == getattr(local, "kind", None)
        try:
            return private(self, kind, shape, dtype)
        finally:
            local.refused = False

    monkeypatch.setattr(Memory, "private", asked)
    monkeypatch.setattr(np, "zeros", zeros)
    return lambda kind: setattr(local, "kind", kind)


def outcome(comm, kind, refusing, strategy):
    """What a rank sees where rank 1 is refused memory of a kind."""
    refusing(kind if comm.rank == 1 else None)
    config = mz.ShardingConfig(comm=comm, share_node_memory=False)
    try:
        with strategy(mz.nn.MLP(6, (8, 8), 3), config) as model:
            optimizer = mz.DDPOptimizer if strategy is mz.DDPModel else mz.FSDPOptimizer
            optimizer(mz.AdamW(lr=1e-3), config).set_model(model)
            model.train(np.ones((4, 6), np.float32), np.zeros(4, np.int64))
    except Exception as error:
        return error
    finally:
        refusing(None)
    return None


def check(comm_rank, error, kind):
    if comm_rank == 1:
        assert isinstance(error, OutOfMemoryError)
        assert isinstance(error, MemoryError)
        told = str(error)
        assert f"no memory for {kind}" in told
        assert "bytes wanted" in told
        assert "more ranks" in told
    else:
        assert isinstance(error, RemoteError)
        assert f"rank 1: OutOfMemoryError: no memory for {kind}" in str(error)


@pytest.mark.parametrize("strategy", [mz.DDPModel, mz.FSDPModel])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_to_one_rank_is_told_on_all(refusing, kind, strategy):
    errors = run_in_threads(3, lambda comm: outcome(comm, kind, refusing, strategy))
    for rank, error in enumerate(errors):
        check(rank, error, kind)


def test_the_error_tells_how_much_was_wanted_and_held():
    memory = Memory(as_communicator(None))
    memory.private("parameters", 25, np.float32)
    with pytest.raises(OutOfMemoryError, match=rf"optimizer state: {8 * FAR_TOO_MUCH} bytes wanted, 100 held"):
        memory.private("optimizer state", FAR_TOO_MUCH, np.float64)
    assert memory.private_bytes == {"parameters": 100}


def test_memory_for_a_layers_values_is_refused_with_advice_for_micro_batches():
    def loss_and_grad(parameters, batch):
        np.empty(FAR_TOO_MUCH)

    model = mz.FunctionModel({"w": np.zeros(3)}, loss_and_grad)
    told = pytest.raises(OutOfMemoryError, match="computing a micro-batch.*smaller micro_batch")
    with mz.ShardingConfig() as config, mz.DDPModel(model, config) as placed, told:
        placed.train(np.ones((2, 3)), np.ones(2))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_to_one_rank_of_mpi_is_told_on_all(world, refusing, kind):
    check(world.rank, outcome(world, kind, refusing, mz.FSDPModel), kind)
