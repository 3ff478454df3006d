"""Training on cards, simulated ones: what the host computes within rounding, and the same bits on any layout.

Arrays of a simulated card do not mix with the host's, so a forgotten copy is an error here as on a real one.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

# The simulator is chosen when numba is imported; without it these kernels need a GPU.
if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") in ("", "0"):
    pytest.skip("CUDA kernels run under NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)

import mpizero as mz
from mpizero.errors import ConfigError, DataError
from mpizero.kernels import card as cards
from mpizero.testing import run_in_threads

VOCABULARY = 5


def gpt(dtype="float32", **settings):
    settings = {"dim": 8, "layers": 1, "heads": 2, "sequence": 3, "vocabulary": VOCABULARY, "dropout": 0.1} | settings
    return mz.nn.GPT(dtype=dtype, **settings)


def ids(samples=2):
    drawn = np.random.default_rng(0).integers(0, VOCABULARY, (samples, 4))
    return drawn[:, :-1], drawn[:, 1:]


def trained(device, comm=None, *, place=mz.DDPModel, optimizer=None, batch=None, model=None, steps=2, **settings):
    """Train on this rank's part of a batch; return losses, the parameters, and a prediction."""
    config_keys = {"clip", "micro_batch", "accumulate", "minimum_parameter_group_size", "share_node_memory"}
    config = {key: settings.pop(key) for key in config_keys & set(settings)}
    x, y = ids() if batch is None else batch
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    share = len(x) // size if place is not mz.HybridShardedModel else len(x)  # there ranks split the model
    own = slice(rank * share, (rank + 1) * share) if share < len(x) else slice(None)
    with (
        mz.ShardingConfig(comm=comm, device=device, **{"micro_batch": 1, **config}) as sharding,
        place(gpt() if model is None else model, sharding, **settings) as placed,
    ):
        placed.engine.bind(optimizer or mz.AdamW(lr=1e-2))
        losses = [placed.train(x[own], y[own]) for _ in range(steps)]
        right = placed.evaluate(x[own], y[own])
        return losses, placed.gather_full_parameters(), placed.predict(x), right


def close(first, second, rtol):
    for a, b in zip(first[:3], second[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)
    assert first[3][1:] == second[3][1:]


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 2e-5), ("float64", 1e-10)])
def test_a_card_trains_as_the_host_does(dtype, rtol):
    card, host = (trained(device, model=gpt(dtype), clip=1.0, accumulate=2) for device in ("cuda", "cpu"))
    close(card, host, rtol)
    assert card[0] != host[0] or dtype == "float64"  # it was not the host that computed


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
def test_a_network_of_any_activation_and_task_trains_on_a_card(task, activation):
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 4) if task == "classification" else rng.normal(size=(4, 2)).astype(np.float32)
    batch = (rng.normal(size=(4, 3)).astype(np.float32), y)
    model = mz.nn.MLP(3, (4,), 2, activation=activation, task=task)
    close(*(trained(device, batch=batch, model=model, micro_batch=2) for device in ("cuda", "cpu")), 2e-5)


PRIVATE = {"share_node_memory": False}


@pytest.mark.parametrize(
    ("place", "memory"), [(mz.DDPModel, {}), (mz.ZeRO1Model, PRIVATE), (mz.ZeRO2Model, {}), (mz.ZeRO3Model, PRIVATE)]
)
def test_bits_are_those_of_one_rank_for_any_strategy(place, memory):
    alone = trained("cuda", steps=1)
    settings = {"minimum_parameter_group_size": 1, **memory}
    for losses, parameters, *_ in run_in_threads(
        2, lambda comm: trained("cuda", comm, place=place, steps=1, **settings)
    ):
        assert losses == alone[0]
        assert parameters.tobytes() == alone[1].tobytes()


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 1), ("zero_bubble", 3)])
def test_a_pipeline_of_cards_has_the_bits_of_one(schedule, zero):
    alone = trained("cuda", steps=1)
    layout = {"pipeline_parallel_size": 2, "schedule": schedule, "zero_stage": zero, **PRIVATE}
    for found in run_in_threads(2, lambda comm: trained("cuda", comm, place=mz.HybridShardedModel, steps=1, **layout)):
        assert found[0] == alone[0]
        assert found[1].tobytes() == alone[1].tobytes()
        np.testing.assert_allclose(found[2], alone[2], rtol=1e-6)


@pytest.mark.parametrize("axis", ["tensor", "context"])
def test_layers_split_over_cards_give_what_one_does(axis):
    alone, layout = trained("cpu", steps=1), {f"{axis}_parallel_size": 2}
    for found in run_in_threads(2, lambda comm: trained("cuda", comm, place=mz.HybridShardedModel, steps=1, **layout)):
        close(found, alone, 5e-5)


def test_ranks_of_a_node_take_its_cards_in_turn():
    def number(comm):
        with mz.ShardingConfig(comm=comm, device="cuda") as config, mz.DDPModel(gpt(), config) as model:
            return model.engine.workplace.card.number

    assert run_in_threads(3, number) == [0, 1, 0]


def test_a_rank_without_a_card_stops_all_of_them_with_the_reason(monkeypatch):
    def construct(comm):
        monkeypatch.setattr("mpizero.parallel.workplace.found", lambda: (0, "no package cupy; install it"))
        with mz.ShardingConfig(comm=comm, device="cuda") as config, pytest.raises(ConfigError) as caught:
            mz.DDPModel(gpt(), config)
        return str(caught.value)

    (told,) = set(run_in_threads(2, construct))
    assert told == (
        'device = "cuda": rank 0 of 2 has no card to train on: no package cupy; install it, '
        'or train with device = "cpu"'
    )


def test_what_is_missing_is_told_without_a_card(monkeypatch):
    monkeypatch.setattr(cards, "simulated", lambda: False)
    count, reason = cards.found()
    assert count == 0
    assert reason
    with pytest.raises(ConfigError, match='device = "cpu"'):
        cards.open_card(0)


def test_a_black_box_and_batches_without_numbers_are_refused():
    with mz.ShardingConfig(device="cuda", micro_batch=1) as config:
        box = mz.FunctionModel({"w": np.ones(2, np.float32)}, lambda parameters, batch: (0.0, parameters, 1.0))
        with pytest.raises(ConfigError, match="black box"):
            mz.DDPModel(box, config)
        with mz.DDPModel(gpt(), config) as model, pytest.raises(DataError, match="not list"):
            model.train([[1, 2, 3]], [[2, 3, 4]])
    with pytest.raises(ConfigError, match="'cpu' or 'cuda'"):
        mz.ShardingConfig(device="gpu")


def test_copies_longer_than_the_pinned_buffer_go_in_pieces(monkeypatch):
    monkeypatch.setattr(cards, "STAGING", 64)
    card = cards.open_card(0)
    values = np.arange(100, dtype=np.float32)
    there = card.empty(100, np.float32)
    card.write(there, values)
    assert np.array_equal(there.get(), values)
    parts = [np.zeros((2, 3), np.float32), np.zeros(50, np.float32)]
    card.read(there, [(7, parts[0]), (30, parts[1])])
    assert np.array_equal(parts[0].reshape(-1), values[7:13])
    assert np.array_equal(parts[1], values[30:80])


def test_arrays_of_a_card_do_not_mix_with_the_hosts():
    card = cards.open_card(0)
    here = np.ones(3, np.float32)
    there = card.put(here)
    for mixed in (
        lambda: there + here,
        lambda: here + there,
        lambda: np.asarray(there),
        lambda: there.__setitem__(0, here),
    ):
        with pytest.raises(TypeError):
            mixed()
    assert float((there + there).sum()) == 6.0
