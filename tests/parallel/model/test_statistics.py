"""Averaged parameters, such as running statistics, and integer arrays: new values of layers, the same on any layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import pytest

import mpizero as mz
from mpizero import checkpoint
from mpizero.checkpoint.convert import export
from mpizero.errors import CheckpointError, ConfigError, LayoutError, MpizeroError
from mpizero.nn import Checkpointed, Frozen, initial_parameters
from mpizero.testing import check_model, run_in_threads
from mpizero.types import IntegerSpec
from tests.parallel.models import MEMORIES, PRIVATE, STRATEGIES, layouts, part, sharded
from tests.parallel.normalized import MOMENTUM, RATE, BatchNorm, CountingNorm, by_hand, network, samples
from tests.parallel.parallel_layouts import Case, Way, pipelines, placed, steps
from tests.parallel.parallel_layouts import alone as placed_alone

STATISTICS = ("norm0.mean", "norm0.variance", "norm1.mean", "norm1.variance")


def counting_network(dtype="float64"):
    return network(dtype, CountingNorm)


#: With an update that sums on its way, with one that needs norms first, with grains of several micro-batches, and with
#: two grains, which do not suffice for three ranks.
CASES = {
    "fused": Case(counting_network, lambda: mz.SGD(lr=RATE), samples(3, 23), config={"micro_batch": 5}),
    "clipped": Case(
        counting_network, lambda: mz.AdamW(lr=1e-2), samples(2, 23), config={"micro_batch": 5, "clip": 0.1}
    ),
    "LAMB": Case(
        counting_network, lambda: mz.LAMB(lr=1e-2), samples(2, 23), config={"micro_batch": 2, "accumulate": 3}
    ),
    "loss scale": Case(
        partial(counting_network, "float32"), lambda: mz.AdamW(lr=1e-2), samples(2, 23, "float32"),
        mz.DynamicLossScale(initial=2.0**10), {"micro_batch": 5},
    ),
    "few": Case(
        counting_network, lambda: mz.AdamW(lr=1e-2), samples(2, 10), config={"micro_batch": 3, "accumulate": 2}
    ),
}  # fmt: skip


def values(model):
    return dict(model._engine.global_view.named(model.get_parameters()))


def integers(model):
    return {name: a.tolist() for name, a in model.named_parameters().items() if a.dtype.kind in "iub"}


def trained_as(name, comm, way, sizes=None, **memory):
    """What the steps find, and the integers after them."""
    with placed(CASES[name], comm, way, **memory) as model:
        return steps(model, CASES[name], sizes), integers(model)


@cache
def alone(name):
    with placed_alone(CASES[name]) as model:
        return steps(model, CASES[name]), integers(model)


@pytest.mark.parametrize("clip", [None, 1e9])
def test_statistics_are_those_of_plain_numpy(clip):
    """By either kind of update: the bound of the second is never reached."""
    start, batches = initial_parameters(network()), samples(4, 23)
    with sharded("zero1", None, network(), mz.SGD(lr=RATE), micro_batch=5, clip=clip) as model:
        for batch in batches:
            model.train(*batch)
        found = values(model)
    for name, value in by_hand(start, batches, 5).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)
        assert name.startswith("linear") or (found[name] != start[name]).all()


def test_integers_count_steps():
    expected = {"steps": 3, "flags": [False, True, True], "unused": [7, 7]}
    assert alone("fused")[1] == {f"norm{i}.{name}": value for i in range(2) for name, value in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_replicas_have_the_bits_of_one_process(ranks):
    """All samples come from one rank."""
    for number, (strategy, memory) in enumerate(layouts(ranks)):
        name = list(CASES)[(number + ranks) % len(CASES)]
        sizes = [len(CASES[name].batches[0][0])] + [0] * (ranks - 1)
        run = partial(trained_as, name, way=Way(zero=STRATEGIES.index(strategy)), sizes=sizes, **memory)
        assert run_in_threads(ranks, run) == [alone(name)] * ranks, (name, strategy, memory)


@pytest.mark.slow
def test_every_schedule_has_the_bits_of_one_process():
    """With two replicas; one of them without."""
    ways = [(4, way) for way in pipelines(4, 7) if way.pipeline == 2]
    for number, (ranks, way) in enumerate([*ways, (2, ways[1][1])]):
        name = list(CASES)[number % len(CASES)]
        run = partial(trained_as, name, way=way, **MEMORIES[number % len(MEMORIES)])
        assert run_in_threads(ranks, run) == [alone(name)] * ranks, (ranks, name, way)


@pytest.mark.slow
def test_checkpoints_hold_them_and_any_layout_goes_on(tmp_path):
    case = CASES["clipped"]

    def gone_on(comm, way, after, until):
        with placed(case, comm, way, **PRIVATE) as model:
            if after:
                model.load_model(tmp_path / str(after))
            for x, y in case.batches[after:until]:
                model.train(*part(model.batch_group, x, y))
            model.save_model(tmp_path / str(until), replace=True)
            return model.parameters_sha256(), integers(model)

    run_in_threads(4, lambda comm: gone_on(comm, Way(zero=3), 0, 1))
    found, counted = alone("clipped")
    for ranks, way in ((3, Way(zero=0)), (2, Way(2, zero=3))):
        assert run_in_threads(ranks, partial(gone_on, way=way, after=1, until=2)) == [(found.sha256, counted)] * ranks
    with checkpoint.open_checkpoint(tmp_path / "2") as reader:
        assert reader.arrays["parameters/norm0.steps"] == ((), np.dtype("int64"))
        export(reader, tmp_path / "2.npz", "npz")
    with sharded("ddp", None, network()) as other, pytest.raises(CheckpointError, match=r"unknown norm0\.flags"):
        other.load_model(tmp_path / "2")
    with sharded("ddp", None, counting_network()) as fresh, np.load(tmp_path / "2.npz") as exported:
        assert exported["norm1.unused"].tolist() == [7, 7]
        fresh.load_named(exported)
        with fresh.deep_copy() as copy:
            assert integers(fresh) == integers(copy) == counted
        with pytest.raises(LayoutError, match=r"'norm0\.steps' is int64 of shape .*given int64 of shape \(2,\)"):
            fresh.load_named({**fresh.named_parameters(), "norm0.steps": np.zeros(2, np.int64)})


def test_no_optimizer_has_state_of_averaged_parameters():
    with sharded("ddp", None, network(), mz.AdamW(lr=1e-2)) as model:
        told = model.metadata()
        assert told.trainable_count == told.parameter_count - 2 * (11 + 13)
        held, formula = told.bytes_on_rank["optimizer state"], told.formula_bytes["optimizer state"]
        assert held == formula == 2 * 8 * told.trainable_count
        assert not set(STATISTICS) & set(model.optimizer.state_dict()["state"]["exp_avg"])
    groups = (mz.ParameterGroup("norm?.mean", lr_scale=0.0),)
    with pytest.raises(ConfigError, match=r"'norm\?\.mean'.* matches no parameter"):
        sharded("ddp", None, network(), mz.AdamW(lr=1e-2, groups=groups))


def test_gradients_by_hand_update_them_in_a_step_and_not_in_apply_gradients():
    case = CASES["clipped"]

    def by_steps(comm):
        with sharded(
            "zero2", comm, counting_network(), case.optimizer(), **case.config, auto_sync_gradients=False
        ) as model:
            for x, y in case.batches:
                assert not model.compute_gradients(*part(comm, x, y)).synchronized
                before = values(model)
                whole = model.synchronize_gradients(gather=True)
                assert not any(whole.named()[name].any() for name in STATISTICS)
                model.optimizer.step()
                assert all((values(model)[name] != before[name]).all() for name in STATISTICS)
            after = model.get_parameters().copy()
            model.apply_gradients(whole, 0.5)
            changed = values(model)
            assert all((changed[name] == model._engine.global_view.named(after)[name]).all() for name in STATISTICS)
            model.set_parameters(after)
            return model.parameters_sha256()

    assert set(run_in_threads(2, by_steps)) == {alone("clipped")[0].sha256}


def test_a_skipped_step_leaves_them_and_evaluation_does_too():
    with sharded("zero1", None, counting_network(), micro_batch=5, bad_steps=mz.BadSteps(warn=False)) as model:
        x, y = samples(1, 11)[0]
        before = model.parameters_sha256()
        model.train(np.full_like(x, np.nan), y)
        assert model.last_step.skipped
        model.evaluate(x, y)
        model.compute_gradients(x, y)
        assert model.parameters_sha256() == before
        model.optimizer.step()
        assert integers(model)["norm0.steps"] == 1


def test_local_steps_keep_integers():
    def go(comm):
        with sharded("ddp", comm, counting_network(), mz.SGD(lr=RATE), micro_batch=5) as model:
            for number, (x, y) in enumerate(CASES["fused"].batches):
                if number == 1:
                    mz.LocalSGDOptimizer(mz.SGD(lr=RATE), every=2).set_model(model)
                model.train(*part(comm, x, y))
            return integers(model)["norm0.steps"]

    assert run_in_threads(2, go) == [3, 3]


def test_those_of_frozen_layers_are_constants_and_of_checkpointed_ones_are_not():
    blocks = counting_network().blocks
    frozen = {"norm0": Frozen(CountingNorm(11)), "norm1": Checkpointed(blocks["norm1"])}
    chain = replace(counting_network(), blocks={**blocks, **frozen})
    with sharded("zero3", None, chain, mz.SGD(lr=RATE), micro_batch=5) as model:
        before = values(model)
        model.train(*samples(1, 23)[0])
        changed = {name for name, value in values(model).items() if (value != before[name]).any()}
        assert changed == {name for name in before if not name.startswith("norm0.")}
        assert (integers(model)["norm0.steps"], integers(model)["norm1.steps"]) == (0, 1)
    assert "layers: they overwrite" in str(check_model(chain, *samples(1, 6)[0]))


def function(poison=lambda x, found: None, *, in_place=False):
    """A mean whose statistic ``seen`` is a running mean, with weights of 1/1000, and a count of two a step."""

    def loss_and_grad(p, batch):
        x, _ = batch
        error = x - p["w"]
        found = {
            "w": -2 * error.sum(0),
            "seen": (1 - MOMENTUM) * p["seen"] + MOMENTUM * x.mean(0),
            "n": p["n"] + 2,
        }  # fmt: skip
        poison(x, found)
        return float((error**2).sum()), found, 1e-3 * len(x)

    def written(p, batch, gradients):
        loss, found, weight = loss_and_grad(p, batch)
        for name, value in found.items():
            gradients[name][...] = value
        return loss, weight

    start, counts = {"w": np.zeros(6), "seen": np.ones(6)}, {"n": np.array(3, np.int32)}
    return mz.FunctionModel(
        start, written if in_place else loss_and_grad, averaged=["seen"], integers=counts, in_place=in_place
    )


@pytest.mark.slow
def test_functions_are_given_them_and_return_new_ones_in_place_of_gradients():
    x, y = samples(1, 11)[0]

    def go(comm, strategy="ddp", in_place=False, clip=None):
        with sharded(strategy, comm, function(in_place=in_place), mz.SGD(lr=1e-5), micro_batch=2, clip=clip) as model:
            for _ in range(2):
                model.train(*part(comm, x, y))
            model.evaluate(*part(comm, x, y))
            found = model.named_parameters()
            assert (found["n"].dtype, found["n"]) == (np.int32, 7)
            return found["seen"].tobytes(), model.parameters_sha256()

    one = go(None)
    kept = (1 - MOMENTUM) ** 2
    for seen, _ in (one, go(None, clip=1e9)):  # by either kind of update
        np.testing.assert_allclose(np.frombuffer(seen), kept * np.ones(6) + (1 - kept) * x.mean(0), rtol=1e-14)
    for number, strategy in enumerate(STRATEGIES):
        assert run_in_threads(3, partial(go, strategy=strategy, in_place=number % 2 == 0)) == [one] * 3
    for in_place in (True, False):
        told = str(check_model(function(in_place=in_place), x[:6], y[:6]))
        assert "averaged" in told
        assert "agree" in told


def test_a_new_value_that_is_not_finite_skips_the_step_and_is_named():
    def poison(x, found):
        if x[0, 0] == 3.0:
            found["seen"][2] = np.nan

    def go(comm):
        settings = {"micro_batch": 1, "bad_steps": mz.BadSteps(warn=False), **PRIVATE}
        with sharded("zero3", comm, function(poison), mz.SGD(lr=1e-5), **settings) as model:
            before = model.parameters_sha256()
            model.train(*part(comm, np.arange(4.0)[:, None].repeat(6, axis=1), np.zeros(4)))
            assert model.parameters_sha256() == before
            assert "the new value of 'seen' is not finite" in model.last_step.skipped

    run_in_threads(2, go)


def test_copies_with_other_parameters_and_the_best_parameters_have_their_integers():
    def go(comm, strategy):
        start = {"w": np.ones(6)}
        linear = mz.FunctionModel(
            start, lambda p, b: (float((b[0] @ p["w"]).sum()), {"w": b[0].sum(0), "n": p["n"] + 2}, float(len(b[0]))),
            integers={"n": 3},
        )  # fmt: skip
        model = sharded(strategy, comm, linear, mz.SGD(lr=0.1), micro_batch=5)
        x = np.where(np.arange(20) < 15, 1.0, -1.0)[:, None] * np.ones(6)  # the last ones get worse by every step
        source = mz.data.ArraySource(x, np.zeros(20))
        source.in_order = True
        options = mz.OptimizationOptions(epochs=3, batch_size=5, validation=0.25)
        with model, model.with_parameters(model.get_parameters()) as before:
            result = model.optimizer.optimize(source, options)
            with model.with_parameters(model.get_parameters()) as after:
                counts = [int(one.named_parameters()["n"]) for one in (before, model, after)]
                return result.best_epoch, counts, after.parameters_sha256() == model.parameters_sha256()

    for strategy in ("ddp", "zero3"):
        assert run_in_threads(2, partial(go, strategy=strategy)) == [(0, [3, 9, 9], True)] * 2


class Tied(BatchNorm):
    """Takes the statistics of another block."""

    def own_specs(self):
        return tuple(replace(s, tied=f"norm0.{s.name}") if s.averaged else s for s in super().own_specs())


@dataclass(frozen=True)
class Unlike(BatchNorm):
    """Counts samples, of which grains have different numbers."""

    def own_integers(self):
        return (IntegerSpec("seen"),)

    def backward_weights(self, params, cache, pending, grads):
        super().backward_weights(params, cache, pending, grads)
        grads["seen"][...] = params["seen"] + len(cache[0])


@pytest.mark.parametrize(("ranks", "way"), [(1, Way()), (2, Way(2)), (3, Way())], ids=str)
def test_grains_that_do_not_agree_are_named_on_every_rank(ranks, way):
    case = Case(lambda: network(norm=Unlike), batches=samples(1, 23), config={"micro_batch": 9})

    def go(comm):
        with placed(case, comm, way) as model:
            before = model.parameters_sha256()
            with pytest.raises(MpizeroError, match="the new value of integer array 'norm") as caught:
                steps(model, case)
            assert model.parameters_sha256() == before
            return str(caught.value)

    for told in run_in_threads(ranks, go):
        assert "9 after samples 0 to 8" in told
        assert "5 after samples 18 to 22" in told


def nothing(p, batch):
    return 0.0, {}, 1.0


def in_context():
    def go(comm):
        with mz.ShardingConfig(comm=comm) as config:
            mz.HybridShardedModel(network(), config, context_parallel_size=2)

    run_in_threads(2, go)


def half(x, found):
    found["n"] = found["n"] + 0.5


W, N = np.zeros(2), np.zeros(1, int)
REFUSED = {
    "tied": (
        lambda: sharded("ddp", None, replace(network(), blocks={"norm0": BatchNorm(3), "norm1": Tied(3)})),
        LayoutError, r"'norm1\.mean' is tied to 'norm0\.mean', and averaged parameters cannot be tied",
    ),
    "sequences that are cut": (in_context, ConfigError, r"context=2 .*'norm0\.mean'"),
    "frozen too": (
        lambda: mz.FunctionModel({"a": W}, nothing, averaged=["a"], frozen=["a"]),
        ConfigError, r"frozen and averaged both name \['a'\]",
    ),
    "unknown": (
        lambda: mz.FunctionModel({"mean": W}, nothing, averaged=["maen"]),
        ConfigError, r"averaged names \['maen'\].*'mean'",
    ),
    "no integer type": (
        lambda: sharded("ddp", None, mz.FunctionModel({"w": W}, nothing, integers={"n": W})),
        ConfigError, "integer array 'n' has dtype float64: use int64, int32",
    ),
    "a parameter too": (
        lambda: sharded("ddp", None, mz.FunctionModel({"w": W}, nothing, integers={"w": N})),
        ConfigError, "'w' is a parameter and an integer array",
    ),
    "no integer as a new value": (
        lambda: sharded("ddp", None, function(half)).train(*samples(1, 2)[0]),
        LayoutError, r"loss_and_grad at .* as the new value of integer array 'n' by sample 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_said(what):
    make, kind, message = REFUSED[what]
    with pytest.raises(kind, match=message):
        make()
