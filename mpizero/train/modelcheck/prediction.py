"""Check that predictions are the same every time, and that no sample's prediction depends on other samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpizero._util.pytree import leaves_of
from mpizero._util.text import Rounding
from mpizero.train.modelcheck.batch_pieces import content, cut
from mpizero.train.modelcheck.checked_model import CheckedModel, Named, place_of
from mpizero.train.modelcheck.model_report import ModelFinding
from mpizero.train.modelcheck.repeats import CheckBatch


def check_prediction(checked: CheckedModel, batch: CheckBatch, here: Named) -> tuple[list[ModelFinding], str]:
    """Predict a batch twice as a whole and once in pieces, and compare the predictions.

    ``here`` are the parameters. Return the findings, and a line that says what was measured. The line is "" after a
    finding, or if the model has no ``predict``.
    """
    try:
        whole = checked.predict(here, batch.x)
    except NotImplementedError:
        return [], ""
    except (ValueError, TypeError, IndexError, RuntimeError, ArithmeticError, AttributeError) as error:
        seen = f"{type(error).__name__} at {place_of(error)}: {error}"
        return [_wrong(seen, "predict(parameters, x) that takes something else", "let it take named arrays and x")], ""
    if content(checked.predict(here, batch.x)) != content(whole):
        return [_wrong("differs from call to call", "dropout or noise in it", "leave random numbers out of it")], ""
    if batch.samples is None or not _one_each(whole, batch.samples):
        return [], "prediction: the same every time"
    apart, middle = 0.0, max(1, batch.samples // 3)
    for start, stop in ((0, middle), (middle, batch.samples)):
        try:
            piece = checked.predict(here, cut(batch.x, start, stop))
        except (ValueError, TypeError, IndexError, RuntimeError, ArithmeticError) as error:
            seen = f"{type(error).__name__} for {stop - start} samples at {place_of(error)}: {error}"
            return [_wrong(seen, "a number of samples that is built in", "let it take any number of samples")], ""
        apart = max(apart, _apart(piece, whole, slice(start, stop)))
    if not apart <= 64 * Rounding(str(checked.dtype), 4096).of_sums:
        seen = f"of a sample changes with those beside it, by {apart:.1e} of the largest"
        return [_wrong(seen, "statistics of the batch", "predict each sample by itself")], ""
    return [], f"prediction: sample by sample, apart by {apart:.1e} at most"


def _one_each(whole: Any, count: int) -> bool:
    found = leaves_of(whole)
    return all(isinstance(v, np.ndarray) and v.ndim > 0 and len(v) == count and v.dtype.kind in "fiub" for v in found)


def _apart(piece: Any, whole: Any, part: slice) -> float:
    distances = [0.0]
    for a, b in zip(leaves_of(piece), leaves_of(whole), strict=True):
        if a.shape != b[part].shape:
            return float("inf")
        size = float(np.max(np.abs(b.astype(np.float64)), initial=0.0))
        distances.append(float(np.max(np.abs(a.astype(np.float64) - b[part]), initial=0.0)) / (size or 1.0))
    return max(distances)


def _wrong(seen: str, cause: str, remedy: str) -> ModelFinding:
    return ModelFinding("prediction", "prediction", seen, cause, remedy)
