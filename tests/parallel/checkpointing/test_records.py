"""A resumed training has the grains and the tiles of the one that wrote its checkpoint, or says that it has not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.errors import CheckpointError, ConfigError
from mpizero.testing import run_in_threads
from tests.parallel.models import gpt, mlp, part, sharded, tokens
from tests.parallel.parallel_layouts import Chain

SAMPLES = 40


def long_gpt() -> mz.nn.GPT:
    """A model whose products are fast with one sample (of 1,024 tokens), so that every sample is a grain."""
    return gpt(layers=1, sequence=1024)


def place(comm: Any = None, strategy: str = "ddp", model: Any = None, **settings: Any) -> Any:
    return sharded(strategy, comm, model or long_gpt(), mz.AdamW(lr=1e-2), **settings)


def train(model: Any, comm: Any, steps: int) -> str:
    for _ in range(steps):
        model.train(*part(comm, *tokens(SAMPLES)))
    found: str = model.parameters_sha256()
    return found


def written(comm: Any = None, change: Any = None, model: Any = None, **settings: Any) -> bytes:
    """The checkpoint of a model after one step; ``change`` takes and returns its record of grains."""
    with place(comm, model=model, **settings) as placed:
        train(placed, comm, 1)
        attributes = placed._checkpoint_attributes()
        if change is not None:
            attributes["mpizero"]["grains"] = change(attributes["mpizero"]["grains"])
        return checkpoint.to_bytes(placed._checkpoint_arrays(), attributes)


def gone_on(
    data: bytes, comm: Any = None, strategy: str = "ddp", model: Any = None, **settings: Any
) -> tuple[int, str]:
    """The size of a grain and the parameters' hash, two steps after loading a checkpoint."""
    with place(comm, strategy, model, **settings) as placed:
        placed.deserialize(data)
        return placed.grain_size(SAMPLES), train(placed, comm, 2)


@pytest.mark.slow
def test_a_large_batch_of_long_samples_has_more_than_sixteen_grains_on_every_layout() -> None:
    with place() as placed:
        assert placed.grain_size(SAMPLES) == 1
        whole = train(placed, None, 2)
    with place(micro_batch=1) as placed:
        assert train(placed, None, 2) == whole

    def on(comm: Any) -> str:
        with place(comm, {2: "zero1", 3: "zero3", 17: "zero2"}[comm.size]) as placed:
            return train(placed, comm, 2)

    for ranks in (2, 3, 17):
        assert set(run_in_threads(ranks, on)) == {whole}


@pytest.mark.slow
def test_a_checkpoint_without_a_record_goes_on_with_a_sixteenth_of_the_batch_on_any_layout() -> None:
    with place(micro_batch=3) as placed:
        whole = train(placed, None, 3)
    before = written(micro_batch=3, change=lambda record: None)
    assert gone_on(before) == (3, whole)
    assert set(run_in_threads(3, lambda comm: gone_on(before, comm, "zero2"))) == {(3, whole)}


def test_a_small_model_goes_on_with_its_grains_and_one_of_an_older_version_with_a_sixteenth() -> None:
    def before(record: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if name != "least"} | {"micro_batch": None}

    whole = {}
    for grain in (10, 3):
        with place(model=gpt(), micro_batch=grain) as placed:
            whole[grain] = grain, train(placed, None, 3)
    assert gone_on(written(model=gpt()), model=gpt()) == whole[10]
    data = written(model=gpt(), micro_batch=3, change=before)
    assert gone_on(data, model=gpt()) == whole[3]
    assert set(run_in_threads(3, lambda comm: gone_on(data, comm, "zero2", gpt()))) == {whole[3]}


def test_the_state_of_an_optimizer_alone_brings_its_grains_and_parameters_alone_do_not() -> None:
    with sharded("ddp", None, long_gpt(), mz.AdamW(lr=1e-2), micro_batch=4) as model:
        optimizer = model.optimizer
        train(model, None, 1)
        state, data = optimizer.serialize(), model.serialize()
    with sharded("ddp", None, long_gpt(), mz.AdamW(lr=1e-2)) as model:
        optimizer = model.optimizer
        optimizer.deserialize(state)
        assert model.grain_size(SAMPLES) == 4
    with mz.DDPModel(long_gpt(), mz.ShardingConfig()) as alone:
        alone.deserialize(data)
        assert alone.grain_size(SAMPLES) == 1


def test_a_recorded_micro_batch_is_taken_and_told(capfd: pytest.CaptureFixture[str]) -> None:
    data = written(micro_batch=4)
    capfd.readouterr()
    with place(micro_batch=4) as placed:
        whole = train(placed, None, 3)
    assert gone_on(data) == (4, whole)
    assert "training goes on with micro_batch=4, as the checkpoint says; set micro_batch to" in capfd.readouterr().err
    assert gone_on(data, micro_batch=4) == (4, whole)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("settings", "grain", "told"),
    [
        ({"micro_batch": 2}, 2, "micro_batch=4, this training goes on with micro_batch=2: not with the bits"),
        ({"accumulate": 2}, 8, "micro_batch=4, this training goes on with micro_batch=4 and accumulate=2: not with"),
    ],
)
def test_other_settings_than_the_checkpoint_s_are_kept_and_told(
    settings: dict[str, Any], grain: int, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert gone_on(written(micro_batch=4), **settings)[0] == grain
    assert f"was trained with {told}" in capfd.readouterr().err


def test_an_unknown_order_of_additions_is_refused_before_anything_changes() -> None:
    data = written(change=lambda record: record | {"order": "as they come"})
    with place() as placed:
        before = placed.parameters_sha256()
        with pytest.raises(CheckpointError, match=r"in the order 'as they come', which this version does not know"):
            placed.deserialize(data)
        assert placed.parameters_sha256() == before
    with mz.DDPModel(long_gpt(), mz.ShardingConfig()) as alone:
        alone.deserialize(data)  # the parameters alone were added in no order


@pytest.mark.slow
def test_batches_of_a_model_are_those_that_each_rank_computes() -> None:
    def sent(comm: Any, give: Any) -> tuple[int, str]:
        source = mz.data.ArraySource(*tokens(SAMPLES))
        with place(comm) as placed:
            for x, y in mz.data.batches(source, give(placed), SAMPLES, steps=2):
                placed.train(x, y)
            return placed.last_step.bytes_sent, placed.parameters_sha256()

    own = run_in_threads(3, lambda comm: sent(comm, lambda placed: placed))
    cut = run_in_threads(3, lambda comm: sent(comm, lambda placed: placed.config))
    assert len({digest for _, digest in own + cut}) == 1
    assert sum(count for count, _ in own) < sum(count for count, _ in cut)


def test_each_load_and_each_new_optimizer_begins_anew(capfd: pytest.CaptureFixture[str]) -> None:
    """With what the model needed when the checkpoint was written, or with the settings."""
    loads = [(written(micro_batch=4), 4), (written(change=lambda record: record | {"efficient": 2}), 2), (written(), 1)]
    with place() as placed:
        for data, grain in loads:
            capfd.readouterr()
            placed.deserialize(data)
            assert placed.grain_size(SAMPLES) == grain
        assert capfd.readouterr().err == ""
        placed.deserialize(loads[0][0])
        placed._engine.bind(mz.AdamW(lr=1e-2))
        assert placed.grain_size(SAMPLES) == 1


def test_a_model_with_numbers_of_numpy_is_saved_and_resumed() -> None:
    model = gpt(vocabulary=np.int64(31))
    assert gone_on(written(model=model), model=model)[0] == 10


class Hidden(mz.nn.GPT):
    """A model whose longest sample depends on something that is not compared."""

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return (self._own,)


def test_ranks_with_other_default_grains_are_told_before_anything_is_trained() -> None:
    def differ(comm: Any) -> None:
        model = Hidden(12, 1, 2, 1024, vocabulary=31)
        object.__setattr__(model, "_own", 1024 >> comm.rank)
        with place(comm, model=model):
            pass

    with pytest.raises(ConfigError, match=r"(?s)the samples of a default grain.*1 on rank 0, 2 on rank 1"):
        run_in_threads(2, differ)


def test_copies_that_train_alone_are_given_samples_of_their_own() -> None:
    def given(comm: Any) -> list[int]:
        source = mz.data.ArraySource(np.arange(32.0, dtype=np.float32)[:, None], np.arange(32) % 2)
        with mz.ShardingConfig(comm=comm) as config:
            local = mz.LocalSGDOptimizer(mz.SGD(lr=0.1), config, every=2)
            with mz.DDPModel(mz.nn.MLP(1, (4,), 2), config) as model:
                local.set_model(model)
                return [int(v) for x, _ in mz.data.batches(source, model, 32, steps=1) for v in x[:, 0]]

    assert sorted(sum(run_in_threads(3, given), [])) == list(range(32))


def in_tiles(comm: Any, data: bytes | None, steps: int, tiles: Any = None, model: Any = None, **sizes: int) -> Any:
    """Load a checkpoint if there is one, train on, and return the metadata, the hash, and a checkpoint."""
    with mz.ShardingConfig(comm=comm, micro_batch=2, tiles=tiles) as config:
        layout = {f"{axis}_parallel_size": size for axis, size in sizes.items()}
        model = mz.HybridShardedModel(model or gpt(), config, **layout, optimizer=mz.AdamW(lr=1e-2))
        with model:
            if data is not None:
                model.deserialize(data)
            for _ in range(steps):
                model.train(*part(model.batch_group, *tokens(8)))
            told = model._checkpoint_attributes()["mpizero"]
            return model.metadata(), model.parameters_sha256(), model.serialize(), told


def on(ranks: int, *args: Any, **sizes: Any) -> Any:
    found = run_in_threads(ranks, lambda comm: in_tiles(comm, *args, **sizes))
    assert len({one[1] for one in found}) == 1
    return found[0]


@pytest.mark.slow
def test_a_training_goes_on_with_its_bits_where_the_tiles_are_kept_and_says_which_are(capfd) -> None:
    _, whole, _, told = on(2, None, 3, tensor=2)
    assert "tiles" not in told  # they are the sizes of its groups, as in older checkpoints
    data = on(2, None, 1, tensor=2)[2]
    capfd.readouterr()
    found, sha256, _, told = in_tiles("self", data, 2, {"tensor": 2})
    assert (sha256, capfd.readouterr().err) == (whole, "")
    assert told["tiles"] == found.tiles == {"tensor": 2, "context": 1}
    assert found.exactness == "the bits of one process with tiles={'tensor': 2}"
    assert in_tiles("self", data, 2)[1] != whole
    assert "was trained with tiles={'tensor': 2}, this training goes on with tiles=1" in (err := capfd.readouterr().err)
    assert "ShardingConfig(tiles={'tensor': 2}) keeps those" in err
    again = in_tiles("self", data, 1, {"tensor": 2})[2]  # a record
    capfd.readouterr()
    assert in_tiles("self", again, 1, {"tensor": 2})[1] == whole
    assert capfd.readouterr().err == ""


def test_sizes_that_do_not_fit_say_so_once_and_the_checkpoint_keeps_what_the_training_has(capfd) -> None:
    model = mlp(hidden=(9, 6), features=8, task="regression", outputs=8)
    found, *_, told = on(3, None, 0, 8, model, tensor=3)
    only = "tensor=3 cannot compute 8 tiles, only tensor=1, tensor=2, tensor=4, tensor=8 can"
    assert capfd.readouterr().err.count(f"{only}, so results agree") == 1
    assert found.exactness == f"within rounding ({only})"
    assert (found.tiles, told["tiles"]) == ({"tensor": 3, "context": 1}, {"tensor": 8, "context": 1})
    found, *_ = on(3, None, 0, None, model, tensor=3)
    assert found.within_rounding == ("tensor=3 is no power of two, so one process cannot compute 3 tiles",)


class Talkative(mz.nn.Linear):
    """A layer of a user's that sums over its ranks by means of its own."""

    within_rounding = "sums are added as its own messages arrive"

    def split(self, group: Any) -> Any:
        return mz.nn.Linear(self.inputs, self.outputs).split(group)


def test_a_layer_that_cannot_keep_bits_says_so() -> None:
    model = Chain({"in": mz.nn.Linear(8, 8), "own": mz.nn.Sequential({"layer": Talkative(8, 8)})})
    found = in_tiles("self", None, 0, 2, model)[0]
    assert found.within_rounding == ("block 'own': sums are added as its own messages arrive",)
