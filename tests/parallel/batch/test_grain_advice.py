"""What is said about default grains that have a fixed cost, from times that are given."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from mpizero.adapters import user_code
from mpizero.adapters.user_code import EfficientSamples, PassTimes, PassWork
from mpizero.layout.batch import GrainRule
from mpizero.sharding.step_report import described_grains, faster_grain


@pytest.mark.parametrize("batch", [*range(1, 40), 128, 1000])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_coarse_rule_makes_at_least_four_grains_of_a_batch_that_has_so_many_samples(
    batch: int, accumulate: int
) -> None:
    for efficient in (None, 1, 5, 10**9):
        rule = GrainRule(None, accumulate, efficient, coarse=True)
        assert rule.grains(batch).count >= min(4, -(-batch // accumulate))
        assert rule.micro_size(batch) <= max(1, batch // (4 * accumulate), 1)
        assert rule.micro_size(batch) >= 1
    assert GrainRule(None, accumulate, 1, coarse=True).micro_size(batch) == 1


def test_a_grain_has_more_samples_where_its_fixed_cost_is_more_of_its_work() -> None:
    def enough(each: int, parameters: int = 1000, least: int = 1) -> int | None:
        def work(x: np.ndarray, y: np.ndarray) -> PassWork:
            if len(x) < least:
                raise ValueError("batch norms need more samples")
            return PassWork(calls=100, operations=each * len(x))

        return EfficientSamples(work, parameters)(np.zeros((0, 3)), np.zeros(0))

    found = [enough(each) for each in (10**5, 10**7, 10**9)]
    assert found == [65536, 512, 4] == [enough(each, least=2) for each in (10**5, 10**7, 10**9)]
    assert enough(0) is None
    assert enough(1, least=4) is None
    more = enough(10**7, 10**7)
    assert more is not None
    assert found[1] is not None
    assert more > found[1]


def test_the_line_of_a_start_names_grains_and_the_ranks_that_they_are_work_for() -> None:
    rule = GrainRule(None, 1, 64, coarse=True)
    line = described_grains(rule, 32, "TorchModel")
    assert "32 samples a step in 4 grains of 8" in line
    assert line.endswith("work for at most 4 ranks")


@pytest.mark.parametrize(
    ("ranks", "fixed", "best", "share"),
    [(1, 1.0, "micro_batch=32", "at most 1 rank "), (2, 1.0, "micro_batch=16", "at most 2 ranks"),
     (8, 0.1, "micro_batch=4", "at most 8 ranks"), (1, 0.01, None, ""), (4, 1.0, None, "")],
)  # fmt: skip
def test_another_grain_is_named_where_it_would_save_more_than_a_tenth(
    ranks: int, fixed: float, best: str | None, share: str
) -> None:
    """Passes take ``fixed`` + samples / 10 seconds; the grains are 4 of 8 samples."""
    rule = GrainRule(None, 1, 8, coarse=True)
    line = faster_grain(rule, 32, ranks, 8, fixed + 0.8, fixed + 0.1)
    assert (line is None) == (best is None)
    assert line is None or (f"{best} in place of 8" in line and share in line)


def test_a_clock_that_makes_no_sense_says_nothing() -> None:
    rule = GrainRule(None, 1, 8, coarse=True)
    assert faster_grain(rule, 32, 1, 8, 1.0, 1.1) is None
    assert faster_grain(rule, 32, 1, 8, 8.0, 0.5) is None


def test_times_are_known_when_every_block_was_timed_with_and_without_the_other_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_code, "perf_counter", count(step=0.25).__next__)
    times = PassTimes()
    for number in range(5):
        assert times.seconds is None
        for block in (0, 1):
            times.add(block, 8, 1.0 + number, lambda: None)
    assert times.seconds == (8, 6.0, 0.5)  # the first two passes are left out
    refused: list[int] = []
    times.add(0, 8, 0.1, lambda: refused.append(8))
    times.add(0, 1, 0.1, lambda: refused.append(1))
    assert not refused
    assert times.seconds == (8, 6.0, 0.5)


def test_code_that_takes_no_single_sample_has_no_times_and_no_error() -> None:
    times = PassTimes()
    for _ in range(5):
        times.add(0, 8, 1.0, lambda: [].pop())
    assert times.seconds is None
