"""Make typical mistakes of users with the batches that they pass to ``train``."""

from __future__ import annotations

import case
import numpy as np

import mpizero as mz


def linear(**more):
    """Return a ZeRO-1 model of one linear layer from 4 to 2 numbers; ``more`` are settings."""
    return mz.ZeRO1Model(mz.nn.MLP(4, (), 2, task="regression", dtype="float32"), case.config(**more))


def pieces(parameters, batch):
    """Return loss, gradient and weight of a linear model whose input is a dictionary of two arrays."""
    x, y = batch
    return case.squares(parameters, (np.concatenate([x["left"], x["right"]], axis=1), y))


def black_box(function=pieces, **more):
    """Return a ZeRO-2 model of a black-box ``function``; ``more`` are settings."""
    return mz.ZeRO2Model(mz.FunctionModel(case.parameters(), function), case.config(**more))


def halves(x):
    """Return the first and the last two columns of ``x`` in a dictionary."""
    return {"left": x[:, :2], "right": x[:, 2:]}


@case.mistake("DataError", "3", "features", status=65)
def an_axis_too_short():
    """Train on samples with 3 features where the layer takes 4."""
    x, y = case.samples()
    linear().train(x[:, :3], y)


@case.mistake("DataError", "equally many samples", "x has 8, y has 7", status=65)
def a_target_lost():
    """Pass one target less than there are samples."""
    x, y = case.samples()
    linear().train(x, y[:-1])


@case.mistake("DataError", "x['left'] has 8, x['right'] has 5", "pad sequences", status=65)
def arrays_of_different_lengths():
    """Pass a dictionary of arrays of which one has fewer samples."""
    x, y = case.samples()
    black_box().train({"left": x[:, :2], "right": x[:5, 2:]}, y)


@case.mistake("x is float32 with samples of shape (4,) on rank 0 and float64", "on rank", status=65, ranks=(2, 4))
def another_type_on_one_rank():
    """Pass samples in float64 on rank 1, and in float32 on the other ranks."""
    x, y = case.samples()
    linear().train(x.astype(np.float64) if case.rank() == 1 else x, y)


@case.mistake("x['right'] is float32", "on rank 0 and missing on rank 1", status=65, ranks=(2, 4))
def a_key_missing_on_one_rank():
    """Leave a key of the dictionary out on one rank."""
    x, y = case.samples()
    batch = halves(x)
    if case.rank() == 1:
        del batch["right"]
    black_box().train(batch, y)


@case.mistake("the batch is x dict(['left']", "on rank 0 and x dict(['right']", "same order", status=65, ranks=(2, 4))
def keys_in_another_order_on_one_rank():
    """Pass a dictionary whose keys have another order on one rank."""
    x, y = case.samples()
    batch = halves(x)
    black_box().train(dict(reversed(batch.items())) if case.rank() == 1 else batch, y)


@case.mistake("x is float32", "on rank 0 and float64", "empty arrays then, x[:0]", status=65, ranks=(2, 4))
def no_samples_as_an_empty_list_made_an_array():
    """Pass np.array([]) on a rank that has no samples."""
    x, y = case.samples()
    empty = np.array([])
    linear().train(*((empty, empty) if case.rank() == 1 else (x, y)))


@case.mistake("rank 1: x and y hold no arrays", "as that of rank 0 can", "x[:0]", status=65, ranks=(2, 4))
def nothing_on_one_rank():
    """Pass None on a rank that has no samples."""
    x, y = case.samples()
    black_box().train(*((None, None) if case.rank() == 1 else (halves(x), y)))


@case.mistake("no samples on any rank", status=65)
def no_samples_at_all():
    """Pass empty arrays on all ranks."""
    x, y = case.samples()
    linear().train(x[:0], y[:0])


@case.mistake("masked array, whose mask would be lost", "two arrays", status=65)
def missing_values_as_a_mask():
    """Pass a masked array."""
    x, y = case.samples()
    linear().train(np.ma.masked_less(x, 0), y)


@case.mistake("x is an array of objects", "micro_batch has no effect", "depends on the number of ranks", status=0)
def ragged_samples():
    """Pass sequences of different lengths in an array of objects (it trains, with a warning)."""

    def loss_and_grad(parameters, batch):
        return 1.0, case.parameters(), 1.0

    ragged = np.array([np.ones(2), np.ones(3)], dtype=object)
    black_box(loss_and_grad, micro_batch=1).train(ragged, np.ones(2))


@case.mistake("x[0][0] is a number (float), not an array: numpy.asarray", status=65)
def a_list_of_lists():
    """Pass lists of numbers instead of an array."""
    x, y = case.samples()
    linear().train(x.tolist(), y)


@case.mistake("ranks that share a batch", "x['graph'] is a object", status=65, ranks=(2,))
def objects_in_a_pipeline():
    """Pass an object that is no array to a model that is cut into pipeline stages."""
    model = mz.nn.MLP(4, (4,), 2, dtype="float32")
    model = mz.PipelineParallelModel(model, case.config(), pipeline_parallel_size=2)
    model.train({"graph": object()}, case.samples()[1])


@case.mistake("ConfigError", "loss_and_grad is called as loss_and_grad(parameters, batch)", "'y'", status=78)
def x_and_y_apart():
    """Define loss_and_grad(parameters, x, y) instead of loss_and_grad(parameters, batch)."""
    mz.FunctionModel(case.parameters(), lambda parameters, x, y: case.squares(parameters, (x, y)))


@case.mistake("rank 0 is asked for epoch=0, rank 1 for epoch=1", status=65, ranks=(2, 4))
def an_epoch_that_differs():
    """Pass epoch=0 on rank 0, and epoch=1 on the other ranks."""
    x, y = case.samples()
    linear().train(x, y, epoch=min(case.rank(), 1))


@case.mistake("this rank has a part of the gradient", "gather=True", status=70)
def names_of_a_part_of_a_gradient():
    """Ask for gradients by name although each rank has only a part of the gradient."""
    x, y = case.samples()
    black_box(case.squares).compute_gradients(x, y).named()
