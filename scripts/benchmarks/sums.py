"""Compare ways to sum the gradients of grains whose result does not depend on the number of ranks.

A training may give each rank any number of grains, so a sum must have the same bits for every grouping of its terms.
The library adds float32 rows in the order of one binary tree (``tree``). It needs floor(log2(k + 1)) rows for k grains.
The other ways need no order: they round every term to a multiple of one step for each tensor, so that all additions are
exact.

``int64``     integers, 62 bits below a bound of the terms' sum. Two float32 rows.
``float64``   the same with the 52 bits that float64 holds exactly, so that any MPI library adds them. Two float32 rows.
``bins``      three float32 bins of 12 bits each, as in pre-rounded summation (Demmel and Nguyen, "Parallel Reproducible
              Summation", IEEE Transactions on Computers 64, 2015). Three float32 rows.
``in order``  float32, one term after the other: for orientation, it depends on the grouping. One float32 row.

In all ways the gradient that is being computed needs an array as large as one block besides. The bound of a tensor is
``2**margin`` times its largest term, as it would be known from the step before.

The first table has errors, in units of 2**-24 times the sum of the terms' magnitudes, the best bound that a sum in
float32 can have; the exact sum is computed with 64 bits. It does so for Gaussian terms whose scales differ between the
elements of a tensor by up to 2**30: for all elements, and for the largest and the smallest ones. The second table has
the time of a whole sum of k rows, divided once, over that of ``tree``. The third is of the gradients of a training: the
same errors, and the factor by which the largest gradient of a tensor grows from one step to the next, which is what
``margin`` must allow for (where it does not, the step has to be computed again). With
``--ranks`` the fourth has the time of ``Allreduce`` of one row of each kind.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numba
import numpy as np
from harness import alternate, parser, result_of

from mpizero._util.numbers import Measurement
from mpizero.layout.sum_tree import fold_plan

TREE = "tree"
SPREADS = (0, 10, 20, 30)
MARGINS = (0, 2, 4, 6, 8, 10)


@numba.njit(error_model="numpy")
def _add_int64(x: Any, scale: Any, total: Any) -> None:
    for i in range(x.size):
        total[i] += np.int64(np.rint(np.float64(x[i]) * scale))


@numba.njit(error_model="numpy")
def _end_int64(total: Any, factor: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = np.float64(total[i]) * factor


@numba.njit(error_model="numpy")
def _add_float64(x: Any, big: Any, total: Any) -> None:
    for i in range(x.size):
        total[i] += (np.float64(x[i]) + big) - big


@numba.njit(error_model="numpy")
def _end_float64(total: Any, factor: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = total[i] * factor


@numba.njit(error_model="numpy")
def _add_bins(x: Any, big: Any, total: Any) -> None:
    first, second, third = total[0], total[1], total[2]
    for i in range(x.size):
        rest = x[i]
        part = (rest + big[0]) - big[0]
        first[i] += part
        rest -= part
        part = (rest + big[1]) - big[1]
        second[i] += part
        rest -= part
        third[i] += (rest + big[2]) - big[2]


@numba.njit(error_model="numpy")
def _end_bins(total: Any, factor: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = ((np.float64(total[2, i]) + total[1, i]) + total[0, i]) * factor


@numba.njit(error_model="numpy")
def _add_in_order(x: Any, unused: Any, total: Any) -> None:
    for i in range(x.size):
        total[i] += x[i]


@numba.njit(error_model="numpy")
def _end_in_order(total: Any, factor: Any, out: Any) -> None:
    by = np.float32(factor)
    for i in range(out.size):
        out[i] = total[i] * by


@numba.njit(error_model="numpy")
def _add_rows(a: Any, b: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = a[i] + b[i]


@dataclass(frozen=True)
class Way:
    """Describe how terms are added to a total, without an order.

    Attributes
    ----------
    add, end : callable
        ``add(x, step, total)`` adds a float32 row to ``total``; ``end(total, factor, out)`` writes ``factor * total``.
    step : callable
        ``step(bound)`` returns what ``add`` takes for terms whose sum has magnitudes below the power of two ``bound``.
    unit : callable
        ``unit(bound)`` returns the value of 1 in ``total``.
    dtype : numpy dtype
        Type of ``total``.
    rows : int
        Number of rows of ``total`` in its dtype.
    """

    add: Callable[[Any, Any, Any], None]
    end: Callable[[Any, Any, Any], None]
    step: Callable[[float], Any]
    unit: Callable[[float], float]
    dtype: Any
    rows: int = 1

    @property
    def bytes(self) -> int:
        """Bytes of the total, per element."""
        return self.rows * int(np.dtype(self.dtype).itemsize)

    def total(self, size: int) -> np.ndarray:
        """Return a total of ``size`` elements that is zero."""
        return np.zeros((self.rows, size) if self.rows > 1 else size, self.dtype)


def _bins(bound: float) -> np.ndarray:
    """Return three large numbers; adding and subtracting one rounds to a multiple of its last bit.

    A bin's last bit is 2**-24 of twice its bound, so that sums below the bound are exact.
    """
    return np.array([1.5 * bound * 2.0**-shift for shift in (0, 12, 24)], np.float32)


WAYS: Mapping[str, Way] = {
    "int64": Way(_add_int64, _end_int64, lambda b: 2.0**62 / b, lambda b: b / 2.0**62, np.int64),
    "float64": Way(_add_float64, _end_float64, lambda b: 1.5 * b, lambda _: 1.0, np.float64),
    "bins": Way(_add_bins, _end_bins, _bins, lambda _: 1.0, np.float32, 3),
    "in order": Way(_add_in_order, _end_in_order, lambda _: 1.0, lambda _: 1.0, np.float32),
}


def bound_of(largest: float, count: int, margin: int) -> float:
    """Return the power of two that no sum of ``count`` terms reaches if they stay below ``2**margin * largest``."""
    return 2.0 ** (math.frexp(largest)[1] + margin + math.ceil(math.log2(count)))


def by_way(way: Way, rows: np.ndarray, bound: float, total: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write the mean of ``rows`` to ``out``, added to ``total`` in one way; return ``out``."""
    step = way.step(bound)
    total.fill(0)
    for row in rows:
        way.add(row, step, total)
    way.end(total, way.unit(bound) / len(rows), out)
    return out


def by_tree(rows: np.ndarray, buffer: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Write the mean of ``rows`` to ``out``, added in the order of the tree in the rows of ``buffer``; return ``out``.

    In a training a gradient is computed in its row of ``buffer``. Here it is read from ``rows``, so that it need not be
    copied.
    """
    plan = fold_plan(range(len(rows)), len(rows))
    values: dict[int, np.ndarray] = {}
    for fold in plan.folds:
        last = fold.row
        values[last] = rows[fold.grain]
        for target in fold.targets:
            _add_rows(values[target], values[last], buffer[target])
            values[target], last = buffer[target], target
    ((_, last),) = plan.held
    _end_in_order(values[last], 1 / len(rows), out)
    return out


def terms(rng: np.random.Generator, count: int, size: int, spread: int) -> np.ndarray:
    """Return ``count`` rows of Gaussian terms; the scales of ``size`` elements go from 1 down to ``2**-spread``."""
    scales = 2.0 ** -np.linspace(0, spread, size)
    return (rng.standard_normal((count, size)) * scales).astype(np.float32)


def errors(rows: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the error of the mean ``found`` of each element, in units of 2**-24 of the mean of the magnitudes."""
    exact = rows.astype(np.longdouble).sum(axis=0) / len(rows)
    return np.asarray(np.abs(found - exact) / np.abs(rows.astype(np.longdouble)).mean(axis=0) * 2.0**24, np.float64)


def sums(rows: np.ndarray, margin: int, largest: float | None = None) -> dict[str, Callable[[], np.ndarray]]:
    """Return for each way a function that computes the mean of ``rows`` and returns it.

    ``largest`` is the largest term that the bound is made from; None takes that of ``rows``.
    """
    size = rows.shape[1]
    out, buffer = np.empty(size, np.float32), np.empty((fold_plan(range(len(rows)), len(rows)).rows, size), np.float32)
    bound = bound_of(float(np.abs(rows).max()) if largest is None else largest, len(rows), margin)
    cases: dict[str, Callable[[], np.ndarray]] = {TREE: lambda: by_tree(rows, buffer, out)}
    for name, way in WAYS.items():
        cases[name] = partial(by_way, way, rows, bound, way.total(size), out)
    return cases


def check(rows: np.ndarray, margin: int) -> None:
    """End the script if a way that needs no order gives other bits for the terms in another order."""
    backwards = sums(rows[::-1].copy(), margin)
    for name, run in sums(rows, margin).items():
        if name in (TREE, "in order"):
            continue
        if not np.array_equal(run().copy(), backwards[name]()):
            sys.exit(f"{name}: the bits depend on the order of {len(rows)} terms")


def accuracy(count: int, margin: int, size: int) -> dict[str, dict[str, list[float]]]:
    """Return for each spread and way the largest error of all elements, of the largest and of the smallest ones."""
    found: dict[str, dict[str, list[float]]] = {}
    for spread in SPREADS:
        rows = terms(np.random.default_rng(spread), count, size, spread)
        check(rows, margin)
        part = size // 16
        found[str(spread)] = {}
        for name, run in sums(rows, margin).items():
            error = errors(rows, run())
            found[str(spread)][name] = [float(e.max()) for e in (error, error[:part], error[-part:])]
    return found


def cost(counts: list[int], size: int, margin: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return for each number of terms and way the seconds of a whole sum in each round."""
    found = {}
    for count in counts:
        rows = terms(np.random.default_rng(1), count, size, 20)
        cases = sums(rows, margin)

        def seconds(name: str, cases: Mapping[str, Callable[[], Any]] = cases) -> float:
            started = time.perf_counter()
            cases[name]()
            return time.perf_counter() - started

        found[str(count)] = alternate(rounds, list(cases), seconds, warm_up=1, quiet=True)
    return found


@dataclass
class Training:
    """Hold what the gradients of a training's grains were like, step by step.

    Attributes
    ----------
    growths : list of float
        For each step and tensor, by how much its largest gradient of any grain grew since the step before.
    small : list of float
        For each looked-at step, the part of the elements below 2**-20 and below 2**-30 of their tensor's largest.
    errors : dict
        For each way, the errors of the elements of all looked-at steps.
    """

    growths: list[float]
    small: list[tuple[float, float]]
    errors: dict[str, list[np.ndarray]]

    def look(self, terms: np.ndarray, largest: float, margin: int) -> None:
        """Add the errors of one tensor, whose largest term was ``largest`` in the step before."""
        rows = terms[:, terms.any(axis=0)]
        if rows.size and np.abs(rows).max() < 2.0**margin * largest:
            for name, run in sums(rows, margin, largest).items():
                self.errors.setdefault(name, []).append(errors(rows, run()))

    def summary(self, margins: Sequence[int]) -> dict[str, Any]:
        """Return the figures that the report prints, as plain values."""
        return {
            "growth": self.growths,
            "repeated": {str(m): float(np.mean(np.array(self.growths) >= 2.0**m)) for m in margins},
            "small": np.mean(self.small, axis=0).tolist(),
            "errors": {
                name: [float(value) for value in np.quantile(np.concatenate(found), (0.5, 0.99, 0.9999, 1.0))]
                for name, found in self.errors.items()
            },
        }


def training(steps: int, margin: int) -> dict[str, Any]:
    """Train a small GPT on 16 grains, and add the gradients of every tenth step in all ways.

    The bound of a tensor is known from the step before, as it would be in a training.
    """
    import mpizero as mz

    gpt = mz.nn.GPT(dim=64, layers=2, heads=4, sequence=64)
    source = mz.data.TextSource("stdlib", sequence=64)
    found, before = Training([], [], {}), dict[str, float]()
    with (
        mz.ShardingConfig(comm="self", micro_batch=1) as config,
        mz.distribute(gpt, mz.AdamW(lr=1e-3), strategy="ddp", config=config) as model,
    ):
        for step, (x, y) in enumerate(mz.data.batches(source, model, global_batch=16, seed=0, steps=steps)):
            values = model.named_parameters()
            grains = [mz.nn.loss_and_gradients(gpt, values, (x[i : i + 1], y[i : i + 1]))[2] for i in range(len(x))]
            below = []
            for name in values:
                terms = np.stack([np.asarray(grain[name], np.float32).reshape(-1) for grain in grains])
                largest = float(np.abs(terms).max())
                if before.get(name):
                    found.growths.append(largest / before[name])
                    if step % 10 == 9:
                        found.look(terms, before[name], margin)
                        sizes = np.abs(terms).max(axis=0)
                        below.append((sizes.size, *((sizes < 2.0**-bits * largest).sum() for bits in (20, 30))))
                before[name] = largest
            if below:
                elements, twenty, thirty = np.sum(below, axis=0)
                found.small.append((twenty / elements, thirty / elements))
            model.train(x, y)
    return found.summary(MARGINS)


def allreduce(size: int, rounds: int) -> None:
    """Print the seconds of ``Allreduce`` of a row of each type in each round, as one rank of an MPI job."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rows = {name: WAYS[name].total(size) for name in ("in order", "int64", "float64", "bins")}
    into = {name: row.copy() for name, row in rows.items()}

    def seconds(name: str) -> float:
        world.Barrier()
        started = time.perf_counter()
        world.Allreduce(rows[name], into[name])
        return float(world.allreduce(time.perf_counter() - started, MPI.MAX))

    found = alternate(rounds, list(rows), seconds, warm_up=1, quiet=True)
    if world.rank == 0:
        print(json.dumps(found))


def arguments() -> argparse.Namespace:
    """Parse the command line, and return its options."""
    options = parser(__doc__, rounds=9, mpiexec=True, json=True)
    options.add_argument(
        "--size", type=float, default=4e6, help="elements of a row that is timed (default: %(default).0f)"
    )
    options.add_argument("--terms", type=int, nargs="+", default=[4, 16, 64], help="(default: 4 16 64)")
    options.add_argument("--margin", type=int, default=6, help="(default: %(default)s)")
    options.add_argument("--steps", type=int, default=200, help="of the training, third table (default: %(default)s)")
    options.add_argument("--ranks", type=int, default=0, help="of the fourth table (default: none)")
    args = options.parse_args()
    args.size = int(args.size)
    return args


def trained(found: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Format the table of the training."""
    growths = np.array(found["growth"])
    twenty, thirty = found["small"]
    lines = [
        f"gradients of a GPT, 16 grains, {args.steps} steps, margin {args.margin}; errors of 50 %, 99 %, 99.99 %, all"
    ]
    lines += [f"{name:16s}{', '.join(f'{e:.3g}' for e in values):>30s}" for name, values in found["errors"].items()]
    lines.append(f"elements below 2**-20 of their tensor's largest: {twenty:.2%}, below 2**-30: {thirty:.2%}")
    lines.append(
        f"growth of a tensor's largest gradient in a step: median {np.median(growths):.2f}, "
        f"99 % {np.quantile(growths, 0.99):.2f}, largest {growths.max():.2f}"
    )
    repeated = ", ".join(f"{margin}: {part:.3%}" for margin, part in found["repeated"].items())
    return [*lines, f"tensors in a step that reach their bound, by margin: {repeated}"]


def report(found: Mapping[str, Any], args: argparse.Namespace) -> str:
    """Format all tables."""
    names = [TREE, *WAYS]
    head = "".join(f"{name:>27s}" for name in names)
    lines = [f"largest error: all elements, largest, smallest (units of 2**-24; margin {args.margin})", ""]
    lines.append(f"{'terms, spread':16s}{head}")
    for count, spreads in found["errors"].items():
        for spread, values in spreads.items():
            cells = "".join(f"{', '.join(f'{e:.3g}' for e in values[name]):>27s}" for name in names)
            lines.append(f"{f'{count}, 2**{spread}':16s}{cells}")
    lines += ["", f"time of a sum of rows of {args.size:,} elements, over {TREE}", "", f"{'terms':16s}{head}"]
    for count, seconds in found["cost"].items():
        cells = "".join(f"{Measurement.of_ratios(seconds[name], seconds[TREE])!s:>27s}" for name in names)
        lines.append(f"{count:16s}{cells}")
    rows = "".join(f"{fold_plan(range(c), c, limit=0).rows:>27d}" for c in args.terms)
    lines += ["", f"float32 rows of {TREE} for {args.terms} terms, besides one block:{rows}"]
    lines.append("of the others: " + ", ".join(f"{name} {way.bytes // 4}" for name, way in WAYS.items()))
    lines += ["", *trained(found["training"], args)]
    if args.ranks:
        seconds = found["allreduce"]
        cells = ", ".join(
            f"{name} {Measurement.of_ratios(values, seconds['in order'])}" for name, values in seconds.items()
        )
        lines += ["", f"Allreduce of one row on {args.ranks} ranks, over float32: {cells}"]
    return "\n".join(lines)


def main() -> None:
    """Measure errors, times and growth, and print the tables or one JSON document."""
    args = arguments()
    if args.be:
        allreduce(args.size, args.rounds)
        return
    found: dict[str, Any] = {
        "errors": {str(count): accuracy(count, args.margin, 1 << 15) for count in args.terms},
        "cost": cost(args.terms, args.size, args.margin, args.rounds),
        "training": training(args.steps, args.margin),
    }
    if args.ranks:
        words = [__file__, "--be", "allreduce", "--size", str(args.size), "--rounds", str(args.rounds)]
        found["allreduce"] = result_of(args.mpiexec, args.ranks, *words)
    print(json.dumps(found) if args.json else report(found, args))


if __name__ == "__main__":
    main()
