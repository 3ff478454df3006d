"""Make mistakes with the shapes and types of arrays that layers and losses take."""

from __future__ import annotations

from types import SimpleNamespace

import case
import numpy as np

import mpizero as mz


def network(last, loss=None):
    """Return a model of three blocks, of which ``last`` is the last one."""
    blocks = {"encoder.0": mz.nn.Linear(4, 4), "encoder.1": mz.nn.Tanh(), "encoder.2": last}
    loss = loss or mz.nn.MeanSquaredError()
    return SimpleNamespace(blocks=blocks, loss=loss, dtype=np.dtype("f4"), seed=0)


@case.mistake("DataError", "block 'encoder.2', Linear: takes 3 features", "the input has shape", status=65)
def layers_that_do_not_fit():
    """Put a layer of 3 inputs after one of 4 outputs."""
    mz.ZeRO1Model(network(mz.nn.Linear(3, 2)), mz.ShardingConfig()).train(*case.samples())


@case.mistake("DataError", "block 'encoder.2', layer 'out', Linear: takes 5 features", status=65)
def layers_inside_of_a_block():
    """Put a layer of 5 inputs after one of 4 outputs inside a block."""
    inside = mz.nn.Sequential({"in": mz.nn.Linear(4, 4), "out": mz.nn.Linear(5, 2)})
    mz.ZeRO3Model(network(inside), mz.ShardingConfig()).train(*case.samples())


@case.mistake("block 'encoder.2', Linear: takes 3 features", status=65, ranks=(2, 4))
def layers_on_another_stage():
    """Put a layer of 3 inputs after one of 4 outputs, on the last of two pipeline stages."""
    split = mz.PipelineParallelModel(network(mz.nn.Linear(3, 2)), case.config(), 2)
    split.train(np.ones((4, 4), np.float32), np.ones((4, 2), np.float32))


@case.mistake("DataError", "TokenEmbedding: takes ids of shape (samples, length <= 8)", status=65)
def a_text_too_long():
    """Train a GPT for sequences of at most 8 tokens on 9 tokens."""
    ids = np.zeros((2, 9), np.int64)
    gpt(8).train(ids, ids)


@case.mistake("DataError", "block 'embedding', Embedding: takes ids from 0 to 15", "ids from 0 to 16", status=65)
def a_token_too_great():
    """Train on a token id beyond the vocabulary."""
    ids = np.arange(17).reshape(1, 17)
    gpt(17).train(ids, ids % 16)


@case.mistake("DataError", "Embedding: takes integer ids", "float32", "astype", status=65)
def tokens_of_floats():
    """Pass token ids as floating-point numbers."""
    ids = np.zeros((2, 8), np.float32)
    gpt(8).train(ids, ids)


@case.mistake("DataError", "CrossEntropy: takes class numbers", "shape (1, 3)", status=65)
def labels_as_one_hot_rows():
    """Pass one-hot rows to a classifier instead of class numbers."""
    x, _ = case.samples()
    classes = network(mz.nn.Linear(4, 3), mz.nn.CrossEntropy())
    mz.ZeRO2Model(classes, mz.ShardingConfig(micro_batch=1)).train(x, np.eye(3, dtype=np.float32)[[0] * len(x)])


@case.mistake("DataError", "CrossEntropy: target 3 is not below the number of classes, 3", status=65)
def a_label_too_great():
    """Pass the label 3 to a classifier of three classes."""
    x, _ = case.samples()
    classes = network(mz.nn.Linear(4, 3), mz.nn.CrossEntropy())
    mz.ZeRO2Model(classes, mz.ShardingConfig()).train(x, np.full(len(x), 3))


@case.mistake("DataError", "MeanSquaredError: takes targets of the prediction's shape", status=65)
def targets_of_another_shape():
    """Pass targets of three numbers to a regressor of two outputs."""
    x, y = case.samples()
    mz.ZeRO2Model(network(mz.nn.Linear(4, 2)), mz.ShardingConfig()).train(x, np.hstack([y, y[:, :1]]))


@case.mistake("DataError", "block 'encoder.0', Linear: takes real numbers", "complex64", status=65)
def complex_inputs():
    """Pass complex numbers to a layer."""
    x, y = case.samples()
    mz.ZeRO2Model(network(mz.nn.Linear(4, 2)), mz.ShardingConfig()).train(x.astype(np.complex64), y)


@case.mistake("ArgumentError", "block 'encoder.2'", "the class Linear", "call it to make one", status=78)
def a_class_for_a_layer():
    """Use the class of a layer as a block instead of a layer."""
    mz.ZeRO2Model(network(mz.nn.Linear), mz.ShardingConfig())


@case.mistake("ValueError: cannot reshape", "In block 'encoder.2': Folded.forward", 'shapes.py", line', status=(1, 70))
def an_error_of_the_users_layer():
    """Raise an error in a user's layer; its traceback is printed, with the name of the block."""

    class Folded(mz.nn.Tanh):
        def forward(self, params, x, run=None):
            return x.reshape(3, 7), None

    mz.ZeRO2Model(network(Folded()), mz.ShardingConfig()).train(*case.samples())


def gpt(sequence):
    """Return a small sharded GPT for sequences of at most ``sequence`` tokens."""
    return mz.FSDPModel(mz.nn.GPT(8, 1, 2, sequence, vocabulary=16), mz.ShardingConfig())
