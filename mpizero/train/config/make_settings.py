"""Define the settings ``make``: the name of a user's function, and the keys of the section that are its arguments."""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from mpizero.train.config.setting_checks import ConfigSection, required, shown, text

#: The only key of a table that stands for a TOML value which JSON lacks: a date, a time, NaN or an infinite number.
_TOML = "toml"


def reference(value: Any) -> str:
    """Check ``make``: it must name a file or module, and a function in it."""
    place, _, function = text(value).rpartition(":")
    if not place.strip() or not function.isidentifier():
        raise ValueError('must be "FILE.py:FUNCTION" or "PACKAGE.MODULE:FUNCTION"')
    return str(value)


@dataclass(frozen=True, kw_only=True)
class MakeSettings(ConfigSection):
    """Serve as base class of the sections whose object a function of the user's makes.

    Attributes
    ----------
    make : str
        ``"my_model.py:make"`` or ``"package.module:make"``.
    arguments : dict
        The section's other keys with their TOML values: keyword arguments of the function.
    """

    make: str = required(reference)
    arguments: Mapping[str, Any] = field(default_factory=dict, metadata={"check": dict})

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Self:
        """Return the section of a TOML table, or of what :meth:`to_dict` returned; unknown keys become arguments."""
        own = {item.name for item in fields(cls)} - {"arguments"}
        arguments = {key: _decoded(value) for key, value in table.items() if key not in own}
        return cls(**{key: value for key, value in table.items() if key in own}, arguments=arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return every setting, defaults included, and all arguments, as JSON values by key."""
        own = {item.name: _encoded(getattr(self, item.name)) for item in fields(self) if item.name != "arguments"}
        return own | {key: _encoded(value) for key, value in self.arguments.items()}


def _encoded(value: Any) -> Any:
    """Return a TOML value as a JSON value; :func:`_decoded` returns it as it was."""
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {_TOML: repr(value)}
    return {_TOML: value.isoformat()} if isinstance(value, datetime.date | datetime.time) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if list(value) == [_TOML]:
        return tomllib.loads(f"value = {value[_TOML]}")["value"]
    return {key: _decoded(item) for key, item in value.items()}


def keys_listed(arguments: Mapping[str, Any]) -> str:
    """Return arguments as text, such as "width = 64, depth = 2"."""
    return ", ".join(f"{key} = {shown(value)}" for key, value in arguments.items())
