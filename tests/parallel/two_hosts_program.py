"""One rank of a training on several hosts, started by test_two_hosts.py: a line of JSON for each strategy.

``two_hosts_program.py FOLDER`` leaves a checkpoint of each strategy in the folder. ``two_hosts_program.py FOLDER
sleep`` gets stuck.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import mpizero as mz
from mpizero.guard.watchdog import Watchdog

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
STEPS, BATCH, SEQUENCE, VOCABULARY = 2, 11, 8, 32


def gpt():
    return mz.nn.GPT(dim=32, layers=2, heads=2, sequence=SEQUENCE, vocabulary=VOCABULARY)


def batches(rank, size):
    rng = np.random.default_rng(3)
    for _ in range(STEPS):
        text = rng.integers(0, VOCABULARY, (BATCH, SEQUENCE + 1))[rank * BATCH // size : (rank + 1) * BATCH // size]
        yield text[:, :-1], text[:, 1:]


def train(config, strategy, folder):
    """Train the same model and save it.

    ``strategy`` is a name, "2 x 2" for two stages of two replicas, or "groups": zero3 over half of the hosts.
    """
    optimizer = mz.AdamW(lr=1e-3)
    if strategy == "2 x 2":
        model = mz.HybridShardedModel(gpt(), config, 2, zero_stage=1)
        mz.HybridShardedOptimizer(optimizer, config).set_model(model)
        group = model.batch_group
    else:
        model = mz.distribute(gpt(), optimizer, strategy="zero3" if strategy == "groups" else strategy, config=config)
        group = config.communicator
    with model:
        before = by_interface(config.communicator), model._engine.grid.bytes_sent
        for x, y in batches(group.rank, group.size):
            model.train(x, y)
        after = by_interface(config.communicator), model._engine.grid.bytes_sent
        interface, counted = (late - early for late, early in zip(after, before, strict=True))
        model.save_model(Path(folder) / strategy)
        return {"sha256": str(model.parameters_sha256()), "by_interface": interface, "counted": counted}


def by_interface(comm):
    """Return what this host has sent, by the count of its interface, once all ranks have come here."""
    comm.barrier()
    file = Path("/sys/class/net/eth0/statistics/tx_bytes")
    count = int(file.read_text()) if file.exists() else 0
    comm.barrier()
    return count


def sleep_on_rank_1(folder):
    """Let rank 0 wait for rank 1, which sleeps by then: no other call is watched, however slow the machine is."""
    comm, asleep = mz.comm.as_communicator(), Path(folder) / "asleep"
    with Watchdog(comm, timeout=0.6):
        if comm.rank == 1:
            asleep.touch()
            time.sleep(1000)
        while not asleep.exists():
            time.sleep(0.01)
        comm.barrier("gradients")


def main():
    import socket

    from mpi4py import MPI

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    nodes = sorted(set(world.allgather((socket.gethostname(), node.size))))
    for strategy in (*STRATEGIES, "2 x 2", "groups"):
        half = len(nodes) // 2 if strategy == "groups" else None
        with mz.ShardingConfig(comm=world, micro_batch=2, shard_nodes=half) as config:
            found = train(config, strategy, sys.argv[1])
        interface = world.allreduce(found["by_interface"] if node.rank == 0 else 0)
        counted = world.allreduce(found["counted"])
        if world.rank == 0:
            row = {"strategy": strategy, "nodes": nodes, "sha256": found["sha256"]}
            print(json.dumps(row | {"by_interface": interface, "counted": counted}), flush=True)
    node.Free()


if __name__ == "__main__":
    sleep_on_rank_1(sys.argv[1]) if sys.argv[2:] else main()
