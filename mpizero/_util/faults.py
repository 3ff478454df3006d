"""Inject faults for tests: make a rank fail, hang or compute NaN at a chosen point of a save, a load or a step.

A site is a point of the code at which a fault can be injected; :data:`SITES` lists them.

The environment variable ``MPIZERO_FAULT=site:rank:k:action`` chooses one fault. The library calls :func:`inject` at
each site. At the ``k``-th call of a process for that ``site`` (counted from 1; ``*`` means every call), on the rank
with that number (``*`` means every rank), the process

=================  =======================================================================
``raise``          raises :class:`InjectedError`
``kill``           is killed by SIGKILL
``stop``           is stopped by SIGSTOP, like a machine that hangs
``sleep``          sleeps for 100 s; ``sleep=2.5`` for 2.5 s
``exit``           ends by ``os._exit(0)``, which no hook sees; ``exit=3`` with status 3
``nan``            writes NaN to the first element of the array passed to :func:`inject`
``truncate``       cuts off the second half of the file passed to :func:`inject`
=================  =======================================================================

If the variable is not set, :func:`inject` does nothing. The variable is read once, when this module is imported.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mpizero._util.launch import launched_rank

#: Names of the places that call :func:`inject`, each with what is about to happen there and, in parentheses, the
#: target that is passed.
SITES: Mapping[str, str] = {
    "save.write": "a rank writes a block of an array into the state file (the file)",
    "save.sync": "a rank makes its part of the state file durable (the file)",
    "save.manifest": "rank 0 writes the manifest",
    "save.commit": "rank 0 gives the whole checkpoint its name",
    "save.prune": "rank 0 removes an old checkpoint",
    "load.read": "a rank reads a block of an array from the state file",
    "train.step": "a rank begins a training step",
}
ACTIONS = ("raise", "kill", "stop", "sleep", "exit", "nan", "truncate")


class InjectedError(RuntimeError):
    """Raised by the action ``raise``. It is no :class:`MpizeroError`, so it is handled like an unexpected bug."""


@dataclass(frozen=True)
class Fault:
    """Hold the fault that ``MPIZERO_FAULT`` chose for this process, and count the calls of :func:`inject` for its site.

    ``occurrence`` is the number of the call, from 1, that performs ``action``; 0 means every call. ``value`` is the
    text after ``=`` in the action, such as the seconds of "sleep=2.5".
    """

    site: str
    occurrence: int  # 0 for every call
    action: str
    value: str = ""
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Fault | None:
        """Parse ``MPIZERO_FAULT`` and return its fault, or None if it is not set or chooses another rank.

        Raises
        ------
        ValueError
            If the value is not of the form ``site:rank:k:action``, or its site or action is unknown.
        """
        if not (text := environment.get("MPIZERO_FAULT")):
            return None
        site, rank, occurrence, action = (text.split(":") + [""] * 4)[:4]
        kind, _, value = action.partition("=")
        numbers = all(number == "*" or number.isdecimal() for number in (rank, occurrence))
        known = site in SITES and kind in ACTIONS and numbers and occurrence.strip("0") != ""
        if not known or text.count(":") != 3 or not _is_number(value or "0"):
            raise ValueError(
                f"MPIZERO_FAULT={text!r}: expected site:rank:k:action with a site of {', '.join(SITES)}, "
                f"a rank or *, k >= 1 or *, and an action of {', '.join(ACTIONS)}; unset it to plant nothing"
            )
        meant = rank == "*" or int(rank) == launched_rank(environment)
        return cls(site, int(occurrence.replace("*", "0")), kind, value) if meant else None

    def inject(self, target: Any) -> None:
        """Count one call of the site, and perform the action if this call is the chosen one."""
        if next(self.calls) == self.occurrence or not self.occurrence:
            getattr(self, f"_{self.action}")(target)

    def _raise(self, target: Any) -> NoReturn:
        raise InjectedError(f"planted at {self.site}, call {self.occurrence or '*'}")

    def _kill(self, target: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self, target: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _sleep(self, target: Any) -> None:
        time.sleep(float(self.value or 100))

    def _exit(self, target: Any) -> NoReturn:
        os._exit(int(float(self.value or 0)))

    def _nan(self, target: Any) -> None:
        target.reshape(-1)[0] = float("nan")

    def _truncate(self, target: Any) -> None:
        os.truncate(target, os.stat(target).st_size // 2)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


_FAULT = Fault.from_environment(os.environ)


def inject(site: str, target: Any = None) -> None:
    """Perform the fault of ``MPIZERO_FAULT`` if it was chosen for this site, this rank and this call; else do nothing.

    Parameters
    ----------
    site : str
        One of :data:`SITES`.
    target : array, file descriptor or path, optional
        The array that ``nan`` changes, or the file that ``truncate`` shortens.
    """
    if _FAULT is not None and _FAULT.site == site:
        _FAULT.inject(target)
