"""The number of tiles of each axis: what the setting asks for, where it fits, and errors that name the way out."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero import FunctionModel, ShardingConfig, nn
from mpizero.errors import ConfigError
from mpizero.sharding.partition import ParallelLayout, in_tiles

GPT = nn.GPT(dim=16, layers=1, heads=4, sequence=8, vocabulary=11)
MLP = nn.MLP(6, [8, 8], 3)
BLACK_BOX = FunctionModel({"w": np.zeros(3, np.float32)}, lambda *_: None)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_tiles_that_fit_are_the_size_times_a_power_of_two(size):
    fitting = {size * 2**k for k in range(5)}
    for tiles in range(1, 17):
        layout = ParallelLayout(tensor=size, tiles=tiles)
        assert layout.tensor_tiles == (tiles if tiles in fitting else size)
        assert ParallelLayout(context=size, tiles=tiles).context_tiles == layout.tensor_tiles
    assert ParallelLayout(tensor=size).tensor_tiles == size


@pytest.mark.parametrize(
    ("model", "sizes", "tiles", "found"),
    [
        (GPT, {}, None, (1, 1)),
        (GPT, {}, 4, (4, 4)),
        (GPT, {}, {"tensor": 4}, (4, 1)),
        (GPT, {"tensor": 2}, {"context": 2}, (2, 2)),
        (GPT, {"tensor": 2, "context": 2}, 4, (4, 4)),
        (MLP, {}, 4, (4, 1)),
        (MLP, {"tensor": 3}, 3, (3, 1)),
        (MLP, {"tensor": 3}, 8, (3, 1)),
        (MLP, {}, 3, (1, 1)),
        (BLACK_BOX, {}, 1, (1, 1)),
    ],
)
def test_a_number_for_both_axes_holds_for_those_that_the_model_has(model, sizes, tiles, found):
    layout = in_tiles(ParallelLayout(**sizes), tiles, model)
    assert (layout.tensor_tiles, layout.context_tiles) == found


@pytest.mark.parametrize(
    ("model", "tiles", "message"),
    [
        (GPT, 8, r"tiles=8 computes .* of 8 ranks .*heads=4 .*\(1, 2, 4\)"),
        (MLP, {"context": 2}, "no attention along a sequence.*leave tiles of the context axis out"),
        (MLP, {"context": 3}, "no attention along a sequence.*leave tiles of the context axis out"),
        (BLACK_BOX, 3, r"tiles=3: FunctionModel is a black box"),
        (BLACK_BOX, 4, r"tiles=4: FunctionModel is a black box, .*leave tiles out \(tiles=None\)"),
    ],
)
def test_tiles_that_no_layer_can_compute_are_refused(model, tiles, message):
    with pytest.raises(ConfigError, match=message):
        in_tiles(ParallelLayout(), tiles, model)


@pytest.mark.parametrize("tiles", [0, True, "8", 2.0, {"pipeline": 2}, {"tensor": 0}])
def test_a_wrong_number_of_tiles_is_refused_where_it_is_given(tiles):
    with pytest.raises(ConfigError, match="tiles=.*expected a whole number from 1 to"):
        ShardingConfig(tiles=tiles)
