"""Define assertions that fail on all ranks together, so that no rank is left waiting for one that failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.comm.startup.launch import one_process


def parallel_assert(comm: Communicator, condition: object, message: str = "") -> None:
    """Assert that ``condition`` is true on every rank; otherwise raise the same error on all ranks.

    Collective over ``comm``.

    Raises
    ------
    AssertionError
        On every rank, if ``condition`` is false on any rank. The message names these ranks and contains their
        ``message``.
    """
    answers = comm.allgather_object((bool(condition), message), tag="parallel_assert")
    if wrong := [f"rank {rank}: {text or 'false'}" for rank, (right, text) in enumerate(answers) if not right]:
        raise AssertionError("; ".join(wrong))


def assert_same_as_serial(function: Callable[[Any], Any], comm: Communicator) -> None:
    """Assert that ``function(comm)`` returns, on every rank, the bits that it returns for a communicator of one rank.

    Collective over ``comm``. The function must return numbers, strings, arrays, or nested mappings, lists and tuples of
    them. Arrays are compared by dtype, shape and bytes, so that NaN equals itself and 0.0 differs from -0.0.

    Raises
    ------
    AssertionError
        On every rank, if the bits differ on any rank. The message names these ranks and the first difference on each.
    Exception
        Any other error of ``function``, on the ranks that raised it.
    RemoteError
        On the other ranks then; names the ranks that failed and the first error.
    """
    difference = ""
    with all_ranks(comm, "assert_same_as_serial"):
        try:
            difference = first_difference(function(comm), function(one_process()))
        except AssertionError as error:
            difference = str(error) or "false"
    parallel_assert(comm, not difference, difference)


def first_difference(found: Any, expected: Any, place: str = "result") -> str:
    """Return a description of the first difference in bits between two nested values; "" if equal. Not collective.

    ``place`` names the values in the description.
    """
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        if list(found) != list(expected):
            return f"{place} has keys {list(found)}, expected {list(expected)}"
        pairs = [(found[key], expected[key], f"{place}[{key!r}]") for key in expected]
    elif isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{place} has {len(found)} items, expected {len(expected)}"
        pairs = [(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(found, expected, strict=True))]
    else:
        return _leaf_difference(found, expected, place)
    return next(filter(None, (first_difference(*pair) for pair in pairs)), "")


def _leaf_difference(found: Any, expected: Any, place: str) -> str:
    a, b = np.asarray(found), np.asarray(expected)
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{place} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
    if a.dtype.hasobject:
        return "" if found == expected else f"{place} is {found!r}, expected {expected!r}"
    if a.tobytes() == b.tobytes():
        return ""
    rows = [np.frombuffer(v.tobytes(), np.dtype((np.void, v.itemsize))) for v in (a, b)]
    wrong = [i for i, (p, q) in enumerate(zip(*rows, strict=True)) if p.tobytes() != q.tobytes()]
    first = wrong[0]
    values = f"{a.reshape(-1)[first]!r}, expected {b.reshape(-1)[first]!r}"
    return f"{place} differs in {len(wrong)} of {a.size} elements, first at {first}: {values}"
