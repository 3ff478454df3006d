"""Define in PyTorch the GPT that all contenders of compare.py train."""

from __future__ import annotations

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
