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
from harness import parser

import mpizero as mz

NAMES, BATCHES = ("CNN", "U-Net", "transformer", "MLP"), (8, 32, 128)


def plain_step(module: Any, loss: Any, x: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """Return a function that trains a module by PyTorch alone."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    torch.set_num_threads(1)
    given, wanted = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> None:
        optimizer.zero_grad()
        (loss(module(given), wanted) / len(given)).backward()
        optimizer.step()

    return step


def compared(name: str, batch: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of a step of plain PyTorch, with the default grain, and with each other."""
    from comparing.modules import CASES

    from mpizero.adapters.torch import TorchModel

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
    chosen = parser(__doc__, rounds=12, json=True).parse_args()
    rows = []
    if not chosen.json:
        print("| module | batch | default grain | fastest | default over fastest | over plain PyTorch |")
        print("|---|---|---|---|---|---|")
    for name in NAMES:
        for batch in BATCHES:
            rows.append(row := compared(name, batch, chosen.rounds))
            if not chosen.json:
                ratios = f"{row['over best']:.2f} | {row['over plain']:.2f}"
                print(f"| {name} | {batch} | {row['default']} | {row['best']} | {ratios} |", flush=True)
    if chosen.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
