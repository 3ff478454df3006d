"""Check that loss, gradients and weight of a batch are the sums of the values of its pieces."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpizero._util.text import Rounding
from mpizero.train.modelcheck.batch_pieces import cut
from mpizero.train.modelcheck.checked_model import CheckedModel, LossAndGradients, Named, place_of
from mpizero.train.modelcheck.model_report import ModelFinding
from mpizero.train.modelcheck.repeats import CheckBatch
from mpizero.types import Array

#: How much sums may differ, as a multiple of what changing the last bits of the parameters changes.
OF_NOISE = 64.0


class BatchSums:
    """Hold loss, weight and gradients of a batch and of its pieces, as float64 arrays by name.

    ``counts`` has the number of samples in each piece.
    """

    def __init__(self, whole: LossAndGradients, pieces: list[LossAndGradients], counts: list[int]) -> None:
        self.whole, self.counts = _flat(whole), counts
        self.pieces = [_flat(piece) for piece in pieces]

    def total(self, what: str, count: int | None = None) -> Array:
        """Return the sum of the quantity named ``what`` over the first ``count`` pieces; over all pieces for None."""
        total: Array = np.sum([piece[what] for piece in self.pieces[:count]], axis=0)
        return total

    def size(self, what: str) -> float:
        """Return the largest magnitude of the quantity named ``what`` in the batch and in its pieces."""
        return max(float(np.max(np.abs(v[what]), initial=0.0)) for v in (self.whole, *self.pieces))


def _flat(evaluation: LossAndGradients) -> dict[str, Array]:
    values = {"loss": np.array([evaluation.loss]), "weight": np.array([evaluation.weight])}
    return values | {f"gradient of {n!r}": g.astype(np.float64).reshape(-1) for n, g in evaluation.gradients.items()}


def check_sums(
    checked: CheckedModel,
    batch: CheckBatch,
    here: Named,
    whole: LossAndGradients,
    noise: Callable[[], list[LossAndGradients]],
) -> tuple[list[ModelFinding], str]:
    """Compare a batch with the sum over its pieces: a single sample, about a third of the others, and the rest.

    ``here`` are the parameters, and ``whole`` is the evaluation of the batch. ``noise`` returns evaluations of the
    batch at parameters that differ in their last bits. Return the findings, and a line that says how well the sums
    agree.
    """
    count = batch.samples or 0
    marks = sorted({0, 1, 1 + (count - 1) // 3 or 1, count})
    spans = list(zip(marks, marks[1:], strict=False))
    try:
        pieces = [checked.evaluate(here, cut(batch.x, a, b), cut(batch.y, a, b), a) for a, b in spans]
        joined = checked.evaluate(here, cut(batch.x, 0, marks[-2]), cut(batch.y, 0, marks[-2]))
    except (ValueError, TypeError, IndexError, RuntimeError, ArithmeticError) as error:
        told = "let it take any number of samples, one too: a step's last piece may be short"
        seen = f"{type(error).__name__} at {place_of(error)}: {error}"
        return [ModelFinding("sum", "a piece of the batch", seen, "a number of samples that is built in", told)], ""
    sums = BatchSums(whole, pieces, [b - a for a, b in spans])
    scatter = [_flat(evaluation) for evaluation in noise()]
    findings, largest = [], 0.0
    for what in sums.whole:
        size, apart = sums.size(what), float(np.max(np.abs(sums.total(what) - sums.whole[what]), initial=0.0))
        shaken = max((float(np.max(np.abs(s[what] - sums.whole[what]), initial=0.0)) for s in scatter), default=0.0)
        allowed = _rounding(checked, whole, count).of_sums * size + OF_NOISE * shaken
        if not apart <= allowed:
            findings.append(_finding(what, sums, _flat(joined)))
        largest = max(largest, apart / size if size else 0.0)
    shown = " + ".join(map(str, sums.counts))
    return findings, f"sums: {count} samples as {shown}, apart by {largest:.1e} at most"


def _rounding(checked: CheckedModel, whole: LossAndGradients, count: int) -> Rounding:
    coarse = checked.dtype == np.float32 or float(np.float32(whole.loss)) == whole.loss
    dtype = "float32" if coarse else "float64"
    terms = float(max([count, *(side for g in whole.gradients.values() for side in g.shape)]))
    return Rounding(dtype, terms)


def _finding(what: str, sums: BatchSums, joined: dict[str, Array]) -> ModelFinding:
    total, whole = sums.total(what), sums.whole[what]
    at = int(np.argmax(np.abs(total - whole)))
    place = f" (element {at})" if total.size > 1 else ""
    shown = " + ".join(map(str, sums.counts))
    seen = f"{whole[at]:.6g} for {sum(sums.counts)} samples, {total[at]:.6g} for {shown} of them{place}"
    return ModelFinding("sum", what, seen, *_cause(what, sums, joined))


def _cause(what: str, sums: BatchSums, joined: dict[str, Array]) -> tuple[str, str]:
    whole, counts = sums.whole[what], np.array(sums.counts, np.float64)
    near = 1e-3 * sums.size(what)
    means = np.sum([c * p[what] for c, p in zip(counts, sums.pieces, strict=True)], axis=0) / counts.sum()
    constant = all(np.abs(p[what] - whole).max(initial=0.0) <= near for p in sums.pieces)
    if what == "weight":
        told = "return how much the batch weighs, float(len(x)) for a mean over samples"
        return ("a weight that does not grow with the batch" if constant else "a weight that is no sum"), told
    if np.abs(means - whole).max(initial=0.0) <= near and not constant:
        return "a mean over the samples", "return the sum over the samples, and float(len(x)) as the weight"
    weights = np.array([p["weight"][0] for p in sums.pieces])
    by_weight = np.sum([w * p[what] for w, p in zip(weights, sums.pieces, strict=True)], axis=0)
    if np.abs(by_weight / (weights.sum() or 1.0) - whole).max(initial=0.0) <= near and not constant:
        return "a mean by weight", "return the weighted sum, and the sum of the weights as the weight"
    extra = sums.total(what) - whole  # a term per call is there as often as there are pieces more
    first = sums.total(what, len(counts) - 1) - joined[what]
    if len(counts) > 2 and np.abs(extra * (len(counts) - 2) - first * (len(counts) - 1)).max() <= near:
        told = "multiply it, and its gradient, by the weight of the batch, such as len(x)"
        return "a term that is added once a call, such as a penalty on the parameters", told
    told = "compute each sample by itself, from its own numbers"
    return "statistics of the batch, in which samples see each other, or random numbers not keyed by run.samples", told
