"""Save and restore a run's state other than arrays, and choose the checkpoint from which a run continues."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mpizero import checkpoint
from mpizero._util.text import notice
from mpizero.checkpoint import StepFolder
from mpizero.checkpoint.folders import step_folders
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.errors import CheckpointDamagedError, CheckpointError, ConfigError
from mpizero.sharding import state_dict
from mpizero.sharding.saved_attributes import read_attribute, recorded_tiles
from mpizero.train.config.data_identity import difference, touched
from mpizero.train.config.overridden import overridable
from mpizero.train.config.sections import changes, described_change
from mpizero.train.run.metrics import finite
from mpizero.train.run.progress import Progress
from mpizero.train.run.run_folder import RunFolder
from mpizero.train.run.setup import RunSetup

#: Name of the checkpoint attribute with the state of a training run.
ATTRIBUTE = "training"
_CHANGING = ("best", "numbers", "callbacks", "stopped", "overrides")


@dataclass(frozen=True)
class RunState:
    """Hold the state of a run, other than arrays and settings, that changes from step to step.

    Attributes
    ----------
    loss : float or None
        Loss of the last step; None if it was not finite.
    best : dict
        State of :class:`~mpizero.train.run.improvement.Improvement`; empty if there is none.
    numbers : dict
        State of :class:`~mpizero.train.run.number_watch.NumberWatch`.
    callbacks : dict
        States of the callbacks, by name.
    stopped : str
        The reason for which a callback has ended the run at this step; "" if none has.
    overrides : list of dict
        Settings that were changed when the run was resumed: "step", "key", "was", "now".
    """

    loss: float | None = None
    best: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""
    overrides: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class SavedRun:
    """Hold the state of a training run that a checkpoint has besides the arrays.

    Attributes
    ----------
    step : int
        Number of steps done. Multiplied by the global batch size, it is the number of samples consumed.
    state : RunState
        What changes from step to step.
    config : dict
        The whole configuration of the run.
    data : str
        Fingerprint of the training data.
    validation : str
        Fingerprint of the validation samples; "" if there were none.
    code : mapping of str to str
        Hashes of the files of the user's functions that made model and data, by file name.
    contents : mapping
        What identifies the contents of the data; empty in checkpoints of older versions.
    """

    step: int
    state: RunState
    config: dict[str, dict[str, Any]]
    data: str
    validation: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, attributes: Mapping[str, Any], path: str | Path) -> SavedRun:
        """Read and check the state in a checkpoint's attributes, which are the result of :func:`saved_attributes`.

        Not collective. ``path`` is for error messages.

        Raises
        ------
        CheckpointError
            If the checkpoint was not written by ``mpizero train`` or :class:`mpizero.Trainer`.
        """
        try:
            found = attributes[ATTRIBUTE]
            parts = {name: dict(found.get(name) or {}) for name in ("best", "numbers", "callbacks")}
            stopped, overridden = str(found.get("stopped") or ""), list(found.get("overrides") or ())
            state = RunState(found["loss"], **parts, stopped=stopped, overrides=overridden)
            config = {str(name): dict(section) for name, section in dict(found["config"]).items()}
            data, held = str(found["data"]), str(found.get("validation") or "")
            code, contents = (dict(found.get(name) or {}) for name in ("code", "contents"))
            return cls(_whole(found["step"]), state, config, data, held, code, contents)
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}: not written by `mpizero train` or mpizero.Trainer: it holds no training run's state"
            ) from None


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(value)
    return value


def saved_attributes(setup: RunSetup, step: int, state: RunState, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the checkpoint attributes with the state of the run after ``step`` steps.

    Not collective. ``versions`` are those of Python and the libraries, by name.
    """
    loop, record = setup.loop, setup.record
    own = {
        "step": step,
        "samples": step * loop.global_batch,
        "seed": loop.seed,
        "loss": finite(state.loss),
        "config": record.settings,
        "data": record.fingerprint,
        **({"validation": held} if (held := record.validation_fingerprint) else {}),
        **({"contents": record.contents} if record.contents else {}),
        "versions": dict(versions),
        **({"code": dict(record.code)} if record.code else {}),
    }
    own |= {name: part for name in _CHANGING if (part := getattr(state, name))}
    return {ATTRIBUTE: own}


@dataclass(frozen=True)
class ResumePoint:
    """Describe the checkpoint from which a run continues.

    Attributes
    ----------
    saved : SavedRun
        State of the run in that checkpoint, whose arrays have been restored.
    newer : list of StepFolder
        The checkpoints of later steps, newest first; they are moved to another folder before training goes on.
    """

    saved: SavedRun
    newer: list[StepFolder]


def restore(
    setup: RunSetup, folder: RunFolder, comm: Communicator, progress: Progress, step: int | None = None
) -> ResumePoint | None:
    """Restore the newest undamaged checkpoint of a run, or the checkpoint of ``step``.

    Return None if the folder holds no checkpoint. Collective over ``comm``. No file is changed. Without ``step``,
    damaged newer checkpoints are skipped. A newer checkpoint that cannot be opened for another reason is an error,
    because it may be undamaged.

    Raises
    ------
    ConfigError
        If the saved run has other data, or other settings that change the result. The message names the first
        difference.
    CheckpointError
        If there is no checkpoint of ``step``, or it cannot be loaded. If ``step`` is None: a newer checkpoint cannot be
        opened, or all checkpoints are damaged. The message names these checkpoints, and says what to do.
    """
    found = checkpoint.survey(folder.checkpoints, comm)
    if step is not None:
        start = _restore_step(setup, folder, comm, found, step)
        progress.say(f"resuming from step {step}, as asked for{_changed_code(setup, start.saved)}")
        return start
    passed: list[StepFolder] = []
    for one in found:
        if one.sound and any(newer.unreadable for newer in passed):
            raise _refusal(setup, folder, passed, one)
        looked, saved = _try(setup, one, comm)
        if saved is not None:
            progress.say(f"resuming from {one.path}{_changed_code(setup, saved)}")
            return ResumePoint(saved, passed)
        passed.append(looked)
    if passed:
        raise _refusal(setup, folder, passed, None)
    progress.say(f"no checkpoint in {folder.checkpoints}: starting from the beginning")
    return None


def tiles_of_checkpoint(checkpoints: Path, comm: Communicator, step: int | None = None) -> dict[str, int] | None:
    """Return the number of tiles of each axis that the training has which wrote a run's checkpoint.

    Collective over ``comm``; only rank 0 reads. It is the newest undamaged checkpoint, or that of ``step``. None is
    returned if there is none, or it does not say: :func:`restore` then raises the error.
    """

    def look() -> dict[str, int] | None:
        for path in step_folders(str(checkpoints)):
            if step in (None, checkpoint.step_of(path)):
                with suppress(CheckpointError, OSError), checkpoint.open_checkpoint(path, "self") as reader:
                    return recorded_tiles(read_attribute(reader))
        return None

    found = None
    with all_ranks(comm):
        found = look() if comm.rank == 0 else None
    told: dict[str, int] | None = comm.broadcast_object(found, tag="tiles")
    return told


def _changed_code(setup: RunSetup, saved: SavedRun) -> str:
    """Return a text that names the user's files that have changed since the checkpoint was saved; "" if none has."""
    code = setup.record.code
    changed = [name for name, digest in sorted(code.items()) if saved.code.get(name, digest) != digest]
    if not changed:
        return ""
    verb = "has" if len(changed) == 1 else "have"
    return f"; {', '.join(changed)} {verb} changed since it was saved: from here on the run is that of the new code"


def _try(setup: RunSetup, found: StepFolder, comm: Communicator) -> tuple[StepFolder, SavedRun | None]:
    """Try to load a checkpoint; return its description and the run's state in it.

    If loading fails, the description has the problem, and the state is None.
    """
    if not found.sound:
        return found, None
    try:
        return found, _load(setup, found.path, comm)
    except CheckpointError as error:
        return replace(found, problem=str(error), damaged=isinstance(error, CheckpointDamagedError)), None


def _restore_step(
    setup: RunSetup, folder: RunFolder, comm: Communicator, found: Sequence[StepFolder], step: int
) -> ResumePoint:
    asked = setup.record.wording.resume_from.format(step)
    chosen = next((one for one in found if one.step == step), None)
    if chosen is None:
        there = ", ".join(str(one.step) for one in reversed(found))
        raise CheckpointError(
            f"{asked}: no checkpoint of step {step} in {folder.checkpoints}: "
            + (f"there are those of the steps {there}" if there else "it holds none")
        )
    looked, saved = _try(setup, chosen, comm)
    if saved is None:
        raise CheckpointError(f"{asked}: {looked.problem}")
    return ResumePoint(saved, [one for one in found if one.step > step])


def _refusal(
    setup: RunSetup, folder: RunFolder, passed: Sequence[StepFolder], good: StepFolder | None
) -> CheckpointError:
    """Return the error that names the checkpoints ``passed``, which cannot be loaded, and says what the user can do.

    ``good`` is an older checkpoint that can be loaded, or None.
    """
    told = "; ".join(
        f"{os.path.basename(one.path)} {'is damaged' if one.damaged else 'cannot be used'}: {one.problem}"
        for one in passed
    )
    wording = setup.record.wording
    older = "" if good is None else f"go on from an older one with {wording.resume_from.format(good.step)}, or "
    return CheckpointError(
        f"cannot resume in {folder.checkpoints}, where nothing was changed: {told}. Mend that, or {older}start over "
        f"{wording.afresh}: what is left behind then moves to earlier/ in the run's folder"
    )


def _overrides(setup: RunSetup, saved: SavedRun, path: str, elsewhere: str) -> list[dict[str, Any]]:
    """Return the settings that this run changes; raise ``ConfigError`` if it may not change one of them."""
    found, allowed, override = [], setup.record.overridden, setup.record.wording.override
    for key, (was, now) in changes(saved.config, setup.record.settings).items():
        if key not in allowed:
            section, _, name = key.partition(".")
            able = override and overridable(key) and name in setup.record.settings.get(section, {})
            way = f"go on with the new one by {override.format(key)}, " if able else ""
            changed = described_change(key, (was, now))
            raise ConfigError(f"cannot resume from {path}: {changed}; give the saved value, {way}{elsewhere}")
        found.append({"step": saved.step, "key": key, "was": was, "now": now})
    return found


def _check_data(what: str, alike: bool, saved: Any, now: Any, refused: str, elsewhere: str) -> None:
    """Raise ConfigError if the data named ``what`` are not those of the saved run."""
    why = difference(saved.get(what, {}), now.get(what, {}))
    if why or not alike:
        told = f": {why}" if why else ""
        raise ConfigError(
            f"{refused}: data: the {what} samples are not those of the saved run{told}; give the same data, {elsewhere}"
        )


def _load(setup: RunSetup, path: str, comm: Communicator) -> SavedRun:
    elsewhere = f"or start in another {setup.record.wording.folder}"
    with checkpoint.open_checkpoint(path, comm) as reader:
        saved = SavedRun.of(reader.attributes, path)
        if checkpoint.step_of(path) != saved.step:
            raise CheckpointError(f"{path}: holds step {saved.step}: give it back the name of its own step")
        if ("model" in saved.config) != ("model" in setup.record.settings):
            writers = "mpizero.Trainer", "`mpizero train`"
            raise ConfigError(f"cannot resume from {path}: it is of a run of {writers['model' in saved.config]}")
        saved.state.overrides.extend(_overrides(setup, saved, path, elsewhere))
        record, compared = setup.record, {"training": (saved.data, setup.record.fingerprint)}
        if saved.validation and record.validation_fingerprint:  # a run may begin to validate, and may end it
            compared["validation"] = saved.validation, record.validation_fingerprint
        for what, (before, now) in compared.items():
            _check_data(what, before == now, saved.contents, record.contents, f"cannot resume from {path}", elsewhere)
            if comm.rank == 0 and (told := touched(*(one.get(what, {}) for one in (saved.contents, record.contents)))):
                notice(f"the {what} data: {told}")
        state_dict.restore(setup.model.loadable_engine, reader)
    setup.model.invalidate_cache()
    return saved
