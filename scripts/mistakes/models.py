"""Make mistakes in models that users write, all of which ``check_model`` finds."""

from __future__ import annotations

import case
import numpy as np

import mpizero as mz
from mpizero.testing import check_model


def checked(loss_and_grad, predict=None):
    """Call check_model for a model with this ``loss_and_grad``, with the same samples on all ranks."""
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    model = mz.FunctionModel(case.parameters(), loss_and_grad, predict=predict)
    check_model(model, x, x[:, :2] - x[:, 2:], comm=case.world())


@case.mistake("ModelCheckError", "loss:", "a mean over the samples", "return the sum over the samples", status=70)
def a_mean_for_a_sum():
    """Return the mean loss and its gradient instead of sums over the samples."""

    def mean(parameters, batch):
        loss, gradients, weight = case.squares(parameters, batch)
        return loss / weight, {name: g / weight for name, g in gradients.items()}, weight

    checked(mean)


@case.mistake("ModelCheckError", "gradient of 'bias'", "0.5 times what it must be", "multiply it by 2", status=70)
def half_a_gradient():
    """Return half of the gradient of one parameter."""

    def halved(parameters, batch):
        loss, gradients, weight = case.squares(parameters, batch)
        return loss, {**gradients, "bias": gradients["bias"] / 2}, weight

    checked(halved)


@case.mistake("ModelCheckError", "gradient of 'bias'", "not computed", status=70)
def zeros_for_a_gradient():
    """Return zeros as the gradient of a parameter on which the loss depends."""

    def forgotten(parameters, batch):
        loss, gradients, weight = case.squares(parameters, batch)
        return loss, {**gradients, "bias": np.zeros(2, np.float32)}, weight

    checked(forgotten)


@case.mistake("ModelCheckError", "gradients of all 2 parameters", "its sign", "turn it around", status=70)
def the_wrong_sign():
    """Return gradients with the wrong sign."""

    def downhill(parameters, batch):
        loss, gradients, weight = case.squares(parameters, batch)
        return loss, {name: -g for name, g in gradients.items()}, weight

    checked(downhill)


@case.mistake("ModelCheckError", "weight: 1 for 8 samples", "does not grow with the batch", status=70)
def a_weight_of_one():
    """Return 1 as the weight of every batch."""

    def weightless(parameters, batch):
        loss, gradients, _ = case.squares(parameters, batch)
        return loss, gradients, 1.0

    checked(weightless)


@case.mistake("ModelCheckError", "added once a call", "multiply it, and its gradient, by the weight", status=70)
def a_penalty_once_a_call():
    """Add a penalty on the parameters that does not grow with the batch."""

    def penalized(parameters, batch):
        loss, gradients, weight = case.squares(parameters, batch)
        penalty = sum(float((value**2).sum()) for value in parameters.values())
        return loss + penalty, {name: g + 2 * parameters[name] for name, g in gradients.items()}, weight

    checked(penalized)


@case.mistake("ModelCheckError", "the global generator numpy.random", "key them", status=70)
def noise_from_a_global_generator():
    """Draw noise from NumPy's global generator."""

    def noisy(parameters, batch):
        x, y = batch
        return case.squares(parameters, (x + np.random.normal(size=x.shape).astype(np.float32), y))  # noqa: NPY002

    checked(noisy)


@case.mistake("ModelCheckError", "evaluated elsewhere in between", "kept from call to call", status=70)
def a_warm_start():
    """Start each call of loss_and_grad from the result of the previous call."""
    kept = [np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32)]

    def warm(parameters, batch):
        loss, gradients, weight = case.squares(parameters, batch)
        if not np.array_equal(kept[1], parameters["weight"]):
            kept[:] = kept[1], parameters["weight"].copy()
        return loss + float(kept[0].sum()), gradients, weight

    checked(warm)


@case.mistake("ModelCheckError", "cache that goes by the identity", status=70)
def a_cache_by_identity():
    """Cache results by the address of the parameter arrays, whose values training changes in place."""
    kept = {}

    def cached(parameters, batch):
        key = parameters["weight"].ctypes.data, len(batch[0])
        return kept.setdefault(key, case.squares(parameters, batch))

    checked(cached)


@case.mistake("ModelCheckError", "statistics of the batch", "compute each sample by itself", status=70)
def statistics_of_the_batch():
    """Normalize samples by the mean and standard deviation of the batch."""

    def normalized(parameters, batch):
        x, y = batch
        return case.squares(parameters, ((x - x.mean(axis=0)) / (x.std(axis=0) + 1), y))

    checked(normalized)


@case.mistake("ModelCheckError", "random numbers not keyed by run.samples", status=70)
def dropout_by_the_place_in_the_batch():
    """Draw dropout masks from seed and step alone, so that each micro-batch has the same mask."""

    def dropped(parameters, batch, *, run):
        x, y = batch
        return case.squares(parameters, (x * (np.random.default_rng((run.seed, run.step)).random(x.shape) < 0.5), y))

    checked(dropped)


@case.mistake("ModelCheckError", "a number of samples that is built in", "cannot reshape", status=70)
def a_built_in_number_of_samples():
    """Reshape every batch to a fixed number of samples."""

    def rigid(parameters, batch):
        x, y = batch
        return case.squares(parameters, (x.reshape(8, 4), y))

    checked(rigid)


@case.mistake("ModelCheckError", "rank 1 computes other bits than rank 0", status=70, ranks=(2, 4))
def a_rank_in_the_model():
    """Multiply the loss by a number that differs from rank to rank."""
    shift = 1 + 1e-6 * case.rank()

    def shifted(parameters, batch):
        loss, gradients, weight = case.squares(parameters, batch)
        return loss * shift, gradients, weight

    checked(shifted)


@case.mistake("ModelCheckError", "prediction:", "dropout or noise in it", status=70)
def noise_in_the_prediction():
    """Leave dropout on in the predictions."""

    def predict(parameters, x):
        kept = np.random.random(x.shape) < 0.5  # noqa: NPY002
        return (x * kept) @ parameters["weight"]

    checked(case.squares, predict)


if __name__ == "__main__":
    case.main()
