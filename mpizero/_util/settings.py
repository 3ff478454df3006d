"""Declare settings: fields of a frozen dataclass with a default, a check, and whether a resumed run may change them.

The constructor of :class:`Settings` calls the checks. Classes of settings combine by inheritance: the class of a table
of the configuration file inherits from the library's classes whose settings the table has (``train/config/schema.py``),
and from :class:`ConfigSection`, whose errors name a setting and its values as the file does. A check returns the value
to use, or raises :class:`~mpizero._util.checks.Unexpected`, whose text says what is expected. If a check raises another
ValueError, that error's text is the whole message, apart from the name and value of the setting.

[Note: no library] With libraries such as msgspec and pydantic, checks of types and ranges are shorter. But their errors
would have to be parsed to give messages with the value, the allowed values, the most similar word and a remedy; and
NumPy's numbers, durations of batch systems, and settings that do not fit together would need functions of their own,
too.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np

from mpizero._util.checks import Check, Unexpected, positive
from mpizero._util.names import nearest
from mpizero._util.text import printable
from mpizero.errors import ConfigError

#: Whether a resumed run may change a setting: freely, only if ``--override`` names the setting, or never.
Resume = Literal["free", "override", "never"]


def setting(default: Any, check: Check, *, resume: Resume = "override", off: Any = None) -> Any:
    """Declare a setting with its default (``dataclasses.MISSING`` if it must be given) and its check.

    ``resume`` says whether a resumed run may change the setting. ``off`` is the value that stands for None in a
    configuration file, because TOML has no None.
    """
    return field(default=default, metadata={"check": check, "resume": resume, "off": off})


def like(kind: type, name: str, **changes: Any) -> Any:
    """Declare a setting like ``name`` of class ``kind``; ``changes`` are another ``default``, ``resume`` or ``off``."""
    declared = next(item for item in fields(kind) if item.name == name)
    default = changes.pop("default", declared.default)
    return field(default=default, metadata={**declared.metadata, **changes})


@dataclass(frozen=True)
class Settings:
    """Serve as base class of settings: the constructor calls each field's check, and then :meth:`check_combination`."""

    def __post_init__(self) -> None:
        """Check all values and their combination; raise an error that names the wrong setting."""
        for item in fields(self):
            if check := item.metadata.get("check"):
                try:
                    object.__setattr__(self, item.name, check(self._value(item)))
                except ValueError as error:
                    raise self._wrong(item.name, error) from None
        self.check_combination()

    def check_combination(self) -> None:
        """Raise an error for settings that do not fit together; subclasses override this."""

    def reject(self, name: str, message: str) -> ConfigError:
        """Return the error about the wrong setting ``name``; ``message`` says what is wrong, or what is allowed."""
        return ConfigError(f"{name}={getattr(self, name)!r}: {message}")

    def named(self, name: str) -> str:
        """Return the name of a setting for messages."""
        return name

    def values_of(self, kind: type) -> dict[str, Any]:
        """Return the settings that the class ``kind`` declares, by name."""
        return {item.name: getattr(self, item.name) for item in fields(kind)}

    def _value(self, item: Field[Any]) -> Any:
        """Return the value of the setting ``item``, a field of the dataclass, as its check is to get it."""
        return getattr(self, item.name)

    def _wrong(self, name: str, error: ValueError) -> ConfigError:
        return self.reject(name, f"expected {error}" if isinstance(error, Unexpected) else str(error))


# ---------------------------------------------------------------------- settings of files


class SettingError(ConfigError):
    """Report a wrong setting; ``key`` is its name, such as ``train.steps``, for finding its line in the file."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key
        self.message = message


def rejected(key: str, value: object, allowed: str) -> SettingError:
    """Return the error about a wrong setting; its message has the key, the value and what is allowed."""
    return SettingError(key, f"{key} = {shown(value)}: {allowed}")


def shown(value: object) -> str:
    """Format a value as in a TOML file."""
    match value:
        case bool():
            return str(value).lower()
        case str():
            return '"' + printable(value.replace("\\", "\\\\").replace('"', '\\"')) + '"'
        case list() | tuple():
            return "[" + ", ".join(map(shown, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{key} = {shown(item)}" for key, item in value.items()) + "}"
        case None:
            return "(not given)"
        case _:
            return str(value)


def allowed(error: ValueError) -> str:
    """Return the part of a check's error that says which values are allowed, such as "must be true or false"."""
    if not isinstance(error, Unexpected):
        return str(error)
    return f"must be {error}".replace("True or False", "true or false")


def check_option(option: str, value: object, check: Check) -> None:
    """Check the value of a command line option.

    Raises
    ------
    ConfigError
        If the check fails. The message names the option, its value and what is allowed.
    """
    try:
        check(value)
    except ValueError as error:
        raise ConfigError(f"{option} {value}: {allowed(error)}") from None


@dataclass(frozen=True)
class ConfigSection(Settings):
    """Serve as base class of the tables of a configuration file; errors name a setting as the file does."""

    #: The table's name in the file; if "", :meth:`title` makes the name from the class's name.
    table: ClassVar[str] = ""

    @classmethod
    def title(cls) -> str:
        """Return the table's name in the file: :attr:`table`, or a name made from that of the class."""
        return cls.table or cls.__name__.removesuffix("Section").lower()

    def named(self, name: str) -> str:
        """Return the key of a setting, such as "train.steps"."""
        return f"{self.title()}.{name}"

    def reject(self, name: str, message: str) -> SettingError:
        """Return the error about the wrong setting ``name`` of this table; ``message`` says what is allowed."""
        return rejected(self.named(name), getattr(self, name), message)

    def to_dict(self) -> dict[str, Any]:
        """Return every setting, defaults included, as JSON values by key."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def values(self, *without: str) -> dict[str, Any]:
        """Return the values of all settings by key, except those named in ``without``."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in without}

    def _value(self, item: Field[Any]) -> Any:
        value, off = getattr(self, item.name), item.metadata.get("off")
        is_off = (
            isinstance(value, int | float | str) and not isinstance(value, bool) and off is not None and value == off
        )
        return None if is_off else value

    def _wrong(self, name: str, error: ValueError) -> ConfigError:
        off = next(item.metadata.get("off") for item in fields(self) if item.name == name)
        return self.reject(name, allowed(error) + ("" if off is None else f", or {shown(off)} for none"))


# ---------------------------------------------------------------------- checks


def optional(check: Check) -> Check:
    """Return a check that allows None, and uses ``check`` for other values."""
    return lambda value: None if value is None else check(value)


def one_of(*words: str) -> Check:
    """Return a check that allows only the given words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise Unexpected("one of " + ", ".join(map(shown, words)) + nearest(value, words))
        return value

    return check


def text(value: Any) -> str:
    """Check that a value is a string that is neither empty nor blank, and has no NUL characters."""
    if not isinstance(value, str) or not value.strip():
        raise Unexpected("a string that is not empty")
    if "\0" in value:
        raise Unexpected("a string without NUL characters")
    return value


def many(check: Check, *, least: int = 0, count: int | None = None, what: str = "") -> Check:
    """Return a check for lists, which applies ``check`` to each item and returns the results as a tuple.

    There must be ``count`` items or, without it, at least ``least`` items. ``what`` is the name of the items in
    messages.
    """
    size = f"a list of {count} values" if count is not None else "a list" + f" of at least {least} values" * (least > 0)
    size += f": {what}" if what else ""

    def check_all(value: Any) -> tuple[Any, ...]:
        listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if not listed and not (isinstance(value, np.ndarray) and value.ndim):
            raise Unexpected(size)
        if len(value) < least or (count is not None and len(value) != count):
            raise Unexpected(f"{size}, got {len(value)}")
        try:
            return tuple(map(check, value))
        except ValueError as error:
            raise ValueError(f"each value {allowed(error)}") from None

    return check_all


def clock_seconds(value: str) -> float:
    """Convert a batch system's duration "MM:SS", "HH:MM:SS" or "D-HH:MM:SS" to seconds.

    Raises
    ------
    ValueError
        If the text has another form.
    """
    parts = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", value)
    if parts is None:
        raise ValueError(f"not a time: {value}")
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def duration(value: Any) -> float:
    """Check a duration and return it in seconds: a number > 0, a text such as "HH:MM:SS", or a TOML time."""
    if isinstance(value, datetime.time):
        value = value.strftime("%H:%M:%S")
    try:
        if isinstance(value, str) and value.count(":") == 2:
            value = clock_seconds(value)
        return positive(value)
    except ValueError:
        raise Unexpected('seconds > 0, "HH:MM:SS" or "D-HH:MM:SS"') from None
