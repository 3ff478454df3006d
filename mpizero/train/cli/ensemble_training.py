"""Train what a configuration file describes: one run, or with a section ``[ensemble]`` the members of an ensemble."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mpizero._util.names import nearest
from mpizero.comm import Communicator
from mpizero.tools.ensemble import Member, run_members
from mpizero.train.cli.train_command import train
from mpizero.train.config.checks import SettingError, rejected
from mpizero.train.config.schema import Config
from mpizero.train.config.toml import ConfigDocument, parse_config, tables_of
from mpizero.train.run_folder import RunFolder

#: The settings of the section.
KEYS = ("members", "on_failure", "each")


@dataclass(frozen=True)
class EnsembleSettings:
    """Hold the section ``[ensemble]``.

    Attributes
    ----------
    members : int
        Number of members.
    on_failure : str
        "end" or "continue", see :func:`run_members`.
    each : dict
        Lists of values by setting, such as "optimizer.lr"; member k takes the k-th value.
    """

    members: int
    on_failure: Literal["end", "continue"] = "end"
    each: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EnsembleSettings:
        """Return the checked settings of a section; raise SettingError if one is wrong."""
        for key in given:
            if key not in KEYS:
                message = f"ensemble.{key}: unknown key{nearest(key, KEYS)}; known: {', '.join(KEYS)}"
                raise SettingError(f"ensemble.{key}", message)
        members, on_failure = given.get("members"), given.get("on_failure", "end")
        if type(members) is not int or members < 1:
            raise rejected("ensemble.members", members, "must be a whole number >= 1")
        if on_failure not in ("end", "continue"):
            raise rejected("ensemble.on_failure", on_failure, 'must be "end" or "continue"')
        each = _flat(given.get("each", {}))
        for key, values in each.items():
            if not isinstance(values, list) or len(values) != members:
                raise rejected(f"ensemble.each.{key}", values, f"must be a list of {members} values, one a member")
        return cls(members, on_failure, each)

    def values(self, config: Config, member: Member) -> dict[str, Any]:
        """Return the settings of a member by key, such as "optimizer.lr"; without ``train.seed`` it counts up."""
        own: dict[str, Any] = {"train.seed": config.train.seed + member.number, "train.threads": config.train.threads}
        own |= {key: values[member.number] for key, values in self.each.items()}
        return own | {"checkpoint.folder": os.path.abspath(member.run / "checkpoints")}


def _flat(tables: object, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted keys."""
    if not isinstance(tables, dict):
        raise rejected("ensemble.each", tables, "must be a table of lists, such as optimizer.lr = [0.1, 0.2]")
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def train_document(document: ConfigDocument, config: Config, comm: Communicator, **arguments: Any) -> dict[str, Any]:
    """Train a configuration, or the members of its ensemble; return the result, or the ensemble's summary.

    Collective over ``comm``. ``arguments`` are those of :func:`train`.
    """
    tables = tables_of(document)
    if "ensemble" not in tables:
        return train(config, comm, **arguments)
    ensemble = EnsembleSettings.of(tables["ensemble"])

    def one(member: Member) -> dict[str, Any]:
        own = replace(document, values=ensemble.values(config, member))
        return train(parse_config(own), member.comm, **arguments)

    run = RunFolder(config.checkpoint.folder).root
    return run_members(one, ensemble.members, comm, run=run, on_failure=ensemble.on_failure)
