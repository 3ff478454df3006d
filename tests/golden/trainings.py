"""Thirteen small trainings whose bits are the same on every CPU: their sha256 stands in ``hashes.json``.

``python -m tests.golden.trainings`` trains them in one process, without pytest and MPI, and prints a table; with names,
only those. ``--write`` writes what it finds to ``hashes.json``. A change that changes bits does this in its own commit,
whose message says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import mpizero as mz

HASHES = Path(__file__).with_name("hashes.json")
STEPS, SAMPLES, LENGTH, WORDS = 20, 7, 10, 37


def mlp(**settings: Any) -> mz.nn.MLP:
    """Make an MLP of two hidden layers, whose activations need exp or tanh."""
    return mz.nn.MLP(5, [19, 14], 3, **settings)


def gpt(**settings: Any) -> mz.nn.GPT:
    """Make a GPT of two blocks."""
    return mz.nn.GPT(24, 2, 2, LENGTH, WORDS, **settings)


def unet(**settings: Any) -> mz.nn.UNet:
    """Make a U-Net of two grids, of which one has odd extents."""
    return mz.nn.UNet(1, 3, **{"width": 6, "levels": 2, "groups": 3, "space": (5, 7), **settings})


@dataclass(frozen=True)
class Training:
    """Hold what a training needs: model, optimizer and settings. All random numbers come from kernels and integers."""

    model: Callable[[], Any]
    optimizer: Callable[[], Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    tensor: int = 1  # ranks of a tensor group, where there are so many
    domain: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # the cut of space, by the number of ranks
    steps: int = STEPS

    def run(self, comm: Any = None, strategy: str = "zero2", **mesh: Any) -> str:
        """Train for some steps, and return the sha256 of the parameters. Collective."""
        model, size = self.model(), 1 if comm is None else comm.size
        groups: dict[str, Any] = {"tensor": self.tensor if size % self.tensor == 0 else 1}
        groups["domain"] = self.domain.get(size, ())
        config = mz.Config(micro_batch=2, **self.config)
        optimizer = self.optimizer()
        with mz.distribute(model, optimizer, strategy, mesh=mz.Mesh(comm, **groups, **mesh), config=config) as trained:
            replicas = 1 if groups["domain"] else size // groups["tensor"]
            replica = 0 if comm is None else comm.rank % replicas  # data is the last axis of the mesh's order
            for step in range(self.steps):
                x, y = batch(model, step)
                part = (slice(SAMPLES * replica // replicas, SAMPLES * (replica + 1) // replicas),)
                if groups["domain"]:
                    part += trained.mesh.slab(model.space)
                trained.train(x[part], y[part])
            return str(trained.parameters_sha256())


class FullBatch(Training):
    """Minimize the mean loss of one batch."""

    def run(self, comm: Any = None, strategy: str = "zero2", **mesh: Any) -> str:
        """Minimize for some iterations, and return the sha256 of the parameters. Collective."""
        model = self.model()
        with mz.distribute(
            model, self.optimizer(), strategy, mesh=mz.Mesh(comm, **mesh), config=mz.Config(micro_batch=2)
        ) as trained:
            mz.minimize(trained, batch(model, 0), method=mz.LBFGS(gtol=0.0), options={"maxiter": STEPS})
            return str(trained.parameters_sha256())


def batch(model: Any, step: int) -> tuple[Any, Any]:
    """Return the samples and targets of a step, from integers alone: exact in every type."""
    numbers = (np.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) * 7919 + step * 104_729) % 1_009
    if isinstance(model, mz.nn.UNet | mz.nn.FNO):
        shape = SAMPLES, *model.sample_shape
        x = ((np.arange(np.prod(shape)).reshape(shape) * 7919 + step * 104_729) % 1_009 / 512.0 - 1.0).astype(
            model.dtype
        )
        return x, np.concatenate([np.roll(x, shift, axis=1) for shift in range(model.outputs)], axis=-1)
    if isinstance(model, mz.nn.GPT):
        words = numbers % WORDS
        return words, np.roll(words, -1, axis=1)
    return (numbers[:, :5] / 512.0 - 1.0).astype(model.dtype), numbers[:, 5] % 3


TRAININGS = {
    "mlp": Training(lambda: mlp(activation="tanh"), lambda: mz.AdamW(lr=0.01)),
    "mlp float64": Training(lambda: mlp(activation="gelu", dtype="float64"), lambda: mz.Adam(lr=0.01)),
    "gpt": Training(lambda: gpt(tied=False), lambda: mz.AdamW(lr=0.01)),
    "gpt float64": Training(lambda: gpt(dtype="float64"), lambda: mz.Adam(lr=0.01)),
    "dropout": Training(lambda: gpt(dropout=0.1), lambda: mz.AdamW(lr=0.01)),
    "cosine, clip": Training(gpt, lambda: mz.AdamW(lr=mz.optim.cosine(0.02, STEPS, warmup=3)), {"clip": 0.5}),
    "lamb": Training(lambda: mlp(activation="silu"), lambda: mz.LAMB(lr=0.02)),
    "muon": Training(lambda: gpt(), lambda: mz.Muon(lr=0.02)),
    "l-bfgs": FullBatch(lambda: mlp(activation="tanh", dtype="float64"), lambda: mz.SGD(0.0)),
    "u-net": Training(
        lambda: unet(dropout=0.1, refine="linear"),
        lambda: mz.AdamW(lr=0.01),
        domain={2: (1, 2), 3: (3, 1), 4: (2, 2), 8: (4, 2)},
        steps=4,
    ),
    "u-net float64": Training(
        lambda: unet(axes=3, space=(3, 4, 7), dtype="float64", padding=("zeros", "zeros", "reflect")),
        lambda: mz.Adam(lr=0.01),
        domain={2: (1, 1, 2), 3: (3, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)},
        steps=3,
    ),
    "fno": Training(
        lambda: mz.nn.FNO(1, 3, 2, modes=(7, 6), width=10, layers=2, space=(11, 14), padding=(0.0, 0.3), seed=7),
        lambda: mz.AdamW(lr=0.01),
        domain={2: (2, 1), 3: (1, 3), 4: (2, 2), 8: (2, 4)},
        steps=4,
    ),
    "tensor tiles": Training(gpt, lambda: mz.AdamW(lr=0.01), {"tiles": 2}, tensor=2),
}


def main() -> int:
    """Print each training's hash and whether it is the one of the file; return 1 if one differs."""
    parser = argparse.ArgumentParser(description="Train, and compare the hashes with those of every other CPU.")
    parser.add_argument("names", nargs="*", default=list(TRAININGS), metavar="NAME", help=", ".join(TRAININGS))
    parser.add_argument("--write", action="store_true", help="write the hashes found to hashes.json")
    options = parser.parse_args()
    expected = json.loads(HASHES.read_text()) if HASHES.exists() else {}
    found = {}
    for name in options.names:
        found[name] = TRAININGS[name].run()
        said = "" if options.write else "the same" if found[name] == expected.get(name) else "DIFFERS"
        print(f"{name:14} {found[name]}  {said}", flush=True)
    if options.write:
        HASHES.write_text(json.dumps(expected | found, indent=1) + "\n")
        return 0
    return int(any(found[name] != expected.get(name) for name in found))


if __name__ == "__main__":
    sys.exit(main())
