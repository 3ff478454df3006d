"""Define a residual network of PyTorch with batch norms and dropout, for scikit-learn's digits."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from mpizero.adapters.torch import TorchModel

CHANNELS = 7


class Residual(nn.Module):
    """Add two convolutions, each with a batch norm, to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return images of the shape of ``x``, (samples, channels, height, width)."""
        y = self.drop(torch.relu(self.norm1(self.conv1(x))))
        return torch.relu(x + self.norm2(self.conv2(y)))


def network() -> nn.Sequential:
    """Make the network; its children are its blocks."""
    first = nn.Conv2d(1, CHANNELS, 3, padding=1)
    last = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * CHANNELS, 10))
    return nn.Sequential(first, Residual(), Residual(), last)


def by_blocks() -> TorchModel:
    """Return the model as a list of blocks."""
    return TorchModel(network, nn.CrossEntropyLoss(reduction="sum"), blocks=["0", "1", "2", "3"], seed=1)


def whole() -> TorchModel:
    """Return the model as one module."""
    return TorchModel(network, nn.CrossEntropyLoss(reduction="sum"), seed=1)


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, (samples, 1, 8, 8), and their classes."""
    images, classes = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32).reshape(-1, 1, 8, 8), classes
