"""Implement ``mpizero replay``: evaluate the samples of a bad step again, in one process, with saved parameters.

A bad step is a step that training skipped because a gradient was not finite, and whose samples it saved in a folder.
:func:`replay` evaluates them, :func:`report` and :func:`as_json` format the :class:`ReplayedStep`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mpizero import checkpoint, nn
from mpizero._util.settings import SettingError, shown
from mpizero._util.text import aligned, joined
from mpizero.checkpoint.format import ARRAY_LIMIT, is_count
from mpizero.comm.startup import available_memory
from mpizero.errors import ConfigError, DataError
from mpizero.sharding import BadStep, Replay, distribute, read_bad_step, replay_bad_step, state_dict
from mpizero.sharding.diagnostics import ReplayedArray
from mpizero.train.config.build import build_model, make_model, user_functions, users_modules
from mpizero.train.config.schema import RunConfig
from mpizero.train.config.sections import NamedModelSection
from mpizero.train.config.toml import config_of
from mpizero.train.run_folder import SavedRun
from mpizero.train.setup import finite


@dataclass(frozen=True)
class ReplayedStep:
    """Hold the result of a replay.

    Attributes
    ----------
    step : BadStep
        The bad step that was replayed, with its samples.
    parameters : str
        Text that says where the parameters came from.
    replays : list of Replay
        Results for the saved samples, one for each micro-batch.
    """

    step: BadStep
    parameters: str
    replays: list[Replay]


def replay(path: str, chosen: str | None, tell: Callable[[str], object]) -> ReplayedStep:
    """Evaluate the samples of the bad step in the folder ``path`` again. Not collective.

    The parameters come from the checkpoint ``chosen``; None means the run's newest undamaged checkpoint of an earlier
    step or, if there is no such checkpoint, the initial values. ``tell`` is called with a line of text for each damaged
    checkpoint.

    Raises
    ------
    DataError
        If the folder is not a bad step written by ``mpizero train``, or is damaged.
    CheckpointError
        If the checkpoint cannot be read, or belongs to another model.
    """
    step = read_bad_step(path)
    config = _config_of(step, path)
    with users_modules(config):
        try:
            model = _model_of(step, config, path)
        except SettingError as error:
            raise ConfigError(f"{path}: {error.message}") from error.__cause__
        return _replayed(step, model, chosen or _latest_before(Path(path), step.step, tell))


def _replayed(step: BadStep, model: Any, path: str | None) -> ReplayedStep:
    with distribute(model, None, "ddp") as placed:
        source = "the start values"
        if path is not None:
            with checkpoint.open_checkpoint(path, "self") as reader:
                done = SavedRun.of(reader.attributes, path).step
                state_dict.restore(placed._engine, reader)
            source = f"step {done}, from {path}"
        return ReplayedStep(step, source, replay_bad_step(step, placed))


def _config_of(step: BadStep, path: str) -> RunConfig:
    try:
        config = config_of(dict(step.about["config"]))
    except KeyError:
        raise DataError(
            f"{path}: has no configuration: not written by `mpizero train`; replay it from Python, with "
            "mpizero.sharding.replay_bad_step(path, model)"
        ) from None
    except (ConfigError, TypeError, ValueError) as error:
        raise DataError(f"{path}: its configuration is of another version: {error}") from None
    # Where the run's folder is gone, the working directory may have the files.
    folders = dict.fromkeys((str(step.about.get("folder", ".")), os.getcwd()))
    candidates = [replace(config, folder=folder) for folder in folders]
    for candidate in candidates:
        if all(function.file is None or function.file.is_file() for function in user_functions(candidate).values()):
            return candidate
    missing = next(f for f in user_functions(config).values() if f.file is not None and not f.file.is_file())
    raise DataError(
        f"{path}: {missing.key} was {shown(missing.make)}, which is neither in {' nor in '.join(folders)}: replay it "
        "where the file is"
    )


def _model_of(step: BadStep, config: RunConfig, path: str) -> Any:
    """Build the model of a bad step, without parameter arrays.

    Raise :class:`DataError` if the model is too large for this machine, or the samples do not fit the model.
    """
    widths, section = step.about.get("widths"), config.model
    if not isinstance(section, NamedModelSection):
        return build_model(config)
    if widths is not None and not (isinstance(widths, list) and all(is_count(width, 1) for width in widths)):
        raise DataError(f"{path}: about.widths is {widths!r:.80}: expected whole numbers > 0")
    for what, values in ((name, getattr(grain, name)) for grain in step.grains for name in "xy"):
        if not isinstance(values, np.ndarray):
            raise DataError(f"{path}: {what} is a {type(values).__name__}: a {section.name} takes one array")
        if values.dtype.kind == "c":
            raise DataError(f"{path}: {what} is {values.dtype}: a {section.name} takes real numbers")
    if section.block_count > ARRAY_LIMIT:
        raise DataError(f"{path}: its model has {section.block_count} blocks, at most {ARRAY_LIMIT} are allowed")
    model = make_model(config, widths)
    for grain in step.grains:
        if grain.x.shape[1:] != model.sample_shape:
            raise DataError(
                f"{path}: its samples have shape {grain.x.shape[1:]} each, "
                f"its {section.name} takes {model.sample_shape}"
            )
    size = np.dtype(model.dtype).itemsize * sum(prod(spec.shape) for spec in nn.model_specs(model))
    if (memory := available_memory()) is not None and size > memory:
        raise DataError(f"{path}: its model has {size} bytes of parameters, this job may take {memory} of memory")
    return model


def _latest_before(path: Path, step: int, tell: Callable[[str], object]) -> str | None:
    """Return the path of the run's newest undamaged checkpoint of a step before ``step``; None if there is none.

    ``path`` is the folder of the bad step, inside the run's folder.
    """
    root = path.absolute().parent.parent
    for folder in (root / "checkpoints", root):
        for step_path in checkpoint.list_valid(folder, report=tell):
            at = checkpoint.step_of(step_path)
            if at is not None and at < step:
                return step_path
    return None


def report(result: ReplayedStep) -> str:
    """Format the result of a replay as text for people. Not collective."""
    step = result.step
    lines = [f"step {step.step}, skipped in training; parameters here: {result.parameters}"]
    lines += [f"in training: {item['message']}, samples {item['start']} to {item['stop'] - 1}" for item in step.found]
    for replay_ in result.replays:
        lines += ["", *_of_samples(replay_)]
    return joined(lines)


def _of_samples(replay_: Replay) -> list[str]:
    first = replay_.first
    if first is None:
        verdict = "every value is finite with these parameters"
    else:
        verdict = f"first not finite: {first.what} {first.name}, {first.not_finite} of {first.size} values"
    head = f"samples {replay_.start} to {replay_.stop - 1}: loss {replay_.loss / replay_.weight:.6g}; {verdict}"
    rows = [["", f"{'min':>11}", f"{'max':>11}", f"{'norm':>11}", "not finite"], *map(_cells, replay_.figures)]
    return [head, *(f"  {line}" for line in aligned(rows))]


def _cells(array: ReplayedArray) -> list[str]:
    numbers = (f"{number:11.4g}" for number in (array.minimum, array.maximum, array.norm))
    bad = f"{array.not_finite} of {array.size}" if array.not_finite else "-"
    return [f"{array.what} {array.name}", *numbers, bad]


def as_json(result: ReplayedStep) -> str:
    """Format the result of a replay as one line of JSON for programs. Not collective."""
    return json.dumps(
        {
            "step": result.step.step,
            "found": result.step.found,
            "parameters": result.parameters,
            "replays": [
                {
                    "start": r.start,
                    "stop": r.stop,
                    "loss": finite(r.loss),
                    "weight": finite(r.weight),
                    "first": None if r.first is None else f"{r.first.what} {r.first.name}",
                    "figures": _plain(r.figures),
                }
                for r in result.replays
            ],
        },
        allow_nan=False,
    )


def _plain(arrays: Sequence[ReplayedArray]) -> list[dict[str, Any]]:
    numbers = ("minimum", "maximum", "norm")
    return [asdict(f) | {key: finite(getattr(f, key)) for key in numbers} for f in arrays]
