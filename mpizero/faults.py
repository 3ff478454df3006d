"""Inject faults for tests: a rank is killed, stuck or wrong at a known place of a save or a step.

``MPIZERO_FAULT=site:rank:k:action`` plants one. At the ``k``-th call (from 1; ``*`` for every call) of :func:`inject`
with that site, on the rank that the launcher gave this number (``*`` for every rank), the process

=================  =======================================================================
``raise``          raises :class:`InjectedError`
``kill``           is killed by SIGKILL
``stop``           is stopped by SIGSTOP, like a machine that hangs
``sleep``          sleeps for 100 s; ``sleep=2.5`` for 2.5 s
``exit``           ends by ``os._exit(0)``, which no hook sees; ``exit=3`` with status 3
``nan``            gets NaN as the first element of the array that the site passes
``truncate``       loses the second half of the file that the site passes
=================  =======================================================================

Nothing is planted by default, and :func:`inject` is then one comparison. The module keeps the fault of its process
and the number of calls of its site.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mpizero.launched import launched_rank

#: Where a fault may be planted, and what is about to happen there.
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
    """Raised by the action ``raise``: no error that the library expects."""


@dataclass(frozen=True)
class Fault:
    """Describe the fault of this process."""

    site: str
    occurrence: int  # 0 for every call
    action: str
    value: str = ""
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Fault | None:
        """Return the fault that ``MPIZERO_FAULT`` plants on this rank, None if it plants none here.

        Not collective.

        Raises
        ------
        ValueError
            For a text that names no known site and action.
        """
        if not (text := environment.get("MPIZERO_FAULT")):
            return None
        site, rank, occurrence, action = (text.split(":") + [""] * 4)[:4]
        kind, _, value = action.partition("=")
        numbers = all(number == "*" or number.isdecimal() for number in (rank, occurrence))
        known = site in SITES and kind in ACTIONS and numbers
        if not known or text.count(":") != 3 or not _is_number(value or "0"):
            raise ValueError(
                f"MPIZERO_FAULT={text!r}: expected site:rank:k:action with a site of {', '.join(SITES)}, "
                f"a rank or *, k >= 1 or *, and an action of {', '.join(ACTIONS)}; unset it to plant nothing"
            )
        meant = rank == "*" or int(rank) == launched_rank(environment)
        return cls(site, int(occurrence.replace("*", "0")), kind, value) if meant else None

    def inject(self, target: Any) -> None:
        """Act, if this is the chosen call."""
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
    """Trigger the planted fault if it is for this site, this rank and this call.

    Not collective.

    Parameters
    ----------
    site : str
        One of :data:`SITES`.
    target : array, file descriptor or path, optional
        Changed by ``nan`` and ``truncate``.
    """
    if _FAULT is not None and _FAULT.site == site:
        _FAULT.inject(target)
