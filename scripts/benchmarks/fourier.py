"""Time training steps of a Fourier neural operator beside the same model of PyTorch, in one process and thread.

PyTorch's model has the same parameters, activations and loss; its spectral convolutions are `torch.fft.rfftn`, a
product of the modes that are kept by `einsum`, and `torch.fft.irfftn`. A step is forward, backward and Adam. The
contenders take turns. Printed are the medians of the rounds, their ratio, and the difference of the first losses.

PyTorch (its CPU build) must be installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `harness` is

from harness.options import parser
from harness.tables import markdown

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from convolutions import medians

import mpizero as mz


def torchs(net: mz.nn.FNO, values: dict[str, Any], x: Any, y: Any) -> tuple[Callable[[], float], Any]:
    """Return a step of PyTorch's model with these parameters, and its function of (samples, channels, space)."""
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

    return step, model


def row(axes: int, extent: int, modes: int, width: int, samples: int, rounds: int) -> tuple[str, ...]:
    """Return a row of the table."""
    rng, space = np.random.default_rng(0), (extent,) * axes
    net = mz.nn.FNO(1, 1, axes=axes, modes=modes, width=width, space=space)
    x, y = rng.normal(size=(2, samples, *space, 1)).astype("f4")
    step, _ = torchs(net, mz.nn.initial_parameters(net), x, y)
    with (
        mz.Mesh("self") as mesh,
        mz.distribute(net, mz.Adam(lr=1e-3), "ddp", mesh=mesh, config=mz.Config(micro_batch=samples)) as model,
    ):
        apart = abs(model.train(x, y) - step())
        found = medians({"mpizero": lambda: model.train(x, y), "PyTorch": step}, rounds)
    return (
        " x ".join([str(extent)] * axes), str(modes), str(width), str(samples), f"{found['mpizero']:.1f}",
        f"{found['PyTorch']:.1f}", f"{found['mpizero'] / found['PyTorch']:.2f}", f"{apart:.0e}",
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    made = parser(__doc__, rounds=11)
    made.add_argument("--extents", default="64,128", help="positions along each axis (default: %(default)s)")
    made.add_argument("--axes", type=int, default=2, help="number of axes of space (default: %(default)s)")
    made.add_argument("--modes", type=int, default=12, help="modes along each axis (default: %(default)s)")
    made.add_argument("--width", type=int, default=32, help="channels (default: %(default)s)")
    made.add_argument("--samples", type=int, default=4, help="samples of a step (default: %(default)s)")
    args = made.parse_args()
    rows = [
        row(args.axes, extent, args.modes, args.width, args.samples, args.rounds)
        for extent in map(int, args.extents.split(","))
    ]
    heads = ("field", "modes", "channels", "samples", "mpizero, ms", "PyTorch, ms", "ratio", "losses apart")
    print(markdown(heads, rows))


if __name__ == "__main__":
    main()
