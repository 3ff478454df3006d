"""How long a learning rate takes to its end is a setting of its own: more steps do not stretch it without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpizero.cli.train import train
from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads
from mpizero.train.config.schema import RunConfig, changes, described_change
from tests.train.conftest import metrics, perceptron_run


def run(config: RunConfig, resume: bool = False) -> dict:
    return run_in_threads(1, lambda comm: train(config, comm, resume=resume))[0]


def configuration(folder: Path, steps: int, **optimizer) -> RunConfig:
    return perceptron_run(folder, {"steps": steps}, optimizer={"lr": 0.01, **optimizer})


def rates(folder: Path) -> list[float]:
    return [line["learning_rate"] for line in metrics(folder / "run")]


def test_more_steps_never_move_the_rate_of_a_resumed_run(arrays):
    run(configuration(arrays, 10, schedule="linear"))
    first = rates(arrays)
    told = r"optimizer.schedule_steps was 10 in the saved run and is 20 now .train.steps, where it is not given."
    with pytest.raises(ConfigError, match=told):
        run(configuration(arrays, 20, schedule="linear"), resume=True)
    assert rates(arrays) == first
    run(configuration(arrays, 14, schedule="linear", schedule_steps=10), resume=True)
    assert rates(arrays) == [*first, 0.0, 0.0, 0.0, 0.0]
    run(configuration(arrays, 16, schedule="linear", schedule_steps=10), resume=True)


def test_a_part_of_a_run_has_the_rates_and_bits_of_the_whole(arrays):
    own = {"schedule": "cosine", "warmup": 6, "end": 0.001}
    whole = run(configuration(arrays, 20, **own))["parameters_sha256"]
    expected = rates(arrays)
    run(configuration(arrays, 4, schedule_steps=20, **own))  # ends within the warm-up
    run(configuration(arrays, 9, schedule_steps=20, **own), resume=True)
    assert run(configuration(arrays, 20, **own), resume=True)["parameters_sha256"] == whole
    assert rates(arrays) == expected


def test_a_constant_rate_takes_more_steps_as_before(arrays):
    run(configuration(arrays, 3, warmup=2))
    assert run(configuration(arrays, 6, warmup=2), resume=True)["steps"] == 6


def test_runs_saved_before_there_was_the_setting_have_the_length_of_their_steps(arrays):
    saved = configuration(arrays, 10, schedule="linear").to_dict()
    del saved["optimizer"]["schedule_steps"]
    assert not changes(saved, configuration(arrays, 10, schedule="linear").to_dict())
    assert not changes(saved, configuration(arrays, 30, schedule="linear", schedule_steps=10).to_dict())
    told = described_change(*next(iter(changes(saved, configuration(arrays, 30, schedule="linear").to_dict()).items())))
    assert "schedule_steps" in told
    assert "was 10" in told
    constant = configuration(arrays, 10).to_dict()
    del constant["optimizer"]["schedule_steps"]
    assert not changes(constant, configuration(arrays, 30).to_dict())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"schedule_steps": 5}, 'schedule_steps = 5: belongs to the schedules "linear" and "cosine"'),
        ({"schedule": "cosine", "schedule_steps": 0}, "schedule_steps = 0: must be a whole number >= 1"),
        ({"schedule": "cosine", "schedule_steps": 5, "warmup": 6}, "warmup = 6: .* optimizer.schedule_steps = 5"),
        ({"schedule": "cosine", "warmup": 11}, "warmup = 11: must be at most train.steps = 10"),
        ({"warmup": 11}, "warmup = 11: must be at most train.steps = 10"),
    ],
)
def test_lengths_that_do_not_fit_are_named(arrays, settings, told):
    with pytest.raises(ConfigError, match=told):
        configuration(arrays, 10, **settings)
