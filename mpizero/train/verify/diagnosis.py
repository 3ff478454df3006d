"""What the pattern of a difference tells about its cause; arrays and numbers only, no ranks run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpizero.types import Array

#: How closely a pattern must fit: rounding is far below, another pattern far above.
_FIT = 1e-3
_ROUNDING = "numbers added in another order: the differences are of the size of rounding"


@dataclass(frozen=True)
class Evaluations:
    """Mean losses of one batch with the same parameters.

    Attributes
    ----------
    first, again : float
        In the layout, evaluated twice for training.
    expected : float
        In one process.
    quiet, quiet_expected : float
        Without training, so without dropout, in the layout and in one process.
    weight, weight_expected : float
        What the sums of losses were divided by.
    grains : mapping of int to (float, int)
        Loss sum of each grain in the layout, and the rank that computed it.
    grains_expected : mapping of int to float
        In one process.
    """

    first: float
    again: float
    expected: float
    quiet: float
    quiet_expected: float
    weight: float
    weight_expected: float
    grains: Mapping[int, tuple[float, int]]
    grains_expected: Mapping[int, float]

    @property
    def wrong_grains(self) -> list[int]:
        """The grains with another loss, in order. Not collective."""
        pairs = ((g, loss, self.grains_expected.get(g)) for g, (loss, _) in sorted(self.grains.items()))
        return [g for g, loss, wanted in pairs if wanted is not None and not _near(loss, wanted)]


@dataclass(frozen=True)
class Gradients:
    """Averaged gradients of the tensors that differ, each under its name, with the same parameters.

    Attributes
    ----------
    found, again : mapping of str to array
        In the layout, evaluated twice.
    expected : mapping of str to array
        In one process.
    own : mapping of str to array
        From the samples of each element's owner alone.
    uses : mapping of str to mapping of str to array
        Of tied parameters: the part of each use, by its name.
    tensors : int
        How many trainable tensors the model has.
    """

    found: Mapping[str, Array]
    again: Mapping[str, Array]
    expected: Mapping[str, Array]
    own: Mapping[str, Array]
    uses: Mapping[str, Mapping[str, Array]]
    tensors: int


def of_loss(seen: Evaluations, sizes: Mapping[str, int]) -> str | None:
    """Return the probable cause of another loss. Not collective.

    ``sizes`` are the sizes of the layout's groups by what they count.
    """
    if _near(seen.first, seen.expected):
        return _ROUNDING
    quiet = _near(seen.quiet, seen.quiet_expected)
    random = not _near(seen.expected, seen.quiet_expected)
    if repeated := _repeated(_near(seen.again, seen.expected) or (quiet and not random), seen.again == seen.first):
        return repeated
    if not _near(seen.weight, seen.weight_expected) and _near(
        seen.first * seen.weight, seen.expected * seen.weight_expected
    ):
        return _wrong_count("the loss", seen.weight_expected / seen.weight, sizes)
    if quiet:
        return (
            "random numbers keyed by the rank: without dropout the losses of this batch are equal; key them by sample, "
            "element and step"
        )
    wrong = {seen.grains[g][1] for g in seen.wrong_grains}
    right = {rank for g, (_, rank) in seen.grains.items()} - wrong
    if wrong and right:
        return (
            f"something depends on the rank, random numbers keyed by it or data of its own: only the samples of "
            f"{_ranks(wrong)} have other losses, with equal parameters"
        )
    if seen.grains and not wrong:
        return "the losses of all micro-batches are equal: their sum is not"
    return _wrong_count("the loss", seen.first / seen.expected, sizes) if seen.expected else None


def of_gradient(seen: Gradients, sizes: Mapping[str, int]) -> str | None:
    """Return the probable cause of another gradient where the loss is the same. Not collective."""
    found, expected = seen.found, seen.expected
    if _alike(found, expected):
        return _ROUNDING
    if repeated := _repeated(_alike(seen.again, expected), _same(seen.again, found)):
        return repeated
    factor = _factor(list(found.values()), list(expected.values()))
    if factor is not None and len(found) == seen.tensors > 1:
        return _wrong_count("every gradient", factor, sizes)
    if told := _tied(seen):
        return told
    names = [name for name in found if not _close(seen.own[name], expected[name])]
    if names and all(_factor([found[name]], [seen.own[name]]) is not None for name in names):
        return "a skipped reduction: each owner has the gradient of its own samples alone, not the sum over the ranks"
    if factor is not None:
        which = "the gradient of this tensor" if len(found) == 1 else "the gradients of these tensors"
        return _wrong_count(which, factor, sizes)
    return None


def of_norm(found: float | None, expected: float | None, sizes: Mapping[str, int]) -> str | None:
    """Return the probable cause of another norm of an equal gradient. Not collective."""
    if found is None or not expected:
        return "a missed clip: this layout never asked for the norm" if expected else None
    ratio = (found / expected) ** 2
    for what, size in sizes.items():
        if _near(ratio, size):
            return f"squares counted {size} times, the number of {what}: the norm is {ratio**0.5:.4g} times too large"
    return "squares of a part of the elements only" if ratio < 1 else "squares of some elements counted more than once"


def of_clipped(found: Array, before: Array, expected: Array) -> str | None:
    """Return the probable cause of another gradient after clipping. Not collective."""
    if np.array_equal(found, before):
        return "a missed clip: these elements are as they were before clipping"
    factor = _factor([found], [expected])
    return None if factor is None else f"clipped by {factor:.6g} times the factor of one process"


def of_update(found: Array, before: Array, quantity: str) -> str | None:
    """Return the probable cause of other values after an update with an equal gradient. Not collective."""
    if np.array_equal(found, before):
        if quantity == "parameter":
            return "stale parameters: these elements have the values of the step before, the new ones never came"
        return "an update left out: these elements have the values of the step before"
    return None


def common_factor(found: Array, before: Array) -> float | None:
    """Return what ``before`` was multiplied by to become ``found``; None if that is not one number. Not collective."""
    return _factor([found], [before], keep_one=True)


def _repeated(right_again: bool, same_again: bool) -> str | None:
    if right_again:
        return (
            "stale data: the same batch evaluated once more gives the right numbers, so what ranks exchanged (a halo, "
            "the ring of a context group, gathered parameters) was of an earlier evaluation"
        )
    if not same_again:
        return (
            "a model that is no function of parameters and batch: evaluated once more it gives other numbers again "
            "(a random generator with a state, a cache, a race)"
        )
    return None


def _tied(seen: Gradients) -> str | None:
    """Tell which use of tied parameters was added too often or not at all."""
    if not set(seen.found) <= set(seen.uses):
        return None
    told: set[str] = set()
    for name in seen.found:
        extra = seen.found[name] - seen.expected[name]
        uses = seen.uses[name]
        match = [("counted twice", use) for use, part in uses.items() if _close(extra, part)]
        match += [("left out", use) for use, part in uses.items() if _close(extra, -part)]
        if not match and _close(extra, seen.expected[name]):
            match = [("counted twice", "all uses")]
        if not match:
            return None
        told.add(f"a tied gradient {match[0][0]}: the part of {match[0][1]!r}")
    return "; ".join(sorted(told))


def _wrong_count(what: str, factor: float, sizes: Mapping[str, int]) -> str | None:
    for name, size in sizes.items():
        for times in (float(size), 1 / size):
            if _near(factor, times):
                right = f"{size} times too large" if times > 1 else f"{size} times too small"
                return f"a sum divided by the wrong count: {what} is {right}, and {size} is the number of {name}"
    return f"a sum divided by the wrong count: {what} is {factor:.6g} times what it must be"


def _factor(found: Sequence[Array], expected: Sequence[Array], *, keep_one: bool = False) -> float | None:
    """Return the one number by which all elements of ``expected`` are multiplied; None if there is none."""
    a, b = (np.concatenate([np.ravel(v) for v in arrays]).astype(np.float64) for arrays in (found, expected))
    square = float(b @ b)
    if not np.isfinite(a).all() or not 0 < square < np.inf:
        return None
    factor = float(a @ b) / square
    fits = factor != 0 and _close(a, factor * b)
    return factor if fits and (keep_one or not _near(factor, 1.0)) else None


def _alike(found: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    return all(_close(found[name], expected[name], 1e-5) for name in expected)


def _same(found: Mapping[str, Array], expected: Mapping[str, Array]) -> bool:
    return all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def _close(found: Array, expected: Array, fit: float = _FIT) -> bool:
    size = float(np.max(np.abs(expected), initial=0.0))
    return size > 0 and float(np.max(np.abs(found - expected), initial=0.0)) <= fit * size


def _near(found: float, expected: float) -> bool:
    return found == expected or abs(found - expected) <= 1e-6 * abs(expected)


def _ranks(ranks: set[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
