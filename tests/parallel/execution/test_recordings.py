from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

import mpizero as mz
from mpizero.kernels import matmul, recording
from mpizero.nn import recorded
from mpizero.testing import run_in_threads
from tests.parallel.covering import covering
from tests.parallel.parallel_layouts import Chain

rng = np.random.default_rng(5)
STEPS = 10
IDS = rng.integers(0, 12, (2, STEPS, 8, 6))
NUMBERS = rng.normal(size=(2, STEPS, 8, 3)).astype(np.float32)


def gpt(dropout=0.0):
    return mz.nn.GPT(vocabulary=12, sequence=6, dim=8, layers=2, heads=2, dropout=dropout)


def mlp(activation="tanh"):
    return mz.nn.MLP(3, [16, 16], 3, task="regression", activation=activation)


def falling(step):
    return 0.01 / (1 + step // 6)  # changes after recordings are made


def train(comm, net, data, *, strategy="zero2", mesh=None, between=lambda model, step: None, rate=falling, **config):
    """Train on this rank's part of each batch; return losses, parameters' hash and how the last step was computed."""
    config = {"micro_batch": 2, **config}
    with (
        mz.Mesh(comm, **mesh or {}) as there,
        mz.distribute(net, mz.AdamW(lr=rate), strategy, mesh=there, config=mz.Config(**config)) as model,
    ):
        group, losses = model._engine.grid.data, []
        for step, (x, y) in enumerate(zip(*data, strict=True)):
            part = slice(len(x) * group.rank // group.size, len(x) * (group.rank + 1) // group.size)
            losses.append(model.train(x[part], y[part]))
            between(model, step)
        return losses, model.parameters_sha256(), model.metadata().recordings


def both(monkeypatch, task, ranks=1):
    """Return the results of ``task(comm)`` on all ranks with recordings, after a comparison with those without."""
    results = []
    for value in ("1", "0"):
        monkeypatch.setenv("MPIZERO_REPLAY", value)
        results.append([task("self")] if ranks == 1 else run_in_threads(ranks, task))
    with_recordings, without = results
    assert [rank[:2] for rank in with_recordings] == [rank[:2] for rank in without]
    for *_, how in without:
        assert set(how.values()) <= {"called", "called: MPIZERO_REPLAY=0"}
    return with_recordings


@pytest.mark.parametrize(
    ("ranks", "mesh", "strategy", "net", "config"),
    [
        (1, {}, "ddp", partial(mlp, "tanh"), {}),
        (1, {}, "zero1", partial(mlp, "relu"), {"clip": 0.1, "ema": 0.9}),
        (1, {}, "ddp", partial(gpt, 0.2), {"accumulate": 2}),
        (2, {}, "zero1", partial(mlp, "gelu"), {}),
        (2, {}, "zero3", partial(gpt, 0.2), {}),
        (3, {}, "zero2", partial(mlp, "silu"), {}),
        (4, {"share_node_memory": False}, "zero3", gpt, {"micro_batch": 1}),
        (2, {"share_node_memory": False}, "ddp", gpt, {}),
        (4, {"pipeline": 2}, "zero1", partial(gpt, 0.2), {"schedule": "zero_bubble"}),
        (2, {"pipeline": 2}, "zero2", mlp, {"schedule": "1f1b"}),
    ],
)
def test_repeated_steps_have_the_bits_of_called_ones(monkeypatch, ranks, mesh, strategy, net, config):
    data = NUMBERS if net().loss.__class__.__name__ == "MeanSquaredError" else IDS
    for *_, how in both(monkeypatch, lambda c: train(c, net(), data, strategy=strategy, mesh=mesh, **config), ranks):
        assert {name: value for name, value in how.items() if value != "repeated"} == {}


@pytest.mark.parametrize("net", [mlp, gpt])
def test_products_of_another_library_are_repeated(monkeypatch, net):
    monkeypatch.setenv("MPIZERO_BLAS", "numpy")
    matmul.library.cache_clear()
    try:
        data = NUMBERS if net is mlp else IDS
        assert set(both(monkeypatch, lambda c: train(c, net(), data))[0][2].values()) == {"repeated"}
    finally:
        monkeypatch.undo()
        matmul.library.cache_clear()


def test_what_changes_between_steps_reaches_repeated_steps(monkeypatch, tmp_path):
    def between(model, step):
        if step == 5:
            model.set_parameters(model.gather_full_parameters() * 0.5)
        if step == 6:
            model.save_model(tmp_path / "saved")
        if step == 8:
            model.load_model(tmp_path / "saved")

    assert set(both(monkeypatch, lambda c: train(c, mlp(), NUMBERS, between=between))[0][2].values()) == {"repeated"}


def test_batches_of_several_lengths_in_turns_keep_their_recordings(monkeypatch):
    data = [[array[: 8 if number % 2 else 5] for number, array in enumerate(part)] for part in NUMBERS]
    how = both(monkeypatch, lambda c: train(c, mlp(), data, micro_batch=1))[0][2]
    assert set(how.values()) == {"repeated"}
    by_length = [[array[: 3 + number % 3] for number, array in enumerate(part)] for part in np.repeat(NUMBERS, 3, 1)]
    both(monkeypatch, lambda c: train(c, mlp(), by_length, micro_batch=8))


def test_a_rank_without_samples_in_some_steps_takes_part(monkeypatch):
    data = [[array[: 2 if number % 3 == 2 else 8] for number, array in enumerate(part)] for part in NUMBERS]
    both(monkeypatch, lambda c: train(c, mlp(), data, strategy="zero3"), ranks=2)


def test_two_models_in_turns_do_not_share_memory_of_recordings(monkeypatch):
    def task(comm):
        made = partial(mz.distribute, optimizer=mz.SGD(lr=0.1))
        with mz.Mesh(comm) as mesh, made(mlp(), mesh=mesh) as one, made(mlp("relu"), mesh=mesh) as other:
            losses = [(one.train(x, y), other.train(y, x)) for x, y in zip(*NUMBERS, strict=True)]
            return losses, (one.parameters_sha256(), other.parameters_sha256()), one.metadata().recordings

    assert set(both(monkeypatch, task)[0][2].values()) == {"repeated"}


def test_a_value_that_is_not_finite_and_an_id_out_of_range_are_told_in_repeated_steps():
    with mz.distribute(gpt(), mz.SGD(lr=0.1), config=mz.Config(micro_batch=2)) as model:
        for x, y in zip(*IDS, strict=True):
            model.train(x, y)
        before = model.parameters_sha256()
        with pytest.raises(
            mz.errors.DataError, match="block 'embedding'.*ids from 0 to 11, the input has ids from 0 to 12"
        ):
            model.train(np.where(IDS[0, 0] == IDS[0, 0, 7, 5], 12, 0), IDS[1, 0])
        assert model.parameters_sha256() == before
        assert model.train(IDS[0, 0], IDS[1, 0]) > 0
        assert model.metadata().recordings["embedding"] == "repeated"
    with mz.distribute(mlp(), mz.SGD(lr=0.1)) as model:
        for x, y in zip(*NUMBERS, strict=True):
            model.train(x, y)
        before = model.parameters_sha256()
        model.train(np.full_like(NUMBERS[0, 0], np.nan), NUMBERS[1, 0])
        assert model.last_step.skipped
        assert model.parameters_sha256() == before


def test_predictions_are_arrays_of_their_own():
    with mz.distribute(mlp(), None) as model:
        kept = [model.predict(x) for x in NUMBERS[0]]
        again = [model.predict(x) for x in NUMBERS[0]]
    assert [a.tobytes() for a in kept] == [a.tobytes() for a in again]
    assert len({a.tobytes() for a in kept}) == STEPS


def test_threads_that_predict_at_once_do_not_share_arrays_of_recordings():
    wide = mz.nn.MLP(3, [64, 64, 64], 3, task="regression", activation="tanh")
    samples = np.repeat(NUMBERS[0].reshape(-1, 3), 4, axis=0)
    parts = [samples[first : first + 256] for first in range(0, len(samples) - 255, 16)]
    with mz.distribute(wide, None) as model:
        alone = [model.predict(part).tobytes() for part in parts]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                together = list(pool.map(model.predict, parts * 4))
                assert [found.tobytes() for found in together] == alone * 4


@dataclass(frozen=True)
class HalfRecorded(mz.nn.Tanh):
    """Compute a part by NumPy, unrecorded: ``where`` says in which pass."""

    where: str = "forward"

    def forward(self, params, x, run=mz.types.EVALUATE):
        y, cache = super().forward(params, x, run)
        if self.where == "forward":
            y *= 2
        return y, (cache * 1 if self.where == "cache" else cache)

    def backward_input(self, params, cache, dy):
        dx, pending = super().backward_input(params, cache, dy)
        return (dx * 3 if self.where == "backward" else dx), pending


def half_recorded(where):
    return Chain({"in": mz.nn.Linear(3, 4), "half": HalfRecorded(where), "out": mz.nn.Linear(4, 3)})


@pytest.mark.parametrize(
    ("where", "what"), [("forward", "output"), ("cache", "cache"), ("backward", "gradient of the input")]
)
def test_a_recording_that_misses_a_part_is_refused(monkeypatch, where, what):
    monkeypatch.setattr(recorded, "KNOWN", recorded.KNOWN | {HalfRecorded})
    how = both(monkeypatch, lambda c: train(c, half_recorded(where), NUMBERS))[0][2]
    assert how["half"] == f"called: the {what} of HalfRecorded differs when its kernels are repeated"
    assert how["in"] == how["out"] == "repeated"


@dataclass(frozen=True)
class Positive(mz.nn.ReLU):
    """Refuse negative numbers, which a trial of a recording makes up; ``where`` says in which pass."""

    where: str = "forward"

    def forward(self, params, x, run=mz.types.EVALUATE):
        if self.where == "forward" and (x < 0).any():
            raise ValueError("negative")
        return super().forward(params, x, run)

    def backward_input(self, params, cache, dy):
        if self.where == "backward" and np.abs(dy).max() > 0.9:
            raise ValueError("large")
        return super().backward_input(params, cache, dy)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_that_only_a_trial_raises_is_not_the_users(monkeypatch, where):
    monkeypatch.setattr(recorded, "KNOWN", recorded.KNOWN | {Positive})
    layers = {"first": mz.nn.ReLU(), "positive": Positive(where), "out": mz.nn.Linear(3, 3)}
    how = both(monkeypatch, lambda c: train(c, Chain(layers), NUMBERS / 20))[0][2]
    assert how["positive"] == "called: a trial of Positive raises ValueError"
    assert how["first"] == how["out"] == "repeated"


@pytest.mark.parametrize(
    ("ranks", "strategy", "shared"),
    [(1, "zero3", True), (2, "ddp", True), (2, "zero1", False), (2, "zero3", True), (2, "zero3", False)],
)
def test_the_blocks_of_a_unit_are_repeated_as_one(ranks, strategy, shared):
    def task(comm):
        called = []
        with (
            mz.Mesh(comm, share_node_memory=shared) as mesh,
            mz.distribute(mlp(), mz.SGD(lr=0.1), strategy, mesh=mesh, config=mz.Config(micro_batch=2)) as model,
        ):
            part = slice(8 * mesh.comm.rank // ranks, 8 * (mesh.comm.rank + 1) // ranks)
            for step, (x, y) in enumerate(zip(*NUMBERS[..., part, :], strict=True)):
                if step == 7:
                    for block in model._engine.runner.blocks.values():
                        block.forward = block.backward = lambda *arguments: called.append(arguments)
                model.train(x, y)
                model.evaluate(x, y)
            assert set(model.metadata().recordings.values()) == {"repeated"}
        return called

    assert run_in_threads(ranks, task) == [[]] * ranks


class UsersLoss(mz.nn.MeanSquaredError):
    """A user's loss: ``look(step, prediction, gradient)`` returns the gradient of each step."""

    def __init__(self, look):
        self.__dict__.update(look=look, step=0)

    def backward(self, cache, scale=1.0):
        return self.look(self.step, cache[0], super().backward(cache, scale))


def train_with(comm, look, **mesh):
    """Train linear layers with a user's loss, also after errors; return losses and notes, hash, and what was repeated.

    ``look`` takes the model, and what :class:`UsersLoss` passes on.
    """
    seen = []
    loss = UsersLoss(lambda *step: look(model, *step))
    net, config = Chain({name: mz.nn.Linear(3, 3) for name in "abc"}, loss), mz.Config(minimum_parameter_group_size=1)
    with (
        mz.Mesh(comm, **mesh) as there,
        mz.distribute(net, mz.SGD(lr=0.1), "zero3", mesh=there, config=config) as model,
    ):
        first = 2 * model._engine.grid.data.rank
        part = slice(first, first + 2)
        for x, y in zip(*NUMBERS[..., part, :], strict=True):
            try:
                seen.append(model.train(x, y))
            except (TypeError, ValueError, AttributeError) as error:
                seen.append(f"{type(error).__name__} {error.__notes__[-1]}")
            loss.__dict__["step"] += 1
        return seen, model.parameters_sha256(), model.metadata().recordings


def test_a_loss_that_gathers_parameters_changes_no_memory_of_a_repeated_pass(monkeypatch):
    """Then units lie in other slots in the backward pass than in other steps."""

    def gathers(model, step, prediction, gradient):
        if 5 <= step < 8:
            model.gather_full_parameters()
        return gradient

    task = partial(train_with, look=gathers, share_node_memory=False)
    assert set(both(monkeypatch, task, ranks=2)[0][2].values()) == {"repeated"}


@pytest.mark.parametrize("step", [1, 2, 3, 6])  # called, recorded, repeated, repeated with its unit
@pytest.mark.parametrize(
    "wrong",
    [lambda d: d.astype("f8"), lambda d: d[:, :1], lambda d: d[:, :2], lambda d: None],
    ids=["f8", "1", "2", "None"],
)
def test_a_wrong_gradient_of_a_loss_is_told_with_the_block_and_the_training_goes_on(monkeypatch, wrong, step):
    monkeypatch.setattr(matmul.library(), "by_numpy", {})  # which keeps that NumPy has multiplied what is wrong

    def look(model, now, prediction, gradient):
        return wrong(gradient) if now == step else gradient

    ((losses, *_),) = both(monkeypatch, partial(train_with, look=look))
    assert [loss for loss in losses if type(loss) is str] == [losses[step]]
    assert "In block 'c'" in losses[step]


@pytest.mark.parametrize("stages", [1, 2])
def test_what_a_loss_of_one_call_keeps_is_not_overwritten(monkeypatch, stages):
    def task(comm):
        kept = []
        loss = UsersLoss(lambda step, prediction, gradient: kept.append(prediction) or gradient)
        with (
            mz.Mesh(comm, pipeline=stages) as mesh,
            mz.distribute(mlp(), mz.SGD(lr=0.1), mesh=mesh, config=mz.Config(micro_batch=2)) as model,
        ):
            for x, y in zip(*NUMBERS, strict=True):
                model.apply_gradients(model.compute_gradients(x, y, loss=loss), 0.1)
            return [array.tobytes() for array in kept], model.parameters_sha256(), model.metadata().recordings

    both(monkeypatch, task, stages)


def test_a_block_that_is_replaced_sees_every_pass_though_its_unit_was_repeated(monkeypatch):
    @dataclass
    class Observed:
        block: object
        passes: int = 0

        def forward(self, *arguments):
            self.passes += 1
            return self.block.forward(*arguments)

        def backward(self, *arguments):
            return self.block.backward(*arguments)

    def task(comm):
        observed = []

        def between(model, step):
            blocks = model._engine.runner.blocks
            if step in (0, 6):
                observed.append(blocks["hidden.1"])
                blocks["hidden.1"] = Observed(observed[-1])
            if step == 8:
                assert blocks["hidden.1"].passes == 2 * 4

        return train(comm, mlp(), NUMBERS, between=between)

    both(monkeypatch, task)


def test_an_error_of_repeated_kernels_names_the_block():
    with mz.distribute(gpt(), None) as model:
        for _ in range(8):
            model.predict(IDS[0, 0])
        model.set_parameters(np.full_like(model.gather_full_parameters(), 3e38))
        with np.errstate(all="raise"), pytest.raises(FloatingPointError) as told:
            model.predict(IDS[0, 0])
        assert "In block 'embedding'" in told.value.__notes__[-1]


def test_blocks_are_called_again_when_one_of_their_recordings_is_refused(monkeypatch):
    monkeypatch.setattr(recorded, "KNOWN", recorded.KNOWN | {Positive})
    layers = {"positive": Positive(), "out": mz.nn.Linear(3, 3)}
    # What a trial makes up of the long batches is positive, but not of the short ones.
    data = [
        [array[: 4 if step == 6 else 8] + (0 if step in (5, 6) else 8) for step, array in enumerate(part)]
        for part in abs(NUMBERS)
    ]
    data = [[array for array in part for _ in range(4)] for part in data]
    how = both(monkeypatch, lambda c: train(c, Chain(layers), data, micro_batch=8))[0][2]
    assert how["positive"] == "called: a trial of Positive raises ValueError"


def test_frozen_layers_are_repeated(monkeypatch):
    def frozen(*names):
        net = mz.nn.freeze(mlp(), names)
        return both(monkeypatch, lambda c: train(c, net, NUMBERS, strategy="zero3"), ranks=2)[1][2]

    assert set(frozen("hidden.0.*").values()) == set(frozen("*.bias", "hidden.1.*").values()) == {"repeated"}


def test_a_users_layer_is_called_between_repeated_ones(monkeypatch):
    how = both(monkeypatch, lambda c: train(c, half_recorded("forward"), NUMBERS))[0][2]
    assert how == {"in": "repeated", "half": "called: HalfRecorded", "out": "repeated", "update": "repeated"}


@dataclass(frozen=True)
class Keeping(mz.nn.Layer):
    """Keep all inputs and gradients, as a user may who looks at them later."""

    kept: list

    def forward(self, params, x, run=mz.types.EVALUATE):
        self.kept.append(x)
        return x * 1, None

    def backward_input(self, params, cache, dy):
        self.kept.append(dy)
        return dy * 1, None


def test_what_a_users_layer_keeps_is_not_overwritten(monkeypatch):
    kept = []

    def task(comm):
        kept.append([])
        layers = {"in": mz.nn.Linear(3, 4), "keeping": Keeping(kept[-1]), "out": mz.nn.Linear(4, 3)}
        return train(comm, Chain(layers), NUMBERS)

    assert both(monkeypatch, task)[0][2]["in"] == "repeated"
    assert [array.tobytes() for array in kept[0]] == [array.tobytes() for array in kept[1]]


@pytest.mark.parametrize(
    ("copies", "rate", "clip"),
    covering(
        [{"ema": 0.9}, {"wire": "bfloat16", "wire_parameters": True}],
        [falling, lambda step: 0.01 * (step > 5)],
        [None, 1.0],
    ),
)
def test_copies_of_parameters_follow_repeated_updates_and_begin_anew_after_a_reset(monkeypatch, copies, rate, clip):
    def task(comm):
        states = []

        def between(model, step):
            if step == 6:
                model.optimizer.reset()
            state = model.optimizer.state_dict()["state"]
            states.append([array.tobytes() for arrays in state.values() for array in arrays.values()])

        trained = partial(train, comm, mlp(), NUMBERS, strategy="ddp", mesh={"share_node_memory": False})
        losses, *rest = trained(between=between, rate=rate, clip=clip, **copies)
        return (losses, states), *rest

    assert {rank[2]["update"] for rank in both(monkeypatch, task, ranks=2)} == {"repeated"}


def test_an_optimizer_that_computes_by_numpy_is_refused(monkeypatch):
    class Halved(mz.SGD):
        def apply(self, w, g, state, hyper, threads=1):
            super().apply(w, g * 0.5, state, hyper, threads)

        def apply_tree(self, rows, w, state, hyper, threads=1):
            super().apply_tree(rows, w, state, hyper, threads)
            w *= 0.5

        _kernel = "sgd"

    Halved.__module__ = "mpizero.optim.elementwise"

    def task(comm):
        with mz.Mesh(comm) as mesh, mz.distribute(mlp(), Halved(lr=0.1), mesh=mesh) as model:
            losses = [model.train(x, y) for x, y in zip(*NUMBERS, strict=True)]
            return losses, model.parameters_sha256(), model.metadata().recordings

    assert both(monkeypatch, task)[0][2]["update"] == "called: Halved differs when its kernels are repeated"


def test_an_optimizer_of_the_user_is_called_once_a_step():
    class Counting:
        calls = 0

        def update(self, params, grads, state):
            self.calls += 1
            params -= 0.1 * grads

    counting = Counting()
    with mz.distribute(mlp(), counting) as model:
        before = counting.calls
        for x, y in zip(*NUMBERS, strict=True):
            model.train(x, y)
        assert model.metadata().recordings["update"] == "called"
        assert (counting.calls - before) % STEPS == 0


def test_memory_and_number_of_recordings_have_a_limit(monkeypatch):
    monkeypatch.setattr(recorded, "_MOST_PASSES", 4)
    with mz.distribute(mlp(), None) as model:
        for length in [*range(1, 9), *range(1, 9)] * 2:
            model.predict(NUMBERS[0, 0, :length])
        block = model._engine.runner.blocks["output"]
        assert block._passes == 4
    monkeypatch.setattr(recorded, "LIMIT", 100)
    with mz.distribute(mlp(), mz.SGD(lr=0.1)) as model:
        for x, y in zip(*NUMBERS, strict=True):
            model.train(x, y)
        assert model.metadata().recordings["hidden.0"] == "called"


@pytest.mark.parametrize("value", ["off", "false", "", "2"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch, value):
    monkeypatch.setenv("MPIZERO_REPLAY", value)
    with pytest.raises(mz.errors.ConfigError, match=f"MPIZERO_REPLAY={value}: expected 1"):
        mz.distribute(mlp(), mz.SGD(lr=0.1))


def test_a_call_inside_a_recorded_call_is_not_recorded_twice():
    x, total = np.ones(3), np.zeros(3)

    def twice(out):
        recording.call(np.add, out, x, out)
        recording.call(np.add, out, x, out)

    with recording.Recording() as calls:
        recording.call(twice, total)
    assert len(calls.calls) == 1
    assert not recording.ACTIVE
    calls.repeat()
    assert total.tolist() == [4, 4, 4]


def test_temporary_memory_is_shared_by_the_calls_of_a_recording():
    assert recording.temporary(4, np.dtype("f4")) is not recording.temporary(4, np.dtype("f4"))
    with recording.Recording() as calls:
        one, other = recording.temporary(8, np.dtype("f4")), recording.temporary(4, np.dtype("f4"))
    assert np.shares_memory(one, other)
    assert one.size == 8
    assert set(calls.workspaces) == {"f"}
