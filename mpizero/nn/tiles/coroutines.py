"""Run several functions in turns; each runs until it needs something from all of them.

[Note: coroutines] A layer calls a collective in the middle of its code. To run the layer for several virtual ranks in
one process, each call has to be left where it is and continued later. Python's generators would need ``yield`` in every
function between; threads would need locks, and a thread switch takes longer than a small layer. So the functions run
as coroutines of the library greenlet, which switches between stacks in less than a microsecond. A coroutine
starts without the caller's context variables, such as NumPy's error state and the dtype of products on a GPU, unless it
is given a copy of the context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

from greenlet import getcurrent, greenlet

from mpizero._util.text import Line, is_users
from mpizero.errors import CollectiveError

R = TypeVar("R")


class Mismatch(Exception):
    """Raised by the ``answer`` of a :class:`Meeting` if what its members bring does not fit together."""


class Meeting:
    """Let ``size`` coroutines wait for one another, and compute what each of them gets from what all of them bring.

    Parameters
    ----------
    size : int
        Number of the members, which are numbered from 0.
    answer : callable
        Takes what the members bring, in the order of their numbers; returns what each of them gets.
    """

    def __init__(self, size: int, answer: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self.size, self.answer = size, answer

    def wait(self, member: int, brought: Any) -> Any:
        """Wait until all members have come; return what member number ``member``, the caller, gets.

        Raises :class:`CollectiveError` if the caller does not run in :func:`run_in_turns`.
        """
        caller = getcurrent()
        if not isinstance(caller, _Coroutine):
            raise CollectiveError(
                f"{brought} was called for one of {self.size} tiles of this rank alone: a split layer of a rank with "
                "several tiles runs in the tiled model only"
            )
        return caller.parent.switch(_Arrival(self, member, brought))


class _Coroutine(greenlet):  # type: ignore[misc]  # no stubs
    """Run one of the functions of :func:`run_in_turns`."""


class _Arrival(NamedTuple):
    """Say that a coroutine waits at a meeting."""

    meeting: Meeting
    member: int
    brought: Any


def run_in_turns(functions: Sequence[Callable[[], R]]) -> list[R]:
    """Call the functions, each until it waits at a :class:`Meeting` and then on; return their results in order.

    The order in which they run is always the same. An exception of one of them ends all. Each sees the caller's context
    variables; what it sets in them is not seen outside.

    Raises
    ------
    CollectiveError
        Functions wait at meetings to which others do not come any more, or bring what does not fit together. The error
        names the line of each.
    """
    coroutines = [_Coroutine(function) for function in functions]
    for coroutine in coroutines:
        coroutine.gr_context = copy_context()
    results: dict[int, Any] = {}
    came: dict[Meeting, dict[int, tuple[int, Any]]] = {}
    ready: deque[tuple[int, tuple[Any, ...]]] = deque((number, ()) for number in range(len(coroutines)))
    try:
        while ready:
            number, given = ready.popleft()
            arrival = coroutines[number].switch(*given)
            if coroutines[number].dead:
                results[number] = arrival
                continue
            there = came.setdefault(arrival.meeting, {})
            there[arrival.member] = number, arrival.brought
            if len(there) == arrival.meeting.size:
                members = [there[member] for member in sorted(there)]
                answers = arrival.meeting.answer([brought for _, brought in members])
                del came[arrival.meeting]
                ready.extend((waiting, (answer,)) for (waiting, _), answer in zip(members, answers, strict=True))
        if came:
            raise CollectiveError(f"{_different(came, coroutines)}; others have ended")
    except Mismatch:
        raise CollectiveError(_different(came, coroutines)) from None
    finally:
        for coroutine in coroutines:
            if coroutine and not coroutine.dead:
                with suppress(Exception):  # of a function's ``finally``, which would hide the error that ends all
                    coroutine.throw()
    return [results[number] for number in range(len(coroutines))]


def _different(came: Mapping[Meeting, Mapping[int, tuple[int, Any]]], coroutines: Sequence[greenlet]) -> str:
    """Say what the waiting coroutines have called, and where."""
    calls = (
        f"tile {member} {brought}{_place(coroutines[number])}"
        for there in came.values()
        for member, (number, brought) in sorted(there.items())
    )
    return f"the tiles of this rank called different collectives: {'; '.join(calls)}"


def _place(coroutine: greenlet) -> str:
    """Return where the user's code waits in a coroutine, as " at file:line in function", or ""."""
    frame = coroutine.gr_frame
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return f" at {Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)}"
        frame = frame.f_back
    return ""
