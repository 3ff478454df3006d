#!/usr/bin/env python
"""Train a small GPT on 8 pipeline stages x 8 tensor parts x 8 replicas: 512 ranks that are threads of this process.

The same training then runs as one process that computes the 8 tensor parts as tiles. Both must end with the same
parameters, to the bit: the sha256 of the parameters is compared, and the exit status is 1 if it differs. No MPI is
needed. The threads take turns with the processor, so this shows that a layout works, not how fast it is.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from functools import partial
from typing import Any

from drawing import BLUE, ORANGE, add_option, save

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for BLAS: each rank computes with one thread

import numpy as np

import mpizero as mz
from mpizero.testing import run_in_threads

VOCABULARY = 256
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in (("pipeline", "stages"), ("tensor", "parts of each layer"), ("data", "replicas")):
        parser.add_argument(f"--{name}", type=int, default=8, help=f"number of {what} (default: %(default)s)")
    parser.add_argument("--zero", type=int, default=1, choices=range(4), help="ZeRO stage (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step (default: %(default)s)")
    for name, size in (("dim", 64), ("blocks", 8), ("heads", 8), ("sequence", 16)):
        parser.add_argument(f"--{name}", type=int, default=size, help="of the GPT (default: %(default)s)")
    add_option(parser, "which ranks have the bits of one process")
    return parser.parse_args()


def train(comm: Any, args: argparse.Namespace, **sizes: int) -> tuple[list[float], str]:
    """Train as one rank of ``comm``; return the loss of each step, and the sha256 of the whole model's parameters."""
    gpt = mz.nn.GPT(args.dim, args.blocks, args.heads, args.sequence, vocabulary=VOCABULARY)
    text = np.random.default_rng(0).integers(0, VOCABULARY, (args.steps * args.batch, args.sequence + 1))
    source = mz.data.ArraySource(text[:, :-1], text[:, 1:])
    config, strategy = mz.Config(micro_batch=1, tiles={"tensor": args.tensor}), STRATEGIES[args.zero]
    with (
        mz.Mesh(comm, **sizes) as mesh,
        mz.distribute(gpt, mz.AdamW(1e-3), strategy, mesh=mesh, config=config) as model,
    ):
        batches = mz.data.batches(source, model, global_batch=args.batch, steps=args.steps)  # this rank's samples
        return [model.train(x, y) for x, y in batches], model.parameters_sha256()


def draw(figure: Any, args: argparse.Namespace, everyone: list[Any], alone: Any) -> None:
    """Draw each rank in its place, coloured by whether it ends like one process, and the losses."""
    same = np.array([one == alone for one in everyone]).reshape(args.pipeline, args.tensor, args.data)
    grid, curve = figure.subfigures(1, 2, width_ratios=(2.2, 1))
    across = -(-args.data // 2)
    for replica, axes in enumerate(grid.subplots(2, across, sharex=True, sharey=True, squeeze=False).flat):
        if replica >= args.data:
            axes.remove()
            continue
        stage, part = np.indices(same.shape[:2]).reshape(2, -1)
        colours = [BLUE if equal else ORANGE for equal in same[:, :, replica].flat]
        axes.scatter(part, stage, c=colours, marker="s", s=900 / max(*same.shape[:2], 4) ** 1.7)
        axes.set(title=f"replica {replica}", xlabel="part", ylabel="stage", aspect="equal")
        axes.set(xlim=(-0.7, args.tensor - 0.3), xticks=(0, args.tensor - 1))
        axes.set(ylim=(args.pipeline - 0.3, -0.7), yticks=(0, args.pipeline - 1))
        axes.label_outer()
    grid.suptitle(f"{same.sum()} of {same.size} ranks have the bits of one process", fontsize=11)
    axes, steps = curve.subplots(), range(1, args.steps + 1)
    axes.plot(steps, everyone[0][0], "o", color=BLUE, markersize=9, fillstyle="none", label=f"{same.size} ranks")
    axes.plot(steps, alone[0], ".-", color="black", label="one process")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)


def main() -> None:
    """Train on the grid and in one process, print what both took, and compare their parameters."""
    args = arguments()
    ranks = args.pipeline * args.tensor * args.data
    sizes = {"pipeline": args.pipeline, "tensor": args.tensor}

    started = time.monotonic()
    everyone = run_in_threads(ranks, lambda comm: train(comm, args, **sizes))
    wall, used = time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"{ranks} threads, {args.pipeline} stages x {args.tensor} parts x {args.data} replicas, ZeRO-{args.zero}: "
        f"{wall:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of processors, {used.ru_maxrss / 1e3:.0f} MB"
    )
    if len({result for _, result in everyone}) > 1:
        sys.exit("the ranks end with different parameters")

    started = time.monotonic()
    alone = train("self", args)
    print(f"one process, {args.tensor} tiles: {time.monotonic() - started:.1f} s")
    for step, losses in enumerate(zip(everyone[0][0], alone[0], strict=True), 1):
        print(f"step {step}: loss {losses[0]!r} on the grid, {losses[1]!r} alone")
    if args.picture:
        save(args.picture, (7, 3.3), partial(draw, args=args, everyone=everyone, alone=alone))
    if everyone[0] != alone:
        sys.exit(f"not the same: the parameters have the sha256 {everyone[0][1]} on the grid, {alone[1]} alone")
    print(f"the same bits: sha256 {alone[1]}")


if __name__ == "__main__":
    main()
