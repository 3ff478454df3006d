"""Show what the default grain makes of global batches: for five models, on 1, 8 and 64 ranks.

The first table has the products' rate: one process with one thread computes the matrix products of a training step
(forward, gradients of inputs and of weights) with 32 to 4,096 rows, again and again, by the same BLAS as the library.
The rate with the rows of a default grain is divided by the best rate of the same round; *whole step* is the same for
steps of ``mpizero`` with such grains (forward, backward, sums, AdamW) of one batch.

The second table has, for each model and number of ranks, the samples of a grain and the number of grains, what a
sixteenth of the batch would make of them, the ranks without a grain, and rows and bytes of gradients (ZeRO-1, on nodes
of 64 ranks; a row is one copy of the whole gradient vector). They are planned for the rank that needs most. With one
rank they are also counted in a training; the script ends with an error if the count differs from the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from harness import alternate, parser, tell

import mpizero as mz
from mpizero._util.numbers import Measurement
from mpizero.kernels.matmul import matmul
from mpizero.layout import GrainRule
from mpizero.sharding.config import placement
from mpizero.tools.plan import TrainingPlan

ROWS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
RANKS = (1, 8, 64)
VOCABULARY = 256


@dataclass(frozen=True)
class Case:
    """Describe a model and a global batch.

    ``maps`` are the (inputs, outputs) of all its linear maps.
    """

    model: Any
    batch: int
    maps: tuple[tuple[int, int], ...]

    @property
    def positions(self) -> int:
        """Rows of the products that one sample has."""
        return int(getattr(self.model, "sequence", 1))

    def data(self, samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs and targets of ``samples`` random samples."""
        random = np.random.default_rng(0)
        if isinstance(self.model, mz.nn.GPT):
            text = random.integers(0, VOCABULARY, (samples, self.positions + 1))
            return text[:, :-1], text[:, 1:]
        x = random.standard_normal((samples, self.model.features), np.float32)
        return x, random.integers(0, self.model.outputs, samples)


def gpt(dim: int, layers: int, sequence: int, batch: int) -> Case:
    """Return the case of a GPT."""
    block = ((dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim))
    model = mz.nn.GPT(dim, layers, max(1, dim // 64), sequence, vocabulary=VOCABULARY)
    return Case(model, batch, block * layers + ((dim, VOCABULARY),))


def mlp(features: int, hidden: tuple[int, ...], outputs: int, batch: int) -> Case:
    """Return the case of a fully connected network."""
    widths = (features, *hidden, outputs)
    return Case(mz.nn.MLP(features, hidden, outputs), batch, tuple(zip(widths, widths[1:], strict=False)))


CASES = {
    "MLP 32-64-64-10": mlp(32, (64, 64), 10, 131072),
    "MLP 784-1024-1024-10": mlp(784, (1024, 1024), 10, 65536),
    "GPT dim 64": gpt(64, 2, 64, 1024),
    "GPT dim 256": gpt(256, 4, 128, 512),
    "GPT dim 1024": gpt(1024, 2, 128, 512),
}


def products(case: Case, rows: int) -> Callable[[], None]:
    """Return a function that computes all products of a step with ``rows`` rows; maps of one shape share arrays."""
    random, made = np.random.default_rng(0), {}
    for inputs, outputs in dict.fromkeys(case.maps):
        sizes = (rows, inputs), (inputs, outputs), (rows, outputs)
        x, w, dy = (random.standard_normal(size, np.float32) for size in sizes)
        made[inputs, outputs] = (x, w, np.empty_like(dy)), (dy, w.T, np.empty_like(x)), (x.T, dy, np.empty_like(w))
    calls = [product for pair in case.maps for product in made[pair]]

    def compute() -> None:
        for left, right, out in calls:
            matmul(left, right, out)

    return compute


def seconds(work: Callable[[], Any], least: float) -> float:
    """Call ``work`` until ``least`` seconds have passed, at least once, and return the seconds of one call."""
    started, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - started < least:
        work()
        calls += 1
    return (time.perf_counter() - started) / calls


def product_rates(case: Case, rounds: int) -> dict[int, list[float]]:
    """Return rows per second of the products in every round, by the number of rows."""
    own = default_rule(case).grain_size(case.batch) * case.positions
    works = {rows: products(case, rows) for rows in sorted({*ROWS, own}) if rows >= case.positions}
    return alternate(rounds, list(works), lambda rows: rows / seconds(works[rows], 0.2), warm_up=1, quiet=True)


def step_rates(case: Case, rounds: int) -> dict[int, list[float]]:
    """Return samples per second of whole steps in every round, by the samples of a grain."""
    own = default_rule(case).grain_size(case.batch)
    sizes = [own // 2, own, 2 * own, 4 * own] if own > 1 else [own, 2 * own, 4 * own]
    batch = 4 * own
    x, y = case.data(batch)
    models = {}
    try:
        for size in sizes:
            config = mz.ShardingConfig(comm="self", micro_batch=size)
            models[size] = mz.ZeRO1Model(case.model, config, optimizer=mz.AdamW(1e-3))
        return alternate(
            rounds, sizes, lambda size: batch / seconds(lambda: models[size].train(x, y), 0.2), warm_up=1, quiet=True
        )
    finally:
        for model in models.values():
            model.close()
            model.config.close()


def default_rule(case: Case) -> GrainRule:
    """Return the default rule for a case's grains."""
    return mz.ShardingConfig().grain_rule(case.model)


def planned(case: Case, ranks: int) -> dict[str, Any]:
    """Return the grains, rows and bytes of a training on ``ranks`` ranks, by name."""
    rule = default_rule(case)
    grains, before = rule.grains(case.batch), GrainRule().grains(case.batch)
    x, y = case.data(1)
    plan = TrainingPlan(
        model=case.model, optimizer=mz.AdamW(1e-3), config=mz.ShardingConfig(), row=placement("zero1"), ranks=ranks,
        ranks_per_node=min(ranks, 64), global_batch=case.batch, x=x, y=y,
    )  # fmt: skip
    rows = [plan.traffic(rank).training.step.rows_plan(plan.places.grid(rank)).rows for rank in range(ranks)]
    nbytes = [one.memory["gradients"].mine for one in plan.by_rank]
    return {
        "samples": grains.size,
        "grains": grains.count,
        "a sixteenth": before.count,
        "idle": max(0, ranks - grains.count),
        "idle before": max(0, ranks - before.count),
        "rows": max(rows),
        "bytes": max(nbytes),
    }


def counted(case: Case) -> int:
    """Return the bytes of gradients that one rank has allocated for a step on the global batch."""
    with mz.ShardingConfig(comm="self") as config, mz.ZeRO1Model(case.model, config) as model:
        model.reserve(case.batch)
        return int(model.engine.memory.kinds()["gradients"])


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=5, json=True)
    options.add_argument("--models", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="some of them")
    options.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="(default: 1 8 64)")
    options.add_argument("--plan-only", action="store_true", help="leave out the first table")
    return options.parse_args()


def fractions(rates: Mapping[int, Sequence[float]], own: int) -> Measurement:
    """Return the rate at ``own`` over the best one of the same round."""
    best = [max(values) for values in zip(*rates.values(), strict=True)]
    return Measurement.of_ratios(rates[own], best)


def rates_of(case: Case, rounds: int) -> dict[str, Any]:
    """Measure the rates of products and of whole steps with default grains, as fractions of the best."""
    size = default_rule(case).grain_size(case.batch)
    return {
        "rows": size * case.positions,
        "products": str(fractions(product_rates(case, rounds), size * case.positions)),
        "step": str(fractions(step_rates(case, rounds), size)),
    }


def plans_of(name: str, case: Case, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the plans of one model by number of ranks; end the script if one rank's count differs from its plan."""
    found = []
    for size in ranks:
        plan = planned(case, size)
        if size == 1 and (held := counted(case)) != plan["bytes"]:
            raise SystemExit(f"{name}: planned {plan['bytes']} bytes of gradients, one rank has {held}")
        found.append({"model": name, "batch": case.batch, "ranks": size, **plan})
    return found


def report(rates: Mapping[str, Mapping[str, Any]], plans: Sequence[Mapping[str, Any]]) -> str:
    """Format both tables."""
    lines = []
    if rates:
        lines = [f"{'model':22s}{'rows':>6s}{'products, of the best':>26s}{'whole step, of the best':>26s}"]
        lines += [f"{n:22s}{r['rows']:6d}{r['products']:>26s}{r['step']:>26s}" for n, r in rates.items()] + [""]
    lines.append(
        f"{'model':22s}{'batch':>8s}{'ranks':>7s}{'a grain':>9s}{'grains':>8s}{'(before)':>10s}{'idle':>6s}"
        f"{'(before)':>10s}{'rows':>6s}{'MB a rank':>11s}"
    )
    for plan in plans:
        lines.append(
            f"{plan['model']:22s}{plan['batch']:8d}{plan['ranks']:7d}{plan['samples']:9d}{plan['grains']:8d}"
            f"{plan['a sixteenth']:10d}{plan['idle']:6d}{plan['idle before']:10d}{plan['rows']:6d}"
            f"{plan['bytes'] / 1e6:11.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and plan, and print both tables or one JSON document."""
    args = arguments()
    cases = {name: CASES[name] for name in args.models}
    rates, plans = {}, []
    for name, case in cases.items():
        tell(name)
        if not args.plan_only:
            rates[name] = rates_of(case, args.rounds)
        plans += plans_of(name, case, args.ranks)
    print(json.dumps({"rates": rates, "plans": plans}) if args.json else report(rates, plans))


if __name__ == "__main__":
    main()
