"""Test training on a GPU: compare losses with the CPU's, the AdamW kernel with a copy, and speed with PyTorch's.

There are three parts, each on this process's first GPU. What is timed runs alternately, and ratios are computed from
times of the same round. The output has medians over rounds and, in parentheses, the smallest and largest value.

1. ``losses``: a small GPT in float32 trains some steps on the GPU and on the CPU. The largest relative difference of
   their losses must stay below 1e-4.
2. ``kernel``: the fused AdamW kernel (which reads 4 and writes 3 floats for each element) is compared with a copy of as
   many bytes within the GPU's memory. The result is the kernel's rate as a fraction of the copy's.
3. ``train``: whole steps of a GPT in float32, and with products in bfloat16, are compared with PyTorch's eager mode
   (float32, and autocast to bfloat16) and its fused AdamW, if PyTorch can be imported and finds the GPU.

Without a GPU the script says why and ends with status 69. In Numba's simulator only the first part runs, because the
speed of the simulator means nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import alternate, chosen, parser

import mpizero as mz
from mpizero.kernels import cuda
from mpizero.kernels import device as devices
from mpizero.measurement import Measurement

PARTS = ("losses", "kernel", "train")
LIMIT = 1e-4
#: Floats that AdamW reads and writes for one element.
TOUCHED = 7
RATE = 1e-3


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--parts", default=",".join(PARTS), help="(default: %(default)s)")
    options.add_argument("--parameters", type=float, default=100e6, help="of the kernel (default: %(default).0f)")
    options.add_argument("--dim", type=int, default=1024)
    options.add_argument("--layers", type=int, default=12)
    options.add_argument("--heads", type=int, default=16)
    options.add_argument("--sequence", type=int, default=512)
    options.add_argument("--batch", type=int, default=16, help="sequences of a step, one grain")
    options.add_argument("--vocabulary", type=int, default=256)
    options.add_argument("--steps", type=int, default=5, help="of a turn, and of the losses")
    args = options.parse_args()
    args.parts = chosen("--parts", args.parts, PARTS)
    return args


def shape_of(args: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of the GPT by the names of its constructor's parameters."""
    return {name: getattr(args, name) for name in ("dim", "layers", "heads", "sequence", "vocabulary")}


def samples(args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Return one batch of random token ids, and as targets the id that follows each."""
    ids = np.random.default_rng(0).integers(0, args.vocabulary, (args.batch, args.sequence + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def losses(args: argparse.Namespace) -> bool:
    """Train a small GPT on GPU and CPU, and print the largest relative difference of their losses.

    Tell whether it is below ``LIMIT``.
    """
    small = {"dim": 64, "layers": 2, "heads": 4, "sequence": 32, "vocabulary": 64, "batch": 8}
    args = argparse.Namespace(
        **{**vars(args), **{name: min(size, getattr(args, name)) for name, size in small.items()}}
    )
    found = {}
    for device in ("cpu", "cuda"):
        with (
            mz.ShardingConfig(device=device, micro_batch=max(1, args.batch // 2)) as config,
            mz.DDPModel(mz.nn.GPT(**shape_of(args)), config) as model,
        ):
            model.engine.bind(mz.AdamW(lr=RATE))
            found[device] = [model.train(*samples(args)) for _ in range(args.steps)]
    apart = max(abs(a - b) / abs(a) for a, b in zip(found["cpu"], found["cuda"], strict=True))
    verdict = "ok" if apart < LIMIT else "TOO FAR"
    print(
        f"losses  {args.steps} steps, float32: GPU and CPU differ by {apart:.1e} at most, limit {LIMIT:.0e}: {verdict}"
    )
    return apart < LIMIT


def kernel(args: argparse.Namespace, device: devices.Device) -> None:
    """Print the rates, in GB/s, of the fused AdamW kernel and of a copy within the GPU's memory, and their ratio."""
    import cupy

    size, repeat = int(args.parameters), 10
    w, g, m, v = (device.put(np.random.default_rng(k).random(size, np.float32)) for k in range(4))
    one, other = (cupy.empty(size * TOUCHED // 2, cupy.float32) for _ in range(2))
    hyper = device.put(np.array([0.99, 0.9, 0.1, 0.999, 0.001, RATE, 1.0, 1e-8], np.float32))

    def seconds(work: Callable[[], Any]) -> float:
        cupy.cuda.Device().synchronize()
        begun = time.perf_counter()
        for _ in range(repeat):
            work()
        cupy.cuda.Device().synchronize()
        return (time.perf_counter() - begun) / repeat

    work = {"AdamW": lambda: cuda.optimizer.adamw(w, g, m, v, hyper, 0, size), "copy": lambda: cupy.copyto(other, one)}
    for name in work:
        seconds(work[name])  # compiles
    found = alternate(args.rounds, list(work), lambda name: seconds(work[name]))
    for name, taken in found.items():
        rate = Measurement.of([size * TOUCHED * 4 / 1e9 / one for one in taken])
        print(f"kernel  {name:6} {rate.text(0)} GB/s")
    print(f"kernel  AdamW reaches {Measurement.of_ratios(found['copy'], found['AdamW'])} of the copy rate")


class Ours:
    """Train a GPT with mpizero on the GPU; ``precision`` is the setting ``mixed_precision``."""

    def __init__(self, args: argparse.Namespace, precision: str | None) -> None:
        self.config = mz.ShardingConfig(device="cuda", micro_batch=args.batch, mixed_precision=precision)
        self.model = mz.DDPModel(mz.nn.GPT(**shape_of(args)), self.config)
        self.model.engine.bind(mz.AdamW(lr=RATE), self.config.loss_scale(None))
        self.batch = samples(args)

    def step(self) -> None:
        """Train one step."""
        self.model.train(*self.batch)

    def wait(self) -> None:
        """Wait until the GPU has finished all work: ``train`` waits for the loss, not for the update after it."""
        from numba import cuda

        cuda.synchronize()

    def close(self) -> None:
        """Free the model's memory and communicators."""
        self.model.close()
        self.config.close()


class Torch:
    """Train a GPT with PyTorch in eager mode on the GPU, with autocast to bfloat16 if ``precision`` is not None."""

    def __init__(self, args: argparse.Namespace, precision: str | None) -> None:
        import torch
        from comparing.peers import GPT

        torch.set_default_device("cuda")
        self.torch, self.sixteen = torch, precision is not None
        self.model = GPT(shape_of(args))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, fused=True)
        self.x, self.y = (torch.from_numpy(values).cuda() for values in samples(args))

    def step(self) -> None:
        """Train one step."""
        with self.torch.autocast("cuda", self.torch.bfloat16, enabled=self.sixteen):
            loss = self.model(self.x, self.y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Wait until the GPU has finished all work."""
        self.torch.cuda.synchronize()

    def close(self) -> None:
        """Do nothing: the garbage collector frees the model."""


def contenders(args: argparse.Namespace) -> dict[str, Any]:
    """Build all trainings that can run on this machine, by name: mpizero's, and PyTorch's if PyTorch finds the GPU."""
    made: dict[str, Any] = {f"mpizero {p or 'float32'}": Ours(args, p) for p in (None, "bfloat16")}
    try:
        import torch

        if not torch.cuda.is_available():
            raise ImportError("it finds no GPU")
    except ImportError as error:
        print(f"train   no PyTorch to compare with: {error}")
        return made
    return made | {f"PyTorch {p or 'float32'}": Torch(args, p) for p in (None, "bfloat16")}


def train(args: argparse.Namespace) -> None:
    """Time the steps of all trainings alternately, and print tokens a second."""
    made = contenders(args)

    def seconds(name: str) -> float:
        made[name].wait()
        begun = time.perf_counter()
        for _ in range(args.steps):
            made[name].step()
        made[name].wait()
        return (time.perf_counter() - begun) / args.steps

    for name in made:
        seconds(name)  # compiles
    found = alternate(args.rounds, list(made), seconds)
    for name, taken in found.items():
        rate = Measurement.of([args.batch * args.sequence / one for one in taken]).text(0)
        peer = f"PyTorch {name.split()[1]}"
        against = (
            "" if peer not in found or peer == name else f", {Measurement.of_ratios(found[peer], taken)} of {peer}"
        )
        print(f"train   {name:17} {rate} tokens/s{against}")
    for one in made.values():
        one.close()


def main() -> int:
    """Run the chosen parts, and return the exit status: 0, 1 if losses differ too much, or 69 without a GPU."""
    args = arguments()
    count, reason = devices.found()
    if not count:
        print(f"no GPU: {reason}", file=sys.stderr)
        return os.EX_UNAVAILABLE
    if devices.simulated():
        print("simulated GPU: its losses are compared, speed it has none")
        return 0 if "losses" not in args.parts or losses(args) else 1
    device = devices.open_device(0)
    print(f"GPU     {device.name}")
    near = "losses" not in args.parts or losses(args)
    if "kernel" in args.parts:
        kernel(args, device)
    if "train" in args.parts:
        train(args)
    return 0 if near else 1


if __name__ == "__main__":
    sys.exit(main())
