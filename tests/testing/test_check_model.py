"""check_model: wrong models are found with what is wrong and why, right ones pass whatever the seed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

import mpizero as mz
from mpizero.errors import DataError, ModelCheckError, RemoteError
from mpizero.testing import check_model, run_in_threads
from mpizero.types import EVALUATE
from tests.testing.suspects import RIGHT, WRONG, box, chain, dense

SLOW = {"GPT in float32 with dropout", "tied GPT with dropout"}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_model_raises_no_alarm(name):
    for seed in range(1 if name in SLOW else 2):
        report = check_model(*RIGHT[name](np.random.default_rng(seed)), seed=seed)
        assert report.right
        assert [line.partition(":")[0] for line in report.passed][:2] == ["values", "repeats"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_found_with_its_cause(name):
    make, what, cause = WRONG[name]
    with pytest.raises(ModelCheckError) as caught:
        check_model(*make(np.random.default_rng(0)))
    assert f"- {what}" in str(caught.value), caught.value
    assert cause in str(caught.value), caught.value


def test_all_that_is_wrong_is_named_at_once(rng):
    def spoil(answer):
        g = answer.gradients
        return answer._replace(gradients={"a": -g["a"], "b": g["b"], "c": 3 * g["c"]}, weight=1.0)

    with pytest.raises(ModelCheckError, match=r"wrong \(loss_and_grad at suspects.py:\d+\)") as caught:
        check_model(*box(rng, spoil))
    found = caught.value.report.findings
    assert {finding.what for finding in found} == {"weight", "gradient of 'a'", "gradient of 'c'"}
    assert all(finding.seen and finding.cause and finding.remedy for finding in found)


def test_an_error_of_the_models_own_passes_through(rng):
    def broken(answer):
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        check_model(*box(rng, broken))


def test_the_report_of_a_right_model_says_what_was_looked_at(rng):
    report = check_model(*box(rng, predict=lambda p, x: x @ p["a"]))
    shown = [line.partition(":")[0] for line in report.passed]
    assert shown == ["values", "repeats", "sums", "gradient", "prediction"]
    assert "3 of 3 parameters" in str(report)
    assert report.to_dict()["right"] is True
    assert report.evaluations < 150


def test_a_parameter_without_influence_is_noted(rng):
    def loss_and_grad(p, batch):
        error = batch[0] @ p["w"] - batch[1]
        return float((error**2).sum()), {"w": 2 * batch[0].T @ error, "idle": np.zeros(2)}, float(len(error))

    model = mz.FunctionModel({"w": np.ones(4), "idle": np.ones(2)}, loss_and_grad)
    report = check_model(model, rng.normal(size=(5, 4)), rng.normal(size=5))
    assert any("zero everywhere for 'idle'" in note for note in report.notes)


def test_batches_may_be_trees_of_arrays(rng):
    def loss_and_grad(p, batch):
        x, (y, scale) = batch
        error = scale * (x["left"] @ p["w"] + x["right"] - y)
        return float((error**2).sum()), {"w": 2 * x["left"].T @ (scale * error)}, float(len(y))

    x = {"left": rng.normal(size=(6, 3)), "right": rng.normal(size=6)}
    report = check_model(mz.FunctionModel({"w": np.zeros(3)}, loss_and_grad), x, (rng.normal(size=6), rng.random(6)))
    assert any(line.startswith("sums: 6 samples") for line in report.passed)


def test_what_cannot_be_cut_is_noted(rng):
    def loss_and_grad(p, batch):
        return float(p["w"] @ p["w"]), {"w": 2 * p["w"]}, 1.0

    report = check_model(mz.FunctionModel({"w": np.ones(3)}, loss_and_grad), object(), None)
    assert any("sums were not looked at" in note for note in report.notes)


def test_other_parameters_than_the_start_values_may_be_given(rng):
    def loss_and_grad(p, batch):
        roots, count = np.sqrt(p["w"]), float(len(batch[0]))
        return float(count * roots.sum()), {"w": count * 0.5 / roots}, count

    model, (x, y) = mz.FunctionModel({"w": np.zeros(3)}, loss_and_grad), dense(rng)
    with pytest.raises(ModelCheckError, match=r"not finite.*check_model\(parameters=\.\.\.\)"):
        check_model(model, x, y)
    assert check_model(model, x, y, parameters={"w": np.ones(3)}).right


def test_a_sharded_model_is_refused_with_the_way_out(rng):
    model, x, y = box(rng)
    with mz.DDPModel(model, mz.ShardingConfig()) as placed, pytest.raises(TypeError, match="DDPModel.wrapped_model"):
        check_model(placed, x, y)


def test_ranks_that_compute_other_bits_are_named(rng):
    x, y = dense(rng)

    def rank(comm):
        shift = 1e-12 * (comm.rank == 2)

        def of_rank(answer):
            return answer._replace(gradients={**answer.gradients, "b": answer.gradients["b"] * (1 + shift)})

        with pytest.raises(ModelCheckError, match="- gradient of 'b': rank 2 computes other bits than rank 0"):
            check_model(box(np.random.default_rng(0), of_rank)[0], x, y, comm=comm)
        return True

    assert all(run_in_threads(3, rank))


def test_the_first_block_that_computes_other_bits_is_named(rng):
    x, y = dense(rng)

    def rank(comm):
        class Shifted(mz.nn.Linear):
            def forward(self, params, x, run=EVALUATE):
                return super().forward(params, x + 1e-6 * (comm.rank == 1), run)

        blocks = {"in": mz.nn.Linear(4, 3), "shifted": Shifted(3, 3), "out": mz.nn.Linear(3, 2)}
        model = SimpleNamespace(blocks=blocks, loss=mz.nn.MeanSquaredError(), dtype=np.dtype("float64"), seed=0)
        with pytest.raises(
            ModelCheckError, match="- output of block 'shifted': rank 1 computes other bits than rank 0"
        ):
            check_model(model, x, y, comm=comm)
        return True

    assert all(run_in_threads(2, rank))


@pytest.mark.slow
def test_the_block_to_begin_with_comes_first_where_the_gradients_of_several_are_wrong(rng):
    """An error is seen in all blocks before its own, and not in its own gradients if it is in backward_input."""

    class Halved(mz.nn.Linear):
        def backward_input(self, params, cache, dy):
            dx, pending = super().backward_input(params, cache, dy)
            return dx * np.linspace(0.3, 0.6, dx.shape[-1]), pending

    blocks = {"in": mz.nn.Linear(4, 3), "inner": mz.nn.Linear(3, 3), "halved": Halved(3, 3), "out": mz.nn.Linear(3, 2)}
    model = SimpleNamespace(blocks=blocks, loss=mz.nn.MeanSquaredError(), dtype=np.dtype("float64"), seed=0)
    with pytest.raises(ModelCheckError) as caught:
        check_model(model, *dense(rng))
    first, *others = (finding for finding in caught.value.report.findings if finding.check == "gradient")
    assert "begin with the backward pass of 'inner'" in first.remedy
    assert "backward_input of 'halved', whose own gradients are right" in first.remedy
    assert first.what.startswith("gradient of 'inner.")
    assert [finding.what[:13] for finding in others] == ["gradient of '"] * 3


def test_all_ranks_hear_of_what_one_has_found(rng):
    x, y = dense(rng)

    def rank(comm):
        def of_rank(answer):
            return answer if comm.rank else answer._replace(weight=1.0)

        with pytest.raises(ModelCheckError, match="weight: 1 for 7 samples"):
            check_model(box(np.random.default_rng(0), of_rank)[0], x, y, comm=comm)

        def fails(answer):
            if comm.rank == 1:
                raise KeyError("own")
            return answer

        with pytest.raises(KeyError if comm.rank == 1 else RemoteError):
            check_model(box(np.random.default_rng(0), fails)[0], x, y, comm=comm)
        with pytest.raises(DataError, match="rank 1 was given other samples or parameters than rank 0"):
            check_model(box(np.random.default_rng(0))[0], x + comm.rank, y, comm=comm)
        return check_model(box(np.random.default_rng(0))[0], x, y, comm=comm).passed[-1]

    assert run_in_threads(2, rank) == ["ranks: the same bits on all 2"] * 2


@pytest.mark.mpi
def test_ranks_of_mpi_are_compared(world):
    model, x, y = box(np.random.default_rng(0))
    report = check_model(model, x, y, comm=world)
    assert world.size == 1 or report.passed[-1] == f"ranks: the same bits on all {world.size}"

    def of_process(answer):
        return answer._replace(loss=answer.loss + 1e-9 * os.getpid())

    if world.size > 1:
        with pytest.raises(ModelCheckError, match="- loss: rank 1 computes other bits than rank 0"):
            check_model(box(np.random.default_rng(0), of_process)[0], x, y, comm=world)


def test_a_layer_of_a_float32_model_is_tested_in_float64(rng):
    """There the difference that a small mistake makes is not hidden by rounding."""
    report = check_model(*chain("")(rng))
    assert report.right
    assert not [note for note in report.notes if "rounding hides" in note]
