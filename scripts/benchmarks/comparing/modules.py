"""Four modules of PyTorch with their losses and data: a CNN, a U-Net, a transformer and an MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

RNG = np.random.default_rng(0)


def convolutions(inputs: int, outputs: int) -> Any:
    """Return two convolutions with norms, as in a U-Net."""
    layers: list[Any] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net of three levels for images of 3 channels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [convolutions(3, width), convolutions(width, 2 * width), convolutions(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.joined = nn.ModuleList([convolutions(4 * width, 2 * width), convolutions(2 * width, width)])
        self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(width, 3, 1)

    def forward(self, x: Any) -> Any:
        """Return an image."""
        kept = [self.down[0](x)]
        for level in (1, 2):
            kept.append(self.down[level](self.pool(kept[-1])))
        y = kept.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            y = joined(torch.cat([up(y), kept.pop()], 1))
        return self.last(y)


class Transformer(nn.Module):
    """A transformer of 4 layers of width 128 for 64 tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True, norm_first=True)
        self.tokens, self.places = nn.Embedding(256, 128), nn.Parameter(torch.zeros(64, 128))
        self.layers, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(128, 256)

    def forward(self, x: Any) -> Any:
        """Return logits, with the classes on the second axis."""
        return self.head(self.layers(self.tokens(x) + self.places)).transpose(1, 2)


def cnn() -> Any:
    """Return a CNN of 4 convolutions for images of 32 x 32 pixels."""
    layers: list[Any] = []
    for inputs, outputs in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4096, 128), nn.ReLU(), nn.Linear(128, 10))


def mlp() -> Any:
    """Return an MLP of 3 layers."""
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))


def normal(*shape: int) -> np.ndarray:
    """Return random numbers."""
    return RNG.standard_normal(shape, dtype=np.float32)


SQUARES, CLASSES = nn.MSELoss(reduction="sum"), nn.CrossEntropyLoss(reduction="sum")
CASES: dict[str, tuple[Callable[[], Any], Any, Callable[[int], tuple[np.ndarray, np.ndarray]]]] = {
    "CNN": (cnn, CLASSES, lambda n: (normal(n, 3, 32, 32), RNG.integers(0, 10, n))),
    "U-Net": (UNet, SQUARES, lambda n: (normal(n, 3, 64, 64), normal(n, 3, 64, 64))),
    "transformer": (Transformer, CLASSES, lambda n: (RNG.integers(0, 256, (n, 64)), RNG.integers(0, 256, (n, 64)))),
    "MLP": (mlp, SQUARES, lambda n: (normal(n, 64), normal(n, 1))),
}
