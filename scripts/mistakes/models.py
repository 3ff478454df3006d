"""Make mistakes in models that users write, all of which ``check_model`` finds."""

from __future__ import annotations

from functools import wraps

import case
import numpy as np

import mpizero as mz
from mpizero.testing import check_model

#: What functions below keep from call to call.
LAST, CACHE = [np.zeros((4, 2), np.float32)] * 2, {}


def checked(loss_and_grad, predict=None):
    """Call check_model for a model with this ``loss_and_grad``, with the same samples on all ranks."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    model = mz.FunctionModel(case.parameters(), loss_and_grad, predict=predict)
    check_model(model, x, x[:, :2] - x[:, 2:], comm=case.world())


def wrong(*says, **settings):
    """Declare a function as the wrong ``loss_and_grad`` of a model; arguments are those of ``case.mistake``."""

    def declare(function):
        run = wraps(function)(lambda: checked(function))
        return case.mistake("ModelCheckError", *says, status=70, **settings)(run)

    return declare


@wrong("loss:", "a mean over the samples", "return the sum over the samples")
def a_mean_for_a_sum(parameters, batch):
    """Return the mean loss and its gradient instead of sums over the samples."""
    loss, gradients, weight = case.squares(parameters, batch)
    return loss / weight, {name: g / weight for name, g in gradients.items()}, weight


@wrong("gradient of 'bias'", "0.5 times what it must be", "multiply it by 2")
def half_a_gradient(parameters, batch):
    """Return half of the gradient of one parameter."""
    loss, gradients, weight = case.squares(parameters, batch)
    return loss, {**gradients, "bias": gradients["bias"] / 2}, weight


@wrong("gradient of 'bias'", "not computed")
def zeros_for_a_gradient(parameters, batch):
    """Return zeros as the gradient of a parameter on which the loss depends."""
    loss, gradients, weight = case.squares(parameters, batch)
    return loss, {**gradients, "bias": np.zeros(2, np.float32)}, weight


@wrong("gradients of all 2 parameters", "its sign", "turn it around")
def the_wrong_sign(parameters, batch):
    """Return gradients with the wrong sign."""
    loss, gradients, weight = case.squares(parameters, batch)
    return loss, {name: -g for name, g in gradients.items()}, weight


@wrong("weight: 1 for 8 samples", "does not grow with the batch")
def a_weight_of_one(parameters, batch):
    """Return 1 as the weight of every batch."""
    loss, gradients, _ = case.squares(parameters, batch)
    return loss, gradients, 1.0


@wrong("added once a call", "multiply it, and its gradient, by the weight")
def a_penalty_once_a_call(parameters, batch):
    """Add a penalty on the parameters that does not grow with the batch."""
    loss, gradients, weight = case.squares(parameters, batch)
    penalty = sum(float((value**2).sum()) for value in parameters.values())
    return loss + penalty, {name: g + 2 * parameters[name] for name, g in gradients.items()}, weight


@wrong("the global generator numpy.random", "key them")
def noise_from_a_global_generator(parameters, batch):
    """Draw noise from NumPy's global generator."""
    x, y = batch
    return case.squares(parameters, (x + np.random.normal(size=x.shape).astype(np.float32), y))  # noqa: NPY002


@wrong("evaluated elsewhere in between", "kept from call to call")
def a_warm_start(parameters, batch):
    """Start each call of loss_and_grad from the result of the previous call."""
    loss, gradients, weight = case.squares(parameters, batch)
    if not np.array_equal(LAST[1], parameters["weight"]):
        LAST[:] = LAST[1], parameters["weight"].copy()
    return loss + float(LAST[0].sum()), gradients, weight


@wrong("cache that goes by the identity")
def a_cache_by_identity(parameters, batch):
    """Cache results by the address of the parameter arrays, whose values training changes in place."""
    key = parameters["weight"].ctypes.data, len(batch[0])
    return CACHE.setdefault(key, case.squares(parameters, batch))


@wrong("statistics of the batch", "compute each sample by itself")
def statistics_of_the_batch(parameters, batch):
    """Normalize samples by the mean and standard deviation of the batch."""
    x, y = batch
    return case.squares(parameters, ((x - x.mean(axis=0)) / (x.std(axis=0) + 1), y))


@wrong("random numbers not keyed by run.samples")
def dropout_by_the_place_in_the_batch(parameters, batch, *, run):
    """Draw dropout masks from seed and step alone, so that each micro-batch has the same mask."""
    x, y = batch
    return case.squares(parameters, (x * (np.random.default_rng((run.seed, run.step)).random(x.shape) < 0.5), y))


@wrong("a number of samples that is built in", "cannot reshape")
def a_built_in_number_of_samples(parameters, batch):
    """Reshape every batch to a fixed number of samples."""
    x, y = batch
    return case.squares(parameters, (x.reshape(8, 4), y))


@wrong("rank 1 computes other bits than rank 0", ranks=(2, 4))
def a_rank_in_the_model(parameters, batch):
    """Multiply the loss by a number that differs from rank to rank."""
    loss, gradients, weight = case.squares(parameters, batch)
    return loss * (1 + 1e-6 * case.rank()), gradients, weight


@case.mistake("ModelCheckError", "prediction:", "dropout or noise in it", status=70)
def noise_in_the_prediction():
    """Leave dropout on in the predictions."""

    def predict(parameters, x):
        kept = np.random.random(x.shape) < 0.5  # noqa: NPY002
        return (x * kept) @ parameters["weight"]

    checked(case.squares, predict)
