"""Find the parameters whose gradient is wrong, and the probable cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from mpizero.train.modelcheck.checked_model import CheckedBlocks
from mpizero.train.modelcheck.model_report import ModelFinding
from mpizero.train.modelcheck.slopes import SURE, ParameterPoint, Slope, dense, steep
from mpizero.types import Array


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
        ratios = [s.seen / s.said for s in self.slopes if s.said]
        if len(ratios) < len(self.slopes):
            return None
        apart = SURE * max(s.bound / abs(s.said) for s in self.slopes)
        allowed = 0.01 * min(abs(ratios[0]), abs(ratios[0] - 1)) + apart
        sure = max(ratios) - min(ratios) <= allowed and apart <= abs(ratios[0] - 1) / 2
        return ratios[0] if sure else None


def check_gradient(
    points: Callable[[int], ParameterPoint], rng: np.random.Generator
) -> tuple[list[ModelFinding], str, list[str]]:
    """Compare the gradient with differences of the loss at up to three points.

    ``points(k)`` returns the point with number ``k``, from 0 to 2. Return the findings, a line that says how many
    parameters agree, and notes.
    """
    point = points(0)
    names = [name for name in point.checked.names if point.at[name].size]
    left = _not_shown_right(point, names, rng)
    wrong, weak = [], []
    for name in left:
        verdicts = _alone(point, name, rng)
        if verdicts is None:
            weak.append(name)
        elif not verdicts and all(_alone(points(k), name, rng) is False for k in (1, 2)):
            moves = [dense(point, rng, [name]), dense(point, rng, [name]), steep(point, rng, [name])]
            slopes = [point.slope(move, rng) for move in moves]
            found = [(s, m[name]) for s, m in zip(slopes, moves, strict=True) if s is not None]
            wrong.append(WrongGradient(name, [s for s, _ in found], [m for _, m in found]))
    notes = []
    if silent := [
        name for name in names if not point.evaluation.gradients[name].any() and name not in {*weak, *_names(wrong)}
    ]:
        notes.append(f"gradient: zero everywhere for {_listed(silent)}: nothing depends on it with these samples")
    if weak:
        notes.append(f"gradient: rounding hides what {_listed(weak)} changes in the loss, so it was not compared")
    line = f"gradient: {len(names) - len(weak)} of {len(names)} parameters agree with differences of the loss"
    if isinstance(point.checked, CheckedBlocks):
        return _from_the_last(point.checked, _explained(point, wrong[::-1], len(names), rng), wrong), line, notes
    return _explained(point, wrong, len(names), rng), line, notes


def _from_the_last(
    checked: CheckedBlocks, findings: list[ModelFinding], wrong: Sequence[WrongGradient]
) -> list[ModelFinding]:
    """Return the findings of a model of blocks, the last block's first, and say there in which block to begin.

    A block gets the gradient of its output from the block after it, so an error in one block is seen in all before it.
    """
    blocks = list(checked.model.blocks)
    places = [max(k for k, block in enumerate(blocks) if w.name.startswith(f"{block}.")) for w in wrong]
    if len(set(places)) < 2:
        return findings
    last = max(places)
    begin = f"begin with the backward pass of {blocks[last]!r}, through which the blocks before it get their gradients"
    if last + 1 < len(blocks):
        begin += f", and with backward_input of {blocks[last + 1]!r}, whose own gradients are right"
    return [replace(findings[0], remedy=f"{findings[0].remedy}; {begin}"), *findings[1:]]


def _names(wrong: Sequence[WrongGradient]) -> set[str]:
    return {w.name for w in wrong}


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _not_shown_right(point: ParameterPoint, names: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Change all parameters together, and return the parameters whose gradient may still be wrong after that."""
    slopes = [point.slope(direction(point, rng, names), rng, enough=1e-5) for direction in (steep, dense, dense)]
    if any(slope is None or point.verdict(slope) is False for slope in slopes):
        return list(names)
    along, across = (max(s.off + SURE * s.bound for s in some if s) for some in (slopes[:1], slopes[1:]))
    left = []
    for name, part in slopes[0].parts.items() if slopes[0] else ():
        usual = abs(part) / math.sqrt(point.at[name].size)  # of a direction that is not the gradient's own
        if not (along <= 0.01 * abs(part) and across <= 0.3 * usual):
            left.append(name)
    return left


def _alone(point: ParameterPoint, name: str, rng: np.random.Generator) -> bool | None:
    """Change one parameter alone, and tell whether its gradient is right; return None if rounding hides it."""
    verdicts = [point.verdict(point.slope(d(point, rng, [name]), rng, enough=1e-6)) for d in (dense, steep)]
    return False if False in verdicts else None if None in verdicts else True


def _explained(
    point: ParameterPoint, wrong: Sequence[WrongGradient], count: int, rng: np.random.Generator
) -> list[ModelFinding]:
    """Return one finding for each wrong gradient; one finding for all if all are wrong by the same factor.

    ``count`` is the number of all parameters that were compared.
    """
    ratios = [w.ratio for w in wrong]
    if len(wrong) == count > 1 and None not in ratios:
        values = [ratio for ratio in ratios if ratio is not None]
        if max(values) - min(values) <= 0.01 * abs(values[0]):
            return [_finding(point, wrong[0], f"gradients of all {count} parameters", rng)]
    return [_finding(point, w, f"gradient of {w.name!r}", rng) for w in wrong]


def _finding(point: ParameterPoint, wrong: WrongGradient, what: str, rng: np.random.Generator) -> ModelFinding:
    slope = max(wrong.slopes, key=lambda s: s.off / (abs(s.seen) + abs(s.said)))
    seen = (
        f"along a direction of {wrong.name!r} the loss changes by {slope.seen:.6g}, the gradient says {slope.said:.6g}"
    )
    return ModelFinding("gradient", what, seen, *_cause(point, wrong, rng))


def _cause(point: ParameterPoint, wrong: WrongGradient, rng: np.random.Generator) -> tuple[str, str]:
    gradient = point.evaluation.gradients[wrong.name]
    if not gradient.any():
        return "a gradient that is not computed, zeros in its place", "compute it, or name the parameter in frozen="
    ratio = wrong.ratio
    if ratio is not None:
        return _of_factor(point, ratio)
    for other, value in point.evaluation.gradients.items():
        if other != wrong.name and value.shape == gradient.shape and _fits(wrong, value):
            return f"the gradient of {other!r} under this name", "give each parameter its own"
    if gradient.ndim == 2 and gradient.shape[0] == gradient.shape[1] and _fits(wrong, gradient.T):
        return "its transpose", "transpose it"
    if point.checked.declared[wrong.name].complex and _fits(wrong, gradient * [1, -1]):
        return "its conjugate, which JAX returns", "return gradient.conj(): dL/dRe + i dL/dIm"
    place = _worst(point, wrong, rng)
    return f"a part of it, most of all around element {place}", "compare the formula of these elements with differences"


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
    said = [float(np.sum(value * move)) for move in wrong.moves]
    return all(abs(s.seen - v) <= SURE * s.bound + 0.01 * abs(s.seen) for s, v in zip(wrong.slopes, said, strict=True))


def _worst(point: ParameterPoint, wrong: WrongGradient, rng: np.random.Generator) -> list[int]:
    """Search by halving for the element around which the gradient is most wrong, and return its index."""
    shape = point.at[wrong.name].shape
    flat = rng.choice([-1.0, 1.0], math.prod(shape)) * point.scales[wrong.name]
    low, high = 0, flat.size
    while high - low > 1:
        middle, off = (low + high) // 2, []
        for a, b in ((low, middle), (middle, high)):
            move = np.zeros(flat.size)
            move[a:b] = flat[a:b]
            slope = point.slope({wrong.name: move.reshape(shape)}, rng, enough=1e-3)
            off.append(0.0 if slope is None else max(0.0, slope.off - slope.bound))
        low, high = (low, middle) if off[0] >= off[1] else (middle, high)
    return [int(i) for i in np.unravel_index(low, shape)]
