"""Train what a configuration file describes: one run, or with a section ``[ensemble]`` the members of an ensemble.

:func:`train_document` reads the section ``[ensemble]``, and :func:`train` builds and trains the model of one run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mpizero._util.names import nearest
from mpizero._util.settings import SettingError, rejected
from mpizero.comm import Communicator
from mpizero.comm.startup import agree_to_start
from mpizero.tools.ensemble import Member, run_members
from mpizero.train.config.build import build
from mpizero.train.config.schema import RunConfig, check_overridden
from mpizero.train.config.toml import ConfigDocument, parse_config, tables_of
from mpizero.train.loop import Preempted
from mpizero.train.run_folder import RunFolder, tiles_of_checkpoint
from mpizero.train.stopping import JobContext, StopSignals
from mpizero.train.trainer import Trainer


def train_document(document: ConfigDocument, config: RunConfig, comm: Communicator, **arguments: Any) -> dict[str, Any]:
    """Train what a configuration describes; return the result of the run, or the summary of an ensemble.

    Collective over ``comm``. ``arguments`` are keyword arguments of :func:`train`.
    """
    tables = tables_of(document)
    if "ensemble" not in tables:
        return train(config, comm, **arguments)
    ensemble = EnsembleSettings.of(tables["ensemble"])

    def one(member: Member) -> dict[str, Any]:
        member_document = replace(document, values=ensemble.values(config, member))
        return train(parse_config(member_document), member.comm, **arguments)

    run = RunFolder(config.checkpoint.folder).root
    return run_members(one, ensemble.members, comm, run=run, on_failure=ensemble.on_failure)


def train(
    config: RunConfig,
    comm: Communicator,
    *,
    resume: bool = False,
    resume_from: int | None = None,
    overridden: Sequence[str] = (),
    context: JobContext | None = None,
) -> dict[str, Any]:
    """Run the training that a configuration describes, and return its result.

    Collective over ``comm``.

    Parameters
    ----------
    config : RunConfig
        The configuration, the same on every rank.
    comm : Communicator
        The ranks that train; the communicator is not closed.
    resume : bool
        Whether to continue from the newest undamaged checkpoint of the run, if there is one; see :func:`restore` in
        ``train/run_folder.py``.
    resume_from : int, optional
        Continue from the checkpoint of this step; checkpoints of later steps are moved to another folder.
    overridden : sequence of str
        Keys of settings that change the result, in which this run may differ from the run that it resumes.
    context : JobContext, optional
        Signals that the caller catches already, and the start time of the command. If it is None, this function
        catches signals itself.

    Returns
    -------
    dict
        ``steps``, ``loss`` (of the last step), ``parameters_sha256``, ``bits``, ``ranks``, ``strategy``,
        ``tokens_per_second`` (None if samples have no tokens; ``samples_per_second`` is then another key),
        ``parameter_count`` and ``layout``. See :meth:`~mpizero.train.setup.TrainingResult.to_dict` for more.

    Raises
    ------
    Preempted
        After SIGUSR1, SIGUSR2 or SIGTERM on any rank, if a file ``STOP`` exists in the run's folder, or shortly before
        the job's time limit. The state is saved, and the message names the reason.
    NonFiniteError
        After five skipped steps in a row, whose loss or gradient was not finite.
    """
    config.parallel.check_ranks(comm.size)
    agree_to_start(comm, lambda: {"the configuration": config.to_dict()})
    keys = check_overridden(overridden, config.to_dict())
    folder = RunFolder(config.checkpoint.folder).checkpoints  # before the user's code can go into another folder
    if config.parallel.tiles is None and (resume or resume_from is not None):
        config = config.with_tiles(tiles_of_checkpoint(folder, comm, resume_from))
    context = context or JobContext(StopSignals())
    with context.signals, build(config, comm, overridden=keys) as setup:
        setup = replace(setup, checkpoints=replace(config.checkpoint, folder=str(folder)))
        outcome = Trainer.of_setup(setup, context).run_session(resume=resume, resume_from=resume_from)
    if isinstance(outcome, Preempted):  # raised when the model is closed
        raise outcome
    return outcome.to_dict()


#: The settings of the section ``[ensemble]``.
KEYS = ("members", "on_failure", "each")


@dataclass(frozen=True)
class EnsembleSettings:
    """Hold the settings of the section ``[ensemble]``.

    Attributes
    ----------
    members : int
        Number of members.
    on_failure : str
        Whether other members "end" or "continue" after a member has failed, see :func:`run_members`.
    each : dict
        Lists of values by setting, such as "optimizer.lr"; member k takes the k-th value.
    """

    members: int
    on_failure: Literal["end", "continue"] = "end"
    each: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, section: Mapping[str, Any]) -> EnsembleSettings:
        """Return the checked settings of a section; raise SettingError if one is wrong."""
        for key in section:
            if key not in KEYS:
                message = f"ensemble.{key}: unknown key{nearest(key, KEYS)}; known: {', '.join(KEYS)}"
                raise SettingError(f"ensemble.{key}", message)
        members, on_failure = section.get("members"), section.get("on_failure", "end")
        if type(members) is not int or members < 1:
            raise rejected("ensemble.members", members, "must be a whole number >= 1")
        if on_failure not in ("end", "continue"):
            raise rejected("ensemble.on_failure", on_failure, 'must be "end" or "continue"')
        each = _flat(section.get("each", {}))
        for key, values in each.items():
            if not isinstance(values, list) or len(values) != members:
                raise rejected(f"ensemble.each.{key}", values, f"must be a list of {members} values, one a member")
        return cls(members, on_failure, each)

    def values(self, config: RunConfig, member: Member) -> dict[str, Any]:
        """Return the settings of a member by key; "train.seed" defaults to the run's seed plus the member's number."""
        table: dict[str, Any] = {"train.seed": config.train.seed + member.number, "train.threads": config.train.threads}
        table |= {key: values[member.number] for key, values in self.each.items()}
        return table | {"checkpoint.folder": os.path.abspath(member.run / "checkpoints")}


def _flat(tables: object, prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to one dict with dotted keys, such as "optimizer.lr"."""
    if not isinstance(tables, dict):
        raise rejected("ensemble.each", tables, "must be a table of lists, such as optimizer.lr = [0.1, 0.2]")
    result: dict[str, Any] = {}
    for key, value in tables.items():
        result |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result
