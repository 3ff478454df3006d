"""Calls of every kernel: arguments are random, outputs filled with NaN; on CPUs, simulated GPUs and real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from tests.support import reference
from tests.support.reference.update import ROUND

Array = np.ndarray[Any, np.dtype[Any]]

#: Kernels that update parameters -> (number of arrays of their state, the scalars of some step).
UPDATES: dict[str, tuple[int, list[float]]] = {
    "sgd": (0, [0.1, 0.01]),
    "momentum": (1, [0.1, 0.01, 0.9, 0.8, 1.0, 0.9]),
    "adam": (2, [0.01, 0.9, 0.1, 0.999, 0.001, 0.05, 3.0, 1e-8]),
    "adamw": (2, [0.99, 0.9, 0.1, 0.999, 0.001, 0.05, 3.0, 1e-8]),
    "rmsprop": (1, [0.1, 0.01, 0.99, 0.01, 1e-8]),
    "lion": (1, [0.99, 0.1, 0.9, 0.1, 0.99, 0.01, 0.0]),
    "lamb_direction": (2, [0.01, 0.9, 0.1, 0.999, 0.001, 1.5, 3.0, 1e-6]),
    "lamb_apply": (0, [0.3]),
    "ema": (0, [0.3]),
}
#: Those that a kernel of its own also computes in one pass with the sum of a tree's rows.
IN_ONE_PASS = tuple(name for name in UPDATES if not name.startswith("lamb") and name != "ema")
_COPIES = "pack unpack scale split_columns join_columns gather scatter_add column_sums add_bias add_bias_residual"
_CASTS = "to_bfloat16 from_bfloat16 to_float16 from_float16"
_ORDERED = "tree_dots tree_square_sums add_two add_four add_eight all_finite first_nonfinite"
_DRAWN = "dropout fill_uniform permutation philox"
_UPDATED = "tree_sum round_bfloat16 int8_encode int8_decode top_encode top_decode"
#: Kernels that have the same bits on CPUs and in NumPy: they copy, count, or round in an order that is fixed.
EXACT = {
    *(f"layers.{name}" for name in f"{_COPIES} {_CASTS}".split()),
    *(f"reduction.{name}" for name in f"{_ORDERED} {_DRAWN}".split()),
    *(f"update.{name}" for name in _UPDATED.split()),
}


class Host(np.ndarray[Any, np.dtype[Any]]):
    """Hold an argument that is passed from the host's memory, as scalars of a step, ranges and programs are."""


@dataclass(frozen=True)
class Case:
    """Describe one call of a kernel.

    Attributes
    ----------
    kernel : str
        Module and name of the function, in the packages ``mpizero.kernels.cpu``, ``mpizero.kernels.cuda`` and
        ``tests.support.reference``.
    args : tuple
        Its arguments, on the host.
    wide : bool
        Whether the reference computes in float64; otherwise in the dtype of the arguments, on which results depend.
    tolerance : float
        The largest allowed error, relative to the largest value of the result, in units of the dtype's resolution.
    scratch : int
        Number of the array that means nothing afterwards; -1 if all do.
    """

    kernel: str
    args: tuple[Any, ...]
    wide: bool = True
    tolerance: float = 100.0
    scratch: int = -1

    def copies(self) -> list[Any]:
        """Return arguments of which nothing is shared with those of other calls."""
        return [value.view(np.ndarray).copy() if isinstance(value, np.ndarray) else value for value in self.args]

    def called(self, package: Any, args: list[Any]) -> Any:
        """Call the kernel of a package; return its result."""
        module, function = self.kernel.split(".")
        return getattr(import_module(f"{package.__name__}.{module}"), function)(*args)

    def error(self, run: Callable[[Case], tuple[Any, list[Any]]]) -> tuple[float, str]:
        """Return the largest error of a call in units of the allowed one, infinity if integers differ; and where it is.

        ``run`` makes the call; it returns its result and the arguments afterwards, on the host.
        """
        wanted = [
            value.astype(np.float64) if self.wide and getattr(value, "dtype", None) == np.float32 else value
            for value in self.copies()
        ]
        expected = self.called(reference, wanted)
        result, got = run(self)
        pairs = [pair for pair in zip(got, wanted, strict=True) if isinstance(pair[0], np.ndarray)]
        if self.scratch >= 0:
            del pairs[self.scratch]
        if expected is not None:
            pairs.append((np.asarray(result), np.asarray(expected)))
        largest = (0.0, "")
        for number, (have, want) in enumerate(pairs):
            if have.dtype.kind != "f":
                error = 0.0 if np.array_equal(have, want) else np.inf
            elif have.shape != want.shape or not np.array_equal(np.isfinite(have), np.isfinite(want)):
                error = np.inf
            else:
                finite = np.isfinite(want)
                allowed = self.tolerance * self._resolution() * max(1.0, float(np.abs(want[finite]).max(initial=0)))
                error = float(np.abs(have[finite].astype(np.float64) - want[finite]).max(initial=0)) / allowed
            largest = max(largest, (error, f", array {number}"))
        return largest

    def _resolution(self) -> float:
        """Return the resolution of the dtype in which a kernel computes: that of its first array of floats."""
        kinds = (value.dtype for value in self.args if isinstance(value, np.ndarray) and value.dtype.kind == "f")
        return float(np.finfo(next(kinds)).eps)


@dataclass
class Draw:
    """Draw arrays of one dtype; ``flat`` elements or ``rows`` x ``columns``.

    ``length`` is that of arrays whose NumPy form runs a loop of Python over all elements.
    """

    dtype: Any
    flat: int
    rows: int
    columns: int
    length: int
    rng: Any = field(default_factory=lambda: np.random.default_rng(0))

    def normal(self, *shape: int) -> Array:
        """Return normal random numbers."""
        return np.asarray(self.rng.standard_normal(shape).astype(self.dtype))

    def positive(self, *shape: int) -> Array:
        """Return random numbers above 0, as second moments are."""
        return np.abs(self.normal(*shape)) + self.dtype(0.01)

    def out(self, *shape: int, dtype: Any = None) -> Array:
        """Return an output, filled with NaN, or with 77 for integers."""
        kind = np.dtype(self.dtype if dtype is None else dtype)
        return np.full(shape, np.nan if kind.kind == "f" else 77, kind)

    def host(self, values: Any, dtype: Any = None) -> Host:
        """Return an argument that stays on the host; its dtype is that of the arrays unless it is given."""
        return np.array(values, self.dtype if dtype is None else dtype).view(Host)


def cases(d: Draw) -> Iterator[Case]:
    """Yield calls of all kernels."""
    for family in (_flat, _updates, _rows, _attention, _random, _copies):
        yield from family(d)
    if d.dtype is np.float32:
        yield from compression(d)


def _flat(d: Draw) -> Iterator[Case]:
    n, (rows, columns) = d.flat, (d.rows, d.columns)
    for name in ("gelu", "silu", "relu", "tanh"):
        yield Case(f"layers.{name}", (d.normal(n), d.out(n)))
        yield Case(f"layers.{name}_backward", (d.normal(n), d.normal(n), d.out(n)))
    x, bias = d.normal(rows, columns), d.normal(columns)
    yield Case("layers.add_bias", (x, bias, d.out(rows, columns)))
    yield Case("layers.add_bias_residual", (x, bias, d.normal(rows, columns), d.out(rows, columns)))
    yield Case("layers.bias_gelu", (x, bias, d.out(rows, columns), d.out(rows, columns)))
    yield Case("layers.column_sums", (x, d.out(columns)))
    one, other, scale = d.normal(n), d.normal(n), d.host([0.25])
    other[::3] = one[::3]
    losses = d.out(n, dtype=np.float64)
    yield Case("losses.absolute_error", (one, other, losses))
    yield Case("losses.absolute_error_backward", (one, other, scale, d.out(n)))
    yield Case("losses.huber", (one, other, d.host([0.5]), losses))
    yield Case("losses.huber_backward", (one, other, d.host([0.5]), scale, d.out(n)))
    target, weights = (d.normal(rows, columns) > 0).astype(d.dtype), d.positive(columns)
    losses, lowest, both = d.out(rows, columns, dtype=np.float64), d.host([-0.5]), d.normal(rows, 2 * columns)
    yield Case("losses.binary_cross_entropy", (x, target, weights, losses))
    yield Case("losses.binary_cross_entropy_backward", (x, target, weights, scale, d.out(rows, columns)))
    yield Case("losses.gaussian_likelihood", (both, x, lowest, losses))
    yield Case("losses.gaussian_likelihood_backward", (both, x, lowest, scale, d.out(rows, 2 * columns)))
    yield Case("losses.row_square_sums", (x, d.out(rows, dtype=np.float64)))
    yield Case("layers.scale", (d.normal(n), d.host([0.1])))
    starts, stops = d.host([0, n // 3, n], np.int64), d.host([n, n // 3, n], np.int64)
    yield Case("reduction.tree_square_sums", (one, starts, stops, d.host(np.zeros(3), np.float64)))
    yield Case("reduction.tree_dots", (one, other, starts, stops, d.host(np.zeros(3), np.float64)))
    long = d.normal(2, 300)  # sums of more than one level at every size
    bounds = d.host([5, 0], np.int64), d.host([299, 1], np.int64), d.host([0, 0], np.float64)
    yield Case("reduction.tree_dots", (*long, *bounds))
    yield Case("reduction.tree_square_sums", (long[0], *bounds))
    bad = one.copy()
    bad[n // 2 :] = np.inf
    for values in (one, bad):
        yield Case("reduction.all_finite", (values,))
        yield Case("reduction.first_nonfinite", (values,))
    for name, terms in (("add_two", 2), ("add_four", 4), ("add_eight", 8)):
        arrays = [d.normal(rows, columns + 3) for _ in range(terms)]
        yield Case(f"reduction.{name}", (*arrays, 2, d.out(rows, columns)))


#: A tree program over five rows: ((0 + 1) + (2 + 3)) + 4; and the same with sums that are rounded.
PROGRAM = [0, -3, 2, -5, -1, -6]
ROUNDS = [0, -3, ROUND, 2, -5, ROUND, -1, ROUND, -6, ROUND]


def _updates(d: Draw) -> Iterator[Case]:
    n = d.flat
    first, last = n // 3, n - n // 5
    program, divisor = d.host(PROGRAM, np.int32), d.host([3])
    rows_a, rows_b = d.normal(2, n + 2), d.normal(3, n + 5)
    yield Case("update.tree_sum", (rows_a, 1, rows_b, 3, program, divisor, d.normal(n), first, last))
    if d.dtype is np.float32:
        yield Case("update.round_bfloat16", (d.normal(n),), wide=False)
        rounds = d.host(ROUNDS, np.int32)
        yield Case("update.tree_sum", (rows_a, 1, rows_b, 3, rounds, divisor, d.normal(n), first, last), wide=False)
    rows = (d.normal(5, n + 2), 1, program, divisor)
    for name, (slots, scalars) in UPDATES.items():
        state, hyper = [d.positive(n) for _ in range(slots)], d.host(scalars)
        yield Case(f"update.{name}", (d.normal(n), d.normal(n), *state, hyper, first, last))
        if name in IN_ONE_PASS:
            yield Case(f"update.{name}_tree", (*rows, d.normal(n), *state, hyper, first, last))
    state, hyper = [d.positive(n), d.positive(n)], d.host(UPDATES["lamb_direction"][1])
    yield Case("update.lamb_direction_tree", (*rows, d.normal(n), d.normal(n), *state, hyper, first, last))
    yield Case("update.add_scaled", (d.normal(n), d.normal(n), d.host([0.3]), first, last))


def _rows(d: Draw) -> Iterator[Case]:
    rows, columns = d.rows, d.columns
    x, dy, gamma, beta = d.normal(rows, columns), d.normal(rows, columns), d.normal(columns), d.normal(columns)
    mean, rstd, eps, y = d.normal(rows), d.positive(rows), d.host([1e-2]), d.out(rows, columns)
    yield Case("layers.layernorm", (x, gamma, beta, eps, y, d.out(rows), d.out(rows)))
    for residual in (x[:0], d.normal(rows, columns)):
        sums = d.out(columns), d.out(columns)
        yield Case("layers.layernorm_backward", (dy, x, gamma, mean, rstd, residual, y, *sums))
    yield Case("layers.rmsnorm", (x, gamma, eps, y, d.out(rows)))
    yield Case("layers.rmsnorm_backward_input", (dy, x, gamma, rstd, y))
    yield Case("layers.rmsnorm_backward_weights", (dy, x, rstd, d.out(columns)))
    targets = d.rng.integers(-1, columns + 1, rows)
    losses, scale = d.out(rows, dtype=np.float64), d.host([0.5])
    yield Case("losses.softmax_cross_entropy", (x, targets, losses), tolerance=300)
    yield Case("losses.softmax_cross_entropy_backward", (x, targets, scale, y), tolerance=300)
    # a part of the classes, numbers 8 to 7 + columns
    shifted = np.where(targets < 0, -1, targets + 8)
    terms = np.abs(d.normal(2, 3, rows)) + d.dtype(1)
    merged = np.stack([d.normal(rows), d.positive(rows)])
    for part in (x, x[:, :0]):
        yield Case("losses.partial_cross_entropy", (part, shifted, 8, d.out(3, rows)), tolerance=300)
    yield Case("losses.merged_cross_entropy", (terms, shifted, d.out(2, rows), losses), tolerance=300)
    yield Case("losses.partial_cross_entropy_backward", (x, shifted, 8, merged, scale, y), tolerance=300)
    ids = d.rng.integers(0, columns, 2 * rows)
    ids[: min(2, rows)] = (-1, columns)[: min(2, rows)]  # of no row of the table
    yield Case("layers.gather", (d.normal(columns, 7), ids, d.out(2 * rows, 7)))
    yield Case("layers.scatter_add", (d.normal(2 * rows, 7), ids, d.normal(columns, 7)))


def _attention(d: Draw) -> Iterator[Case]:
    length, scale = min(d.rows, d.columns), d.host([0.7])
    for shape in ((3, length, length), (2, min(2, length), d.columns), (1, length + 1, length)):
        scores = 5 * d.normal(*shape)
        yield Case("attention.causal_softmax", (scores, scale))
        yield Case("attention.causal_softmax_backward", (np.abs(scores), d.normal(*shape), scale))
    samples, places = (3, length) if length else (0, 4)
    x, bias = d.normal(samples * places, 2 * 4 * 5), d.normal(2 * 4 * 5)
    for added in (bias, bias[:0]):
        yield Case("attention.split_heads", (x, added, 1, 2, np.zeros((2, samples + 2, 3, places, 5), d.dtype)))
    yield Case("attention.transposed_heads", (d.normal(2, 3, length, 4), d.out(2, 3, 4, length)))
    maxima, sums = d.normal(2, length + 1, 3), d.positive(2, length + 1, 3)
    for offset, keys in ((0, length), (length, length), (-1, length), (d.columns - length, d.columns)):
        shape = (2, 3, length, keys)
        before = np.where(np.arange(length + 1)[:, None] % 2, -np.inf, maxima).astype(d.dtype)  # some saw nothing yet
        total = np.where(np.isinf(before), 0, sums).astype(d.dtype)
        running = (d.normal(*shape), scale, offset, 1, before, total, d.out(2, 3, length))
        yield Case("attention.running_softmax", running)
        yield Case("attention.known_softmax", (d.normal(*shape), scale, offset, 1, maxima, sums))
        yield Case("attention.known_softmax_backward", (d.normal(*shape), d.normal(*shape), scale, offset, 1, sums))


def _random(d: Draw) -> Iterator[Case]:
    counter, key = np.arange(4, dtype=np.uint32), np.array([7, 8], np.uint32)
    yield Case("reduction.philox", (counter, key, d.out(4, dtype=np.uint32)))
    one, rate = d.host([1]), d.host([0.4])
    for start in (0, 3, 2**34 + 1):
        yield Case("reduction.fill_uniform", (1, 2**31, 3, start, d.out(d.flat), -one, one), wide=False)
        yield Case("reduction.fill_normal", (1, 2**31, 3, start, d.out(d.flat), one), wide=False)
    x = d.normal(3 * d.columns)
    window = (d.columns, 0, d.columns, 1, 0, 0)
    yield Case("reduction.dropout", (x, d.out(x.size), rate, 1, 2, 3, 10, *window), wide=False)
    yield Case("reduction.dropout", (d.normal(24), d.out(24), rate, 1, 2, 3, 10, 12, 2, 3, 2, 4, 17), wide=False)
    yield Case("reduction.permutation", (np.arange(-1, d.length + 1), d.length, 2**40, 6))


def _copies(d: Draw) -> Iterator[Case]:
    starts, sizes = d.host([9, 2, 4], np.int64), d.host([3, 0, 4], np.int64)
    for name in ("pack", "unpack"):
        yield Case(f"layers.{name}", (d.normal(12), starts, sizes, d.normal(12)))
    ranges = d.host([[0, 1, 8, 3], [1, 2, 0, 2], [3, 2, 9, 3]], np.int64)
    yield Case("layers.split_columns", (d.normal(3, 5), ranges, np.zeros(17, d.dtype)))
    yield Case("layers.join_columns", (d.normal(17), ranges, d.normal(3, 5)))
    if d.dtype is np.float32:
        bits = d.rng.integers(0, 2**16, d.flat).astype(np.uint16)
        bits[bits & 0x7C00 == 0x7C00] = 0  # neither NaN nor infinite in float16; bfloat16 has its own test of NaN
        for name in ("bfloat16", "float16"):
            x = np.ldexp(d.normal(d.flat), d.rng.integers(-26, 18, d.flat)).astype(np.float32)
            yield Case(f"layers.to_{name}", (x, d.out(d.flat, dtype=np.uint16)), wide=False)
            yield Case(f"layers.from_{name}", (bits & 0x7BFF, d.out(d.flat)), wide=False)


def compression(d: Draw) -> Iterator[Case]:
    """Yield calls of the kernels that compress messages."""
    from mpizero.kernels.cpu import update

    n = d.flat
    x, residual, blocks = d.normal(n), d.normal(n), -(-n // update.COMPRESSION_BLOCK)
    x[n // 2 : n // 2 + 9], residual[n // 2 : n // 2 + 9] = 1.5, 0  # equal magnitudes
    encoded = d.out(blocks), d.out(n, dtype=np.int8)
    yield Case("update.int8_encode", (x, residual, *encoded), wide=False)
    codes = d.rng.integers(-127, 128, n).astype(np.int8)
    yield Case("update.int8_decode", (d.positive(blocks), codes, d.out(n)), wide=False)
    count = min(n, max(1, n // 7))
    picked = d.out(count, dtype=np.int32), d.out(count)
    counters = np.zeros(update.COUNTERS, np.int64)
    yield Case("update.top_encode", (x, residual, counters, *picked), wide=False, scratch=2)
    places = np.sort(d.rng.choice(n, count, replace=False)).astype(np.int32)
    yield Case("update.top_decode", (places, d.normal(count), d.out(n)), wide=False)
