"""Run by test_direct_messages under mpiexec, in the simulator: its GPUs have memory of the host, known to any MPI."""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np
from mpi4py import MPI

import mpizero as mz
from mpizero.comm import as_communicator, p2p
from mpizero.kernels import gpu
from tests.cuda.in_turn import simulate_in_turn
from tests.support.simulated import simulate_gpus

LAYOUTS = {
    "pipeline": {"pipeline_parallel_size": 2},
    "tensor": {"tensor_parallel_size": 2},
    "context": {"context_parallel_size": 2},
}
VOCABULARY = 5


def trained(comm, layout, *, directly):
    """Return the loss of a step, a hash of the parameters, what is said of messages, and how often they were copied."""
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (2, 4))
    copied, to_host = [], p2p.to_host
    p2p.to_host = lambda x: (isinstance(x, np.ndarray) or copied.append(x.nbytes), to_host(x))[1]
    model = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=3, vocabulary=VOCABULARY, dropout=0.1)
    with (
        mz.ShardingConfig(comm=comm, device="cuda", micro_batch=1, direct_messages=directly) as config,
        mz.HybridShardedModel(model, config, **LAYOUTS[layout]) as placed,
    ):
        placed._engine.bind(mz.AdamW(lr=1e-2))
        copied.clear()  # what the probe has looked at
        loss = placed.train(drawn[:, :-1], drawn[:, 1:])
        values = placed.gather_full_parameters()
        told = placed._engine.compute_device.describe()
    p2p.to_host = to_host
    return loss, hashlib.sha256(values.tobytes()).hexdigest(), told, len(copied)


def proven(comm):
    """Return what a probe says as things are, when a pattern arrives wrong on rank 1, and when MPI claims nothing."""
    found = [p2p.prove(comm, lambda: gpu.open_device(comm.rank))]
    pattern = p2p._pattern
    if comm.rank == 1:
        p2p._pattern = lambda rank, size: pattern(rank, size) ^ (size == p2p.PATTERNS[1])
    found.append(p2p.prove(comm, lambda: gpu.open_device(comm.rank)))
    p2p._pattern = pattern
    gpu.gpus().in_host_memory = False
    found.append(p2p.prove(comm, lambda: sys.exit("a GPU was opened")))
    gpu.gpus().in_host_memory = True
    assert comm.wait_for_device is None
    return found


if __name__ == "__main__":
    world = as_communicator(MPI.COMM_WORLD)
    simulate_gpus()
    simulate_in_turn()
    said = {
        layout: [trained(MPI.COMM_WORLD, layout, directly=directly) for directly in (True, False)] for layout in LAYOUTS
    }
    said["probe"] = proven(world)
    everyone = world.allgather_object(said)
    if world.rank == 0:
        print(json.dumps(everyone))
