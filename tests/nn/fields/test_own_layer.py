"""A layer made of halos and sums over space, a step of diffusion, has the bits of one process on every cut."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero.layout.fields import Cut
from mpizero.testing import run_in_threads
from tests.nn.checks import require_contract, require_gradients
from tests.nn.fields.test_domain import CUTS, require_equal_bits


@pytest.fixture(scope="module")
def program(example: Any) -> Any:
    return example("diffusion_layer")


@pytest.mark.parametrize("space", [(6,), (5, 3), (1, 2, 4)])
def test_its_gradients_are_those_of_differences(program, space, rng):
    layer, x = program.Diffusion(2), rng.normal(size=(2, *space, 2))
    require_gradients(layer, x)
    require_contract(layer, x)


def test_a_step_is_that_of_the_formula(program, rng):
    u = rng.normal(size=(1, 5, 4, 1))
    laplacian = sum(np.roll(u, by, axis) for axis in (1, 2) for by in (1, -1)) - 4 * u
    y, _ = program.Diffusion(1).forward({"k": np.array([0.1])}, u)
    np.testing.assert_allclose(y, u + 0.1 * laplacian, rtol=1e-14)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_it_has_the_bits_of_one_process_on_every_cut(program, cut):
    for space, dtype in (((13, 9, 11), np.float32), ((3, 8, 4), np.float64)):
        require_equal_bits(program.Diffusion(3), space[: len(cut)], 3, Cut(cut), dtype)


@dataclass(frozen=True)
class Net:
    """Two steps of diffusion between convolutions."""

    blocks: dict[str, Any]
    loss: Any = field(default_factory=lambda: mz.nn.FieldLoss(mz.nn.MeanSquaredError()))
    dtype: Any = np.dtype(np.float32)  # noqa: RUF009
    seed: int = 4


def test_a_model_with_convolutions_trains_to_one_hash(program, rng):
    layers: dict[str, Any] = {
        "first": mz.nn.Sequential([mz.nn.Conv(1, 3, (3, 3), padding="periodic"), program.Diffusion(3), mz.nn.GELU()]),
        "last": mz.nn.Sequential([program.Diffusion(3), mz.nn.Conv(3, 1, (3, 3))]),
    }
    x, y = rng.normal(size=(2, 6, 11, 13, 1)).astype(np.float32)

    def train(comm, **axes):
        with mz.Mesh(comm, **axes) as mesh:
            part = (slice(None), *mesh.slab(x.shape[1:-1])) if axes else slice(None)
            config = mz.Config(micro_batch=2, clip=0.5)
            with mz.distribute(Net(layers), mz.Adam(lr=0.01), "zero2", mesh=mesh, config=config) as model:
                losses = [model.train(x[part], y[part]) for _ in range(3)]
                return losses, model.parameters_sha256()

    alone = train("self")
    for axes in ({"domain": (1, 2)}, {"domain": (2, 1)}, {"domain": (2, 2)}, {"domain": (2, 1), "pipeline": 2}):
        ranks = 2 if axes in ({"domain": (1, 2)}, {"domain": (2, 1)}) else 4
        assert run_in_threads(ranks, lambda comm, axes=axes: train(comm, **axes)) == [alone] * ranks
