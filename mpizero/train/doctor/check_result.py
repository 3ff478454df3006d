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
        "warn" if training works, but not as well as it could; "FAIL" if it does not work.
    text : str
        What the check has found.
    remedy : str
        What the user can do about a problem; "" if there is nothing to do.
    code : int
        Exit status of ``mpizero doctor`` if ``status`` is "FAIL"; otherwise without meaning.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""
    code: int = ExitStatus.CONFIG


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, for example "1 rank" or "3 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
