"""A run's state on disk: what is saved beside the arrays, and which checkpoint a run may continue from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpizero import checkpoint
from mpizero.comm import Communicator
from mpizero.errors import CheckpointError, ConfigError
from mpizero.parallel import persistence
from mpizero.train.builder import Job
from mpizero.train.config import difference
from mpizero.train.metrics import finite
from mpizero.train.progress import Progress
from mpizero.train.runfolder import RunFolder

#: The attribute under which a training run keeps what it needs to go on.
ATTRIBUTE = "training"


@dataclass(frozen=True)
class Saved:
    """What a training run wrote beside its arrays.

    Attributes
    ----------
    step : int
        Steps done; with the global batch size it is also the place in the data.
    loss : float or None
        Of that step.
    config : dict
        The whole configuration.
    data : str
        Fingerprint of the training data.
    """

    step: int
    loss: float | None
    config: dict[str, dict[str, Any]]
    data: str

    @classmethod
    def of(cls, attributes: Mapping[str, Any], path: str | Path) -> Saved:
        """Read what :func:`saved_attributes` returned.

        Not collective.

        Raises
        ------
        CheckpointError
            The checkpoint is not a training run's.
        """
        try:
            found = attributes[ATTRIBUTE]
            saved = cls(_whole(found["step"]), found["loss"], dict(found["config"]), str(found["data"]))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: not written by `mpizero train`: it holds no training run's state") from None
        if not isinstance(saved.config.get("model"), dict):
            raise CheckpointError(f"{path}: its configuration has no model")
        return saved


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def saved_attributes(job: Job, step: int, loss: float | None, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return what the checkpoint of a step keeps beside what every model's has.

    Not collective.
    """
    train = job.config.train
    own = {
        "step": step,
        "samples": step * train.global_batch,
        "seed": train.seed,
        "loss": finite(loss),
        "config": job.config.to_dict(),
        "data": job.fingerprint,
        "versions": dict(versions),
    }
    return {ATTRIBUTE: own}


def load_newest(job: Job, folder: RunFolder, comm: Communicator, progress: Progress) -> Saved | None:
    """Restore the newest good checkpoint of a run, None if there is none.

    Collective over ``comm``.

    Raises
    ------
    ConfigError
        The saved run computes something else: the message names the first setting that differs.
    CheckpointError
        Every checkpoint there is fails to load.
    """
    failure: CheckpointError | None = None
    for path in checkpoint.sound(folder.checkpoints, comm, progress.say):
        try:
            saved = _load(job, path, comm)
        except CheckpointError as error:
            failure = error
            progress.say(f"{error}; trying the one before")
            continue
        progress.say(f"resuming from {path}")
        return saved
    if failure is not None:
        raise failure
    progress.say(f"no checkpoint in {folder.checkpoints}: starting from the beginning")
    return None


def _load(job: Job, path: str, comm: Communicator) -> Saved:
    with checkpoint.open_checkpoint(path, comm) as reader:
        saved = Saved.of(reader.attributes, path)
        if checkpoint.step_of(path) != saved.step:
            raise CheckpointError(f"{path}: holds step {saved.step}: give it back the name of its own step")
        if changed := difference(saved.config, job.config.to_dict()):
            raise ConfigError(
                f"cannot resume from {path}: {changed}; give the saved value, or start in another checkpoint.folder"
            )
        if saved.data != job.fingerprint:
            raise ConfigError(
                f"cannot resume from {path}: data: the training samples are not those of the saved run; "
                "give the same data, or start in another checkpoint.folder"
            )
        persistence.restore(job.model.engine, reader)
    job.model.invalidate_cache()
    return saved
