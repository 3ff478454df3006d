"""Hold the result of one check of ``mpizero doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpizero.errors import ExitStatus

Status = Literal["ok", "warn", "FAIL"]


@dataclass(frozen=True)
class CheckResult:
    """Hold the outcome of one check.

    Attributes
    ----------
    name : str
        Name of the check.
    status : {"ok", "warn", "FAIL"}
        "warn": training works, but not as well as it could.
    text : str
        The result in words.
    remedy : str
        What the user can do about a problem.
    code : int
        Exit status of a "FAIL".
    """

    name: str
    status: Status
    text: str
    remedy: str = ""
    code: int = ExitStatus.CONFIG


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, for example "1 rank" or "3 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
