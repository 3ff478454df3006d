"""Start values are functions of seed, name and place: slices and copies have those of the whole parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import ConfigError, LayoutError
from mpizero.layout.tensor_parts import part_shape
from mpizero.nn import arrays
from mpizero.nn.arrays import initial_values
from mpizero.types import Array, Init, ParameterSpec, Part

INITS = [Init("normal", 0.3), Init("uniform", 0.2), Init("ones"), Init("zeros")]


def values(spec: ParameterSpec, dtype: Any, start: int = 0, stop: int | None = None) -> Array:
    stop = spec.size if stop is None else stop
    out = np.full(stop - start, np.nan, dtype)
    initial_values(spec, 5, start, stop, out)
    return out


@st.composite
def slices(draw: Any) -> ParameterSpec:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    ends = sorted(draw(st.lists(st.integers(0, shape[axis]), min_size=0, max_size=6)))
    part = Part(shape, axis, tuple(zip(ends[::2], ends[1::2], strict=False)))
    return ParameterSpec("a.b", part_shape(part), draw(st.sampled_from(INITS)), part=part)


@pytest.mark.parametrize(("run_cost", "rows_at_once"), [(0, 30), (10, 1), (10, 1 << 16), (1 << 40, 30)])
def test_any_range_of_a_slice_has_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, run_cost: int, rows_at_once: int
) -> None:
    monkeypatch.setattr(arrays, "_RUN_COST", run_cost)
    monkeypatch.setattr(arrays, "_ROWS_AT_ONCE", rows_at_once)

    @given(slices(), st.sampled_from([np.float32, np.float64]), st.data())
    def check(spec: ParameterSpec, dtype: Any, data: Any) -> None:
        assert spec.part is not None
        whole = values(replace(spec, shape=spec.part.shape, part=None), dtype).reshape(spec.part.shape)
        kept = [i for span in spec.part.ranges for i in range(*span)]
        expected = whole.take(np.array(kept, np.int64), axis=spec.part.axis).reshape(-1)
        start = data.draw(st.integers(0, spec.size))
        stop = data.draw(st.integers(start, spec.size))
        assert values(spec, dtype, start, stop).tobytes() == expected[start:stop].tobytes()

    check()


@pytest.mark.parametrize("init", INITS)
def test_a_large_slice_has_the_bits_of_the_whole(init: Init) -> None:
    part = Part((70, 9000), 1, ((0, 2000), (3000, 5000), (6001, 8003)))
    whole = values(ParameterSpec("w", part.shape, init), np.float32).reshape(part.shape)
    expected = np.concatenate([whole[:, slice(*span)] for span in part.ranges], axis=1)
    found = values(ParameterSpec("w", part_shape(part), init, part=part), np.float32)
    assert found.tobytes() == expected.tobytes()


def test_a_copy_starts_as_the_parameter_it_names() -> None:
    home = ParameterSpec("embedding.table", (6, 4), Init("normal", 0.5))
    copy = replace(home, name="head.table", guest="embedding.table")
    np.testing.assert_array_equal(values(copy, np.float32), values(home, np.float32))
    part = Part((6, 4), 0, ((2, 4),))
    sliced = replace(copy, shape=(2, 4), part=part)
    np.testing.assert_array_equal(values(sliced, np.float32), values(home, np.float32)[8:16])


def test_an_unknown_start_and_a_range_that_does_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="Init kind 'orthogonal' is not one of"):
        values(ParameterSpec("w", (2,), Init("orthogonal")), np.float32)
    with pytest.raises(LayoutError, match="elements 0:3 of w"):
        initial_values(ParameterSpec("w", (2,)), 0, 0, 3, np.empty(3, np.float32))
