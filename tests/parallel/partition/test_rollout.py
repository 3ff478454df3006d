"""Rollouts of a model of fields have the bits of one process on every cut of space, strategy and number of ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import nn
from mpizero.testing import parallel_assert, run_in_threads

SPACE, SAMPLES, STEPS = (13, 10), 3, 2


def diffusion(u: Any, xx: Any, yy: Any) -> Any:
    """Return the residual of two states, one after the other."""
    return u[..., 2:] - u[..., :-2] - 0.1 * (xx + yy)[..., :-2] * u[..., 2:]


EQUATION = nn.SumLoss(
    [
        nn.MeanSquaredError(),
        nn.SpectralLoss(3, [0.0, 1.0, 2.0, 3.0]),
        nn.ResidualLoss(diffusion, ("u", "xx", "yy"), spacing=0.5, periodic=(True, False)),
    ],
    [1.0, 0.5, 0.1],
)
MODELS = {
    "fno": nn.FNO(3, 2, modes=4, width=6, layers=2, space=SPACE, loss="relative_l2"),
    "unet": nn.UNet(2, 2, width=4, levels=2, groups=2, dropout=0.2, refine="linear", space=SPACE),
    "checkpointed": nn.FNO(2, 2, modes=4, width=6, layers=2, space=SPACE, activation_checkpointing=True),
    "equation": nn.FNO(2, 2, modes=4, width=6, layers=1, space=SPACE, loss=EQUATION),
    "mlp": nn.MLP(3, [8], 2, task="regression"),
}


def trained(comm: Any, name: str, cut: tuple[int, ...] = (), strategy: str = "zero2", **mesh: Any) -> tuple[Any, ...]:
    """Train two steps; return the sha256 of the parameters, losses and evaluation, and this rank's prediction."""
    rng, net = np.random.default_rng(1), nn.Rollout(MODELS[name], STEPS, residual=name == "checkpointed")
    x = rng.normal(size=(SAMPLES, *net.sample_shape)).astype("f4")
    y = rng.normal(size=(2, *x.shape[:-1], 2 * STEPS)).astype("f4")
    config = mz.Config(micro_batch=2, clip=0.5)
    with (
        mz.Mesh(comm, domain=cut, **mesh) as ranks,
        mz.distribute(net, mz.Adam(lr=0.01), strategy, mesh=ranks, config=config) as model,
    ):
        here = (slice(None), *(ranks.slab(SPACE) if cut else ()))
        mine = here if cut else (slice(SAMPLES * ranks.rank // ranks.size, SAMPLES * (ranks.rank + 1) // ranks.size),)
        losses = tuple(model.train(x[mine], target[mine]) for target in y)
        evaluated = model.evaluate(x[mine], y[0][mine]).loss
        return model.parameters_sha256(), losses, evaluated, mine, model.predict(x[mine])


@cache
def alone(name: str) -> tuple[Any, ...]:
    return trained("self", name, strategy="ddp")


def require_the_same(parts: list[tuple[Any, ...]], expected: tuple[Any, ...]) -> None:
    assert {part[:3] for part in parts} == {expected[:3]}
    for *_, mine, prediction in parts:
        np.testing.assert_array_equal(prediction, expected[-1][mine])


@pytest.mark.parametrize(
    ("cut", "strategy", "names"),
    [
        ((2, 1), "zero2", ["fno", "unet"]),
        ((1, 2), "zero3", ["fno", "checkpointed"]),
        ((1, 3), "zero1", ["fno", "equation"]),
        ((2, 2), "ddp", ["fno", "checkpointed", "equation"]),
        ((4, 1), "zero3", ["fno", "unet"]),
    ],
)
def test_on_every_cut_a_rollout_has_the_bits_of_one_process(cut, strategy, names):
    for name in names:
        parts = run_in_threads(int(np.prod(cut)), lambda comm, n=name: trained(comm, n, cut, strategy))
        require_the_same(parts, alone(name))


@pytest.mark.parametrize(
    ("name", "ranks", "strategy"), [("mlp", 2, "zero3"), ("mlp", 4, "zero2"), ("fno", 2, "zero2"), ("fno", 3, "zero1")]
)
def test_on_data_ranks_a_rollout_has_the_bits_of_one_process(name, ranks, strategy):
    require_the_same(run_in_threads(ranks, lambda comm: trained(comm, name, (), strategy)), alone(name))


@pytest.mark.mpi
def test_in_a_job_a_rollout_has_the_bits_of_one_process(world):
    cut = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 8: (4, 2)}[world.size]
    for name, strategy, shared in (("fno", "zero3", True), ("equation", "zero1", False)):
        expected = world.broadcast_object(trained("self", name, strategy="ddp")[:3] if world.rank == 0 else None)
        with world.split(0) as comm:
            found = trained(comm, name, cut, strategy, share_node_memory=shared)[:3]
            parallel_assert(world, found == expected, f"{name}, shared memory {shared}")


def test_a_checkpoint_of_one_step_goes_on_as_a_rollout(tmp_path):
    net, x = MODELS["fno"], np.random.default_rng(2).normal(size=(4, *SPACE, 3)).astype("f4")

    def run(model: Any, target: Any, folder: Any = None) -> str:
        with mz.Mesh("self") as mesh, mz.distribute(model, mz.Adam(lr=0.01), "ddp", mesh=mesh) as trains:
            if folder is not None:
                trains.load_model(folder)
            trains.train(x, target)
            trains.save_model(tmp_path / str(len(target.T)))
            return trains.parameters_sha256()

    run(net, x[..., :2])
    longer = np.concatenate([x[..., :2]] * 3, axis=-1)
    assert run(nn.Rollout(net, 3), longer, tmp_path / "2") != run(nn.Rollout(net, 3), longer)
