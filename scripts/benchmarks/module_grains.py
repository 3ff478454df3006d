"""Compare the default grains of four modules of PyTorch with grains of other sizes, and with plain PyTorch.

For a CNN, a U-Net, a transformer and an MLP and batches of 8, 32 and 128 samples: the processor seconds of a training
step (forward, backward, AdamW) of plain PyTorch, of ZeRO-1 on one process with the default grain, and of the fastest of
the grains of 1, 2, 4, ... samples that leave a batch at least four grains. Steps of all take turns; each figure is the
least of its steps.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from harness import parser
from torch import nn

import mpizero as mz
from mpizero.adapters.torch import TorchModel

BATCHES = (8, 32, 128)
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


def plain_step(module: Any, loss: Any, x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """Return a function that trains a module by PyTorch alone."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    given, wanted = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> None:
        optimizer.zero_grad()
        (loss(module(given), wanted) / len(given)).backward()
        optimizer.step()

    return step


def compared(name: str, batch: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of a step of plain PyTorch, with the default grain, and with each other."""
    make, loss, data = CASES[name]
    x, y = data(batch)
    grains = [1 << power for power in range(10) if 1 << power <= max(1, batch // 4)]
    with ExitStack() as stack:
        steps: dict[Any, Callable[[], Any]] = {"plain": plain_step(make(), loss, x, y)}
        for micro_batch in (None, *grains):
            config = mz.ShardingConfig(comm="self", micro_batch=micro_batch, threads=1)
            placed = mz.distribute(TorchModel(make, loss), mz.AdamW(lr=1e-3), strategy="zero1", config=config)
            stack.enter_context(placed)
            steps[micro_batch] = lambda placed=placed: placed.train(x, y)
            if micro_batch is None:
                placed.train(x, y)
                default = placed.grain_size(batch)
        seconds = {key: float("inf") for key in steps}
        for number in range(rounds):
            for key, step in steps.items():
                start = time.process_time()
                step()
                if number > 2:
                    seconds[key] = min(seconds[key], time.process_time() - start)
    best = min(grains, key=seconds.__getitem__)
    return {
        "module": name,
        "batch": batch,
        "default": default,
        "best": best,
        "seconds": {str(key): value for key, value in seconds.items()},
        "over best": seconds[None] / seconds[best],
        "over plain": seconds[None] / seconds["plain"],
    }


def main() -> None:
    """Print the table, or one JSON document."""
    arguments = parser(__doc__, rounds=12, json=True)
    chosen = arguments.parse_args()
    torch.set_num_threads(1)
    rows = []
    if not chosen.json:
        print("| module | batch | default grain | fastest | default over fastest | over plain PyTorch |")
        print("|---|---|---|---|---|---|")
    for name in CASES:
        for batch in BATCHES:
            rows.append(row := compared(name, batch, chosen.rounds))
            if not chosen.json:
                ratios = f"{row['over best']:.2f} | {row['over plain']:.2f}"
                print(f"| {name} | {batch} | {row['default']} | {row['best']} | {ratios} |", flush=True)
    if chosen.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
