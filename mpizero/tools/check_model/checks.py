"""Check one model, on one rank, or on all ranks of a communicator, and compare the ranks.

:func:`check_model` runs all checks, which are, in the order of this file:

- the model returns the same values every time, wherever its parameters lie in memory (:func:`check_repeats`);
- layers overwrite gradients, and their ``backward`` computes the same as its two halves (:func:`check_layers`);
- the gradient agrees with finite differences of the loss along directions (:func:`check_gradient`, which also finds
  the parameters whose gradient is wrong, and the probable cause);
- loss, gradients and weight of a batch are the sums of the values of its pieces (:func:`check_sums`);
- predictions are the same every time, and no sample's prediction depends on other samples (:func:`check_prediction`).

[Note: slopes] The difference (f(p + h d) - f(p - h d)) / 2h of the loss f, with parameters p, direction d and step h,
differs from the derivative by truncation, which falls with h, and by rounding, which grows as h falls. Neither is known
beforehand, so both are estimated: truncation by how much the difference changes from one h to the next, rounding by
second differences of the loss over steps so small that rounding dominates them. The h with the smallest sum of both
errors decides, with one exception: a loss may be steep at one point and flat around it. So a disagreement at this h
does not count if, at a smaller h, the disagreement and the rounding together are at most half as large. The gradient is
called wrong only if it is wrong by several times the error at three points, because a kink (of ReLU, of a maximum) is
near one of them at most. All parameters are first changed together. This shows that the gradient is right for every
parameter whose term in the slope is much larger than the uncertainty. The other parameters are then changed one by one.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.numbers import Rounding, largest
from mpizero._util.pytree import leaves_of
from mpizero.adapters.user_code import shared_generators
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.errors import ConfigError, DataError, ModelCheckError, MpizeroError
from mpizero.sharding import ShardingConfig
from mpizero.sharding.model import Model
from mpizero.tools.check_model.model import (
    CheckedBlocks,
    CheckedModel,
    LossAndGradients,
    ModelFinding,
    ModelReport,
    Named,
    UnusableEvaluation,
    checked_model,
    content,
    cut,
    in_pairs,
    origin_of,
    raising_line,
    sample_count,
)
from mpizero.types import Array


class CheckBatch(NamedTuple):
    """Hold the batch on which a model is checked.

    ``samples`` is the number of samples in it, None if the batch cannot be cut into samples.
    """

    x: Any
    y: Any
    samples: int | None


def unlike(actual: LossAndGradients, expected: LossAndGradients) -> Iterator[tuple[str, str]]:
    """Yield the name of each value whose bits differ between two evaluations, and a text with both numbers.

    For an array the text shows the element that differs most.
    """
    for (what, a), (_, b) in zip(actual.named(), expected.named(), strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            yield what, f"{b.dtype} of shape {b.shape}, then {a.dtype} of shape {a.shape}"
        elif a.tobytes() != b.tobytes():
            worst = np.unravel_index(int(np.argmax(np.abs(a - b))), a.shape) if a.size else ()
            position = f" at {[int(i) for i in worst]}" if worst else ""
            yield what, f"{b[worst]!s}{position}, then {a[worst]!s}"


def random_states() -> dict[str, bytes]:
    """Return the state of every global random number generator of this process."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "random"):
        return shared_generators()
    return shared_generators() | {"torch.random": torch.random.get_rng_state().numpy().tobytes()}


def check_again(checked: CheckedModel, batch: CheckBatch, start: Named, begun: LossAndGradients) -> list[ModelFinding]:
    """Evaluate the model at the start values ``start`` again, and compare with the first evaluation ``begun``."""
    drawn = random_states()
    again = checked.evaluate(start, *batch[:2])
    used = sorted(name for name, value in random_states().items() if value != drawn[name])
    when = "evaluated twice" if checked.evaluations == 2 else f"evaluated first, and after {checked.evaluations} others"
    return _differ(again, begun, when, _of_noise(used))


def check_repeats(
    checked: CheckedModel, batch: CheckBatch, params: Named, other_params: tuple[Named, Named]
) -> tuple[LossAndGradients, list[ModelFinding]]:
    """Evaluate the model at several points in turn, in the same and in new memory, and compare repeated evaluations.

    ``params`` and ``other_params`` are the parameters at these points. Return the evaluation at ``params``, and a
    finding for each value that is not the same every time.
    """
    x, y, _ = batch
    before = content((x, y))
    first = checked.evaluate(params, x, y)
    if content((x, y)) != before:
        remedy = "copy what is changed, x = x.copy(), also before its address is given away"
        cause = "code that works in place through a bare pointer"
        raise UnusableEvaluation(ModelFinding("repeats", "samples", "are changed by the evaluation", cause, remedy))
    second, third = other_params
    other = checked.evaluate(second, x, y)
    checked.evaluate(third, x, y)
    remedy = "compute everything from the arguments, each time"
    cause = "a value that is kept from call to call, such as a counter, a running mean or a warm start"
    if findings := _differ(checked.evaluate(params, x, y), first, "evaluated elsewhere in between", (cause, remedy)):
        return first, findings
    cause = "a cache that goes by the identity of the arrays: training changes their values in place"
    findings = _differ(
        checked.evaluate(second, x, y, fresh=True), other, "given the same in other arrays", (cause, remedy)
    )
    return first, findings


def _of_noise(used: list[str]) -> tuple[str, str]:
    if used:
        remedy = "key them by what they are for: numpy.random.default_rng((seed, step, number of the sample))"
        return f"random numbers from the global generator {', '.join(used)}", remedy
    cause = "random numbers of its own, a counter, or threads that add in no fixed order"
    return cause, "compute everything from the arguments, and random numbers from a key"


def _differ(again: LossAndGradients, expected: LossAndGradients, when: str, why: tuple[str, str]) -> list[ModelFinding]:
    return [ModelFinding("repeats", what, f"{when}: {how}", *why) for what, how in unlike(again, expected)][:3]


def check_layers(checked: CheckedBlocks, batch: CheckBatch, params: Named) -> list[ModelFinding]:
    """Check that layers overwrite gradients, and that ``backward`` computes the same as its two halves.

    The halves are ``backward_input`` and ``backward_weights``. Both halves run with a loss scale of 2, so that a loss
    that ignores its scale is found, too. ``params`` has the values of the parameters by name.
    """
    one = checked.passed(params, batch[:2])[2]
    two = checked.passed(params, batch[:2], fill=1.0)[2]
    remedy = "write all of it, grads[name][...] = array, rows that are not used too"
    findings = []
    for name in one:
        if one[name].tobytes() != two[name].tobytes():
            stale = not one[name].any()
            problem = "is what its memory held before" if stale else "depends on what its memory held before"
            cause = "grads[...] = array, which binds a name, or no write at all" if stale else "grads[...] += array"
            findings.append(ModelFinding("layers", f"gradient of {name!r}", problem, cause, remedy))
    if findings:
        return findings
    halves = checked.passed(params, batch[:2], halves=True)[2]
    problem = "is not the same from backward and from backward_input with backward_weights under twice the loss scale"
    cause = "a backward of its own that differs from its halves, or loss.backward(cache, scale) without the scale"
    remedy = "let backward call both halves; multiply the gradient by scale"
    wrong = [name for name in one if not _equal(halves[name], one[name])]
    findings = [ModelFinding("layers", f"gradient of {name!r}", problem, cause, remedy) for name in wrong]
    every = len(findings) > 1 and len(findings) == sum(value.any() for value in one.values())
    return findings[:1] if every else findings


def _equal(actual: Array, expected: Array) -> bool:
    """Tell whether arrays are equal, except for values so tiny that they underflow without the loss scale of 2."""
    tiny = 4 * np.finfo(expected.dtype).smallest_normal
    return bool((np.abs(actual - expected) <= np.where(np.abs(expected) < tiny, tiny, 0)).all())


#: Relative errors below which a gradient is not called wrong: in float64, and in float32.
PRECISION = (1e-4, 2e-3)
#: Largest uncertainty, relative to the slope, at which a slope counts as measured.
MEASURED = 0.05
#: A difference counts only if it is this many times the uncertainty.
SURE = 4.0

Direction = Mapping[str, Array]


class Slope(NamedTuple):
    """Hold the derivative of the loss along one direction, computed in two ways.

    Attributes
    ----------
    numerical, analytical : float
        The derivative from finite differences of the loss, and from the gradient that the model returned.
    parts : dict of str to float
        For each parameter, its term in the sum ``analytical``.
    bound : float
        How much ``numerical`` and ``analytical`` may differ by truncation and rounding.
    rounding : float
        How much ``numerical`` and ``analytical`` may differ by rounding alone.
    """

    numerical: float
    analytical: float
    parts: dict[str, float]
    bound: float
    rounding: float

    @property
    def off(self) -> float:
        """Return the distance between the numerical and the analytical slope."""
        return abs(self.numerical - self.analytical)


class ParameterPoint:
    """Evaluate loss and gradient at the parameters ``at``, and finite differences of the loss around them.

    ``scales`` has the size by which each parameter is changed, ``rng`` draws random directions.
    """

    def __init__(
        self, checked: CheckedModel, batch: CheckBatch, at: Named, scales: Mapping[str, float], rng: np.random.Generator
    ) -> None:
        self.checked, self.batch, self.at, self.scales, self.rng = checked, batch, at, scales, rng
        self.evaluation: LossAndGradients = checked.evaluate(at, batch.x, batch.y)
        gradients = self.evaluation.gradients.values()
        # As a float: NumPy would compare in float32.
        self._coarse = float(np.float32(self.evaluation.loss)) == self.evaluation.loss
        coarse = self._coarse or checked.dtype == np.float32 or all((np.float32(g) == g).all() for g in gradients)
        self.precision = PRECISION[int(coarse)]

    def loss(self, move: Direction, h: float) -> tuple[float, dict[str, Array]]:
        """Return the loss (NaN if the model raises) at parameters + ``h`` * ``move``, and the changed parameters."""
        there = dict(self.at)
        for name, direction in move.items():
            there[name] = (self.at[name] + h * direction).astype(self.checked.dtype)
        try:
            return self.checked.loss(there, self.batch.x, self.batch.y), there
        except Exception:  # noqa: BLE001 - the model may be defined at its start values, but not here
            return math.nan, there

    @cached_property
    def noise(self) -> float:
        """The size of rounding errors in the loss."""
        h = 64 * float(np.finfo(self.checked.dtype).eps) if self.checked.dtype == np.float32 else 1e-7
        sizes = [float(np.finfo(np.float32 if self._coarse else np.float64).eps) * abs(self.evaluation.loss)]
        for _ in range(3):
            move = dense(self, self.scales)
            second = self.loss(move, h)[0] + self.loss(move, -h)[0] - 2 * self.evaluation.loss
            sizes += [abs(second)] if math.isfinite(second) else []
        return max(sizes)

    @cached_property
    def shaken(self) -> dict[str, Array]:
        """The change of each parameter's gradient when the last bits of the parameters change."""
        moved = shaken(self.at, self.rng)
        gradients = self.checked.evaluate(moved, self.batch.x, self.batch.y).gradients
        return {name: gradients[name].astype(np.float64) - value for name, value in self.evaluation.gradients.items()}

    def slope(self, move: Direction, enough: float = 0.0) -> Slope | None:
        """Measure the derivative along the direction ``move``; None if the loss cannot be evaluated around this point.

        The search for the best step ends early at a step whose relative uncertainty is at most ``enough``, if the
        gradient agrees with the slope there.
        """
        noise, h, tried = self.noise, 1.0, list[Slope]()
        for _ in range(15):
            (up, above), (down, below) = self.loss(move, h), self.loss(move, -h)
            moved = {name: (above[name].astype(np.float64) - below[name]) / (2 * h) for name in move}
            parts = {name: float(np.sum(self.evaluation.gradients[name] * moved[name])) for name in move}
            shaken = math.fsum(float(np.sum(self.shaken[name] * moved[name])) for name in move)
            numerical, analytical = (up - down) / (2 * h), math.fsum(parts.values())
            rounding = 3 * noise / h + 3 * abs(shaken)
            change = abs(numerical - analytical - (tried[-1].numerical - tried[-1].analytical)) if tried else math.inf
            tried.append(Slope(numerical, analytical, parts, change / 2 + rounding, rounding))
            best = min(tried, key=lambda slope: slope.bound if math.isfinite(slope.bound) else math.inf)
            if best.bound <= enough * abs(best.numerical) and best.off <= self.precision * abs(best.numerical):
                return best
            if rounding > best.bound and SURE * rounding > best.off / 4:
                break
            h /= 4
        if not math.isfinite(best.bound):
            return None
        nearer = [s for s in tried[tried.index(best) :] if s.off + s.rounding <= best.off / 2]
        return best._replace(bound=max(best.bound, best.off / SURE)) if nearer else best

    def shows_right(self) -> bool:
        """Return False if the gradient disagrees with the slope along the gradient's own direction, else True."""
        names = [name for name in self.checked.names if self.at[name].size]
        return self.verdict(self.slope(steep(self, names))) is not False

    def verdict(self, slope: Slope | None) -> bool | None:
        """Tell whether the gradient is right along the direction of ``slope``; None if the slope is too uncertain."""
        if slope is None:
            return None
        size = max(abs(slope.numerical), abs(slope.analytical))
        if slope.off > max(SURE * slope.bound, self.precision * size):
            return False if slope.bound <= MEASURED * size or slope.off > 0.3 * size else None
        return True if slope.bound <= MEASURED * size or size == 0 else None


def dense(point: ParameterPoint, names: Iterable[str]) -> dict[str, Array]:
    """Return a random direction in which every element of the named parameters changes."""
    return {n: point.rng.standard_normal(point.at[n].shape) * point.scales[n] for n in names}


def steep(point: ParameterPoint, names: Sequence[str]) -> dict[str, Array]:
    """Return a direction along the gradient of each named parameter, with a random sign for each parameter."""
    moves = {}
    for name in names:
        g = point.evaluation.gradients[name].astype(np.float64)
        size = math.sqrt(float(np.mean(g**2))) if g.size else 0.0
        toward = g / size if size > 0 and math.isfinite(size) else point.rng.standard_normal(g.shape)
        moves[name] = toward * (point.scales[name] * point.rng.choice([-1.0, 1.0]))
    return moves


def scales_of(checked: CheckedModel, at: Named, evaluation: LossAndGradients) -> dict[str, float]:
    """Return, for every trainable parameter, by how much checks change it: the root mean square of its elements.

    For a parameter that is all zeros, the size is chosen so that the loss changes by about a tenth, within limits.
    """
    sizes = {name: max(1, at[name].size) for name in checked.names}
    scales = {name: math.sqrt(float(np.sum(np.square(at[name], dtype=np.float64))) / n) for name, n in sizes.items()}
    most = max([size for size in scales.values() if size > 0], default=0.1)
    for name, size in scales.items():
        if size == 0:
            g = evaluation.gradients[name].astype(np.float64)
            push = float(np.linalg.norm(g)) * math.sqrt(g.size)
            scales[name] = min(max(0.1 * abs(evaluation.loss) / push, 1e-3 * most), most) if push > 0 else most
    return scales


def shaken(at: Named, rng: np.random.Generator) -> dict[str, Array]:
    """Return parameters that differ from those in ``at`` by random changes of the last bit."""
    return {n: (v * (1 + np.finfo(v.dtype).eps * rng.integers(-1, 2, v.shape))).astype(v.dtype) for n, v in at.items()}


class WrongGradient(NamedTuple):
    """Hold the name of a parameter whose gradient is wrong, and the evidence.

    ``moves`` are directions in which the parameter was changed, and ``slopes`` the derivatives of the loss along them.
    """

    name: str
    slopes: list[Slope]
    moves: list[Array]

    @property
    def ratio(self) -> float | None:
        """Return the factor by which to multiply the gradient, if one factor makes all slopes right; else None."""
        ratios = [s.numerical / s.analytical for s in self.slopes if s.analytical]
        if len(ratios) < len(self.slopes):
            return None
        apart = SURE * max(s.bound / abs(s.analytical) for s in self.slopes)
        allowed = 0.01 * min(abs(ratios[0]), abs(ratios[0] - 1)) + apart
        sure = max(ratios) - min(ratios) <= allowed and apart <= abs(ratios[0] - 1) / 2
        return ratios[0] if sure else None


def check_gradient(points: Callable[[int], ParameterPoint]) -> tuple[list[ModelFinding], str, list[str]]:
    """Compare the gradient with finite differences of the loss at up to three points.

    ``points(k)`` returns the point with number ``k``, from 0 to 2. Return the findings, a line that says how many
    parameters agree, and notes.
    """
    point = points(0)
    names = [name for name in point.checked.names if point.at[name].size]
    wrong, weak = [], []
    for name in _not_proven_right(point, names):
        verdicts = _alone(point, name)
        if verdicts is None:
            weak.append(name)
        elif not verdicts and all(_alone(points(k), name) is False for k in (1, 2)):
            moves = [direction(point, [name]) for direction in (dense, dense, steep)]
            measured = [(slope, move[name]) for move in moves if (slope := point.slope(move)) is not None]
            wrong.append(WrongGradient(name, [s for s, _ in measured], [m for _, m in measured]))
    notes, doubtful = [], {*weak, *(w.name for w in wrong)}
    if silent := [name for name in names if name not in doubtful and not point.evaluation.gradients[name].any()]:
        notes.append(f"gradient: zero everywhere for {_listed(silent)}: nothing depends on it with these samples")
    if weak:
        notes.append(f"gradient: rounding hides what {_listed(weak)} changes in the loss, so it was not compared")
    line = f"gradient: {len(names) - len(weak)} of {len(names)} parameters agree with differences of the loss"
    if isinstance(point.checked, CheckedBlocks):
        return _from_the_last(point.checked, _explained(point, wrong[::-1], len(names)), wrong), line, notes
    return _explained(point, wrong, len(names)), line, notes


def _from_the_last(
    checked: CheckedBlocks, findings: list[ModelFinding], wrong: Sequence[WrongGradient]
) -> list[ModelFinding]:
    """Return ``findings`` about a model of blocks; the first one also says in which block to look for the error first.

    A block gets the gradient of its output from the next block, so an error in one block shows in all blocks before it.
    """
    blocks = list(checked.model.blocks)
    positions = [max(k for k, block in enumerate(blocks) if w.name.startswith(f"{block}.")) for w in wrong]
    if len(set(positions)) < 2:
        return findings
    last = max(positions)
    begin = f"begin with the backward pass of {blocks[last]!r}, through which the blocks before it get their gradients"
    if last + 1 < len(blocks):
        begin += f", and with backward_input of {blocks[last + 1]!r}, whose own gradients are right"
    return [replace(findings[0], remedy=f"{findings[0].remedy}; {begin}"), *findings[1:]]


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(repr(name) for name in names[:8])
    return listed if len(names) <= 8 else f"{listed} and {len(names) - 8} more"


def _not_proven_right(point: ParameterPoint, names: Sequence[str]) -> list[str]:
    """Compare slopes along directions that change all parameters; return the parameters not proven right by that."""
    slopes = [point.slope(direction(point, names), enough=1e-5) for direction in (steep, dense, dense)]
    if any(slope is None or point.verdict(slope) is False for slope in slopes):
        return list(names)
    along, across = (max(s.off + SURE * s.bound for s in some if s) for some in (slopes[:1], slopes[1:]))
    left = []
    for name, part in slopes[0].parts.items() if slopes[0] else ():
        usual = abs(part) / math.sqrt(point.at[name].size)  # of a direction that is not the gradient's own
        if not (along <= 0.01 * abs(part) and across <= 0.3 * usual):
            left.append(name)
    return left


def _alone(point: ParameterPoint, name: str) -> bool | None:
    """Change one parameter alone, and tell whether its gradient is right; None if rounding hides the change."""
    verdicts = [point.verdict(point.slope(d(point, [name]), enough=1e-6)) for d in (dense, steep)]
    return False if False in verdicts else None if None in verdicts else True


def _explained(point: ParameterPoint, wrong: Sequence[WrongGradient], count: int) -> list[ModelFinding]:
    """Return one finding for each wrong gradient; one finding for all if all are wrong by the same factor.

    ``count`` is the number of all parameters that were compared.
    """
    ratios = [w.ratio for w in wrong]
    if len(wrong) == count > 1 and None not in ratios:
        values = [ratio for ratio in ratios if ratio is not None]
        if max(values) - min(values) <= 0.01 * abs(values[0]):
            return [_gradient_finding(point, wrong[0], f"gradients of all {count} parameters")]
    return [_gradient_finding(point, w, f"gradient of {w.name!r}") for w in wrong]


def _gradient_finding(point: ParameterPoint, wrong: WrongGradient, what: str) -> ModelFinding:
    slope = max(wrong.slopes, key=lambda s: s.off / (abs(s.numerical) + abs(s.analytical)))
    problem = f"the loss changes by {slope.numerical:.6g}, the gradient says {slope.analytical:.6g}"
    cause = _gradient_cause(point, wrong)
    return ModelFinding("gradient", what, f"along a direction of {wrong.name!r} {problem}", *cause)


def _gradient_cause(point: ParameterPoint, wrong: WrongGradient) -> tuple[str, str]:
    gradient = point.evaluation.gradients[wrong.name]
    if not gradient.any():
        return "a gradient that is not computed, zeros in its place", "compute it, or name the parameter in frozen="
    if (ratio := wrong.ratio) is not None:
        return _of_factor(point, ratio)
    for other, value in point.evaluation.gradients.items():
        if other != wrong.name and value.shape == gradient.shape and _fits(wrong, value):
            return f"the gradient of {other!r} under this name", "give each parameter its own"
    if gradient.ndim == 2 and gradient.shape[0] == gradient.shape[1] and _fits(wrong, gradient.T):
        return "its transpose", "transpose it"
    if point.checked.declared[wrong.name].complex and _fits(wrong, gradient * [1, -1]):
        return "its conjugate, which JAX returns", "return gradient.conj(): dL/dRe + i dL/dIm"
    index = _worst(point, wrong)
    return (
        f"a part of it, most of all around element {index}",
        "compare the formula of these elements with differences",
    )


def _of_factor(point: ParameterPoint, ratio: float) -> tuple[str, str]:
    samples, weight = point.batch.samples or 0, point.evaluation.weight
    for count, name in ((samples, "samples"), (weight, "weight")):
        if count > 2 and math.isclose(ratio, count, rel_tol=0.01):
            return f"the mean over the {name} beside a loss that is their sum", f"multiply it by {count:g}, the {name}"
        if count > 2 and math.isclose(ratio, 1 / count, rel_tol=0.01):
            return f"the sum over the {name} beside a loss that is their mean", "return the sum of the losses, too"
    if math.isclose(ratio, -1, rel_tol=0.01):
        return "its sign", "turn it around"
    return f"a factor: it is {1 / ratio:.4g} times what it must be", f"multiply it by {ratio:.4g}"


def _fits(wrong: WrongGradient, value: Array) -> bool:
    """Tell whether ``value``, taken as the gradient of the parameter, agrees with all measured slopes."""
    analytical = [float(np.sum(value * move)) for move in wrong.moves]
    return all(
        abs(s.numerical - v) <= SURE * s.bound + 0.01 * abs(s.numerical)
        for s, v in zip(wrong.slopes, analytical, strict=True)
    )


def _worst(point: ParameterPoint, wrong: WrongGradient) -> list[int]:
    """Search by halving for the element around which the gradient is most wrong, and return its index."""
    shape = point.at[wrong.name].shape
    flat = point.rng.choice([-1.0, 1.0], math.prod(shape)) * point.scales[wrong.name]
    low, high = 0, flat.size
    while high - low > 1:
        middle, off = (low + high) // 2, []
        for a, b in ((low, middle), (middle, high)):
            move = np.zeros(flat.size)
            move[a:b] = flat[a:b]
            slope = point.slope({wrong.name: move.reshape(shape)}, enough=1e-3)
            off.append(0.0 if slope is None else max(0.0, slope.off - slope.bound))
        low, high = (low, middle) if off[0] >= off[1] else (middle, high)
    return [int(i) for i in np.unravel_index(low, shape)]


#: How much sums may differ, as a multiple of the change that other last bits of the parameters cause.
OF_NOISE = 64.0


class BatchSums:
    """Hold loss, weight and gradients of a batch and of its pieces, as float64 arrays by name.

    ``counts`` has the number of samples in each piece.
    """

    def __init__(self, full: LossAndGradients, pieces: list[LossAndGradients], counts: list[int]) -> None:
        self.full, self.counts = _flat(full), counts
        self.pieces = [_flat(piece) for piece in pieces]

    def total(self, what: str, count: int | None = None) -> Array:
        """Return the sum of the quantity named ``what`` over the first ``count`` pieces; over all pieces for None."""
        total: Array = np.sum([piece[what] for piece in self.pieces[:count]], axis=0)
        return total

    def size(self, what: str) -> float:
        """Return the largest magnitude of the quantity named ``what`` in the batch and in its pieces."""
        return max(largest(v[what]) for v in (self.full, *self.pieces))


def _flat(evaluation: LossAndGradients) -> dict[str, Array]:
    values = {"loss": np.array([evaluation.loss]), "weight": np.array([evaluation.weight])}
    return values | {f"gradient of {n!r}": g.astype(np.float64).reshape(-1) for n, g in evaluation.gradients.items()}


def check_sums(
    checked: CheckedModel,
    batch: CheckBatch,
    params: Named,
    full: LossAndGradients,
    noise: Callable[[], list[LossAndGradients]],
) -> tuple[list[ModelFinding], str]:
    """Compare values of a batch with sums over its pieces: one sample, a third of the others, and the remaining ones.

    ``params`` has the values of the parameters by name, and ``full`` is the evaluation of the batch at them. ``noise``
    returns evaluations of the batch at parameters whose last bits are different. Return the findings, and a line that
    says how well the sums agree.
    """
    count = batch.samples or 0
    borders = sorted({0, 1, 1 + (count - 1) // 3 or 1, count})
    spans = list(zip(borders, borders[1:], strict=False))
    try:
        pieces = [checked.evaluate(params, cut(batch.x, a, b), cut(batch.y, a, b), a) for a, b in spans]
        joined = checked.evaluate(params, cut(batch.x, 0, borders[-2]), cut(batch.y, 0, borders[-2]))
    except (ValueError, TypeError, IndexError, RuntimeError, ArithmeticError) as error:
        remedy = "let it take any number of samples, one too: a step's last piece may be short"
        problem = f"{type(error).__name__} at {raising_line(error)}: {error}"
        return [
            ModelFinding("sum", "a piece of the batch", problem, "a number of samples that is built in", remedy)
        ], ""
    sums = BatchSums(full, pieces, [b - a for a, b in spans])
    scatter = [_flat(evaluation) for evaluation in noise()]
    findings, most = [], 0.0
    for what, values in sums.full.items():
        size, apart = sums.size(what), largest(sums.total(what) - values)
        shaken = max((largest(s[what] - values) for s in scatter), default=0.0)
        allowed = _rounding(checked, full, count).of_sums * size + OF_NOISE * shaken
        if not apart <= allowed:
            findings.append(_sums_finding(what, sums, _flat(joined)))
        most = max(most, apart / size if size else 0.0)
    sizes = " + ".join(map(str, sums.counts))
    return findings, f"sums: {count} samples as {sizes}, apart by {most:.1e} at most"


def _rounding(checked: CheckedModel, full: LossAndGradients, count: int) -> Rounding:
    coarse = checked.dtype == np.float32 or float(np.float32(full.loss)) == full.loss
    terms = float(max([count, *(side for g in full.gradients.values() for side in g.shape)]))
    return Rounding("float32" if coarse else "float64", terms)


def _sums_finding(what: str, sums: BatchSums, joined: dict[str, Array]) -> ModelFinding:
    total, full = sums.total(what), sums.full[what]
    at = int(np.argmax(np.abs(total - full)))
    position = f" (element {at})" if total.size > 1 else ""
    sizes = " + ".join(map(str, sums.counts))
    problem = f"{full[at]:.6g} for {sum(sums.counts)} samples, {total[at]:.6g} for {sizes} of them{position}"
    return ModelFinding("sum", what, problem, *_sums_cause(what, sums, joined))


def _sums_cause(what: str, sums: BatchSums, joined: dict[str, Array]) -> tuple[str, str]:
    full, counts = sums.full[what], np.array(sums.counts, np.float64)
    near = 1e-3 * sums.size(what)
    means = np.sum([c * p[what] for c, p in zip(counts, sums.pieces, strict=True)], axis=0) / counts.sum()
    constant = all(largest(p[what] - full) <= near for p in sums.pieces)
    if what == "weight":
        hint = "return how much the batch weighs, float(len(x)) for a mean over samples"
        return ("a weight that does not grow with the batch" if constant else "a weight that is no sum"), hint
    if largest(means - full) <= near and not constant:
        return "a mean over the samples", "return the sum over the samples, and float(len(x)) as the weight"
    weights = np.array([p["weight"][0] for p in sums.pieces])
    by_weight = np.sum([w * p[what] for w, p in zip(weights, sums.pieces, strict=True)], axis=0)
    if largest(by_weight / (weights.sum() or 1.0) - full) <= near and not constant:
        return "a mean by weight", "return the weighted sum, and the sum of the weights as the weight"
    extra = sums.total(what) - full  # a term that each call adds is in it once for each piece but one
    first = sums.total(what, len(counts) - 1) - joined[what]
    if len(counts) > 2 and np.abs(extra * (len(counts) - 2) - first * (len(counts) - 1)).max() <= near:
        hint = "multiply it, and its gradient, by the weight of the batch, such as len(x)"
        return "a term that is added once a call, such as a penalty on the parameters", hint
    hint = "compute each sample by itself, from its own numbers"
    return (
        "statistics of the batch, in which samples see each other, or random numbers not keyed by run.samples",
        hint,
    )


def check_prediction(checked: CheckedModel, batch: CheckBatch, params: Named) -> tuple[list[ModelFinding], str]:
    """Predict a batch twice as a whole and once in pieces, and compare the predictions.

    ``params`` has the values of the parameters by name. Return the findings, and a line that says what was measured.
    The line is "" after a finding, or if the model has no ``predict``.
    """
    try:
        full = checked.predict(params, batch.x)
    except NotImplementedError:
        return [], ""
    except (ValueError, TypeError, IndexError, RuntimeError, ArithmeticError, AttributeError) as error:
        problem = f"{type(error).__name__} at {raising_line(error)}: {error}"
        cause = "predict(parameters, x) that takes something else"
        return _wrong_prediction(problem, cause, "let it take named arrays and x")
    if content(checked.predict(params, batch.x)) != content(full):
        remedy = "leave random numbers out of it"
        return _wrong_prediction("differs from call to call", "dropout or noise in it", remedy)
    if batch.samples is None or not _one_each(full, batch.samples):
        return [], "prediction: the same every time"
    apart, middle = 0.0, max(1, batch.samples // 3)
    for start, stop in ((0, middle), (middle, batch.samples)):
        try:
            piece = checked.predict(params, cut(batch.x, start, stop))
        except (ValueError, TypeError, IndexError, RuntimeError, ArithmeticError) as error:
            problem = f"{type(error).__name__} for {stop - start} samples at {raising_line(error)}: {error}"
            remedy = "let it take any number of samples"
            return _wrong_prediction(problem, "a number of samples that is built in", remedy)
        apart = max(apart, _apart(piece, full, slice(start, stop)))
    if not apart <= 64 * Rounding(str(checked.dtype), 4096).of_sums:
        problem = f"of a sample changes with those beside it, by {apart:.1e} of the largest"
        return _wrong_prediction(problem, "statistics of the batch", "predict each sample by itself")
    return [], f"prediction: sample by sample, apart by {apart:.1e} at most"


def _one_each(full: Any, count: int) -> bool:
    leaves = leaves_of(full)
    return all(isinstance(v, np.ndarray) and v.ndim > 0 and len(v) == count and v.dtype.kind in "fiub" for v in leaves)


def _apart(piece: Any, full: Any, part: slice) -> float:
    distances = [0.0]
    for a, b in zip(leaves_of(piece), leaves_of(full), strict=True):
        if a.shape != b[part].shape:
            return float("inf")
        size = largest(b.astype(np.float64))
        distances.append(largest(a.astype(np.float64) - b[part]) / (size or 1.0))
    return max(distances)


def _wrong_prediction(problem: str, cause: str, remedy: str) -> tuple[list[ModelFinding], str]:
    return [ModelFinding("prediction", "prediction", problem, cause, remedy)], ""


def check_model(
    model: Any, x: Any, y: Any, *, comm: Any = None, parameters: Mapping[str, Array] | None = None, seed: int = 0
) -> ModelReport:
    """Check that a model fulfils what training relies on, and name everything that is wrong.

    Collective over ``comm``. The checks are, in this order:

    - values: the model returns loss, gradients and weight, with the right types, shapes and names;
    - repeats: it returns the same bits every time, whatever was evaluated before and wherever its arrays lie in memory,
      and does not change its arguments;
    - layers, of models of blocks: they overwrite the memory for gradients, and ``backward_input`` with
      ``backward_weights`` computes the same as ``backward``;
    - sums: loss, gradients and weight of a batch are the sums over its pieces;
    - gradient: the gradient of each parameter agrees with finite differences of the loss;
    - prediction: each sample's prediction does not depend on the other samples;
    - ranks: all ranks compute the same bits.

    A handful of samples is enough. The model is evaluated 100 to 200 times, within two seconds if it is small. If a
    machine has no cached kernels yet, compiling the kernels of a layer, in both precisions, takes some seconds.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The model, not yet sharded: a model of blocks, or a :class:`~mpizero.FunctionModel`.
    x, y : arrays, or nested tuples and mappings of them
        At least two samples, different from each other; the same on all ranks.
    comm : mpi4py communicator, Communicator or None
        The ranks that are compared, as in :class:`~mpizero.ShardingConfig`.
    parameters : mapping of str to array, or None
        Values to use in place of the model's start values. The model is evaluated at these values and close to them.
    seed : int
        Seed of the random directions along which parameters are changed.

    Returns
    -------
    ModelReport
        A printable report of what was checked; it is returned only if nothing is wrong.

    Raises
    ------
    ModelCheckError
        Raised on all ranks if something is wrong. The error names everything that is wrong: which value, of which
        parameter, with numbers, the probable cause and a remedy.
    TypeError
        If ``model`` is not a model.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> report = mz.testing.check_model(mz.nn.MLP(2, [3], 2), np.eye(2), np.arange(2), comm="self")
    >>> print(report.passed[1])
    repeats: the same bits every time, in any memory
    """
    __tracebackhide__ = True  # pytest shows the message, not this function's long docstring
    with ShardingConfig(comm=comm) as config:
        report = _looked_at(model, CheckBatch(x, y, sample_count(x, y)), config.communicator, parameters, seed)
        if not report.right:  # raised before the communicator is freed: with the last one, the hooks would be gone
            raise _wrong(model, report)
    return report


def _wrong(model: Any, report: ModelReport) -> ModelCheckError:
    """Return an error whose message lists all findings."""
    member = "predict" if {f.check for f in report.findings} == {"prediction"} else "loss_and_grad"
    lines = "\n".join(f"- {line}" for line in report.told)
    return ModelCheckError(f"the model is wrong ({origin_of(model, member)})\n{lines}", report)


def examine(model: Any, x: Any, y: Any, *, comm: Any = None) -> ModelReport:
    """Run :func:`check_model`'s checks, and return the report even if the model is wrong. Collective over ``comm``."""
    with ShardingConfig(comm=comm) as config:
        return _looked_at(model, CheckBatch(x, y, sample_count(x, y)), config.communicator, None, 0)


def _looked_at(
    model: Any, batch: CheckBatch, comm: Communicator, parameters: Mapping[str, Array] | None, seed: int
) -> ModelReport:
    started = time.monotonic()
    with all_ranks(comm, "check_model"):
        if isinstance(model, Model):
            raise TypeError(f"check_model takes the model before it is sharded: {type(model).__name__}.wrapped_model")
        check = _Check(checked_model(model), batch, seed)
        try:
            check.run(parameters)
        except UnusableEvaluation as error:
            check.findings += error.findings
    findings = _beside_others(check, comm)
    seconds = time.monotonic() - started
    return ModelReport(findings, tuple(check.passed), tuple(check.notes), check.checked.evaluations, seconds)


class _Check:
    """Run the checks of one model on one rank, and collect findings, passed checks and notes."""

    def __init__(self, checked: CheckedModel, batch: CheckBatch, seed: int) -> None:
        self.checked, self.batch = checked, batch
        self.batch_content = content((batch.x, batch.y))
        self.rng = np.random.default_rng(seed)
        self.findings: list[ModelFinding] = []
        self.passed: list[str] = []
        self.notes: list[str] = []
        self.evaluated: list[LossAndGradients] = []

    def run(self, parameters: Mapping[str, Array] | None) -> None:
        """Run all checks, with ``parameters`` in place of the start values unless it is None.

        Raise UnusableEvaluation if the model returns values that cannot be used: later checks would mean nothing.
        """
        checked, batch = self.checked, self.batch
        start = self._start(parameters)
        begun = checked.evaluate(start, batch.x, batch.y)
        self.passed.append(f"values: loss {begun.loss:.6g}, weight {begun.weight:g}, {len(begun.gradients)} gradients")
        scales = scales_of(checked, start, begun)
        self.evaluated.append(begun)
        if self._repeated(check_again(checked, batch, start, begun)):
            return
        first_point, second_point = (self._near(start, scales) for _ in range(2))
        evaluation, findings = check_repeats(checked, batch, first_point, (second_point, start))
        if self._repeated(findings):
            return
        self.evaluated.append(evaluation)
        self.passed.append("repeats: the same bits every time, in any memory")
        if isinstance(checked, CheckedBlocks):
            if findings := check_layers(checked, batch, first_point):
                self.findings += findings
                return
            self.passed.append("layers: they overwrite their gradients, and their halves are the whole")
        self._sums(first_point)
        self._gradient([first_point, second_point], start, scales)
        self.findings += check_again(checked, batch, start, begun)
        findings, line = check_prediction(checked, batch, first_point)
        self.findings += findings
        (self.passed if line and not findings else self.notes).append(line or "prediction: the model has none")

    def _repeated(self, findings: list[ModelFinding]) -> bool:
        if findings:
            self.findings += findings
            self.notes.append("sums, gradient and prediction were not looked at: the model does not repeat itself")
        return bool(findings)

    def _start(self, parameters: Mapping[str, Array] | None) -> Named:
        start = self.checked.start()
        if parameters is None:
            return start
        if wrong := sorted(set(start) ^ set(parameters)):
            raise ConfigError(f"check_model: parameters= must have the model's names, {wrong[:8]} are not in both")
        values = {name: in_pairs(np.array(parameters[name])) for name in start}
        return {name: values[name].astype(value.dtype).reshape(value.shape) for name, value in start.items()}

    def _near(self, start: Named, scales: Mapping[str, float]) -> Named:
        """Return random parameters near ``start``, so that no elements are zero or equal to each other.

        Return ``start`` if the model cannot be evaluated at the random parameters.
        """
        there = {name: np.array(value) for name, value in start.items()}
        for name, scale in scales.items():
            moved = start[name] + 0.05 * scale * self.rng.standard_normal(start[name].shape)
            there[name] = moved.astype(self.checked.dtype)
        try:
            self.checked.evaluate(there, self.batch.x, self.batch.y)
        except (UnusableEvaluation, ArithmeticError, ValueError):
            return start
        return there

    def _sums(self, params: Named) -> None:
        if self.batch.samples is None or self.batch.samples < 2:
            self.notes.append("sums were not looked at: give a batch of arrays with at least two samples")
            return

        if getattr(getattr(self.checked, "model", None), "random_by_grain", False):
            self.notes.append(
                "sums were not looked at: the model's random numbers depend on where a grain begins, and differ in "
                "other pieces of the batch"
            )
            return
        if self.checked.averaged:
            self.notes.append(
                f"sums were not looked at: {self.checked.averaged[0]!r} is averaged, so samples of a grain may see "
                "each other, and the grain's size is part of the mathematics"
            )
            return

        def noise() -> list[LossAndGradients]:
            return [self.checked.evaluate(shaken(params, self.rng), self.batch.x, self.batch.y) for _ in range(3)]

        findings, line = check_sums(self.checked, self.batch, params, self.evaluated[-1], noise)
        self.findings += findings
        if not findings:
            self.passed.append(line)

    def _gradient(self, points_at: list[Named], start: Named, scales: Mapping[str, float]) -> None:
        def points_of(checked: CheckedModel) -> Callable[[int], ParameterPoint]:
            @cache
            def point(number: int) -> ParameterPoint:
                at = points_at[number] if number < len(points_at) else self._near(start, scales)
                wide = {name: value.astype(checked.dtype) for name, value in at.items()}
                return ParameterPoint(checked, self.batch, wide, scales, self.rng)

            return point

        points, wide = points_of(self.checked), self._wide(points_at[0])
        if wide is not None and points(0).shows_right():
            findings, line, notes = check_gradient(points_of(wide))
            self.checked.evaluations += wide.evaluations
        else:
            findings, line, notes = check_gradient(points)
        self.findings += findings
        self.notes += notes
        if not findings:
            self.passed.append(line)

    def _wide(self, params: Named) -> CheckedBlocks | None:
        """Return the checked model in float64 if it is a float32 model of blocks; None for other models.

        Also return None if the loss still has only float32 precision, because layers compute in float32.
        """
        if not isinstance(self.checked, CheckedBlocks) or self.checked.dtype == np.float64:
            return None
        wide = self.checked.wide()
        try:
            evaluation = wide.evaluate({n: v.astype(np.float64) for n, v in params.items()}, self.batch.x, self.batch.y)
        except (UnusableEvaluation, MpizeroError, ValueError, TypeError, RuntimeError):  # PyTorch's for other types
            return None
        return None if float(np.float32(evaluation.loss)) == evaluation.loss else wide

    def digests(self) -> dict[tuple[int, str], str]:
        """Return a hash of every value that must be equal on all ranks, in order of computation. Not collective.

        Each key is a pair: the number of the evaluation, and the name of the value.
        """
        result = {}
        for number, evaluation in enumerate(self.evaluated):
            for name, value in evaluation.named():
                result[number, name] = hashlib.sha256(value.tobytes()).hexdigest()[:16]
        return result


def _beside_others(check: _Check, comm: Communicator) -> tuple[ModelFinding, ...]:
    """Return all ranks' findings, and one more finding if ranks computed different bits. Collective over ``comm``."""
    if comm.size == 1:
        check.notes.append("ranks: one only; under mpiexec -n 2 two are compared")
        return tuple(check.findings)
    gathered = comm.allgather_object((check.findings, check.digests(), _digest(check)), tag="check_model")
    merged: list[ModelFinding] = []
    for findings, _, _ in gathered:
        known = {(finding.check, finding.what, finding.cause) for finding in merged}
        merged += [f for f in findings if (f.check, f.what, f.cause) not in known]  # numbers may differ
    for rank, (_, digests, input_digest) in enumerate(gathered):
        if input_digest != gathered[0][2]:
            raise DataError(f"check_model: rank {rank} was given other samples or parameters than rank 0")
        unlike = [what for what, digest in digests.items() if gathered[0][1].get(what, digest) != digest]
        if unlike:
            problem = f"rank {rank} computes other bits than rank 0 from the same parameters and samples"
            cause = "something that a process has of its own: its rank, hash seed, threads or random numbers"
            remedy = "compute everything from the arguments; sort what comes out of sets"
            merged.append(ModelFinding("ranks", unlike[0][1], problem, cause, remedy))
            break
    else:
        check.passed.append(f"ranks: the same bits on all {comm.size}")
    return tuple(merged)


def _digest(check: _Check) -> str:
    digest = hashlib.sha256()
    for name, value in check.checked.start().items():
        digest.update(name.encode() + value.tobytes())
    digest.update(b"".join(check.batch_content))
    return digest.hexdigest()
