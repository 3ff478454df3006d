"""Define a transformer of PyTorch that reads scikit-learn's digits pixel by pixel, with a tied weight and dropout."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from mpizero.adapters.torch import TorchModel

WIDTH, HEADS, LAYERS, LENGTH, WORDS = 24, 4, 3, 64, 17


class Embedding(nn.Module):
    """Add a vector for each of the 17 shades and one for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (samples, places, features) for whole numbers (samples, places)."""
        return self.tokens(x) + self.places[: x.shape[1]]


class Layer(nn.Module):
    """Add attention to earlier places, and then a network of two layers, to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.drop = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (samples, places, features)."""
        samples, places, _ = x.shape
        split = self.qkv(self.norm1(x)).view(samples, places, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).reshape(samples, places, WIDTH)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(gelu(self.up(self.norm2(x)), approximate="tanh")))


class Head(nn.Module):
    """Compute scores of the shades, with the weight of the embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores, (samples, places, shades)."""
        return nn.functional.linear(self.norm(x), self.weight)


class Transformer(nn.Module):
    """Predict the next pixel's shade."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = Embedding(), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = Head(self.embedding.tokens.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores, (samples, places, shades)."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(prediction: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of the cross-entropies, and the number of pixels."""
    return cross_entropy(prediction.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def by_blocks(kernels: str = "torch") -> TorchModel:
    """Return the model as a list of blocks."""
    return TorchModel(Transformer, loss, blocks=["embedding", "layers.*", "head"], seed=1, kernels=kernels)


def with_own_kernels() -> TorchModel:
    """Return the model with attention and GELU computed by mpizero's kernels."""
    return by_blocks("mpizero")


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return the shades of all pixels but the last, and of all but the first."""
    pixels = load_digits(return_X_y=True)[0].astype(np.int64)
    return pixels[:, :-1].copy(), pixels[:, 1:].copy()
