"""Networks of PyTorch for the tests of its adapter: a transformer with a tied weight, and a CNN with batch norms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


class Embedding(nn.Module):
    def __init__(self, words: int, dim: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(words, dim)
        self.places = nn.Parameter(torch.randn(length, dim) * 0.02)

    def forward(self, x: Any) -> Any:
        return self.token(x) + self.places


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.odd = nn.Parameter(torch.ones(13))  # so that no matrix begins at a multiple of 64 bytes
        self.norm1, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        samples, length, dim = x.shape
        split = self.qkv(self.norm1(x)).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*split, is_causal=True).transpose(1, 2).reshape(samples, length, dim)
        x = x + self.drop(self.out(mixed)) * self.odd.mean()
        return x + self.drop(self.down(gelu(self.up(self.norm2(x)), approximate="tanh")))


class Head(nn.Module):
    def __init__(self, dim: int, words: int, tied: Any) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)
        self.out.weight = tied

    def forward(self, x: Any) -> Any:
        return self.out(self.norm(x))


class Transformer(nn.Module):
    blocks = ("embedding", "layers.*", "head")

    def __init__(self, words: int = 31, dim: int = 16, length: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = Embedding(words, dim, length)
        self.layers = nn.ModuleList(Block(dim, 2, dropout) for _ in range(3))
        self.head = Head(dim, words, self.embedding.token.weight)

    def forward(self, x: Any) -> Any:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        y = self.drop(torch.relu(self.norm1(self.conv1(x))))
        return torch.relu(x + self.norm2(self.conv2(y)))


def resnet(channels: int = 7, dropout: float = 0.1) -> nn.Sequential:
    """Classify images of 8 x 8; its children are its blocks."""
    last = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10))
    first = nn.Conv2d(1, channels, 3, padding=1)
    return nn.Sequential(first, Residual(channels, dropout), Residual(channels, dropout), last)


def next_word(prediction: Any, target: Any) -> tuple[Any, int]:
    return cross_entropy(prediction.flatten(0, -2), target.flatten(), reduction="sum"), target.numel()
