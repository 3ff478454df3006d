"""A checkpoint says in how many tiles its training computes; a load with other tiles says how to keep the bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import mpizero as mz
from mpizero.testing import run_in_threads
from tests.parallel.models import gpt, mlp, part, tokens


def trained(comm: Any, data: bytes | None, steps: int, tiles: Any = None, model: Any = None, **sizes: int) -> Any:
    """Load a checkpoint if there is one, train on, and return the metadata, the hash, and a checkpoint."""
    with mz.ShardingConfig(comm=comm, micro_batch=2, tiles=tiles) as config:
        layout = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
        model = mz.HybridShardedModel(model or gpt(), config, **layout, optimizer=mz.AdamW(lr=1e-2))
        with model:
            if data is not None:
                model.deserialize(data)
            for _ in range(steps):
                model.train(*part(model.batch_group, *tokens(8)))
            return (
                model.metadata(),
                model.parameters_sha256(),
                model.serialize(),
                model.checkpoint_attributes()["mpizero"],
            )


def on(ranks: int, *args: Any, **sizes: Any) -> Any:
    found = run_in_threads(ranks, lambda comm: trained(comm, *args, **sizes))
    assert len({one[1] for one in found}) == 1
    return found[0]


def test_a_training_goes_on_with_its_bits_where_the_tiles_are_kept_and_says_which_are(capfd) -> None:
    _, whole, _, told = on(2, None, 3, tensor=2)
    assert "tiles" not in told  # they are the sizes of its groups, as in older checkpoints
    data = on(2, None, 1, tensor=2)[2]
    capfd.readouterr()
    found, sha256, _, told = trained("self", data, 2, {"tensor": 2})
    assert (sha256, capfd.readouterr().err) == (whole, "")
    assert told["tiles"] == found.tiles == {"tensor": 2, "context": 1}
    assert found.exactness == "the bits of one process with tiles={'tensor': 2}"
    assert trained("self", data, 2)[1] != whole
    assert "was trained with tiles={'tensor': 2}, this training goes on with tiles=1" in (err := capfd.readouterr().err)
    assert "ShardingConfig(tiles={'tensor': 2}) keeps those" in err
    again = trained("self", data, 1, {"tensor": 2})[2]  # a record
    assert trained("self", again, 1, {"tensor": 2})[1] == whole


def test_sizes_that_do_not_fit_say_so_once_and_the_checkpoint_keeps_what_the_training_has(capfd) -> None:
    model = mlp(hidden=(9, 6), features=8, task="regression", outputs=8)
    found, *_, told = on(3, None, 0, 8, model, tensor=3)
    err = capfd.readouterr().err
    assert (
        err.count("tensor=3 cannot compute 8 tiles, only tensor=1, tensor=2, tensor=4, tensor=8 can, so results agree")
        == 1
    )
    assert (
        found.exactness
        == "within rounding (tensor=3 cannot compute 8 tiles, only tensor=1, tensor=2, tensor=4, tensor=8 can)"
    )
    assert (found.tiles, told["tiles"]) == ({"tensor": 3, "context": 1}, {"tensor": 8, "context": 1})
    found, *_ = on(3, None, 0, None, model, tensor=3)
    assert found.within_rounding == ("tensor=3 is no power of two, so one process cannot compute 3 tiles",)


class Talkative(mz.nn.Linear):
    """A layer of a user's that sums over its ranks by means of its own."""

    within_rounding = "sums are added as its own messages arrive"

    def split(self, group: Any) -> Any:
        return mz.nn.Linear(self.inputs, self.outputs).split(group)


@dataclass
class Plain:
    """A model of a user's."""

    blocks: dict[str, Any]
    loss: Any = mz.nn.MeanSquaredError()
    dtype: Any = np.dtype("float32")
    seed: int = 0


def test_a_layer_that_cannot_keep_bits_says_so() -> None:
    model = Plain({"in": mz.nn.Linear(8, 8), "own": mz.nn.Sequential({"layer": Talkative(8, 8)})})
    found = trained("self", None, 0, 2, model)[0]
    assert found.within_rounding == ("block 'own': sums are added as its own messages arrive",)
