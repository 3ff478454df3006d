"""Define in PyTorch the GPT that the contenders of compare.py and nodes.py train, and a model that only sleeps."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Compute a pre-norm transformer block with fused causal attention and the tanh approximation of GELU."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.projection = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add attention to ``x``, then the feed-forward layers, and return the result."""
        samples, length, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(samples, length, dim))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Embedding(nn.Module):
    """Add a learned vector for each token and one for each position."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        dim = shape["dim"]
        self.token, self.position = nn.Embedding(shape["vocabulary"], dim), nn.Embedding(shape["sequence"], dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return vectors (samples, length, dim) of the tokens ``x`` (samples, length)."""
        return self.token(x) + self.position(torch.arange(x.shape[1]))


class Head(nn.Module):
    """Compute logits from normalized vectors, by the token embedding's weight."""

    def __init__(self, dim: int, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(dim), weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (samples, length, vocabulary)."""
        return functional.linear(self.norm(x), self.weight)


class GPT(nn.Module):
    """The model of ``mpizero.nn.GPT`` in PyTorch: learned positions, and a head tied to the token embedding."""

    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape["dim"], shape["heads"]) for _ in range(shape["layers"]))
        self.head = Head(shape["dim"], self.embedding.token.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (samples, length, vocabulary) for the tokens ``x``."""
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def next_tokens(logits: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of the cross-entropies of the targets ``y``, and their number."""
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum"), y.numel()


class _Slept(torch.autograd.Function):
    """Sleep in the forward and in the backward pass; the gradients of the weights are the same in every step."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, seconds: tuple[float, float], *weights: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x`` after a while."""
        context.seconds, context.shapes = seconds, [weight.shape for weight in weights]
        time.sleep(seconds[0])
        return x.clone()

    @staticmethod
    def backward(context: Any, *dy: torch.Tensor) -> Any:
        """Return the gradients after a while."""
        time.sleep(context.seconds[1])
        return dy[0], None, *(torch.full(shape, 1e-3) for shape in context.shapes)


class SleepingBlock(nn.Module):
    """Sleep in place of a transformer block; ``matrices`` are the sizes of its arrays, in units of dim x dim."""

    def __init__(self, dim: int, matrices: Iterable[int], *seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(size * dim, dim)) for size in matrices])
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x`` after a while."""
        return _Slept.apply(x, self.seconds, *self.weights)


class Sleeping(nn.Module):
    """Sleep in ``layers`` blocks in place of a GPT's computation."""

    def __init__(self, dim: int, layers: int, matrices: Iterable[int], *seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SleepingBlock(dim, [*matrices], *seconds) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``x`` after a while; it has a gradient as a real input has none."""
        x = x.requires_grad_()
        for block in self.blocks:
            x = block(x)
        return x
