"""A rank that is alone in its data group trains on its GPU: gradients and new values stay there until they are wanted.

That it has the bits of several ranks, for every strategy, is in ``test_training.py`` and ``test_device_updates.py``.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import IntegrityError
from mpizero.kernels import jit
from mpizero.kernels.cuda.launch import CudaKernel
from mpizero.kernels.gpu import Device
from mpizero.sharding.config import placement
from mpizero.testing import run_in_threads
from mpizero.tools.plan import TrainingPlan
from tests.cuda.simulated import bound, config
from tests.parallel.parallel_layouts import Blocks
from tests.support.simulated.arrays import SimulatedArray

pytestmark = pytest.mark.usefixtures("in_turn")

STRATEGIES = (mz.DDPModel, mz.ZeRO1Model, mz.ZeRO2Model, mz.ZeRO3Model)
OPTIMIZERS = {"adamw": mz.AdamW(lr=0.01), "lamb": mz.LAMB(lr=0.01)}


def network(kind="plain"):
    if kind == "tied":
        return mz.nn.GPT(dim=4, layers=1, heads=2, sequence=3, vocabulary=5)
    whole = mz.nn.MLP(3, (4,), 2)
    return whole if kind == "plain" else Blocks(whole, {"hidden.0": mz.nn.Frozen})


def batch(kind="plain"):
    rng = np.random.default_rng(1)
    if kind == "tied":
        drawn = rng.integers(0, 5, (3, 4))
        return drawn[:, :-1], drawn[:, 1:]
    return rng.normal(size=(5, 3)).astype(np.float32), rng.integers(0, 2, 5)


def one_each(comm=None, **settings):
    """Micro-batches of one sample."""
    return config(comm, **{"micro_batch": 1} | settings)


def alone(kind="plain", optimizer="adamw", place=mz.DDPModel, **settings):
    """One rank's model of such micro-batches, with its optimizer."""
    return bound(network(kind), OPTIMIZERS[optimizer], place=place, **{"micro_batch": 1} | settings)


def trained(kind="plain", optimizer="adamw", place=mz.DDPModel, steps=2, **settings):
    """Return losses, parameters and optimizer state."""
    with alone(kind, optimizer, place, **settings) as model:
        losses = [model.train(*batch(kind)) for _ in range(steps)]
        state = model._engine.updater.host_state()
        return losses, model.gather_full_parameters().tobytes(), {slot: a.tobytes() for slot, a in state.items()}


@pytest.fixture
def copied(monkeypatch):
    """Return a list that grows with the elements of every copy of model state between host and GPU."""
    sizes = []

    def watched(name, of):
        method = getattr(Device, name)
        monkeypatch.setattr(Device, name, lambda device, *args: (sizes.append(of(*args)), method(device, *args))[1])

    watched("send", lambda target, sources: target.size)
    watched("read", lambda source, targets: sum(host.size for _, host in targets))
    get = SimulatedArray.get
    monkeypatch.setattr(SimulatedArray, "get", lambda array, out=None: (sizes.append(array.size), get(array, out))[1])
    return sizes


@pytest.mark.parametrize(
    ("place", "optimizer", "clip"),
    [
        (mz.DDPModel, "adamw", None),
        (mz.DDPModel, "lamb", 0.1),
        (mz.ZeRO3Model, "adamw", 0.1),
        (mz.ZeRO3Model, "lamb", None),
    ],
)
def test_a_step_copies_no_gradient_and_no_parameter(place, optimizer, clip, copied):
    with alone("plain", optimizer, place, clip=clip) as model:
        model.train(*batch())
        del copied[:]
        model.train(*batch())
        assert max(copied, default=0) <= len(model._engine.store.layout.parameters), "more than a norm of each tensor"
        del copied[:]
        values = model.get_parameters()
        assert set(copied) == {model.parameter_count}
        del copied[:]
        assert np.array_equal(model.get_parameters(), values)
        assert copied == [], "the host has them now"


CLIPPED = {"clip": 0.1, "accumulate": 2, "micro_batch": 2}


@pytest.mark.parametrize(
    ("optimizer", "kind", "settings"),
    [("adamw", "tied", CLIPPED), ("lamb", "tied", {}), ("adamw", "frozen", {}), ("lamb", "frozen", CLIPPED)],
)
def test_sums_and_updates_on_a_gpu_have_the_hosts_bits(optimizer, kind, settings):
    """The simulator rounds as the host does; with the optimizer there, gradients go there as well."""
    here, there = (trained(kind, optimizer, **settings, optimizer_device=where) for where in (None, "cpu"))
    assert here == there


def test_every_strategy_has_the_same_bits():
    assert len({str(trained(place=place)) for place in STRATEGIES}) == 1


def test_what_is_written_on_the_host_counts_from_then_on():
    def changed(where):
        with alone(optimizer_device=where) as model:
            model.train(*batch())
            store = model._engine.store
            store.owned(0)[:2] = 7.0  # the first values anybody asks for: the others must be the new ones too
            store.all_gather()
            model.train(*batch())
            model.set_parameters(model.get_parameters() * 2)
            return model.train(*batch()), model.predict(batch()[0]).tobytes(), model.get_parameters().tobytes()

    assert changed(None) == changed("cpu")


def test_gradients_by_hand_come_to_the_host_and_go_back():
    def found(where):
        with alone(optimizer="lamb", place=mz.ZeRO2Model, optimizer_device=where, clip=0.1) as model:
            model.train(*batch())
            gradients = model.compute_gradients(*batch())
            assert isinstance(gradients.values, np.ndarray)
            model.optimizer.step()
            model.train(*batch())
            return gradients.values.tobytes(), model.gather_full_parameters().tobytes()

    assert found(None) == found("cpu")


def test_local_gradients_are_the_hosts():
    def found(where):
        with alone(optimizer_device=where, auto_sync_gradients=False) as model:
            local = model.compute_gradients(*batch())
            model.synchronize_gradients()
            model.optimizer.step()
            return local.values.tobytes(), model.gather_full_parameters().tobytes()

    assert found(None) == found("cpu")


def test_a_gpu_is_used_in_the_thread_that_opened_it(monkeypatch):
    """Threads of a rank share the host's work; kernels started in another thread would find another GPU."""
    monkeypatch.setattr(jit, "BLOCK", 4)
    threads, call = set(), CudaKernel.__call__

    def noted(kernel, *args):
        threads.add(threading.current_thread())
        return call(kernel, *args)

    monkeypatch.setattr(CudaKernel, "__call__", noted)
    for clip in (None, 0.1):
        assert trained(threads=2, clip=clip) == trained(clip=clip)
    assert threads == {threading.current_thread()}


def test_ranks_that_train_alone_between_means_keep_their_own_gpus():
    def number(comm):
        with one_each(comm) as sharding, mz.DDPModel(network(), sharding) as model:
            optimizer = mz.LocalSGDOptimizer(mz.SGD(lr=0.1), sharding, every=2)
            optimizer.set_model(model)
            model.train(*batch())
            return model._engine.compute_device.device_number, model._engine.compute_device.keeps_gradients

    assert run_in_threads(2, number) == [(0, True), (1, True)]


def test_a_look_at_memory_overwrites_nothing_that_was_written_on_the_host():
    with alone() as model:
        model.train(*batch())
        store = model._engine.store
        store.owned(0)[:2] = 7.0
        model.check_integrity()
        store.all_gather()
        assert (model.get_parameters()[:2] == 7.0).all()


def test_a_parameter_that_turned_over_on_the_gpu_is_found_and_named():
    with alone(check_every=1) as model:
        model.train(*batch())
        model.train(*batch())
        model._engine.compute_device.parameter_provider(model._engine.store).current()[1] = 0.5
        with pytest.raises(IntegrityError, match=r"parameter 'hidden.0.linear.weight', elements 0 to"):
            model.train(*batch())


@pytest.mark.parametrize(
    ("place", "settings", "kind"),
    [
        (mz.DDPModel, {}, "plain"),
        (mz.ZeRO2Model, {}, "frozen"),
        (mz.DDPModel, {"accumulate": 2, "micro_batch": 2}, "frozen"),
        (mz.ZeRO2Model, {"accumulate": 2, "micro_batch": 2}, "tied"),
    ],
)
def test_a_plan_tells_what_lies_where_to_the_byte(place, settings, kind):
    x, y = batch(kind)
    with alone(kind, place=place, **settings) as model:
        model.train(x, y)
        held = model.metadata()
        whole = TrainingPlan(
            model=network(kind), optimizer=OPTIMIZERS["adamw"], config=one_each(**settings),
            row=placement("ddp" if place is mz.DDPModel else "zero2"), ranks=1, global_batch=len(x), x=x, y=y,
        )  # fmt: skip
        plan = whole.by_rank[0]
    assert 0 not in whole.traffic(0).jobs, "in rows nobody takes part in a micro-batch that is not there"
    assert {
        part: size for part, size in plan.device_memory.items() if part not in ("activations", "working arrays")
    } == {part: size for part, size in held.bytes_on_device.items() if size}
    assert {"gradients", "buffers"} & {part for part, size in held.bytes_on_rank.items() if size} == set()
    assert {"gradients", "buffers"} & set(plan.memory) == set()


def test_stages_of_one_rank_each_exchange_the_uses_of_a_tied_table_and_nothing_else(monkeypatch):
    """The table's uses lie on two stages: their gradients meet on the host."""
    settings, copied, get = {"pipeline_parallel_size": 2, "zero_stage": 1}, [], SimulatedArray.get
    monkeypatch.setattr(SimulatedArray, "get", lambda array, out=None: (copied.append(array.size), get(array, out))[1])

    def found(comm, where):
        x, y = batch("tied")
        with (
            one_each(comm, optimizer_device=where, share_node_memory=False) as sharding,
            mz.HybridShardedModel(network("tied"), sharding, **settings) as model,
        ):
            model._engine.bind(OPTIMIZERS["adamw"])
            losses = [model.train(x, y) for _ in range(2)]
            most = max(copied)
            return losses, model.gather_full_parameters().tobytes(), model._engine.compute_device.keeps_gradients, most

    here, there = (run_in_threads(2, lambda comm, where=where: found(comm, where)) for where in (None, "cpu"))
    assert [told[:2] for told in here] == [told[:2] for told in there]
    assert [told[2] for told in here + there] == [True, True, False, False]
    largest = max(3 * 4, 5 * 4)  # activations of a sample that go to the other stage, and the table
    assert max(told[3] for told in here) <= largest < max(told[3] for told in there)
    assert np.frombuffer(here[0][1], np.float32).tobytes() == trained("tied")[1]
