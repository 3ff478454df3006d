"""Optimizers on GPUs, simulated ones: the host's update in bits, on any layout, with state that is saved and checked.

The simulator computes with NumPy's numbers, hence the host's bits; a real GPU may round a product and a sum at once.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import ConfigError, IntegrityError
from mpizero.kernels import gpu
from mpizero.layout.sum_tree import cover
from mpizero.layout.tensor_parts import tile_rows
from mpizero.sharding import device_update
from mpizero.sharding import update as tensor_tree
from mpizero.sharding.config import placement
from mpizero.sharding.device_update import DeviceUpdater
from mpizero.testing import run_in_threads
from mpizero.tools.plan import TrainingPlan
from mpizero.types import ParameterSpec, Part
from tests.cuda.simulated import PRIVATE, bound, config
from tests.support.reference import reduction

pytestmark = pytest.mark.usefixtures("in_turn")

OPTIMIZERS = {
    "sgd": mz.SGD(lr=0.1, weight_decay=0.01),
    "momentum": mz.SGD(lr=0.1, momentum=0.9),
    "adam": mz.Adam(lr=0.01),
    "adamw": mz.AdamW(lr=0.01, groups=[mz.ParameterGroup("*bias", lr_scale=0.5)]),
    "rmsprop": mz.RMSprop(),
    "lion": mz.Lion(),
    "lamb": mz.LAMB(lr=0.01),
}


def batch(dtype="float32"):
    rng = np.random.default_rng(1)
    return rng.normal(size=(4, 3)).astype(dtype), rng.integers(0, 2, 4)


def train(model, steps, dtype="float32"):
    """Train on this rank's part of the batch; return the losses."""
    x, y = batch(dtype)
    share = len(x) // model.world_size
    own = slice(model.rank * share, (model.rank + 1) * share)
    return [model.train(x[own], y[own]) for _ in range(steps)]


def network(dtype="float32"):
    return mz.nn.MLP(3, (4,), 2, dtype=dtype)


def found_of(model):
    """Return parameters, and state by slot and name, as bytes."""
    told = model.optimizer.state_dict()
    state = {(slot, n): a.tobytes() for slot, arrays in told["state"].items() for n, a in arrays.items()}
    return model.gather_full_parameters().tobytes(), state, told["step_count"]


def trained(optimizer, comm=None, *, dtype="float32", steps=3, **settings):
    with bound(network(dtype), OPTIMIZERS[optimizer], comm, **settings) as model:
        losses = train(model, steps, dtype)
        on_device = isinstance(model._engine.updater, DeviceUpdater)
        assert on_device == (settings.get("optimizer_device") != "cpu")
        return losses, found_of(model)


@functools.cache
def two_steps_alone(optimizer):
    return trained(optimizer, steps=2)


@pytest.mark.parametrize(
    ("optimizer", "dtype"), [(name, ("float32", "float64")[number % 2]) for number, name in enumerate(OPTIMIZERS)]
)
def test_a_simulated_gpu_updates_as_the_host_does_bit_for_bit(optimizer, dtype):
    clip = 0.1 if optimizer in ("adamw", "lamb") else None  # one pass, and two
    on_device, on_host = (trained(optimizer, dtype=dtype, clip=clip, optimizer_device=where) for where in (None, "cpu"))
    assert on_device == on_host


@pytest.mark.parametrize(("optimizer", "place"), [("adamw", mz.ZeRO3Model), ("lamb", mz.DDPModel)])
def test_blocks_change_nothing(optimizer, place, monkeypatch):
    def found():
        return run_in_threads(2, lambda comm: trained(optimizer, comm, place=place, steps=1, **PRIVATE))

    whole = found()
    for module in (gpu, device_update):
        monkeypatch.setattr(module, "STAGING", 20)  # 5 elements, of 26: blocks end inside of parameters
    assert found() == whole


@pytest.mark.parametrize(
    ("place", "optimizer", "memory"),
    [
        (mz.DDPModel, "adamw", {}),
        (mz.ZeRO1Model, "lamb", PRIVATE),
        (mz.ZeRO2Model, "momentum", {}),
        (mz.ZeRO2Model, "adamw", PRIVATE),
        (mz.ZeRO3Model, "lamb", {}),
        (mz.ZeRO3Model, "momentum", PRIVATE),
    ],
)
def test_bits_of_parameters_and_state_are_those_of_one_rank(place, optimizer, memory):
    for found in run_in_threads(2, lambda comm: trained(optimizer, comm, place=place, steps=2, **memory)):
        assert found == two_steps_alone(optimizer)


def test_a_rank_alone_never_copies_its_parameters_to_the_gpu_again(monkeypatch):
    written, write = [], gpu.Device.write
    monkeypatch.setattr(
        gpu.Device, "write", lambda device, target, values: (written.append(values.size), write(device, target, values))
    )
    with bound(network(), OPTIMIZERS["adamw"]) as model:
        train(model, 3)
        assert written == [model.parameter_count]
        model.set_parameters(model.get_parameters() + 1)  # changed by other means: they go there once more
        model.predict(batch()[0])
        assert written == [model.parameter_count] * 2
        parameters = model._engine.compute_device.parameter_provider(model._engine.store).current()
        assert np.array_equal(parameters.get(), model._engine.store.values)


def test_state_on_a_gpu_is_saved_as_the_hosts_and_loads_on_both(tmp_path):
    paths = {where: tmp_path / str(where) for where in (None, "cpu")}
    images, wanted = [], None
    for where, path in paths.items():
        with bound(network(), OPTIMIZERS["adamw"], optimizer_device=where) as model:
            train(model, 2)
            images.append(model.serialize())
            pending = model.begin_save(path)
            train(model, 1)  # what is saved is from before
            pending.commit()
            wanted = model.gather_full_parameters().tobytes()
    assert images[0] == images[1]
    for path in paths.values():
        for where in paths:
            with bound(network(), OPTIMIZERS["adamw"], place=mz.ZeRO2Model, optimizer_device=where) as model:
                train(model, 1)  # not the start values: loading verifies first
                model.load_model(path)
                train(model, 1)
                assert model.gather_full_parameters().tobytes() == wanted


def test_a_state_dict_and_a_clone_carry_the_state():
    with bound(network(), OPTIMIZERS["adamw"]) as model, bound(network(), OPTIMIZERS["adamw"]) as other:
        train(model, 2)
        other.optimizer.load_state_dict(model.optimizer.state_dict())
        other.set_parameters(model.get_parameters())
        with model.deep_copy() as copy:
            for follower in (model, other, copy):
                train(follower, 1)
            assert found_of(other) == found_of(model)
            assert copy.gather_full_parameters().tobytes() == model.gather_full_parameters().tobytes()
        model.optimizer.reset()
        state = model.optimizer.state_dict()["state"]
        assert not any(array.any() for arrays in state.values() for array in arrays.values())


def test_replicated_state_that_differs_is_repaired_on_the_gpu():
    def repair(comm):
        with bound(network(), OPTIMIZERS["adamw"], comm, **PRIVATE) as model:
            train(model, 1)
            right = model._engine.updater.host_state()["exp_avg"].copy()
            if comm.rank == 1:
                model._engine.updater.state["exp_avg"][3] = 7.0
            repaired = model.optimizer.synchronize_optimizer_state()
            return repaired, np.array_equal(model._engine.updater.state["exp_avg"].get(), right)

    assert run_in_threads(2, repair) == [(1, True)] * 2


def test_a_bit_that_turned_over_on_the_gpu_is_found_and_named():
    with bound(network(), OPTIMIZERS["adamw"], check_every=1) as model:
        train(model, 2)
        model._engine.updater.state["exp_avg_sq"][0] = 0.5
        with pytest.raises(IntegrityError, match=r"exp_avg_sq.*elements 0 to"):
            train(model, 1)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the simulator's kernels meet an infinite sample
def test_a_skipped_step_leaves_state_and_parameters_on_the_gpu_as_they_were():
    with bound(network(), OPTIMIZERS["adamw"], loss_scale=mz.DynamicLossScale()) as model:
        train(model, 1)
        before = found_of(model)
        x, y = batch()
        x[0, 0] = np.inf
        model.train(x, y)
        assert model.last_step.skipped
        assert found_of(model) == before


class Own:
    """A user's own: plain descent on NumPy arrays."""

    def update(self, params, grads, state):
        params -= np.float32(0.1) * grads


def test_a_users_own_optimizer_takes_the_sums_on_the_host_and_stays_there():
    found = []
    for where in (None, "cpu"):
        with bound(network(), Own(), optimizer_device=where, clip=0.5) as model:
            losses = train(model, 2)
            assert "optimizer state" not in model.metadata().bytes_on_device
            model._engine.bind(OPTIMIZERS["adamw"])  # and then one of the library's, on the GPU or not
            found.append((losses, train(model, 1), model.gather_full_parameters().tobytes()))
    assert found[0] == found[1]
    with config(optimizer_device="cuda") as sharding, mz.DDPModel(network(), sharding) as model:
        with pytest.raises(ConfigError, match=r"Own.update works on arrays of the host"):
            model._engine.bind(Own())
        model._engine.bind(mz.SGD(lr=0.1))


def test_whole_tensors_are_updated_on_the_host():
    found = []
    for where, ranks in ((None, 1), ("cpu", 1), (None, 2)):

        def run(comm, where=where):
            with bound(network(), mz.Muon(lr=0.01), comm, place=mz.ZeRO2Model, optimizer_device=where) as model:
                train(model, 2)
                assert "optimizer state" not in model.metadata().bytes_on_device
                return model.gather_full_parameters()

        found.append(run_in_threads(ranks, run)[0])
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    wrong = pytest.raises(ConfigError, match=r"Muon.update works on arrays of the host")
    with config(optimizer_device="cuda") as sharding, mz.DDPModel(network(), sharding) as model, wrong:
        model._engine.bind(mz.Muon())


def test_an_optimizer_on_a_gpu_needs_layers_there():
    with pytest.raises(ConfigError, match='give device = "cuda"'):
        mz.ShardingConfig(optimizer_device="cuda")
    with pytest.raises(ConfigError, match='one of "cpu", "cuda"'):
        config(optimizer_device="gpu")


@pytest.mark.parametrize(
    ("optimizer", "memory", "where"),
    [("adamw", {}, None), ("lamb", {}, "cpu"), ("adamw", PRIVATE, "cpu"), ("lamb", PRIVATE, None)],
)
def test_a_plan_tells_where_state_lies_to_the_byte(optimizer, memory, where):
    settings = {"optimizer_device": where, **memory}

    def held(comm):
        with bound(network(), OPTIMIZERS["sgd"], comm, place=mz.ZeRO3Model, **settings) as model:
            model._engine.bind(OPTIMIZERS[optimizer])  # what the first had is given back
            train(model, 1)
            told = model.metadata()
            return told.bytes_on_device, told.bytes_on_rank.get("optimizer state", 0)

    x, y = batch()
    for rank, (device, host) in enumerate(run_in_threads(2, held)):
        plan = TrainingPlan(
            model=network(), optimizer=OPTIMIZERS[optimizer], config=config(**settings), row=placement("zero3"),
            ranks=2, global_batch=4, x=x, y=y,
        ).by_rank[rank]  # fmt: skip
        state = plan.memory.get("optimizer state")
        assert host == (state.private if state else 0)
        assert device == {kind: size for kind, size in plan.device_memory.items() if kind in device}
        assert {"parameters", "gradients"} <= set(device)
        assert plan.device_memory["activations"] > 0
        assert "activations" not in plan.memory
        assert {"optimizer state", "buffers"} <= set(device) if where is None else "optimizer state" not in device
        assert (host > 0) == (where == "cpu")


def test_a_strided_tile_on_the_gpu_has_the_sums_of_its_copy(monkeypatch):
    spec = ParameterSpec("w", (9, 14), part=Part((9, 14), 1, ((0, 14),), (((0, 3), (7, 10)), ((3, 7), (10, 14)))))
    values = np.random.default_rng(3).normal(size=126).astype("float32")
    monkeypatch.setattr(tensor_tree, "DEVICE_BLOCK", 8)
    for rows, columns in zip(tile_rows(spec), ([0, 1, 2, 7, 8, 9], [3, 4, 5, 6, 10, 11, 12, 13]), strict=True):
        copied, expected = values.reshape(9, 14)[:, columns].reshape(-1), np.empty(1)
        reduction.tree_square_sums(copied, np.array([0]), np.array([copied.size]), expected)
        tile = tensor_tree.StridedTile(rows, 0, cover(0, rows.size, rows.size))
        held = gpu.open_device(0).put(values)
        assert tile.sums([held]) == expected.tolist()
