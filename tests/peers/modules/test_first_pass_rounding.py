"""A first pass refuses no sum over samples for its rounding: with small errors, in 16 bits, with noise of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import mpizero as mz  # noqa: E402
from mpizero.adapters.torch import TorchModel  # noqa: E402
from tests.peers.placing import placed  # noqa: E402

X = np.random.default_rng(0).normal(size=(12, 24)).astype(np.float32)
SQUARES = nn.MSELoss(reduction="sum")


def steps(model: Any, x: Any, y: Any, micro_batch: int) -> None:
    """Train for a step, and evaluate."""
    with placed(model, "self", "zero2", optimizer=mz.SGD(1e-3), micro_batch=micro_batch) as one:
        one.train(x, y)
        one.evaluate(x, y)


def convolutions() -> Any:
    parts = nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv1d(8, 4, 3, padding=1), nn.Flatten()
    return nn.Sequential(nn.Unflatten(1, (4, 6)), *parts)


def linear() -> Any:
    return nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))


@pytest.mark.parametrize(
    ("make", "micro_batch", "error"),
    [(convolutions, 1, 1.0), (convolutions, 5, 1e-6), (linear, 5, 1.0), (linear, 1, 1e-6)],
)
def test_an_error_near_the_rounding_of_the_prediction_is_no_difference(
    make: Any, micro_batch: int, error: float
) -> None:
    torch.manual_seed(0)
    net = make()
    near = net(torch.from_numpy(X)).detach().numpy()
    target = (near + error * np.random.default_rng(1).normal(size=near.shape)).astype(np.float32)
    for blocks in (None, list(net)):
        steps(TorchModel(net, SQUARES, blocks=blocks), X, target, micro_batch)


class Coarse(nn.Module):
    """Compute in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = linear()

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.net(x)
        return y.float()


class Noisy(nn.Module):
    """Draw the hidden state of a variational autoencoder, in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(24, 8), nn.Linear(4, 24)

    def forward(self, x: Any) -> Any:
        mean, spread = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + spread.exp() * torch.randn_like(mean))


@pytest.mark.parametrize("make", [Coarse, Noisy])
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_rounding_to_16_bits_and_noise_in_evaluation_are_no_difference(make: Any, micro_batch: int) -> None:
    torch.manual_seed(0)
    steps(TorchModel(make(), SQUARES), X, X, micro_batch)
