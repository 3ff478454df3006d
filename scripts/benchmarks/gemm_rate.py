"""Measure the rate (operations a second) of a whole training step of a GPT as a fraction of the GEMM rate.

One process with one thread times alternately: a whole step (forward, backward, AdamW); forward and backward alone; and
only the matrix products of the linear layers with the step's shapes, by the same BLAS, into allocated arrays. The rate
of these products is the GEMM rate. A step's rate is the number of operations of all its matrix products, as the layers
count them, divided by its seconds. Products of attention that are skipped because they are masked do not count. The
step's rate is divided by the GEMM rate of the same round. The tables show medians over rounds and, in parentheses, the
smallest and largest value. ``--clock cpu`` measures processor time, for machines on which other programs run.

``--kinds`` also prints the time of each kind of layer in forward and backward, and the rate of its products.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from comparing.ours import LinearProducts
from harness import alternate, parser

import mpizero as mz
from mpizero._util.numbers import Measurement
from mpizero.nn.layer import Affine
from mpizero.nn.layers import Activation
from mpizero.nn.models import gradient_slots
from mpizero.nn.transformer import CausalSelfAttention, TransformerBlockBase
from mpizero.train.machine import blas
from mpizero.types import Run

VOCABULARY = 256
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=7)
    options.add_argument("--dim", type=int, default=512)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--batch", type=int, default=8, help="sequences of a step")
    options.add_argument("--sequence", type=int, default=128, help="tokens a sequence")
    options.add_argument("--strategy", default="zero1", help="ddp, zero1, zero2 or zero3 (default: %(default)s)")
    options.add_argument("--clock", choices=CLOCKS, default="wall")
    options.add_argument("--kinds", action="store_true", help="tell the time of each kind of layer")
    return options.parse_args()


def seconds(args: argparse.Namespace, work: Callable[[], Any]) -> float:
    """Call ``work`` once, and return the seconds by the clock that ``args.clock`` names."""
    clock = CLOCKS[args.clock]
    started = clock()
    work()
    return clock() - started


def compare(
    args: argparse.Namespace, works: dict[str, Callable[[], Any]], counted: float, products: LinearProducts
) -> None:
    """Time all functions in ``works`` alternately, and print their times, rates and fractions of the GEMM rate.

    ``works["products"]`` is ``products``, which has its own number of operations; the others have ``counted``.
    """
    for work in works.values():
        work()
    found = alternate(args.rounds, list(works), lambda name: seconds(args, works[name]), quiet=True)
    print(f"{'':24s} {'ms':>28s} {'GFLOP/s':>24s} {'share of the GEMM rate':>32s}")
    for name in works:
        operations = products.operations if name == "products" else counted
        times = found[name]
        rates = [operations / t / 1e9 for t in times]
        gemm = [products.operations / t / 1e9 for t in found["products"]]
        shares = Measurement.of_ratios(rates, gemm).text(1, 100, " %")
        print(
            f"{name:24s} {Measurement.of(times).text(1, 1e3):>28s} {Measurement.of(rates).text(1):>24s} {shares:>32s}"
        )


@contextmanager
def timed_methods(args: argparse.Namespace, spent: Counter[str], operations: Counter[str]) -> Iterator[None]:
    """Inside the ``with`` block, add the seconds of each method of each layer to ``spent``, by the method's name.

    Time in the methods of inner layers is counted only there. Operations of linear layers are added to ``operations``.
    """
    clock, inside = CLOCKS[args.clock], [0.0]
    rows = args.batch * args.sequence

    def timed(kind: type, name: str) -> Any:
        method = getattr(kind, name)

        @functools.wraps(method)
        def call(self: Any, *rest: Any, **named: Any) -> Any:
            inside.append(0.0)
            started = clock()
            try:
                return method(self, *rest, **named)
            finally:
                took = clock() - started
                label = f"{type(self).__name__}.{name}"
                if isinstance(self, mz.nn.Linear):
                    label = f"Linear {self.inputs} -> {self.outputs}, {name}"
                    operations[label] += 2 * rows * self.inputs * self.outputs if name != "forward" else 0
                spent[label] += took - inside.pop()
                inside[-1] += took

        return mock.patch.object(kind, name, call)

    passes = ("forward", "backward_input", "backward_weights")
    places: list[tuple[type, str]] = [
        (Activation, "backward_over"),
        (mz.nn.GELU, "forward_biased"),
        (Affine, "forward"),
    ]
    places += [(mz.nn.Linear, name) for name in ("product", *passes[1:])]
    places += [(mz.nn.LayerNorm, name) for name in ("forward", "backward_joined", "backward_weights")]
    places += [
        (kind, name) for kind in (TransformerBlockBase, mz.nn.Projection, mz.nn.TokenEmbedding) for name in passes
    ]
    places += [(CausalSelfAttention, name) for name in ("attend", "attend_backward")]
    places += [(mz.nn.CrossEntropy, name) for name in ("forward", "backward")]
    patches = [timed(kind, name) for kind, name in places]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in reversed(patches):
            patch.stop()


def tell_kinds(args: argparse.Namespace, work: Callable[[], Any]) -> None:
    """Print the median seconds of each kind of layer in ``work``, and the rate of its matrix products."""
    rounds: list[Counter[str]] = []
    operations: Counter[str] = Counter()
    for _ in range(args.rounds):
        rounds.append(Counter())
        operations.clear()
        with timed_methods(args, rounds[-1], operations):
            work()
    middle = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    print(f"\n{'within forward and backward':52s} {'ms':>8s} {'GFLOP/s':>8s}")
    for name, took in sorted(middle.items(), key=lambda item: -item[1]):
        rate = f"{operations[name] / took / 1e9:8.1f}" if operations[name] else ""
        print(f"{name:52s} {1e3 * took:8.2f} {rate:>8s}")


def main() -> None:
    """Time steps and products of one GPT, and print the tables."""
    args = arguments()
    gpt = mz.nn.GPT(dim=args.dim, layers=args.layers, heads=args.heads, sequence=args.sequence, vocabulary=VOCABULARY)
    text = np.random.default_rng(0).integers(0, VOCABULARY, (args.batch, args.sequence + 1))
    x, y = text[:, :-1], text[:, 1:]
    sizes = {name: getattr(args, name) for name in ("dim", "layers", "batch", "sequence")}
    products = LinearProducts(sizes | {"vocabulary": VOCABULARY}, reuse=True)
    values, slots = mz.nn.initial_parameters(gpt), gradient_slots(gpt)
    counted = args.batch * sum(o.total for o in mz.nn.model_operations(gpt, (args.sequence,)).values())
    config = mz.ShardingConfig(comm="self", micro_batch=args.batch)
    model = mz.distribute(gpt, mz.AdamW(lr=1e-3), strategy=args.strategy, config=config)

    def passes() -> None:
        mz.nn.loss_and_gradients(gpt, values, (x, y), Run(training=True), slots=slots)

    with model:
        works = {"whole step": lambda: model.train(x, y), "forward and backward": passes, "products": products}
        shape = f"dim {args.dim}, {args.layers} layers, {args.batch} x {args.sequence} tokens, {args.strategy}"
        print(f"GPT of {shape}, {model.parameter_count:,} parameters, float32, one process; {args.rounds} rounds")
        print(blas())
        compare(args, works, counted, products)
        if args.kinds:
            tell_kinds(args, passes)


if __name__ == "__main__":
    main()
