"""Any loss, weighted, masked, a user's, has the bits of one process on any layout, and its sum on split models."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import mpizero as mz
from mpizero.testing import run_in_threads
from tests.parallel.models import part
from tests.parallel.parallel_layouts import ONE, Case, Chain, Way, placed

nn = mz.nn
#: Each loss, and how many numbers are predicted for 4 targets.
LOSSES = {
    "cross-entropy": (nn.CrossEntropy(), 4),
    "squared": (nn.MeanSquaredError(), 4),
    "absolute": (nn.L1Loss(), 4),
    "huber": (nn.HuberLoss(0.5), 4),
    "binary": (nn.BCEWithLogitsLoss(2.0), 4),
    "relative": (nn.RelativeL2Loss(), 4),
    "gaussian": (nn.GaussianNLLLoss(), 8),
}
RNG = np.random.default_rng(0)
X, WEIGHT, ELEMENTS, MASK = (
    RNG.normal(size=(11, 5)).astype("f4"),
    RNG.uniform(0, 2, 11),
    RNG.uniform(0, 2, (11, 4)),
    RNG.random((11, 4)) > 0.3,
)
MASK[3] = False
IDS = RNG.integers(0, 30, (11, 4))


def batch(name):
    """Inputs, and targets with weights; what is left out is NaN."""
    if name == "cross-entropy":
        return X, {"target": RNG.integers(0, 4, 11), "weight": WEIGHT, "mask": MASK[:, 0]}
    target = np.where(MASK, np.sign(X[:, :1] + X[:, 1:]) / 2 + 0.5 if name == "binary" else X[:, 1:] + 1, np.nan)
    return X, {"target": target, "weight": WEIGHT if name == "relative" else ELEMENTS, "mask": MASK}


BATCHES = {name: batch(name) for name in LOSSES}


def network(name):
    loss, outputs = LOSSES[name]
    return nn.MLP(5, (6,), outputs, dtype="f4", loss=loss)


def trained(comm, way):
    """Train each loss three steps; return a hash of all parameters, and what evaluations find."""
    found = {}
    for name, (x, y) in BATCHES.items():
        with placed(Case(partial(network, name)), comm, way) as model:
            here, _ = part(model.batch_group, np.arange(11), np.arange(11))
            own = x[here], {key: array[here] for key, array in y.items()}
            losses = [model.train(*own) for _ in range(3)]
            again = model.evaluate(*own)
            other = model.evaluate(*own, loss=nn.MeanSquaredError()).loss if name == "huber" else 0.0
            found[name] = model.parameters_sha256(), losses, tuple(again), again.accuracy, other
    return found


@pytest.mark.slow
def test_one_hash_for_each_loss_on_any_number_of_ranks():
    alone = trained("self", Way(zero=0))
    for ranks, way in ((2, Way(zero=2)), (3, Way(zero=3)), (4, Way(2, zero=2))):
        assert run_in_threads(ranks, partial(trained, way=way))[0] == alone, ranks
    for name, (_, losses, (loss_sum, weight, correct), accuracy, other) in alone.items():
        assert losses[2] < losses[0], name
        counted = BATCHES[name][1]["weight"] * (MASK if BATCHES[name][1]["weight"].ndim > 1 else MASK.any(axis=1))
        if name == "cross-entropy":
            counted = WEIGHT * MASK[:, 0]
        assert weight == pytest.approx(counted.sum() / (4 if counted.ndim > 1 else 1), rel=1e-6), name
        assert np.isfinite(loss_sum)
        assert (correct is None) == (name not in ("cross-entropy", "binary"))
        assert accuracy is None or accuracy > 0
        assert (other > 0) == (name == "huber")


@pytest.mark.slow
def test_losses_see_whole_predictions_where_the_last_layer_is_split():
    gpt = nn.GPT(dim=8, layers=1, heads=2, sequence=4, vocabulary=30)
    cases = [(network(name), *BATCHES[name]) for name in LOSSES]
    cases.append((gpt, IDS, {"target": IDS, "weight": ELEMENTS, "mask": MASK}))

    def evaluated(comm, tensor):
        found = []
        for model, x, y in cases:
            case = Case(lambda m=model: m, lambda: mz.SGD(lr=0.1))
            with placed(case, comm, Way(tensor=tensor), micro_batch=4) as sharded:
                found += [sharded.train(x, y), sharded.train(x, y), sharded.evaluate(x, y).correct or 0]
        return found

    alone, split = evaluated("self", 1), run_in_threads(2, lambda comm: evaluated(comm, 2))
    assert split[0] == split[1] == pytest.approx(alone, rel=1e-5)


def test_element_losses_add_up_over_parts_of_sequences():
    rng = np.random.default_rng(1)
    x, target = rng.normal(size=(2, 7, 4)), rng.uniform(size=(2, 7, 4))
    y = {"target": target, "weight": rng.uniform(size=(2, 7)), "mask": rng.random((2, 7)) > 0.3}

    def found(comm, context):
        result = []
        for loss in (nn.L1Loss(), nn.BCEWithLogitsLoss()):
            own = Chain({"b": nn.TransformerBlock(4, 2), "out": nn.Linear(4, 4)}, loss, np.dtype("f8"))
            with placed(Case(lambda model=own: model), comm, Way(context=context)) as sharded:
                for other in (None, nn.MeanSquaredError()):
                    gradients = sharded.compute_gradients(x, y, loss=other, gather=True)
                    result += [gradients.loss, *gradients.values]
        return result

    alone = found("self", 1)
    for result in run_in_threads(3, lambda comm: found(comm, 3)):
        np.testing.assert_allclose(result, alone, rtol=1e-10, atol=1e-12)


class Twice:
    """Cross-entropy, twice, which refuses a part of the classes."""

    once = nn.CrossEntropy()

    def forward(self, prediction, target):
        assert prediction.shape[-1] == 30
        loss, weight, cache = self.once.forward(prediction, target)
        return 2 * loss, weight, cache

    def backward(self, cache, scale=1.0):
        return self.once.backward(cache, 2 * scale)


@pytest.mark.slow
def test_a_loss_of_the_users_own_takes_whole_predictions_however_the_last_block_is_split():
    case = Case(lambda: nn.GPT(dim=8, layers=2, heads=4, sequence=4, vocabulary=30, dtype="float64"))

    def loss_of(comm, way=ONE):
        with placed(case, comm, way, micro_batch=1) as sharded:
            ids = IDS[: 2 * (sharded.batch_group.rank == 0)]
            return sharded.compute_gradients(ids, ids, loss=Twice()).loss

    expected = loss_of("self")
    for size, way in ((2, Way(tensor=2)), (4, Way(2, 2)), (4, Way(tensor=4))):
        assert run_in_threads(size, partial(loss_of, way=way)) == pytest.approx([expected] * size, rel=1e-12), way
