"""Time L-BFGS of mpizero, or TAO's ``blmvm``, as one of two ranks that minimize a function of millions of unknowns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from harness.jobs import answer

from comparing.minima import HISTORY, history_for_tao
from comparing.objectives import load_pairs

RANKS, TIMED = 2, 30


def timed_by_mpizero(folder: Path, parameters: int) -> None:
    """Run as one of the ranks; rank 0 prints the seconds outside of the function, for each evaluation."""
    from mpi4py import MPI

    import mpizero as mz

    pairs, inside = load_pairs(folder), [0.0]

    def loss_and_grad(given: Any, batch: Any, gradients: Any) -> tuple[float, float]:
        started = time.monotonic()
        value = pairs(given["x"], gradients["x"])
        inside[0] += time.monotonic() - started
        return value, 1.0

    start = np.tile([-1.2, 1.0], parameters // 2)
    plain = mz.FunctionModel({"x": start}, loss_and_grad, in_place=True)
    with mz.ShardingConfig(comm=MPI.COMM_WORLD) as config, mz.ZeRO1Model(plain, config) as model:
        options = {"history": HISTORY, "gtol": 0.0, "maxfun": TIMED}
        MPI.COMM_WORLD.Barrier()
        started = time.monotonic()
        found = mz.minimize(model, method="l-bfgs", options=options)
        took = time.monotonic() - started
    inside_most = MPI.COMM_WORLD.allreduce(inside[0], MPI.MAX)
    if MPI.COMM_WORLD.rank == 0:
        answer((took - inside_most) / found.nfev)


def timed_by_tao(folder: Path, parameters: int) -> None:
    """Run as one of the ranks of PETSc; rank 0 prints the seconds outside of the function, for each evaluation."""
    import petsc4py

    petsc4py.init(["tao", "-tao_max_funcs", str(TIMED), *history_for_tao("blmvm")])
    from petsc4py import PETSc

    pairs, world, inside, count = load_pairs(folder), PETSc.COMM_WORLD, [0.0], [0]
    x = PETSc.Vec().createMPI((parameters // RANKS, None), comm=world)
    parts = PETSc.Vec().createMPI((1, None), comm=world)  # adds the ranks' values
    x.setArray(np.tile([-1.2, 1.0], parameters // RANKS // 2))

    def evaluate(tao: Any, at: Any, slope: Any) -> float:
        started = time.monotonic()
        count[0] += 1
        parts.setArray([pairs(np.asarray(at.getArray(readonly=True)), slope.getArray())])
        total = float(parts.sum())
        inside[0] += time.monotonic() - started
        return total

    tao = PETSc.TAO().create(world)
    tao.setType("blmvm")
    tao.setObjectiveGradient(evaluate, None)
    tao.setTolerances(gatol=0.0, grtol=0.0, gttol=0.0)
    tao.setFromOptions()
    world.barrier()
    started = time.monotonic()
    tao.solve(x)
    took = time.monotonic() - started
    if world.rank == 0:
        answer((took - inside[0]) / count[0])
