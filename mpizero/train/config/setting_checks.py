"""What a setting may be: small checks that turn a TOML value into the value used, or say what is allowed."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from mpizero.errors import ConfigError
from mpizero.names import nearest
from mpizero.text import printable


class SettingError(ConfigError):
    """A setting that cannot be used; ``key`` is its dotted name, so that the file's line can be found."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key
        self.message = message


def rejected(key: str, value: object, allowed: str) -> SettingError:
    """Return the error that names the key, what was given and what is allowed.

    Not collective.
    """
    return SettingError(key, f"{key} = {shown(value)}: {allowed}")


def shown(value: object) -> str:
    """Return a value as it would stand in a TOML file.

    Not collective.
    """
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


class Check(Protocol):
    """Turn a raw value into the one used; :class:`ValueError` says what is allowed."""

    def __call__(self, value: Any) -> Any:
        """Return the value used."""


@dataclass(frozen=True)
class Section:
    """Base of the configuration's sections: every field carries its check."""

    @classmethod
    def title(cls) -> str:
        """Return the section's name in the file.

        Not collective.
        """
        return cls.__name__.removesuffix("Section").lower()

    def __post_init__(self) -> None:
        """Check and normalize every field, then the combinations."""
        for item in fields(self):
            value = getattr(self, item.name)
            try:
                object.__setattr__(self, item.name, item.metadata["check"](value))
            except ValueError as error:
                raise rejected(f"{self.title()}.{item.name}", value, str(error)) from None
        self.check_combination()

    def check_combination(self) -> None:
        """Reject settings that are fine alone and not together."""

    def reject(self, key: str, allowed: str) -> SettingError:
        """Return the error for one of this section's settings.

        Not collective.
        """
        return rejected(f"{self.title()}.{key}", getattr(self, key), allowed)


def setting(default: Any, check: Check) -> Any:
    """Declare a field of a section with its default and its check.

    Not collective.
    """
    return field(default=default, metadata={"check": check})


def required(check: Check) -> Any:
    """Declare a field without a default.

    Not collective.
    """
    return field(metadata={"check": check})


def optional(check: Check) -> Check:
    """Allow a setting to be absent.

    Not collective.
    """
    return lambda value: None if value is None else check(value)


def whole(minimum: int, maximum: int | None = None) -> Check:
    """Take a whole number in a closed range.

    Not collective.
    """
    text = f"must be a whole number >= {minimum}"
    if maximum is not None:
        text = f"must be a whole number from {minimum} to {maximum}"

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(text)
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(text)
        return value

    return check


def number(text: str, accept: Callable[[float], bool]) -> Check:
    """Take a finite number that ``accept`` accepts; ``text`` says which those are.

    Not collective.
    """

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a number {text}")
        # A whole number may be too large for a float.
        if not abs(value) <= sys.float_info.max or not accept(float(value)):
            raise ValueError(f"must be a finite number {text}")
        return float(value)

    return check


def positive() -> Check:
    """Take a finite number above zero.

    Not collective.
    """
    return number("> 0", lambda value: value > 0)


def not_negative() -> Check:
    """Take a finite number from zero up.

    Not collective.
    """
    return number(">= 0", lambda value: value >= 0)


def clock_seconds(value: str) -> float:
    """Return the seconds of "MM:SS", "HH:MM:SS" or "D-HH:MM:SS", which is how batch systems tell time.

    Not collective.

    Raises
    ------
    ValueError
        It is something else.
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", value)
    if found is None:
        raise ValueError(f"not a time: {value}")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def duration(value: Any) -> float:
    """Take seconds > 0, or a text as "HH:MM:SS"; TOML's own times of day are understood too.

    Not collective.
    """
    if isinstance(value, datetime.time):
        value = value.strftime("%H:%M:%S")
    try:
        if isinstance(value, str) and value.count(":") == 2:
            value = clock_seconds(value)
        seconds: float = positive()(value)
    except ValueError:
        raise ValueError('must be seconds > 0, "HH:MM:SS" or "D-HH:MM:SS"') from None
    return seconds


def fraction() -> Check:
    """Take a number from zero up to, not including, one.

    Not collective.
    """
    return number(">= 0 and < 1", lambda value: 0 <= value < 1)


def flag(value: Any) -> bool:
    """Take true or false.

    Not collective.
    """
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def text(value: Any) -> str:
    """Take a string that is not empty.

    Not collective.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError("must be a string that is not empty")
    if "\0" in value:
        raise ValueError("must be a string without NUL characters")
    return value


def choice(*words: str) -> Check:
    """Take one of some words.

    Not collective.
    """

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in words:
            raise ValueError("must be one of " + ", ".join(map(shown, words)) + nearest(value, words))
        return value

    return check


def many(check: Check, *, least: int = 0, count: int | None = None) -> Check:
    """Take a list whose every item passes ``check``.

    Not collective.
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
            raise ValueError(f"each value {error}") from None

    return check_all
