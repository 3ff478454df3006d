"""What may fail on one rank fails on all, and what must not differ is compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.errors import ConfigError, RemoteError
from mpizero.testing import run_in_threads


def outcome(function):
    """Type and text of what ``function`` raises, None if nothing."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None


def fails_on(*ranks, with_error=ValueError):
    def section(comm):
        with all_ranks(comm):
            if comm.rank in ranks:
                raise with_error(f"planted on {comm.rank}")
        return comm.rank

    return section


#: The user's own line in an agreed section, as errors name it.
PLANTED = f"test_agreement.py:{fails_on.__code__.co_firstlineno + 4} in section"


def test_a_section_without_errors_changes_nothing():
    assert run_in_threads(3, fails_on()) == [0, 1, 2]


def test_the_failing_rank_keeps_its_error_and_the_others_learn_of_it():
    found = run_in_threads(3, lambda comm: outcome(lambda: fails_on(1)(comm)))
    assert found[1] == (ValueError, "planted on 1")
    assert found[0] == found[2] == (RemoteError, f"rank 1 raised; rank 1: ValueError: planted on 1 ({PLANTED})")


def test_all_failing_ranks_are_named_with_the_first_error():
    found = run_in_threads(5, lambda comm: outcome(lambda: fails_on(1, 2, 4)(comm)))
    assert found[0] == (RemoteError, f"ranks 1-2, 4 raised; rank 1: ValueError: planted on 1 ({PLANTED})")


def test_an_outer_section_names_the_cause_and_not_the_echo():
    def nested(comm):
        part = comm.split(comm.rank // 2)
        with all_ranks(comm):
            fails_on(1)(part)

    found = run_in_threads(4, lambda comm: outcome(lambda: nested(comm)))
    assert [kind for kind, _ in found] == [RemoteError, ValueError, RemoteError, ValueError]


def test_a_job_goes_on_after_a_failed_section():
    def twice(comm):
        first = outcome(lambda: fails_on(0)(comm))
        return first[0], fails_on()(comm)

    assert run_in_threads(2, twice) == [(ValueError, 0), (RemoteError, 1)]


@pytest.mark.mpi(min_size=2)
def test_sections_agree_over_mpi(world):
    last = world.size - 1
    kind, text = outcome(lambda: fails_on(last)(world))
    assert kind is (ValueError if world.rank == last else RemoteError)
    assert f"planted on {last}" in text
    assert fails_on()(world) == world.rank


@dataclass
class Settings:
    lr: float = 0.1
    layers: tuple[int, ...] = (4, 4)


def table(rank, odd=2):
    return {"lr": 0.1, "specs": [("a", (2, 3)), ("b", (4, 5 if rank == odd else 4))]}


@pytest.mark.parametrize(
    "value",
    [1, "text", None, (1, 2.5), {"a": [1, {2, 3}]}, Settings(), np.arange(3.0), {"x": np.zeros((2, 0), "i2")}],
    ids=repr,
)
def test_equal_values_pass(value):
    assert run_in_threads(3, lambda comm: agree_equal(comm, lambda: {"value": value}, "test")) == [None] * 3


def test_the_order_of_a_mapping_does_not_matter():
    orders = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    assert run_in_threads(2, lambda comm: agree_equal(comm, lambda: {"value": orders[comm.rank]}, "test")) == [None] * 2


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((1, 1, 2), "value 1 on ranks 0-1, 2 on rank 2"),
        ((1, 1.0, 1), "value 1 on ranks 0, 2, 1.0 on rank 1"),
        ([table(rank) for rank in range(3)], "specs['b'] of value (4, 4) on ranks 0-1, (4, 5) on rank 2"),
        (({"a": 1}, {"a": 1}, {}), "a of value 1 on ranks 0-1, nothing on rank 2"),
        ((Settings(), Settings(lr=0.2), Settings()), "learning rate 0.1 on ranks 0, 2, 0.2 on rank 1"),
        (([1], [1, 2], [1]), "value [1] on ranks 0, 2, [1, 2] on rank 1"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(values, text):
    found = run_in_threads(
        3, lambda comm: outcome(lambda: agree_equal(comm, lambda: {"value": values[comm.rank]}, "test"))
    )
    assert [kind for kind, _ in found] == [ConfigError] * 3
    assert {said.partition(";")[0] for _, said in found} == {f"ranks differ: {text}"}


def test_arrays_differ_by_a_single_bit():
    def compare(comm):
        array = np.zeros(1000, np.float32)
        array[7] = -0.0 if comm.rank == 1 else 0.0
        return outcome(lambda: agree_equal(comm, lambda: {"weights": array}, "test"))

    kind, text = run_in_threads(2, compare)[0]
    assert kind is ConfigError
    assert text.startswith("ranks differ: weights float32 array of shape (1000,) [0, 0, 0, ...] (sha256 ")
