"""Equal samples on several ranks, as where each gives the whole batch, are told once."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.testing import run_in_threads

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=(8, 1)).astype(np.float32)


def steps(comm, cut, stages=1, steps=2):
    config = mz.ShardingConfig(comm=comm, micro_batch=2)
    model = mz.nn.MLP(3, [4], 1, task="regression")
    with mz.HybridShardedModel(model, config, optimizer=mz.SGD(0.1), pipeline_parallel_size=stages) as sharded:
        for _ in range(steps):
            sharded.train(X[cut(comm)], Y[cut(comm)])


def own(comm):
    return slice(len(X) * comm.rank // comm.size, len(X) * (comm.rank + 1) // comm.size)


CASES = [
    ("the whole batch", 3, 1, lambda comm: slice(None), "ranks 0 and 1 give the same 8 samples"),
    ("the same part", 4, 1, lambda comm: slice(6, 8) if comm.rank % 2 else own(comm), "ranks 1 and 3 give the same 2"),
    ("of replicas", 4, 2, lambda comm: slice(None), "ranks 0 and 1 give the same 8"),
    ("own parts", 4, 1, own, ""),
    ("of one replica", 2, 2, lambda comm: slice(None), ""),
    ("none on some", 3, 1, lambda comm: slice(0, 8 if comm.rank == 0 else 0), ""),
]


@pytest.mark.parametrize(("ranks", "stages", "cut", "told"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_equal_samples_of_two_replicas_are_told_in_the_first_step(ranks, stages, cut, told, capfd):
    run_in_threads(ranks, lambda comm: steps(comm, cut, stages))
    lines = [line for line in capfd.readouterr().err.splitlines() if "give the same" in line]
    assert len(lines) == bool(told)
    assert not told or told in lines[0]
