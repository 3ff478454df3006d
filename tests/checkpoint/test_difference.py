"""Two checkpoints are equal, or every difference between them is told; an array's figures are those of NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpizero import checkpoint
from mpizero.checkpoint.format import BLOCK
from mpizero.checkpoint.inspect import compare, listing, statistics
from mpizero.errors import CheckpointError, ConfigError
from tests.checkpoint.conftest import State
from tests.checkpoint.sealed import first_byte, flip
from tests.traced import traced_peak


@pytest.fixture
def differ(tmp_path):
    """Compare two tables of arrays."""

    def compared(a, b, tolerance=0.0, attributes=({}, {}), **settings):
        for name, arrays, own in zip("ab", (a, b), attributes, strict=True):
            State(arrays, own).save(tmp_path / name)
        with checkpoint.open_checkpoint(tmp_path / "a") as x, checkpoint.open_checkpoint(tmp_path / "b") as y:
            return compare(x, y, tolerance, **settings)

    return compared


def test_a_checkpoint_equals_itself(state, differ):
    found = differ(state.arrays, state.arrays)
    assert found.equal
    assert found.compared == len(state.arrays)
    assert found.nbytes == sum(a.nbytes for a in state.arrays.values())


def test_one_element_is_found_with_place_values_and_size_of_the_difference(state, differ):
    other = {path: a.copy() for path, a in state.arrays.items()}
    other["parameters/embedding.weight"][1030, 2000] *= 1.5  # in the third block
    found = differ(state.arrays, other)
    (one,) = found.arrays
    value = float(state.arrays["parameters/embedding.weight"][1030, 2000])
    assert (one.path, one.differing, one.size) == ("parameters/embedding.weight", 1, 1031 * 2049)
    assert one.first == (1030, 2000)
    assert one.values == (value, float(np.float32(value) * np.float32(1.5)))
    assert one.largest_absolute == pytest.approx(abs(value) / 2, rel=1e-6)
    assert one.largest_relative == pytest.approx(1 / 3, rel=1e-6)


def test_missing_extra_and_reshaped_arrays_are_told_apart(differ):
    a = {"parameters/a": np.zeros(2), "parameters/b": np.zeros((2, 3)), "parameters/c": np.zeros(2, np.float32)}
    b = {"parameters/b": np.zeros((3, 2)), "parameters/c": np.zeros(2), "parameters/d": np.zeros(1)}
    found = differ(a, b)
    assert (found.missing, found.extra) == (("parameters/a",), ("parameters/d",))
    assert found.reshaped == {
        "parameters/b": ("float64 [2, 3]", "float64 [3, 2]"),
        "parameters/c": ("float32 [2]", "float64 [2]"),
    }
    assert not found.equal


def test_attributes_are_compared_by_dotted_name(differ):
    same = {"parameters/a": np.zeros(2)}
    own = ({"step": 1, "config": {"lr": 0.1, "kept": [1]}}, {"step": 2, "config": {"kept": [1], "new": None}})
    found = differ(same, same, attributes=own)
    assert found.attributes == {"config.lr": (0.1, None), "config.new": (None, None), "step": (1, 2)}
    assert not found.equal


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "differing", "not_finite"),
    [
        ([0.0], [-0.0], 0.0, 1, 0),
        ([0.0], [-0.0], 1e-300, 0, 0),
        ([1.0, 2.0], [1.0, 2.1], 0.2, 0, 0),
        ([1.0, 2.0], [1.0, 2.1], 0.01, 1, 0),
        ([1e9], [1e9 + 5], 1e-8, 0, 0),
        ([math.nan], [math.nan], 0.0, 0, 0),
        ([math.nan], [1.0], 1e9, 1, 1),
        ([math.inf, math.inf], [math.inf, -math.inf], 1.0, 1, 1),
        ([math.inf], [3.0], 1e300, 1, 1),
        ([1.7e308], [-1.7e308], 0.5, 1, 0),
    ],
)
def test_bits_count_without_a_tolerance_and_values_with_one(differ, a, b, tolerance, differing, not_finite):
    found = differ({"parameters/a": np.array(a)}, {"parameters/a": np.array(b)}, tolerance)
    assert sum(one.differing for one in found.arrays) == differing
    assert sum(one.not_finite for one in found.arrays) == not_finite


def test_scalars_integers_and_empty_arrays_are_compared(differ):
    a = {"parameters/s": np.array(1.0), "parameters/i": np.array([1, 2, 3]), "parameters/n": np.zeros((0, 2))}
    b = {**a, "parameters/s": np.array(2.0), "parameters/i": np.array([1, 2, 5])}
    found = {one.path: one for one in differ(a, b).arrays}
    assert found["parameters/s"].first == ()
    assert found["parameters/i"].first == (2,)
    assert found["parameters/i"].largest_absolute == 2


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
def test_a_tolerance_that_means_nothing_is_refused(differ, tolerance):
    with pytest.raises(ConfigError, match="must be a finite number >= 0"):
        differ({}, {}, tolerance)


def test_a_comparison_holds_blocks_and_no_arrays(state, tmp_path):
    """Most values are equal: only those that differ are widened."""
    other = {path: a.copy() for path, a in state.arrays.items()}
    other["parameters/embedding.weight"][::50] += 1
    state.save(tmp_path / "a")
    State(other).save(tmp_path / "b")
    with checkpoint.open_checkpoint(tmp_path / "a") as a, checkpoint.open_checkpoint(tmp_path / "b") as b:
        assert not compare(a, b).equal
        assert traced_peak(lambda: compare(a, b)) < 3 * BLOCK


def test_damage_is_found_while_comparing(small, tmp_path):
    for name in "ab":
        small.save(tmp_path / name)
    flip(tmp_path / "b" / "state.h5", first_byte(tmp_path / "b", "parameters/b") + 9)
    with (
        checkpoint.open_checkpoint(tmp_path / "a") as a,
        checkpoint.open_checkpoint(tmp_path / "b") as b,
        pytest.raises(CheckpointError, match="array 'parameters/b': checksum mismatch"),
    ):
        compare(a, b)


def test_statistics_are_those_of_numpy(state, tmp_path):
    state.save(tmp_path / "c")
    with checkpoint.open_checkpoint(tmp_path / "c") as reader:
        for path, whole in state.arrays.items():
            found, values = statistics(reader, path), whole.astype(np.float64)
            finite = values[np.isfinite(values)]
            assert found.not_finite == values.size - finite.size
            if not finite.size:
                assert (found.minimum, found.maximum, found.mean, found.norm) == (None, None, None, None)
                continue
            assert (found.minimum, found.maximum) == (finite.min(), finite.max())
            assert found.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-12)
            assert found.norm == pytest.approx(np.sqrt(np.square(finite).sum()), rel=1e-12)


def test_a_listing_has_damaged_checkpoints_too_the_oldest_first(small, tmp_path):
    for step in (3, 20, 100):
        small.save(checkpoint.step_folder(tmp_path, step))
    (tmp_path / "step_00000020" / "manifest.json").unlink()
    (tmp_path / "notes").mkdir()
    found = listing(tmp_path)
    assert [one.step for one in found] == [3, 20, 100]
    assert [one.problem is None for one in found] == [True, False, True]
    assert "manifest.json is missing" in str(found[1].problem)
    assert found[1].written is None
    assert found[0].attributes == small.attributes
    assert all(one.nbytes > 0 for one in found)
