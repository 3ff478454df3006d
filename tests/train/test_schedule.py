"""How long a learning rate takes to its end is a setting of its own: more steps do not stretch it without a word."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpizero.cli.train import train
from mpizero.comm import InMemoryCommunicator
from mpizero.errors import ConfigError
from mpizero.train.config.schema import RunConfig, changes, described_change
from mpizero.train.config.toml import config_of
from tests.train.conftest import metrics


def run(config: RunConfig, resume: bool = False) -> dict:
    """Train in one process, whose communicator an error ends."""
    with InMemoryCommunicator.group(1)[0] as comm:
        return train(config, comm, resume=resume)


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(40, 3)).astype(np.float32))
    np.save(tmp_path / "y.npy", rng.integers(0, 2, 40))
    return tmp_path


def configuration(folder: Path, steps: int, **optimizer) -> RunConfig:
    return config_of(
        {
            "model": {"name": "mlp", "hidden": [4]},
            "data": {"arrays": {"x": str(folder / "x.npy"), "y": str(folder / "y.npy")}, "validation": 0.0},
            "train": {"steps": steps, "global_batch": 8, "validate_every": 0},
            "optimizer": {"lr": 0.01, **optimizer},
            "checkpoint": {"folder": str(folder / "run" / "checkpoints")},
        }
    )


def rates(folder: Path) -> list[float]:
    return [line["learning_rate"] for line in metrics(folder / "run")]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_more_steps_never_move_the_rate_of_a_resumed_run(data, schedule):
    run(configuration(data, 10, schedule=schedule))
    first = rates(data)
    told = r"optimizer.schedule_steps was 10 in the saved run and is 20 now .train.steps, where it is not given."
    with pytest.raises(ConfigError, match=told):
        run(configuration(data, 20, schedule=schedule), resume=True)
    assert rates(data) == first
    run(configuration(data, 14, schedule=schedule, schedule_steps=10), resume=True)
    assert rates(data) == [*first, 0.0, 0.0, 0.0, 0.0]
    run(configuration(data, 16, schedule=schedule, schedule_steps=10), resume=True)


def test_a_part_of_a_run_has_the_rates_and_bits_of_the_whole(data):
    own = {"schedule": "cosine", "warmup": 6, "end": 0.001}
    whole = run(configuration(data, 20, **own))["parameters_sha256"]
    expected = rates(data)
    run(configuration(data, 4, schedule_steps=20, **own))  # ends within the warm-up
    run(configuration(data, 9, schedule_steps=20, **own), resume=True)
    assert run(configuration(data, 20, **own), resume=True)["parameters_sha256"] == whole
    assert rates(data) == expected


def test_a_constant_rate_takes_more_steps_as_before(data):
    run(configuration(data, 3, warmup=2))
    assert run(configuration(data, 6, warmup=2), resume=True)["steps"] == 6


def test_runs_saved_before_there_was_the_setting_have_the_length_of_their_steps(data):
    saved = configuration(data, 10, schedule="linear").to_dict()
    del saved["optimizer"]["schedule_steps"]
    assert not changes(saved, configuration(data, 10, schedule="linear").to_dict())
    assert not changes(saved, configuration(data, 30, schedule="linear", schedule_steps=10).to_dict())
    told = described_change(*next(iter(changes(saved, configuration(data, 30, schedule="linear").to_dict()).items())))
    assert "schedule_steps" in told
    assert "was 10" in told
    constant = configuration(data, 10).to_dict()
    del constant["optimizer"]["schedule_steps"]
    assert not changes(constant, configuration(data, 30).to_dict())


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
def test_lengths_that_do_not_fit_are_named(data, settings, told):
    with pytest.raises(ConfigError, match=told):
        configuration(data, 10, **settings)
