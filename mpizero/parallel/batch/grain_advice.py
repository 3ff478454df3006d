"""Say how a model of PyTorch or JAX, whose grains have a fixed cost, is cut into grains, and which would be faster."""

from __future__ import annotations

from typing import Any

from mpizero._util.text import notice
from mpizero.layout.batch import GrainRule, Grains

#: How much less than the time now another ``micro_batch`` must take for a line about it.
_WORTH = 0.9
#: Steps after which no advice comes any more.
_MOST_STEPS = 20


class GrainNotices:
    """Print, in the first steps of a model of PyTorch or JAX, what its grains are and what they mean.

    ``ranks`` is the number of ranks that share a global batch.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._steps, self._advised = ranks, 0, False

    def after_step(self, rule: GrainRule, samples: int, model: Any) -> None:
        """Print what there is to say after a step of a global batch of ``samples`` samples. Not collective."""
        self._steps += 1
        if self._steps == 1:
            if rule.coarse:
                notice(described_grains(rule, samples, type(model).__name__))
            if hasattr(model, "batch_norm_notice") and (text := model.batch_norm_notice(rule.micro_size(samples))):
                notice(text)
            return
        waits = rule.coarse and not self._advised and self._steps <= _MOST_STEPS
        if waits and (seconds := model.times.seconds) is not None:
            self._advised = True
            if text := faster_grain(rule, samples, self._ranks, *seconds):
                notice(text)


def described_grains(rule: GrainRule, samples: int, model: str) -> str:
    """Return a line about the default grains of a global batch of ``samples`` samples."""
    grains = rule.grains(samples)
    return (
        f"{samples} samples a step in {grains.described(rule.accumulate)} (by default, from the operations of the "
        f"{model}; micro_batch sets it): work for at most {_ranks(grains.count)}"
    )


def faster_grain(rule: GrainRule, samples: int, ranks: int, passed: int, seconds: float, one: float) -> str | None:
    """Return a line about the ``micro_batch`` that would save most, if it saves more than a tenth.

    Parameters
    ----------
    rule : GrainRule
        The rule of the grains now.
    samples, ranks : int
        Number of samples of a global batch, and of ranks that share it.
    passed : int
        Number of samples of a timed pass, at least 2.
    seconds, one : float
        Seconds of a pass of ``passed`` samples, and of one sample.
    """
    each = (seconds - one) / (passed - 1)
    fixed = one - each
    if each <= 0 or fixed <= 0:
        return None

    def step(micro: int) -> float:
        waves = -(-Grains(samples, micro * rule.accumulate).count // ranks)
        return waves * rule.accumulate * (fixed + each * micro)

    now = rule.micro_size(samples)
    best = min((1 << power for power in range((samples // rule.accumulate).bit_length())), key=step, default=now)
    if step(best) >= _WORTH * step(now):
        return None
    count = Grains(samples, best * rule.accumulate).count
    return (
        f"a pass of {passed} samples took {seconds * 1e3:.3g} ms, one of a single sample {one * 1e3:.3g} ms: with "
        f"micro_batch={best} in place of {now} the passes of a step would take about {step(best) / step(now):.2f} of "
        f"the time on {_ranks(ranks)}; a batch is work for at most {_ranks(count)} then, with other (equally good) bits"
    )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"
