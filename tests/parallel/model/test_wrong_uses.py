"""What a user gives in the wrong place, of the wrong type, or too late is refused where it is given, in one line.

So is what a program for PyTorch does with a model or an optimizer: nothing is without effect.
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

import mpizero as mz
from mpizero._util.names import INSTEAD
from mpizero.errors import ConfigError, MpizeroError
from mpizero.testing import run_in_threads
from mpizero.types import Init

X, Y = np.ones((8, 4), np.float32), np.ones((8, 2), np.float32)
MASKED = np.ma.masked_array(np.arange(1, 3, dtype=np.float32), mask=[0, 1])
LOST = "is a masked array, whose mask would be lost: give a.filled"


def parameters():
    return {"weight": np.full((4, 2), 0.1, np.float32), "bias": np.zeros(2, np.float32)}


def squares(parameters, batch):
    x, y = batch
    error = x @ parameters["weight"] + parameters["bias"] - y
    return float((error**2).sum()), {"weight": 2 * x.T @ error, "bias": 2 * error.sum(0)}, float(len(x))


def black_box(**arguments):
    return mz.FunctionModel(**({"parameters": parameters(), "loss_and_grad": squares} | arguments))


def network(**changes):
    parts = {"blocks": {"a": mz.nn.Linear(4, 2)}, "loss": mz.nn.MeanSquaredError(), "dtype": "f4", "seed": 0}
    return SimpleNamespace(**(parts | changes))


def placed(model):
    return mz.ZeRO2Model(model, mz.ShardingConfig())


def bound(**arguments):
    optimizer = mz.ZeRO2Optimizer(mz.SGD(), **arguments)
    return mz.ZeRO2Model(black_box(), mz.ShardingConfig(), optimizer=optimizer).optimizer


class Uncounted(mz.nn.Sequential):
    """A layer of others that does not say what it computes, and cannot be tried on zeros."""

    operations = mz.nn.Layer.operations

    def forward(self, params, x, run=None):
        raise ArithmeticError("a singular matrix")


def pipeline(**how):
    blocks = {"a": mz.nn.Linear(4, 4), "b": Uncounted([mz.nn.Linear(4, 2)])}
    model = network(blocks=blocks, sample_shape=(4,), dtype=np.dtype("f4"))
    return run_in_threads(2, lambda comm: mz.PipelineParallelModel(model, mz.ShardingConfig(comm=comm), **how))


def minimized(**terms):
    return mz.minimize(placed(black_box()), (X, Y), **terms)


def step_after_train():
    optimizer = bound()
    optimizer.model.train(X, Y)
    optimizer.step()


def closed_configuration(use):
    config = mz.ShardingConfig()
    model = mz.ZeRO2Model(black_box(), config)
    model.train(X, Y)
    config.close()
    use(model)


MISTAKES = {
    # parameters
    "nested parameters": (lambda: black_box(parameters={"a": {"w": X}}), "'a' is a mapping of 'w'.*flatten the names"),
    "a list of parameters": (lambda: black_box(parameters=[X]), "arrays by name, .* got list"),
    "a ragged parameter": (lambda: black_box(parameters={"a": [[1.0], [1.0, 2.0]]}), "'a' is a list that makes no arr"),
    "no parameter": (lambda: black_box(parameters={"a": None}), "'a' is of type object"),
    "mixed types": (lambda: black_box(parameters={"a": X, "b": X.astype("f8")}), "'b' is float64, 'a' is float32"),
    "a number as a name": (lambda: black_box(parameters={0: X}), "parameter 0: its name is of type int"),
    "no parameters": (lambda: black_box(parameters={}), "at least one"),
    "integers as parameters": (lambda: black_box(parameters={"a": Y.astype(int)}), "or all float64 or .*'a' is int64"),
    "complex among real ones": (
        lambda: black_box(parameters={"a": np.ones(2, "c8"), "b": np.ones(2)}),
        "must be float32 or complex64, or all float64 or complex128; .* 'a' is complex64",
    ),
    "a masked parameter": (lambda: black_box(parameters={"w": MASKED}), f"parameter 'w' {LOST}"),
    "a masked integer": (lambda: black_box(integers={"n": np.ma.masked_array(1)}), f"integer array 'n' {LOST}"),
    "a masked bias": (lambda: mz.nn.bind(network(dtype=np.dtype("f4")), {**FLAT, "a.bias": MASKED}), f"bias' {LOST}"),
    "one frozen name": (lambda: black_box(frozen="bias"), r"got one string: give \['bias'\]"),
    "a frozen typo": (lambda: black_box(frozen=["biass"]), r"did you mean 'bias'\?"),
    "no function": (lambda: black_box(loss_and_grad=3), "must be a function"),
    "two arguments for a batch": (lambda: black_box(loss_and_grad=lambda p, x, y: None), r"batch\), .*'y'"),
    "an argument of one's own": (lambda: black_box(loss_and_grad=lambda p, b, *, context: None), r"with run=.*context"),
    "gradients returned in place": (lambda: black_box(in_place=True), r"loss_and_grad\(parameters, batch, gradients\)"),
    "in place, but not said": (lambda: black_box(loss_and_grad=lambda p, b, g: None), r"batch\).*in_place=True"),
    "a number as in place": (lambda: black_box(in_place=1), "in_place=1: expected True or False"),
    "a loss of no batch": (lambda: black_box(loss=lambda p: None), r"loss is called as loss\(parameters, batch\)"),
    "a number as a loss": (lambda: black_box(loss=3), "loss must be a function, got 3"),
    "a negative seed": (lambda: black_box(seed=-1), "seed=-1: expected a whole number"),
    "a mapping as a vector": (lambda: placed(black_box()).set_parameters(parameters()), "got a dict.*use load_named"),
    "a vector by name": (lambda: placed(black_box()).load_named(X), "got ndarray: .* use set_parameters"),
    "an unknown name": (lambda: placed(black_box()).load_named({"wieght": X, "bias": Y}), r"did you mean 'weight'\?"),
    "complex values": (lambda: placed(black_box()).set_parameters(np.zeros(10, complex)), "real and imaginary parts"),
    # models
    "nothing as a model on one rank": (
        lambda: run_in_threads(3, lambda c: mz.DDPModel(None if c.rank == 1 else network(), mz.ShardingConfig(comm=c))),
        "needs a model, got None|got None",
    ),
    "a layer as a model": (lambda: placed(mz.nn.Linear(3, 2)), "Linear is not a model: it needs 'blocks'"),
    "a class as a model": (lambda: placed(mz.nn.GPT), "GPT is a class, not a model: call it"),
    "a list of blocks": (lambda: placed(network(blocks=[mz.nn.Linear(4, 2)])), "blocks must be layers by name"),
    "no blocks": (lambda: placed(network(blocks={})), "at least one"),
    "a class as a block": (lambda: placed(network(blocks={"a": mz.nn.Linear})), "block 'a' .* the class Linear"),
    "no layer": (lambda: placed(network(blocks={"a": 3})), "block 'a' .* is 3, not a layer: it has no method specs"),
    "a class as a loss": (lambda: placed(network(loss=mz.nn.CrossEntropy)), "the class CrossEntropy.*call it"),
    "a name as a loss": (lambda: placed(network(loss="mse")), "'mse', not a loss: it has no method forward"),
    "a name to evaluate with": (lambda: placed(network()).evaluate(X, Y, loss="l1"), "'l1', not a loss"),
    "a class to evaluate with": (lambda: placed(network()).evaluate(X, Y, loss=mz.nn.L1Loss), "class L1Loss.*call it"),
    "an unknown dtype": (lambda: placed(network(dtype="flot")), "type 'flot' are not supported .* use float32"),
    "no seed": (lambda: placed(network(seed=None)), "seed=None: expected a whole number"),
    "arguments in another order": (lambda: mz.ZeRO2Model(mz.ShardingConfig(), black_box()), "needs a ShardingConfig"),
    # a life that is over
    "train after close": (lambda: closed_configuration(lambda m: m.train(X, Y)), "close the model first"),
    "save after close": (lambda: closed_configuration(lambda m: m.save_model("run")), "close the model first"),
    # optimizers
    "a class as an optimizer": (lambda: mz.ZeRO2Optimizer(mz.AdamW, mz.ShardingConfig()), "the class AdamW: call it"),
    "a bare model": (lambda: mz.ZeRO2Optimizer(mz.SGD(), mz.ShardingConfig()).set_model(black_box()), "sharded model"),
    "a number as a loss scale": (lambda: bound(loss_scale=1024.0), "a DynamicLossScale or None, got 1024.0"),
    "a mapping of options": (lambda: bound(options={"epochs": 3}), "options are OptimizationOptions"),
    "a number of options": (lambda: bound().optimize((X, Y), 3), "options are OptimizationOptions, got 3"),
    "a word as a configuration": (lambda: mz.ZeRO2Optimizer(mz.SGD(), "x"), "needs a ShardingConfig, got 'x'"),
    "a step after train": (step_after_train, "step: no gradient waits for it: train has updated the parameters"),
    "one group": (lambda: mz.SGD(groups=mz.ParameterGroup("a")), "a sequence of ParameterGroup objects"),
    "a schedule without a step": (lambda: mz.SGD(lr=lambda: 0.1), r"called as lr\(step\)"),
    "an unknown strategy": (lambda: mz.distribute(black_box(), mz.SGD(), strategy="zero4"), r"did you mean 'zero"),
    "masked factors": (lambda: mz.LBFGS(preconditioner={"w": MASKED}), rf"LBFGS: preconditioner\['w'\] {LOST}"),
    "a masked reference": (lambda: mz.Tikhonov(1.0, reference=MASKED), f"Tikhonov: reference {LOST}"),
    "a masked bound": (lambda: minimized(bounds={"bias": (MASKED, None)}), f"bounds.*: a bound {LOST}"),
    "a masked slope": (
        lambda: minimized(regularization={"bias": lambda values: (0.0, MASKED)}),
        f"the regularization of 'bias' returned a gradient that {LOST}",
    ),
    # settings
    **{
        f"{setting}={value!r}": (
            lambda s=setting, v=value: mz.ShardingConfig(**{s: v}),
            f"{setting}=.*expected {expected}",
        )
        for setting, expected, values in (
            ("ema", "a finite number > 0 and < 1", (1.5, 0, "0.9", True)),
            ("check_every", "a whole number >= 0", (-1,)),
            ("bucket_mb", "", (0, True, "4", float("nan"), 1e9)),
            ("gradient_compression", "", ("int4", "topk", "topk:x", "topk:0.5", "topk:nan", "int8:3", 8, [])),
            ("grain_assignment", 'one of "static", "dynamic"', ("guided",)),
            ("tiles", "a whole number from 1 to", (0, True, "8", 2.0, {"pipeline": 2}, {"tensor": 0})),
            ("bad_steps", "mpizero.BadSteps", (5,)),
        )
        for value in values
    },
    **{
        f"BadSteps({name}={value!r})": (lambda n=name, v=value: mz.BadSteps(**{n: v}), f"{name}={value!r}: expected")
        for name, value in (("limit", 0), ("limit", 2.0), ("warn", "no"), ("callback", 3))
    },
    "no compression": (lambda: mz.GradientCompressionOptimizer(mz.SGD(), compression=None), "compression=None"),
    "no samples to reserve": (lambda: placed(black_box()).reserve(0), "reserve"),
    "a word for a flag": (lambda: mz.ShardingConfig(auto_sync_gradients="no"), "gradients='no': expected True"),
    "one width": (lambda: mz.nn.MLP(4, 8, 2), "hidden=8 must be the widths"),
    "features of text": (lambda: mz.nn.MLP(4, [8], 2, active_features="01"), "active_features='01' must be"),
    "one layer": (lambda: mz.nn.Sequential(mz.nn.Linear(1, 1)), r"give \[layer, ...\]"),
    "nothing to keep": (lambda: mz.nn.Checkpointed(3), "Checkpointed takes a layer, got 3"),
    "nothing to freeze": (lambda: mz.nn.Frozen(mz.nn.Linear), "Frozen takes a layer"),
    "a feature beyond": (lambda: mz.nn.Select(3, (5,)), "must lie in 0 to 2"),
    "start values by name": (lambda: mz.nn.Linear(3, 2, init="zeros"), "init='zeros' must be None or"),
    # pipelines
    "a layer that does not count": (lambda: pipeline(), "'b', .*Uncounted does not count .* give costs=.* or cuts="),
    "one cut": (lambda: pipeline(cuts=1), "cuts=1: expected a list: the number of the first block"),
    "costs by name": (lambda: pipeline(costs={"a": 1, "b": 2}), "costs={.*: expected a list: a number for every block"),
    "too few costs": (lambda: pipeline(costs=[1]), "costs has 1 numbers, the model has 2 blocks: a, b; give one each"),
    "costs of text": (lambda: pipeline(costs=["1", "2"]), r"costs=\['1', '2'\]: each value must be a finite number"),
    # functions
    "no batch": (lambda: mz.nn.loss_and_gradients(network(dtype=np.dtype("f4")), FLAT, (X,)), r"a pair \(x, target\)"),
    "flat parameters": (lambda: mz.nn.evaluate(network(), FLAT, X), r"block 'a': evaluate takes what bind"),
    "a batch without config": (
        lambda: mz.data.batches(mz.data.ArraySource(X, Y), None, 2),
        "a sharded model or a mpizero.Mesh",
    ),
    "threads in another order": (lambda: mz.testing.run_in_threads(len, 2), "a function|must be one|whole number"),
    "no ranks": (lambda: mz.InMemoryCommunicator.group(0), "size=0: expected a whole number of ranks >= 1"),
    "no folder": (lambda: placed(black_box()).save_model(3), "a path, a string or pathlib.Path; got 3"),
    "a masked input": (
        lambda: mz.nn.evaluate(network(), mz.nn.bind(network(dtype=np.dtype("f4")), FLAT), np.ma.masked_array(X)),
        "x is a masked array",
    ),
    "a dataset of other libraries": (
        lambda: next(iter(mz.data.batches([(X[0], 0), (X[1], 1)], mz.ShardingConfig(), global_batch=2))),
        r"ArraySource\(x, y\)",
    ),
    "nothing to open": (lambda: mz.checkpoint.open_checkpoint(3), "a path, a string or pathlib.Path; got 3"),
}
FLAT = {"a.weight": X.T[:, :2], "a.bias": Y[0]}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_use_is_one_error_that_says_what_is_right(mistake):
    wrong, said = MISTAKES[mistake]
    with pytest.raises(MpizeroError, match=said) as caught:
        wrong()
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    config = mz.ShardingConfig(micro_batch=np.int64(4), learning_rate=np.float32(0.5), share_node_memory=np.bool(True))
    assert (config.micro_batch, config.learning_rate, config.share_node_memory) == (4, 0.5, True)
    assert {type(value) for value in (config.micro_batch, config.learning_rate)} == {int, float}
    mz.nn.Linear(3, 2, init=Init("zeros"))


def test_a_model_may_be_closed_after_its_configuration():
    config = mz.ShardingConfig()
    model = mz.ZeRO2Model(black_box(), config)
    config.close()
    model.close()


def test_lists_of_numbers_are_arrays():
    model = placed(mz.FunctionModel({"w": [1.0, 2.0]}, lambda p, b: (float(p["w"].sum()), {"w": p["w"]}, 1.0)))
    np.testing.assert_array_equal(model.get_parameters(), [1.0, 2.0])


class Module:
    """What PyTorch's modules have that counts here."""

    def __init__(self, trained=True):
        self.trained = trained

    def parameters(self):
        return [SimpleNamespace(requires_grad=self.trained)]


def made_with(module):
    """Return a function that uses a module, as users write them: by a closure."""

    def loss_and_grad(parameters, batch):
        assert module is not None
        return squares(parameters, batch)

    return loss_and_grad


SHARED, ALSO_SHARED = Module(), Module(trained=False)


def by_a_global(parameters, batch):
    assert SHARED is not None
    return squares(parameters, batch)


@pytest.mark.parametrize(
    ("function", "shared"),
    [
        (lambda: made_with(SHARED), True),
        (lambda: by_a_global, True),
        (lambda: partial(by_a_global), True),
        (lambda: made_with(Module()), False),
        (lambda: made_with(ALSO_SHARED), False),  # of which nothing is trained
        (lambda: squares, False),
    ],
    ids=["closure", "global", "partial", "own", "frozen", "none"],
)
def test_threads_that_train_one_module_of_pytorch_are_refused(monkeypatch, function, shared):
    """Nothing would say that ranks add to each other's gradients: the loss just falls more slowly."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(nn=SimpleNamespace(Module=Module)))

    def work(comm):
        with (
            mz.ShardingConfig(comm=comm) as config,
            mz.ZeRO1Model(black_box(loss_and_grad=function()), config) as model,
        ):
            return model.train(X, Y)

    if shared:
        with pytest.raises(ConfigError, match=r"ranks 0 and 1 are threads .* the same PyTorch module, a Module"):
            run_in_threads(2, work)
    else:
        run_in_threads(2, work)
    with mz.ShardingConfig() as config:  # alone, a module is nobody else's
        mz.ZeRO1Model(black_box(loss_and_grad=function()), config).close()


def trained(config, path=None):
    model = mz.ZeRO2Model(black_box(), config, optimizer=mz.Adam(lr=0.1))
    model.train(X, Y)
    if path is not None:
        model.save_model(path)
    return model


def test_an_optimizer_that_begins_without_the_state_that_was_loaded_past_it_is_told(tmp_path, capsys):
    with mz.ShardingConfig() as config:
        trained(config, tmp_path / "saved").close()
        with mz.ZeRO2Model(black_box(), config) as model:
            model.load_model(tmp_path / "saved")  # to predict: nothing to be said
            assert capsys.readouterr().err == ""
            mz.ZeRO2Optimizer(mz.Adam(lr=0.1), config).set_model(model)
            assert "begins anew: its state in" in capsys.readouterr().err
            model.load_model(tmp_path / "saved")
            mz.ZeRO2Optimizer(mz.Adam(lr=0.1), config).set_model(model)
            assert capsys.readouterr().err == ""


def test_ranks_that_name_other_checkpoints_are_told_whose_counts(tmp_path, capfd):
    def save(comm):
        with mz.ShardingConfig(comm=comm) as config, trained(config) as model:
            model.save_model(tmp_path / f"of{comm.rank}")

    run_in_threads(2, save)
    assert (tmp_path / "of0").exists()
    assert not (tmp_path / "of1").exists()
    assert "save_model: rank 0's path counts" in capfd.readouterr().err


def test_a_folder_of_checkpoints_is_not_taken_for_one(tmp_path):
    told = r"1 checkpoint\(s\) lie in .*mpizero.checkpoint.latest"
    with (
        mz.ShardingConfig() as config,
        trained(config, tmp_path / "step_00000001") as model,
        pytest.raises(MpizeroError, match=told),
    ):
        model.load_model(tmp_path)


def answers(gradient=Y[0], integer=0):
    """A function that returns always the same."""
    function = lambda p, batch: (1.0, {"w": gradient, "n": integer}, float(len(batch[0])))  # noqa: E731
    return mz.FunctionModel({"w": np.ones(2, np.float32)}, function, integers={"n": 0})


def stepped(model):
    model.train(X, Y)


MASKED_CALLS = {
    "set_parameters": (answers(), lambda model: model.set_parameters(MASKED), "vector of all parameters"),
    "with_parameters": (answers(), lambda model: model.with_parameters(MASKED), "vector of all parameters"),
    "load_named": (answers(), lambda model: model.load_named({"w": MASKED, "n": 0}), "parameter 'w'"),
    "an integer": (
        answers(), lambda model: model.load_named({"w": Y[0], "n": np.ma.masked_array(1)}), "integer array 'n'"
    ),
    "a gradient": (answers(MASKED), stepped, "returned a gradient of 'w' that"),
    "a new integer": (answers(integer=np.ma.masked_array(1)), stepped, "returned a value of 'n' that"),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED_CALLS)
def test_masked_parameters_and_gradients_are_refused_by_name_on_all_ranks(name):
    given, call, told = MASKED_CALLS[name]

    def run(comm):
        with mz.ShardingConfig(comm=comm, micro_batch=1) as config, mz.ZeRO2Model(given, config) as model:
            with pytest.raises(MpizeroError, match=f"({told}).* {LOST}"):
                call(model)
            assert model.get_parameters().tolist() == [1.0, 1.0]

    run_in_threads(3, run)


LABELS = np.arange(8) % 2


def classifier():
    return mz.distribute(mz.nn.MLP(4, [], 2), mz.SGD(0.1), mesh=mz.Mesh("self"))


@pytest.mark.parametrize("name", ["lr", "weight_decay", "momentum", "param_groups"])
def test_a_setting_of_the_optimizer_is_not_set_without_effect(name):
    with classifier() as model:
        with pytest.raises(AttributeError, match=rf"{name} cannot be set: .*SGD\(lr=lambda step"):
            setattr(model.optimizer, name, 0.2)
        model.train(X, LABELS)


def test_what_is_missing_says_what_takes_its_place():
    with classifier() as model:
        for owner, names in ((model, ("zero_grad", "eval", "state_dict")), (model.optimizer, ("param_groups",))):
            for name in names:
                with pytest.raises(AttributeError, match=name) as told:
                    getattr(owner, name)
                assert INSTEAD[name] in str(told.value)
        assert not hasattr(model, "misspelt")
        assert copy.copy(model.optimizer).wrapped_optimizer is model.optimizer.wrapped_optimizer


def test_a_step_after_several_gradients_says_that_it_takes_the_last(capfd):
    with classifier() as model:
        for _ in range(2):
            for part in (slice(2), slice(2, 4)):
                model.compute_gradients(X[part], LABELS[part])
            model.optimizer.step()
        assert capfd.readouterr().err.count("the last of 2 calls of compute_gradients") == 1
    with classifier() as model:
        model.compute_gradients(X, LABELS)
        model.optimizer.step()
        assert "compute_gradients" not in capfd.readouterr().err


def test_a_loss_that_is_none_on_one_rank_is_an_error_on_all():
    def run(comm):
        with mz.Mesh(comm) as mesh, mz.distribute(network(), mz.SGD(), mesh=mesh) as model:
            with pytest.raises((mz.errors.ArgumentError, mz.errors.RemoteError), match="'l1', not a loss"):
                model.evaluate(X, Y, loss="l1" if comm.rank else None)
            assert model.evaluate(X, Y).weight > 0

    run_in_threads(2, run)
