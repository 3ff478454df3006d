"""A resumed training cuts batches into the grains of the training that wrote its checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.errors import CheckpointError, ConfigError
from mpizero.testing import run_in_threads
from tests.parallel.models import gpt, part, sharded, tokens

SAMPLES = 40


def long_gpt() -> mz.nn.GPT:
    """A model whose products are fast with one sample (of 1,024 tokens), so that every sample is a grain."""
    return gpt(layers=1, sequence=1024)


def place(comm: Any = None, strategy: str = "ddp", model: Any = None, **settings: Any) -> Any:
    return sharded(strategy, comm, model or long_gpt(), mz.AdamW(lr=1e-2), **settings)[0]


def train(model: Any, comm: Any, steps: int) -> str:
    for _ in range(steps):
        model.train(*part(comm, *tokens(SAMPLES)))
    found: str = model.parameters_sha256()
    return found


def written(comm: Any = None, change: Any = None, model: Any = None, **settings: Any) -> bytes:
    """The checkpoint of a model after one step; ``change`` takes and returns its record of grains."""
    with place(comm, model=model, **settings) as placed:
        train(placed, comm, 1)
        attributes = placed.checkpoint_attributes()
        if change is not None:
            attributes["mpizero"]["grains"] = change(attributes["mpizero"]["grains"])
        return checkpoint.to_bytes(placed.checkpoint_arrays(), attributes)


def gone_on(
    data: bytes, comm: Any = None, strategy: str = "ddp", model: Any = None, **settings: Any
) -> tuple[int, str]:
    """The size of a grain and the parameters' hash, two steps after loading a checkpoint."""
    with place(comm, strategy, model, **settings) as placed:
        placed.deserialize(data)
        return placed.grain_size(SAMPLES), train(placed, comm, 2)


def test_a_large_batch_of_long_samples_has_more_than_sixteen_grains_on_every_layout() -> None:
    with place() as placed:
        assert placed.grain_size(SAMPLES) == 1
        whole = train(placed, None, 2)
    with place(micro_batch=1) as placed:
        assert train(placed, None, 2) == whole

    def on(comm: Any, strategy: str) -> str:
        with place(comm, strategy) as placed:
            return train(placed, comm, 2)

    for ranks, strategy in ((2, "zero1"), (3, "zero3"), (17, "zero2")):
        assert set(run_in_threads(ranks, lambda comm, strategy=strategy: on(comm, strategy))) == {whole}


def test_a_checkpoint_without_a_record_goes_on_with_a_sixteenth_of_the_batch_on_any_layout() -> None:
    with place(micro_batch=3) as placed:
        whole = train(placed, None, 3)
    before = written(micro_batch=3, change=lambda record: None)
    assert gone_on(before) == (3, whole)
    assert set(run_in_threads(3, lambda comm: gone_on(before, comm, "zero2"))) == {(3, whole)}


def test_a_checkpoint_goes_on_with_what_its_model_needed_when_it_was_written() -> None:
    data = written(change=lambda record: record | {"efficient": 2})
    assert gone_on(data)[0] == 2
    assert gone_on(written())[0] == 1


def test_the_state_of_an_optimizer_alone_brings_its_grains_and_parameters_alone_do_not() -> None:
    model, optimizer = sharded("ddp", None, long_gpt(), mz.AdamW(lr=1e-2), micro_batch=4)
    with model:
        train(model, None, 1)
        state, data = optimizer.serialize(), model.serialize()
    model, optimizer = sharded("ddp", None, long_gpt(), mz.AdamW(lr=1e-2))
    with model:
        optimizer.deserialize(state)
        assert model.grain_size(SAMPLES) == 4
    config = mz.ShardingConfig(comm="self")
    with config, mz.DDPModel(long_gpt(), config) as alone:
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
    ("settings", "told"),
    [
        (
            {"micro_batch": 2},
            "was trained with micro_batch=4, this training goes on with micro_batch=2: not with the bits",
        ),
        ({"accumulate": 2}, "with micro_batch=4, this training goes on with micro_batch=4 and accumulate=2: not with"),
    ],
    ids=str,
)
def test_other_settings_than_the_checkpoint_s_are_kept_and_told(
    settings: dict[str, Any], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    data = written(micro_batch=4)
    assert gone_on(data, **settings)[0] == settings.get("micro_batch", 8)
    assert told in capfd.readouterr().err


def test_an_unknown_order_of_additions_is_refused_before_anything_changes() -> None:
    data = written(change=lambda record: record | {"order": "as they come"})
    with place() as placed:
        before = placed.parameters_sha256()
        with pytest.raises(CheckpointError, match=r"in the order 'as they come', which this version does not know"):
            placed.deserialize(data)
        assert placed.parameters_sha256() == before
    config = mz.ShardingConfig(comm="self")
    with config, mz.DDPModel(long_gpt(), config) as alone:
        alone.deserialize(data)  # the parameters alone were added in no order


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


def test_a_new_optimizer_begins_with_the_grains_of_the_settings() -> None:
    data = written(micro_batch=4)
    model, _ = sharded("ddp", None, long_gpt(), mz.AdamW(lr=1e-2))
    with model:
        model.deserialize(data)
        assert model.grain_size(SAMPLES) == 4
        model.engine.bind(mz.AdamW(lr=1e-2))
        assert model.grain_size(SAMPLES) == 1


def test_a_second_load_is_compared_with_the_settings(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = written(micro_batch=4), written()
    with place() as placed:
        placed.deserialize(first)
        capfd.readouterr()
        placed.deserialize(second)
        assert (placed.grain_size(SAMPLES), capfd.readouterr().err) == (1, "")


def test_a_model_with_numbers_of_numpy_is_saved_and_resumed() -> None:
    assert gone_on(written(model=gpt(vocabulary=np.int64(31))), model=gpt(vocabulary=np.int64(31)))[0] == 3


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
