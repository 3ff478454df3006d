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
        What was looked at.
    status : {"ok", "warn", "FAIL"}
        "warn": training works, not as well as it could.
    text : str
        What was found.
    remedy : str
        How to mend it.
    code : int
        Exit status of a "FAIL".
    """

    name: str
    status: Status
    text: str
    remedy: str = ""
    code: int = ExitStatus.CONFIG


def counted(number: int, noun: str) -> str:
    """Return "1 rank", "3 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
