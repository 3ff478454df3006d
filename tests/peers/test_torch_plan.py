"""What a plan says of the activations of a PyTorch module is what a step of its training allocates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch.passes import Allocations  # noqa: E402
from mpizero.sharding.config import placement  # noqa: E402
from mpizero.tools.plan import TrainingPlan  # noqa: E402

GRAIN = 4


class Down(nn.Module):
    """Halves a picture, and hands the whole one on to the block that doubles it again."""

    def __init__(self, channels: int, wider: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, wider, 3, padding=1)

    def forward(self, x: Any, *skips: Any) -> Any:
        x = torch.tanh(self.convolution(x))
        return (nn.functional.avg_pool2d(x, 2), *skips, x)


class Up(nn.Module):
    def __init__(self, channels: int, fewer: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, fewer, 3, padding=1)

    def forward(self, x: Any, *skips: Any) -> Any:
        *others, skip = skips
        x = torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], 1)
        x = torch.tanh(self.convolution(x))
        return (x, *others) if others else x


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Down(1, 8), Down(8, 16), Up(32, 16), Up(24, 1)])

    def forward(self, x: Any) -> Any:
        x = (x,)
        for block in self.blocks:
            x = block(*x)
        return x


def mlp() -> Any:
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32))


def transformer() -> Any:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True), 2)


def squares(prediction: Any, target: Any) -> Any:
    return ((prediction - target) ** 2).sum()


MODELS = {
    "U-Net": (UNet, {}, (1, 32, 32)),
    "U-Net in blocks": (UNet, {"blocks": ["blocks.*"]}, (1, 32, 32)),
    "MLP": (mlp, {}, (64, 32)),
    "MLP in blocks": (mlp, {"blocks": ["0", "1", "2"]}, (64, 32)),
    "MLP, computed again": (mlp, {"blocks": ["0", "1", "2"], "activation_checkpointing": ["*"]}, (64, 32)),
    "transformer": (transformer, {}, (48, 32)),  # long enough that the Python objects of a pass weigh little
}


def planned(model: Any, x: Any) -> TrainingPlan:
    return TrainingPlan(
        model=model,
        optimizer=mz.SGD(1e-6),
        config=mz.ShardingConfig(comm="self", micro_batch=GRAIN),
        row=placement("ddp"),
        ranks=1,
        global_batch=2 * GRAIN,
        x=x,
        y=x,
    )


@pytest.mark.parametrize("name", MODELS)
def test_activations_and_working_arrays_are_what_a_step_allocates(name: str) -> None:
    make, options, shape = MODELS[name]
    x = np.random.default_rng(0).standard_normal((2 * GRAIN, *shape)).astype(np.float32)
    torch.manual_seed(0)
    model = mz.adapters.torch.TorchModel(make(), squares, **options)
    plan = planned(model, x)
    assert not plan.not_counted
    memory = plan.by_rank[0].memory
    expected = memory["activations"].per_rank + memory["working arrays"].per_rank
    with mz.distribute(
        model, mz.SGD(1e-6), strategy="ddp", config=mz.ShardingConfig(comm="self", micro_batch=GRAIN)
    ) as placed:
        for _ in range(4):  # the first steps look at the module, and time it
            placed.train(x, x)
        with Allocations() as counted:
            placed.train(x, x)
    assert 0.98 * counted.most < expected < 1.2 * counted.most


def test_what_operations_make_is_counted_as_long_as_it_is_used() -> None:
    given = torch.from_numpy(np.ones((100, 10), np.float32))
    with Allocations() as counted:
        view = given.t()  # no memory of its own
        assert counted.now == 0
        double = view * 2
        assert (counted.now, counted.most) == (4000, 4000)
        half = double[:5]
        del double
        assert counted.now == 4000, "its view is in use"
        del half
        assert (counted.now, counted.most) == (0, 4000)
        counted.begin()
        assert counted.most == 0
        weight = torch.ones(10, 10, requires_grad=True)
        y = (given @ weight).tanh()
        assert counted.now == 400 + 4000  # tanh keeps its own result, the product nothing
        y.sum().backward()
        assert counted.most >= 400 + 2 * 4000
