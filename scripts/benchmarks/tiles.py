"""Measure what tiles cost on one process: a training step with tiles, over the same step without, in turns.

A step is forward, backward, sums and AdamW of one batch, which is one grain. Its time is the processor's, of one
thread, so that other programs disturb it little. ``tensor`` cuts the layers, ``context`` the sequences, and ``both``
does both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.options import parser
from harness.turns import alternate, tell

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import mpizero as mz
from mpizero._util.numbers import Measurement

VOCABULARY = 256
KINDS = {"tensor": ("tensor",), "context": ("context",), "both": ("tensor", "context")}


@dataclass(frozen=True)
class Case:
    """Describe a GPT with heads of 64 features, its batch, and the number of tiles."""

    dim: int
    layers: int
    samples: int
    sequence: int
    tiles: int

    def __str__(self) -> str:
        """Return the case as one word."""
        return f"dim {self.dim} x {self.layers}, {self.samples} x {self.sequence} tokens, tiles {self.tiles}"


CASES = (
    Case(256, 4, 8, 128, 4),
    Case(512, 2, 8, 128, 8),
    Case(1024, 1, 8, 128, 4),
    Case(1024, 1, 8, 128, 8),
    Case(256, 4, 1, 1024, 4),
)


def ratios(case: Case, kinds: tuple[str, ...], rounds: int) -> dict[str, Measurement]:
    """Return, for each kind of tiles, the time of a step over that of a step without tiles."""
    heads = max(case.tiles, case.dim // 64)
    gpt = mz.nn.GPT(case.dim, case.layers, heads, case.sequence, vocabulary=VOCABULARY)
    text = np.random.default_rng(0).integers(0, VOCABULARY, (case.samples, case.sequence + 1))
    settings: dict[str, Any] = {"none": None, **{kind: dict.fromkeys(KINDS[kind], case.tiles) for kind in kinds}}
    models = {}
    try:
        for kind, tiles in settings.items():
            config = mz.ShardingConfig(comm="self", micro_batch=case.samples, tiles=tiles)
            models[kind] = mz.HybridShardedModel(gpt, config, zero_stage=1, optimizer=mz.AdamW(1e-3))

        def seconds(kind: str) -> float:
            started = time.process_time()
            models[kind].train(text[:, :-1], text[:, 1:])
            return time.process_time() - started

        found = alternate(rounds, list(settings), seconds, warm_up=2, quiet=True)
    finally:
        for model in models.values():
            model.close()
            model.config.close()
    return {kind: Measurement.of_ratios(found[kind], found["none"]) for kind in kinds}


def main() -> None:
    """Print one line for each case."""
    options = arguments()
    for case in CASES:
        found = ratios(case, tuple(options.kinds), options.rounds)
        tell(f"{case}: " + ", ".join(f"{kind} {ratio}" for kind, ratio in found.items()))
        if options.json:
            print(json.dumps({**asdict(case), **{kind: str(ratio) for kind, ratio in found.items()}}))


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=9, json=True)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="some of them")
    return options.parse_args()


if __name__ == "__main__":
    main()
