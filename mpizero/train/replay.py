"""``mpizero replay``: the samples of a bad step again, in one process, with the parameters of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mpizero import checkpoint
from mpizero.errors import ConfigError, DataError
from mpizero.parallel import BadStep, DDPModel, Replay, ShardingConfig, persistence, read_bad_step, replay_bad_step
from mpizero.parallel.replay import Figures
from mpizero.train.builder import make_model
from mpizero.train.config import Config
from mpizero.train.configfile import config_of
from mpizero.train.metrics import finite
from mpizero.train.resume import Saved


@dataclass(frozen=True)
class Found:
    """What a replay has shown.

    Attributes
    ----------
    step : BadStep
        What was replayed.
    parameters : str
        Where the parameters come from, for people.
    replays : list of Replay
        One for each micro-batch.
    """

    step: BadStep
    parameters: str
    replays: list[Replay]


def replay(path: str, chosen: str | None, tell: Callable[[str], object]) -> Found:
    """Replay the bad step in the folder ``path``.

    Not collective. The parameters are those of the checkpoint ``chosen``, else of the newest sound one of the run from
    before the step, else the start values.

    Raises
    ------
    DataError
        No bad step of `mpizero train`, or a damaged one.
    CheckpointError
        The checkpoint that was asked for cannot be read, or is of another model.
    """
    step = read_bad_step(path)
    config = _config_of(step, path)
    model = make_model(config, step.about.get("widths"))
    found = chosen or _newest_before(Path(path), step.step, tell)
    with ShardingConfig() as sharding, DDPModel(model, sharding) as placed:
        told = "the start values"
        if found is not None:
            with checkpoint.open_checkpoint(found) as reader:
                done = Saved.of(reader.attributes, found).step
                persistence.restore(placed.engine, reader)
            told = f"step {done}, from {found}"
        return Found(step, told, replay_bad_step(step, placed))


def _config_of(step: BadStep, path: str) -> Config:
    try:
        return config_of(dict(step.about["config"]))
    except KeyError:
        raise DataError(
            f"{path}: has no configuration: not written by `mpizero train`; replay it from Python, with "
            "mpizero.replay_bad_step(path, model)"
        ) from None
    except (ConfigError, TypeError, ValueError) as error:
        raise DataError(f"{path}: its configuration is of another version: {error}") from None


def _newest_before(path: Path, step: int, tell: Callable[[str], object]) -> str | None:
    """Return the newest sound checkpoint of the run, of a step before ``step``."""
    root = path.absolute().parent.parent
    for folder in (root / "checkpoints", root):
        for found in checkpoint.sound(folder, report=tell):
            at = checkpoint.step_of(found)
            if at is not None and at < step:
                return found
    return None


def report(found: Found) -> str:
    """Return what was found for people. Not collective."""
    step = found.step
    lines = [f"step {step.step}, skipped in training; parameters here: {found.parameters}"]
    lines += [
        f"in training: {told.get('message')}, samples {told.get('start')} to {_last(told)}" for told in step.found
    ]
    for replay_ in found.replays:
        lines += ["", *_of_samples(replay_)]
    return "\n".join(lines)


def _last(told: dict[str, Any]) -> Any:
    stop = told.get("stop")
    return stop - 1 if isinstance(stop, int) else stop


def _of_samples(replay_: Replay) -> list[str]:
    first = replay_.first
    if first is None:
        verdict = "every value is finite with these parameters"
    else:
        verdict = f"first not finite: {first.what} {first.name}, {first.not_finite} of {first.size} values"
    head = f"samples {replay_.start} to {replay_.stop - 1}: loss {replay_.loss / replay_.weight:.6g}; {verdict}"
    names = [f"{f.what} {f.name}" for f in replay_.figures]
    width = max(map(len, names))
    rows = [f"  {'':{width}}  {'min':>11}  {'max':>11}  {'norm':>11}  not finite"]
    rows += [f"  {name:{width}}  {_row(figures)}" for name, figures in zip(names, replay_.figures, strict=True)]
    return [head, *rows]


def _row(figures: Figures) -> str:
    numbers = (figures.minimum, figures.maximum, figures.norm)
    bad = f"{figures.not_finite} of {figures.size}" if figures.not_finite else "-"
    return "  ".join(f"{number:11.4g}" for number in numbers) + f"  {bad:>10}"


def as_json(found: Found) -> str:
    """Return what was found on one line for programs. Not collective."""
    return json.dumps(
        {
            "step": found.step.step,
            "found": found.step.found,
            "parameters": found.parameters,
            "replays": [
                {
                    "start": r.start,
                    "stop": r.stop,
                    "loss": finite(r.loss),
                    "weight": finite(r.weight),
                    "first": None if r.first is None else f"{r.first.what} {r.first.name}",
                    "figures": _plain(r.figures),
                }
                for r in found.replays
            ],
        },
        allow_nan=False,
    )


def _plain(figures: Sequence[Figures]) -> list[dict[str, Any]]:
    numbers = ("minimum", "maximum", "norm")
    return [asdict(f) | {key: finite(getattr(f, key)) for key in numbers} for f in figures]
