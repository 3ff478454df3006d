"""Check that the model returns the same values every time, wherever its parameters lie in memory."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpizero.train.modelcheck.batch_pieces import content
from mpizero.train.modelcheck.checked_model import CheckedBlocks, CheckedModel, LossAndGradients, Named
from mpizero.train.modelcheck.model_report import ModelFinding, UnusableEvaluation
from mpizero.types import Array


class CheckBatch(NamedTuple):
    """Hold the batch on which a model is checked.

    ``samples`` is the number of samples in it, None if the batch cannot be cut into samples.
    """

    x: Any
    y: Any
    samples: int | None


def unlike(found: LossAndGradients, expected: LossAndGradients) -> Iterator[tuple[str, str]]:
    """Yield the name of each value that differs in a bit between two evaluations, and a text with both numbers.

    For an array the text has the element that differs most.
    """
    for (what, a), (_, b) in zip(found.named(), expected.named(), strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            yield what, f"{b.dtype} of shape {b.shape}, then {a.dtype} of shape {a.shape}"
        elif a.tobytes() != b.tobytes():
            worst = np.unravel_index(int(np.argmax(np.abs(a - b))), a.shape) if a.size else ()
            place = f" at {[int(i) for i in worst]}" if worst else ""
            yield what, f"{b[worst]!s}{place}, then {a[worst]!s}"


def random_states() -> dict[str, Any]:
    """Return the state of every global random number generator of this process."""
    states: dict[str, Any] = {"numpy.random": str(np.random.get_state()), "random": random.getstate()}  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "random"):
        states["torch.random"] = torch.random.get_rng_state().numpy().tobytes()
    return states


def check_again(checked: CheckedModel, batch: CheckBatch, start: Named, begun: LossAndGradients) -> list[ModelFinding]:
    """Evaluate the model at the start values ``start`` again, and compare with ``begun``, their first evaluation."""
    drawn = random_states()
    again = checked.evaluate(start, *batch[:2])
    used = [name for name, value in random_states().items() if value != drawn[name]]
    when = "evaluated twice" if checked.evaluations == 2 else f"evaluated first, and after {checked.evaluations} others"
    return _differ(again, begun, when, _of_noise(used))


def check_repeats(
    checked: CheckedModel, batch: CheckBatch, here: Named, elsewhere: tuple[Named, Named]
) -> tuple[LossAndGradients, list[ModelFinding]]:
    """Evaluate the model at several points in turn, in the same and in new memory, and compare repeated evaluations.

    ``here`` and ``elsewhere`` are the parameters at these points. Return the evaluation at ``here``, and a finding for
    each value that is not the same every time.
    """
    x, y, _ = batch
    before = content((x, y))
    first = checked.evaluate(here, x, y)
    if content((x, y)) != before:
        told = "copy what is changed, x = x.copy(), also before its address is given away"
        cause = "code that works in place through a bare pointer"
        raise UnusableEvaluation(ModelFinding("repeats", "samples", "are changed by the evaluation", cause, told))
    there, further = elsewhere
    other = checked.evaluate(there, x, y)
    checked.evaluate(further, x, y)
    told = "compute everything from the arguments, each time"
    cause = "a value that is kept from call to call, such as a counter, a running mean or a warm start"
    if findings := _differ(checked.evaluate(here, x, y), first, "evaluated elsewhere in between", (cause, told)):
        return first, findings
    cause = "a cache that goes by the identity of the arrays: training changes their values in place"
    findings = _differ(
        checked.evaluate(there, x, y, fresh=True), other, "given the same in other arrays", (cause, told)
    )
    return first, findings


def _of_noise(used: list[str]) -> tuple[str, str]:
    if used:
        told = "key them by what they are for: numpy.random.default_rng((seed, step, number of the sample))"
        return f"random numbers from the global generator {', '.join(used)}", told
    cause = "random numbers of its own, a counter, or threads that add in no fixed order"
    return cause, "compute everything from the arguments, and random numbers from a key"


def _differ(found: LossAndGradients, expected: LossAndGradients, when: str, why: tuple[str, str]) -> list[ModelFinding]:
    return [ModelFinding("repeats", what, f"{when}: {how}", *why) for what, how in unlike(found, expected)][:3]


def check_layers(checked: CheckedBlocks, batch: CheckBatch, here: Named) -> list[ModelFinding]:
    """Check that layers overwrite gradients, and that ``backward`` computes the same as its two halves.

    The halves are ``backward_input`` and ``backward_weights``. They run with a loss scale of 2, so that a loss which
    ignores its scale is found too. ``here`` are the parameters.
    """
    one = checked.passed(here, batch[:2])[2]
    two = checked.passed(here, batch[:2], fill=1.0)[2]
    findings = []
    for name in one:
        if one[name].tobytes() != two[name].tobytes():
            kept = not one[name].any()
            seen = "is what its memory held before" if kept else "depends on what its memory held before"
            cause = "grads[...] = array, which binds a name, or no write at all" if kept else "grads[...] += array"
            told = "write all of it, grads[name][...] = array, rows that are not used too"
            findings.append(ModelFinding("layers", f"gradient of {name!r}", seen, cause, told))
    if findings:
        return findings
    halves = checked.passed(here, batch[:2], halves=True)[2]
    findings = [
        ModelFinding(
            "layers",
            f"gradient of {name!r}",
            "is not the same from backward and from backward_input with backward_weights under twice the loss scale",
            "a backward of its own that differs from its halves, or loss.backward(cache, scale) without the scale",
            "let backward call both halves; multiply the gradient by scale",
        )
        for name in one
        if not _equal(halves[name], one[name])
    ]
    every = len(findings) > 1 and len(findings) == sum(value.any() for value in one.values())
    return findings[:1] if every else findings


def _equal(found: Array, expected: Array) -> bool:
    """Tell whether arrays are equal, except for values so tiny that they underflow without the loss scale of 2."""
    tiny = 4 * np.finfo(expected.dtype).smallest_normal
    return bool((np.abs(found - expected) <= np.where(np.abs(expected) < tiny, tiny, 0)).all())
