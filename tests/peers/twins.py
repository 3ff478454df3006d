"""Models of PyTorch with the weights of this library's."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from mpizero.nn import GPT, model_specs, to_torch

ACTIVATIONS = {"gelu": lambda: nn.GELU(approximate="tanh"), "silu": nn.SiLU, "relu": nn.ReLU, "tanh": nn.Tanh}


def fill(twin, arrays):
    """Give a module's parameters, in their order, copies of arrays in the module's own orientation."""
    with torch.no_grad():
        for parameter, array in zip(twin.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(np.array(array)))
    return twin


def perceptron_twin(model, named):
    """PyTorch's form of an :class:`mpizero.nn.MLP`; its matrices are transposed."""
    widths = (model.features, *model.hidden, model.outputs)
    layers = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs, dtype=getattr(torch, str(model.dtype))), ACTIVATIONS[model.activation]()]
    return fill(nn.Sequential(*layers[:-1]), [value.T for value in named.values()])


def perceptron_loss(task, prediction, target):
    """The mean loss of the task."""
    return (nn.functional.cross_entropy if task == "classification" else nn.functional.mse_loss)(prediction, target)


class TorchBlock(nn.Module):
    """A pre-norm transformer block; its parameters have GPT-2's names."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(dim, 3 * dim), "c_proj": nn.Linear(dim, dim)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(dim, 4 * dim), "c_proj": nn.Linear(4 * dim, dim)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, dim = x.shape
        qkv = self.attn["c_attn"](self.ln_1(x)).view(samples, length, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).reshape(samples, length, dim))
        hidden = nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class TorchGPT(nn.Module):
    """The model of :class:`mpizero.nn.GPT` in PyTorch; its parameters have GPT-2's names."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(model.vocabulary, model.dim),
                "wpe": nn.Embedding(model.sequence, model.dim),
                "h": nn.ModuleList(TorchBlock(model.dim, model.heads) for _ in range(model.layers)),
                "ln_f": nn.LayerNorm(model.dim),
            }
        )
        self.lm_head = nn.Linear(model.dim, model.vocabulary, bias=False)
        if model.tied:
            self.lm_head.weight = self.transformer["wte"].weight
        self.to(getattr(torch, str(model.dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.transformer["wte"](x) + self.transformer["wpe"].weight[: x.shape[1]]
        for block in self.transformer["h"]:
            h = block(h)
        return self.lm_head(self.transformer["ln_f"](h))

    def mean_loss(self, x: np.ndarray, y: np.ndarray) -> torch.Tensor:
        """The mean cross-entropy of the targets ``y``; those below 0 are ignored."""
        logits = self(torch.from_numpy(x))
        target = torch.from_numpy(y).flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.clamp(min=-1), ignore_index=-1)


def torch_twin(model: GPT, named: dict[str, np.ndarray]) -> TorchGPT:
    """The same model in PyTorch, with copies of the weights ``named`` (by mpizero's names)."""
    twin = TorchGPT(model)
    twin.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in to_torch(model, named).items()})
    return twin


def to_torch_names(model: GPT) -> list[str]:
    """The PyTorch names of a model's parameters, in the order of ``model_specs``."""
    return list(to_torch(model, {spec.name: np.empty(spec.shape) for spec in model_specs(model) if spec.tied is None}))


def text_batches(count: int, *, sequence: int, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets: random windows of a text of few words, and the same windows one byte later."""
    words = np.array(["def", "return", "self", "import", "for", "in", "value", "(x):", "=", "\n   "])
    text = np.frombuffer(" ".join(np.random.default_rng(1).choice(words, 5000)).encode(), np.uint8)
    starts = np.random.default_rng(0).integers(0, len(text) - sequence - 1, (count, batch, 1))
    windows = text[starts + np.arange(sequence + 1)].astype(np.int64)
    return [(np.ascontiguousarray(w[:, :-1]), np.ascontiguousarray(w[:, 1:])) for w in windows]
