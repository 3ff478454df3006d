"""Time convolutions of fields, forward and backward, beside PyTorch's, in one process and thread.

For each number of channels a convolution with windows of 3 positions along each axis is computed on a field in two and
in three dimensions: output, gradient of the input, gradients of weight and bias. PyTorch computes it in both of its
layouts, channels first and channels last; the faster one counts. The contenders take turns. Printed are the medians of
the rounds, the ratio, and what part of the rate of matrix products of this library the forward pass reaches.

PyTorch (its CPU build, which calls oneDNN) must be installed.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.options import parser
from harness.tables import markdown

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import mpizero as mz
from mpizero.kernels.matmul import matmul
from mpizero.nn.layer import Layer

#: Extents of the field by the number of axes and of channels: about as much work for each.
EXTENTS = {2: {4: 256, 16: 192, 32: 128, 64: 96, 128: 48}, 3: {4: 40, 16: 32, 32: 24, 64: 16, 128: 12}}
PRODUCT = 1024


def ours(layer: Layer, x: Any, weight: Any, bias: Any, dy: Any) -> dict[str, Callable[[], Any]]:
    """Return mpizero's forward pass, and forward and backward."""
    params = {"weight": weight, "bias": bias}
    grads = {name: np.empty_like(value) for name, value in params.items()}

    def both() -> None:
        _, cache = layer.forward(params, x)
        layer.backward(params, cache, dy, grads)

    return {"forward": lambda: layer.forward(params, x), "mpizero": both}


def torchs(axes: int, x: Any, weight: Any, bias: Any, dy: Any) -> dict[str, Callable[[], Any]]:
    """Return PyTorch's forward and backward pass in both of its layouts."""
    import torch

    torch.set_num_threads(1)
    conv = getattr(torch.nn.functional, f"conv{axes}d")
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[axes]
    found: dict[str, Callable[[], Any]] = {}
    for name, layout in (("channels first", torch.contiguous_format), ("channels last", last)):
        moved = [np.moveaxis(x, -1, 1), weight.transpose(axes + 1, axes, *range(axes)), np.moveaxis(dy, -1, 1)]
        field, kernel, above = (torch.tensor(part).contiguous(memory_format=layout) for part in moved)
        leaves = [field.requires_grad_(), kernel.requires_grad_(), torch.tensor(bias).requires_grad_()]

        def both(leaves: list[Any] = leaves, above: Any = above) -> None:
            conv(*leaves, padding=1).backward(above)
            for leaf in leaves:
                leaf.grad = None

        found[name] = both
    return found


def medians(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median of the milliseconds of each contender; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, compute in contenders.items():
            begun = time.perf_counter()
            compute()
            if number:  # the first round compiles
                times[name].append(1e3 * (time.perf_counter() - begun))
    return {name: statistics.median(found) for name, found in times.items()}


def row(axes: int, channels: int, extent: int, dtype: str, rounds: int) -> tuple[str, ...]:
    """Return a row of the table."""
    rng = np.random.default_rng(0)
    layer = mz.nn.Conv(channels, channels, (3,) * axes)
    x, dy = rng.normal(size=(2, 1, *(extent,) * axes, channels)).astype(dtype)
    weight, bias = rng.normal(size=(*(3,) * axes, channels, channels)).astype(dtype), np.zeros(channels, dtype)
    left = rng.normal(size=(PRODUCT, PRODUCT)).astype(dtype)
    contenders = ours(layer, x, weight, bias, dy) | torchs(axes, x, weight, bias, dy)
    found = medians(contenders | {"product": lambda: matmul(left, left)}, rounds)
    best = min(("channels first", "channels last"), key=found.__getitem__)
    rate = 2 * (extent * 3) ** axes * channels**2 / found["forward"]
    share = rate / (2 * PRODUCT**3 / found["product"])
    return (
        f"{axes}-D, {extent} positions an axis", str(channels), f"{found['mpizero']:.2f}", f"{found[best]:.2f}", best,
        f"{found['mpizero'] / found[best]:.2f}", f"{share:.2f}",
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    made = parser(__doc__, rounds=15)
    made.add_argument("--channels", default="4,16,32,64,128", help="numbers of channels (default: %(default)s)")
    made.add_argument("--axes", default="2,3", help="numbers of axes of space (default: %(default)s)")
    made.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    args = made.parse_args()
    rows = [
        row(axes, channels, EXTENTS[axes][channels], args.dtype, args.rounds)
        for axes in map(int, args.axes.split(","))
        for channels in map(int, args.channels.split(","))
    ]
    heads = ("field", "channels", "mpizero, ms", "PyTorch, ms", "its layout", "ratio", "forward over products")
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()
