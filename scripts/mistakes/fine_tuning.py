"""Make mistakes with losses, weights and masks, with parameters from files, frozen ones, and their average."""

from __future__ import annotations

import os

import case
import numpy as np

import mpizero as mz


def network(loss=None, **settings):
    """Return a regressor of 4 inputs and 2 outputs."""
    return mz.nn.MLP(4, (8,), 2, task="regression", loss=loss, **settings)


def trained(loss, target, **settings):
    """Train one step with ``loss`` on targets that ``target(x, y)`` makes of the samples."""
    x, y = case.samples()
    mz.ZeRO2Model(network(loss, **settings), mz.ShardingConfig(micro_batch=2)).train(x, target(x, y))


def saved():
    """Save a model in the job's folder, and return another one that loads of it."""
    model = mz.ZeRO3Model(network(), mz.ShardingConfig())
    model.save_model("saved")
    return model


@case.mistake("DataError", "L1Loss: takes a weight of the target's shape (2, 2)", "has shape (2, 3)", status=65)
def weights_of_another_shape():
    """Give weights of three numbers a sample to targets of two."""
    trained("l1", lambda x, y: {"target": y, "weight": np.ones((len(y), 3))})


@case.mistake("DataError", "HuberLoss: takes a mask of booleans", "float32", "astype(bool)", status=65)
def a_mask_of_numbers():
    """Give a mask of zeros and ones as floating-point numbers."""
    trained("huber", lambda x, y: {"target": y, "mask": (y > 0).astype(np.float32)})


@case.mistake("DataError", "the target has the key 'weights' (did you mean 'weight'?)", status=65)
def a_key_misspelt():
    """Misspell the key of the weights."""
    trained("mse", lambda x, y: {"target": y, "weights": np.ones(len(y))})


@case.mistake("DataError", "MeanSquaredError: takes finite weights from 0", "-1.0", status=65)
def a_negative_weight():
    """Give a negative weight."""
    trained("mse", lambda x, y: {"target": y, "weight": np.full(len(y), -1.0)})


@case.mistake("DataError", "RelativeL2Loss: the target of sample 0", "mask", "eps", status=65)
def a_target_of_zeros():
    """Use the relative error with targets that are zero everywhere."""
    trained("relative_l2", lambda x, y: 0 * y)


@case.mistake("DataError", "BCEWithLogitsLoss: takes targets from 0 to 1", "CrossEntropy", status=65)
def class_numbers_for_logits():
    """Give class numbers to the binary cross-entropy."""
    trained(mz.nn.BCEWithLogitsLoss(), lambda x, y: np.full(y.shape, 2))


@case.mistake("ConfigError", "loss='huber' does not belong to task='classification'", "set task=", status=78)
def a_loss_of_another_task():
    """Use a loss of a regressor for a classifier."""
    mz.nn.MLP(4, (8,), 2, loss="huber")


@case.mistake("ConfigError", "freeze: 'hiden.*' fits the name of no parameter", status=78)
def a_frozen_pattern_misspelt():
    """Misspell the pattern of the parameters to freeze."""
    mz.nn.freeze(network(), ["hiden.*"])


@case.mistake("ConfigError", "freeze: '*' leave no parameter to train", status=78)
def everything_frozen():
    """Freeze all parameters."""
    mz.nn.freeze(network(), "*")


@case.mistake("ConfigError", "include: 'hidden.0' fits the name of no parameter", "'hidden.0.*'", status=78)
def a_block_for_a_pattern():
    """Name a block where a pattern of parameter names is taken."""
    saved().load_parameters("saved", include="hidden.0")


@case.mistake("CheckpointError", "different output.linear.weight: shape [8, 2] in the file, [8, 3]", status=65)
def another_head():
    """Load all parameters of a model with another number of outputs."""
    saved()
    net = mz.nn.MLP(4, (8,), 3, task="regression")
    mz.ZeRO1Model(net, mz.ShardingConfig()).load_parameters("saved")


@case.mistake("ranks differ: include of the arguments of load_parameters", "on rank 0", status=78, ranks=(2, 4))
def patterns_that_differ():
    """Load other parameters on each rank."""
    saved().load_parameters("saved", include=f"{'hidden' if case.rank() else 'output'}.*")


@case.mistake("CheckpointMissingError", "nothing.npz: no such file or folder", status=65)
def no_file_of_parameters():
    """Load parameters from a file that is not there."""
    saved().load_parameters(os.path.abspath("nothing.npz"))


@case.mistake("ConfigError", "ema=1.5: expected a finite number > 0 and < 1", status=78)
def a_decay_above_one():
    """Keep an average with a decay above 1."""
    mz.ShardingConfig(ema=1.5)


@case.mistake("StateError", "ema=True: this model keeps no average", "ShardingConfig(ema=0.999)", status=70)
def an_average_that_nobody_keeps():
    """Evaluate with an average that was not asked for."""
    saved().evaluate(*case.samples(), ema=True)
