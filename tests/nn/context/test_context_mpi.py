"""Context parallelism over MPI, on any number of ranks: the numbers of the unsplit model, with the same bits again."""

from __future__ import annotations

import numpy as np
import pytest

from mpizero.comm.model_group import CommunicatorGroup
from mpizero.nn import (
    GPT,
    bind,
    context_model,
    cut_batch,
    evaluate,
    initial_parameters,
    loss_and_gradients,
    whole_prediction,
)
from mpizero.testing import parallel_assert
from mpizero.types import Run
from tests.parallel.parallel_layouts import of_first

pytestmark = pytest.mark.mpi
TRAINING = Run(training=True, seed=3, step=5, first_sample=11)


def test_ranks_of_mpi_together_have_the_unsplit_models_numbers(world):
    """On more than three ranks each length with one dtype, with the other one on another number of ranks."""
    for number, length in enumerate((256, 333, 5)):
        for each, (dtype, tolerance) in enumerate((("float64", 1e-12), ("float32", 1e-6))):
            if world.size <= 3 or (number + world.size // 4) % 2 == each:
                check(world, length, dtype, tolerance)


def check(world, length, dtype, tolerance):
    model = GPT(dim=24, layers=2, heads=3, sequence=400, vocabulary=11, dropout=0.2, dtype=dtype)
    named = initial_parameters(model)
    x, y = np.random.default_rng(length).integers(0, 11, (2, 3, length))
    group = CommunicatorGroup(world)
    part, batch = context_model(model, group), cut_batch(x, y, group)
    loss, gradients, logits = of_first(world, lambda: unsplit(model, named, x, y))
    runs = [loss_and_gradients(part, named, batch, TRAINING) for _ in range(2)]
    wrong = [name for name in named if runs[0][2][name].tobytes() != runs[1][2][name].tobytes()]
    parallel_assert(world, not wrong, f"other bits in the second run: {wrong}")
    parts = runs[0][2]
    total = group.all_reduce(np.concatenate([part.reshape(-1) for part in parts.values()]))
    cuts = np.cumsum([part.size for part in parts.values()])[:-1]
    found = dict(zip(parts, np.split(total, cuts), strict=True))
    # The gradient of the keys' bias is rounding alone.
    distances = {
        name: np.abs(found[name] - gradient.reshape(-1)).max() / np.abs(gradient).max()
        for name, gradient in gradients.items()
        if np.abs(gradient).max() > 1e-5
    }
    # Sums over a thousand places: in float32 both forms round by as much as they differ.
    far = {name: distance for name, distance in distances.items() if not distance < 3 * tolerance}
    parallel_assert(world, len(distances) > 10 and not far, f"{far}")
    total = group.all_reduce(np.array([runs[0][0]]))[0]
    parallel_assert(world, abs(total - loss) <= tolerance * abs(loss), f"loss {total}, unsplit {loss}")
    prediction = whole_prediction(part, evaluate(part, bind(model, named), batch[0], TRAINING))
    distance = np.abs(prediction - logits).max() / np.abs(logits).max()
    parallel_assert(world, prediction.shape == logits.shape and distance < tolerance, f"logits: {distance}")
    group.close()


def unsplit(model, named, x, y):
    """The loss, the gradients and the predictions of the whole model; one rank computes them for all."""
    loss, _, gradients = loss_and_gradients(model, named, (x, y), TRAINING)
    return loss, gradients, evaluate(model, bind(model, named), x, TRAINING)
