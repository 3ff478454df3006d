"""Time convolutions of fields, and steps of a Fourier neural operator, beside PyTorch's, in one process and thread.

``convolutions``: for each number of channels a convolution with windows of 3 positions along each axis is computed on a
field in two and in three dimensions: output, gradient of the input, gradients of weight and bias. PyTorch computes it
in both of its layouts, channels first and channels last; the faster one counts. Printed are the medians of the rounds,
the ratio, and what part of the rate of matrix products of this library the forward pass reaches.

``fourier``: PyTorch's model has the same parameters, activations and loss; its spectral convolutions are
`torch.fft.rfftn`, a product of the modes that are kept by `einsum`, and `torch.fft.irfftn`. A step is forward, backward
and Adam. Printed are the medians of the rounds, their ratio, and the difference of the first losses.

The contenders take turns. PyTorch (its CPU build, which calls oneDNN) must be installed.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.options import parser
from harness.tables import markdown
from harness.turns import alternate, timed

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import mpizero as mz
from mpizero.kernels.matmul import matmul
from mpizero.nn.layer import Layer

#: Of convolutions, the extents of the field by the number of axes and of channels: about as much work for each.
EXTENTS = {2: {4: 256, 16: 192, 32: 128, 64: 96, 128: 48}, 3: {4: 40, 16: 32, 32: 24, 64: 16, 128: 12}}
PRODUCT = 1024
#: Of Fourier neural operators, axes, positions and modes along each, and samples of a step.
OPERATORS = ((1, 1024, 16, 4), (1, 8192, 16, 4), (2, 64, 12, 4), (2, 128, 12, 4), (3, 32, 8, 2))
WIDTH = 32


def medians(contenders: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median of the milliseconds of each contender; they take turns, after a round that compiles."""
    seconds = alternate(rounds, list(contenders), lambda name: timed(contenders[name]), warm_up=1, quiet=True)
    return {name: 1e3 * statistics.median(found) for name, found in seconds.items()}


def convolution(layer: Layer, x: Any, weight: Any, bias: Any, dy: Any) -> dict[str, Callable[[], Any]]:
    """Return mpizero's forward pass, and forward and backward."""
    params = {"weight": weight, "bias": bias}
    grads = {name: np.empty_like(value) for name, value in params.items()}

    def both() -> None:
        _, cache = layer.forward(params, x)
        layer.backward(params, cache, dy, grads)

    return {"forward": lambda: layer.forward(params, x), "mpizero": both}


def convolutions_of_torch(axes: int, x: Any, weight: Any, bias: Any, dy: Any) -> dict[str, Callable[[], Any]]:
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


def convolutions(rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of convolutions."""
    for axes, channels in product(EXTENTS, EXTENTS[2]):
        rng, extent = np.random.default_rng(0), EXTENTS[axes][channels]
        layer = mz.nn.Conv(channels, channels, (3,) * axes)
        x, dy = rng.normal(size=(2, 1, *(extent,) * axes, channels)).astype("f4")
        weight, bias = rng.normal(size=(*(3,) * axes, channels, channels)).astype("f4"), np.zeros(channels, "f4")
        left = rng.normal(size=(PRODUCT, PRODUCT)).astype("f4")
        contenders = convolution(layer, x, weight, bias, dy) | convolutions_of_torch(axes, x, weight, bias, dy)
        found = medians(contenders | {"product": lambda left=left: matmul(left, left)}, rounds)
        best = min(("channels first", "channels last"), key=found.__getitem__)
        rate = 2 * (extent * 3) ** axes * channels**2 / found["forward"]
        share = rate / (2 * PRODUCT**3 / found["product"])
        yield (
            " x ".join([str(extent)] * axes), str(channels), f"{found['mpizero']:.2f}", f"{found[best]:.2f}", best,
            f"{found['mpizero'] / found[best]:.2f}", f"{share:.2f}",
        )  # fmt: skip


def network_of_torch(net: mz.nn.FNO, values: dict[str, Any], x: Any, y: Any) -> Callable[[], float]:
    """Return a step of PyTorch's model with these parameters."""
    import torch

    torch.set_num_threads(1)
    axes, modes, width = net.axes, net.blocks["fourier.0"].spectral.modes, net.width
    space = tuple(range(2, 2 + axes))
    params = {name: torch.tensor(value) for name, value in values.items()}
    for name, value in list(params.items()):
        if name.endswith("spectral.weight"):
            params[name] = (
                torch.complex(value[..., 0, :, :], value[..., 1, :, :]).movedim((-2, -1), (0, 1)).contiguous()
            )
        elif name.endswith("weight"):
            params[name] = value.reshape(value.shape[-2:]).T.reshape(*value.shape[:-3:-1], *(1,) * axes).contiguous()
    params = {name: value.requires_grad_() for name, value in params.items()}
    conv, gelu = getattr(torch.nn.functional, f"conv{axes}d"), torch.nn.functional.gelu
    corners = [(slice(0, (m + 1) // 2), slice(-(m // 2), None)) for m in modes[:-1]]
    letters = "xyz"[:axes]

    def linear(x: Any, name: str) -> Any:
        return conv(x, params[f"{name}.weight"], params[f"{name}.bias"])

    def spectral(x: Any, name: str) -> Any:
        found, weight = torch.fft.rfftn(x, dim=space), params[f"{name}.weight"]
        out = torch.zeros(len(x), width, *found.shape[2:], dtype=found.dtype)
        for corner in product(*corners):
            halves = [
                slice(m // 2, None) if part.start == 0 else slice(0, m // 2)
                for m, part in zip(modes, corner, strict=False)
            ]
            at = (slice(None), slice(None), *corner, slice(0, modes[-1] // 2 + 1))
            part = weight[(slice(None), slice(None), *halves)]
            out[at] = torch.einsum(f"bi{letters},io{letters}->bo{letters}", found[at], part)
        return torch.fft.irfftn(out, s=x.shape[2:], dim=space)

    def model(x: Any) -> Any:
        grid = torch.meshgrid(*(torch.arange(n) / n for n in x.shape[2:]), indexing="ij")
        x = torch.cat([x, *(g.to(x.dtype).expand(len(x), 1, *g.shape) for g in grid)], dim=1)
        x = linear(gelu(linear(x, "lift.first"), approximate="tanh"), "lift.last")
        for number in range(net.layers):
            name = f"fourier.{number}"
            x = spectral(x, f"{name}.spectral") + linear(x, f"{name}.linear")
            x = gelu(x, approximate="tanh") if number < net.layers - 1 else x
        return linear(gelu(linear(x, "project.first"), approximate="tanh"), "project.last")

    optimizer = torch.optim.Adam(params.values(), lr=1e-3)
    fields, targets = (torch.tensor(np.moveaxis(part, -1, 1)).contiguous() for part in (x, y))

    def step() -> float:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(fields), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def fourier(rounds: int) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of Fourier neural operators."""
    for axes, extent, modes, samples in OPERATORS:
        space = (extent,) * axes
        net = mz.nn.FNO(1, 1, axes=axes, modes=modes, width=WIDTH, space=space)
        x, y = np.random.default_rng(0).normal(size=(2, samples, *space, 1)).astype("f4")
        step = network_of_torch(net, mz.nn.initial_parameters(net), x, y)
        config = mz.Config(micro_batch=samples)
        with mz.Mesh("self") as mesh, mz.distribute(net, mz.Adam(lr=1e-3), "ddp", mesh=mesh, config=config) as model:
            apart = abs(model.train(x, y) - step())
            train = partial(model.train, x, y)
            found = medians({"mpizero": train, "PyTorch": step}, rounds)
        yield (
            " x ".join([str(extent)] * axes), str(modes), str(samples), f"{found['mpizero']:.1f}",
            f"{found['PyTorch']:.1f}", f"{found['mpizero'] / found['PyTorch']:.2f}", f"{apart:.0e}",
        )  # fmt: skip


#: The titles of the columns, and the rows, by the name of a part.
PARTS: dict[str, tuple[tuple[str, ...], Callable[[int], Iterator[tuple[str, ...]]]]] = {
    "convolutions": (
        ("field", "channels", "mpizero, ms", "PyTorch, ms", "its layout", "ratio", "forward over products"),
        convolutions,
    ),
    "fourier": (("field", "modes", "samples", "mpizero, ms", "PyTorch, ms", "ratio", "losses apart"), fourier),
}


def main() -> None:
    """Print the table of a part."""
    made = parser(__doc__, rounds=11)
    made.add_argument("part", choices=PARTS)
    args = made.parse_args()
    head, rows = PARTS[args.part]
    print(markdown(head, rows(args.rounds)))


if __name__ == "__main__":
    main()
