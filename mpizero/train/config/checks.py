"""Check settings: a check returns the value to use, or raises a ValueError whose message says what is allowed."""

from __future__ import annotations

import datetime
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from mpizero._util.checks import Check, Unexpected, positive
from mpizero._util.names import nearest
from mpizero._util.text import printable
from mpizero.errors import ConfigError


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
    """Return what the error of a check says about allowed values, such as "must be true or false"."""
    return f"must be {error}" if isinstance(error, Unexpected) else str(error)


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
class ConfigSection:
    """Serve as base class of all sections: the constructor checks every field by the check declared with it."""

    #: The section's name in the file; "" takes it from the class's name.
    named: ClassVar[str] = ""

    @classmethod
    def title(cls) -> str:
        """Return the section's name in the file."""
        return cls.named or cls.__name__.removesuffix("Section").lower()

    def __post_init__(self) -> None:
        """Call every field's check, store the value that it returns, and then call :meth:`check_combination`."""
        for item in fields(self):
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, item.metadata["check"](value))
            except ValueError as error:
                raise rejected(f"{self.title()}.{item.name}", value, allowed(error)) from None
        self.check_combination()

    def check_combination(self) -> None:
        """Raise an error for settings that do not fit together; subclasses override this."""

    def to_dict(self) -> dict[str, Any]:
        """Return every setting, defaults included, as JSON values by key."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    def values(self, *without: str) -> dict[str, Any]:
        """Return the settings as they are used, by key, but for those named."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in without}

    def reject(self, key: str, allowed: str) -> SettingError:
        """Return the error about the wrong setting ``key`` of this section; ``allowed`` says what is allowed."""
        return rejected(f"{self.title()}.{key}", getattr(self, key), allowed)


def setting(default: Any, check: Check) -> Any:
    """Declare a field of a section with its default and its check."""
    return field(default=default, metadata={"check": check})


def required(check: Check) -> Any:
    """Declare a field of a section without a default, and its check."""
    return field(metadata={"check": check})


def optional(check: Check) -> Check:
    """Return a check that allows None, and uses ``check`` for other values."""
    return lambda value: None if value is None else check(value)


def clock_seconds(value: str) -> float:
    """Convert a batch system's duration "MM:SS", "HH:MM:SS" or "D-HH:MM:SS" to seconds.

    Raises
    ------
    ValueError
        If the text has another form.
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", value)
    if found is None:
        raise ValueError(f"not a time: {value}")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def duration(value: Any) -> float:
    """Check a duration and return it in seconds: a number > 0, a text such as "HH:MM:SS", or a TOML time."""
    if isinstance(value, datetime.time):
        value = value.strftime("%H:%M:%S")
    try:
        if isinstance(value, str) and value.count(":") == 2:
            value = clock_seconds(value)
        seconds = positive(value)
    except ValueError:
        raise ValueError('must be seconds > 0, "HH:MM:SS" or "D-HH:MM:SS"') from None
    return seconds


def flag(value: Any) -> bool:
    """Check that a value is true or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def text(value: Any) -> str:
    """Check that a value is a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a string that is not empty")
    if "\0" in value:
        raise ValueError("must be a string without NUL characters")
    return value


def choice(*words: str) -> Check:
    """Return a check that allows only the given words."""

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError("must be one of " + ", ".join(map(shown, words)) + nearest(value, words))
        return value

    return check


def many(check: Check, *, least: int = 0, count: int | None = None) -> Check:
    """Return a check for lists, which returns a tuple of what ``check`` returns for each item.

    There must be ``count`` items or, without it, at least ``least`` items.
    """
    size = f"a list of {count} values" if count is not None else f"a list of at least {least} values"

    def check_all(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be {size}")
        if len(value) < least or (count is not None and len(value) != count):
            raise ValueError(f"must be {size}, got {len(value)}")
        try:
            return tuple(map(check, value))
        except ValueError as error:
            raise ValueError(f"each value {allowed(error)}") from None

    return check_all
