"""What tests of split models share: grids of threads, models of one's own, a group that counts, parts put together."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from mpizero import nn
from mpizero.comm.model_group import CommunicatorGroup
from mpizero.layout.flat import nested
from mpizero.testing import run_in_threads
from mpizero.types import EVALUATE, Run

TRAINING = Run(training=True, seed=3, step=5, first_sample=11)
SMALL = {"dim": 24, "layers": 2, "heads": 12, "sequence": 40, "vocabulary": 11}
#: Sizes of a tensor group and of a context group: every one of 1, 2, 3, 4 and 8 ranks.
TENSOR, CONTEXT = ((2, 1), (3, 1), (4, 1)), ((1, 2), (1, 3), (1, 4))
BOTH = ((2, 2), (3, 2), (2, 3), (2, 4))
GRIDS = (*TENSOR, *CONTEXT, *BOTH)


def on_ranks(size, function):
    """Call ``function(group)`` on every rank of a group of threads; results by rank."""
    return run_in_threads(size, lambda comm: function(CommunicatorGroup(comm)))


def on_grid(sizes, function):
    """Call ``function(tensor group, context group)`` on every rank of a grid of threads; results by tensor rank."""
    tensor, context = sizes

    def work(comm):
        with (
            comm.split(comm.rank % context, name="tensor") as row,
            comm.split(comm.rank // context, name="c") as column,
        ):
            return function(CommunicatorGroup(row), CommunicatorGroup(column))

    found = run_in_threads(tensor * context, work)
    return [found[rank * context : (rank + 1) * context] for rank in range(tensor)]


def cut(model, tensor, context):
    """Split a model over a tensor group and a context group."""
    return nn.context_model(nn.split_model(model, tensor), context)


def tokens(length, samples=3, vocabulary=11):
    """Ids and targets, of which one is ignored, each in memory of its own."""
    x, y = np.random.default_rng(length).integers(0, vocabulary, (2, samples, length))
    y[0, length // 2] = -1
    return x.copy(), y.copy()


def over_grid(model, named, batch, sizes, run=TRAINING):
    """Return loss, weight, gradients in whole, and the whole prediction of each rank."""

    def work(tensor, context):
        part, (x, y) = cut(model, tensor, context), batch if context.size == 1 else nn.cut_batch(*batch, context)
        own = own_parameters(part, named)
        loss, weight, gradients = nn.loss_and_gradients(part, own, (x, y), run, scale=0.5)
        prediction = nn.whole_prediction(part, nn.evaluate(part, nn.bind(part, own), x, run))
        return loss, weight, gradients, prediction, specs_of(part)

    found = on_grid(sizes, work)
    for column in zip(*found, strict=True):
        assert len({rank[:2] for rank in column}) == 1, "a tensor group has one loss"
    summed = [{name: sum(rank[2][name] for rank in row) for name in row[0][2]} for row in found]
    whole = assembled([{name: row[0][4][name] for name in row[0][2]} for row in found], summed)
    loss, weight = (sum(rank[place] for rank in found[0]) for place in range(2))
    return loss, weight, whole, [rank[3] for row in found for rank in row]


def require_close(found, expected, tolerance, name=""):
    """Differences count against the greatest magnitude: some gradients are rounding alone."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    largest = np.abs(expected).max(initial=1e-3)
    assert np.abs(found - expected).max(initial=0) <= tolerance * largest, name


def require_same_numbers(model, batch, *grids, tolerance=None):
    """All ranks of each grid together have the loss, weight, gradients and predictions of the unsplit model."""
    named, tolerance = perturbed(model), tolerance or {"d": 1e-12, "f": 1e-5}[np.dtype(model.dtype).char]
    loss, weight, gradients = nn.loss_and_gradients(model, named, batch, TRAINING, scale=0.5)
    prediction = nn.evaluate(model, nn.bind(model, named), batch[0], TRAINING)
    for sizes in grids:
        found = over_grid(model, named, batch, sizes)
        assert abs(found[0] - loss) <= tolerance * abs(loss), sizes
        assert abs(found[1] - weight) <= 1e-12 * weight, sizes
        assert list(found[2]) == list(gradients), sizes
        for name, gradient in gradients.items():
            require_close(found[2][name], gradient, tolerance, (name, sizes))
        for each in found[3]:
            require_close(each, prediction, tolerance, sizes)
            assert each.tobytes() == found[3][0].tobytes(), "all ranks have the same prediction"


class Model:
    """A model made by hand of layers."""

    def __init__(self, blocks, loss=None, dtype="f8", seed=0):
        self.blocks, self.loss, self.dtype, self.seed = blocks, loss or nn.CrossEntropy(), np.dtype(dtype), seed


class Mute(nn.Layer):
    """A user's layer that says nothing of groups."""

    def forward(self, params, x, run=EVALUATE):
        return x, None

    def backward_input(self, params, cache, dy):
        return dy, None


class Counting:
    """A group that counts messages, by kind and by tag, and the bytes that enter them on this rank."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, group.rank, group.size
        self.kinds, self.tags, self.bytes = Counter(), Counter(), Counter()

    def _call(self, kind, x, *rest):
        self.kinds[kind] += 1
        self.tags[rest[-1]] += 1
        self.bytes[kind] += x.nbytes
        return getattr(self.group, kind)(x, *rest)

    def all_reduce(self, x, tag=""):
        return self._call("all_reduce", x, tag)

    def all_max(self, x, tag=""):
        return self._call("all_max", x, tag)

    def all_gather(self, x, axis, sizes, tag=""):
        return self._call("all_gather", x, axis, sizes, tag)

    def reduce_scatter(self, x, axis, sizes, tag=""):
        return self._call("reduce_scatter", x, axis, sizes, tag)

    def clear(self):
        """Forget what was counted and return the kinds."""
        kinds = dict(self.kinds)
        for counter in (self.kinds, self.tags, self.bytes):
            counter.clear()
        return kinds


class Apart:
    """A group of one process that plays one of several ranks: for shapes and specs, not for messages."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def taken(whole, part):
    """The part of a whole array that a rank holds."""
    if part is None:
        return whole
    pieces = [np.take(whole, range(start, stop), part.axis) for start, stop in part.ranges]
    return np.ascontiguousarray(np.concatenate(pieces, part.axis))


def own_parameters(model, named):
    """Cut a whole model's named parameters for a split one."""
    return {s.name: taken(named[s.name], s.part) for s in nn.model_specs(model) if s.tied is None}


def assembled(specs, arrays):
    """Put the ranks' arrays together.

    ``specs`` and ``arrays`` are lists by rank of specs by name and arrays by name. Parts cover the whole once; what
    every rank holds whole has the same bits on all of them.
    """
    result = {}
    for name, spec in specs[0].items():
        if spec.part is None:
            for other in arrays[1:]:
                assert other[name].tobytes() == arrays[0][name].tobytes(), f"{name} differs between ranks"
            result[name] = arrays[0][name]
            continue
        whole, covered = np.full(spec.part.shape, np.nan, arrays[0][name].dtype), np.zeros(spec.part.shape, int)
        for rank_specs, rank_arrays in zip(specs, arrays, strict=True):
            part, array = rank_specs[name].part, rank_arrays[name]
            assert array.shape == rank_specs[name].shape
            at = 0
            for start, stop in part.ranges:
                index = (slice(None),) * part.axis
                whole[(*index, slice(start, stop))] = array[(*index, slice(at, at + stop - start))]
                covered[(*index, slice(start, stop))] += 1
                at += stop - start
            assert at == array.shape[part.axis]
        assert (covered == 1).all(), f"{name} is not covered once"
        result[name] = whole
    return result


def specs_of(model):
    """A model's specs by name, without tied uses."""
    return {spec.name: spec for spec in nn.model_specs(model) if spec.tied is None}


def perturbed(model, scale=0.2):
    """Start values with noise: biases and norms are then not at their special values."""
    rng = np.random.default_rng(1)
    return {n: v + rng.normal(0, scale, v.shape).astype(v.dtype) for n, v in nn.initial_parameters(model).items()}


def each_block(model, params, x, run=EVALUATE):
    """Run the blocks forward one after the other; yield the name, the output and the cache of each."""
    for name, layer in model.blocks.items():
        x, cache = layer.forward(params[name], x, run)
        yield name, x, cache


def slots_of(grads, block):
    """The nested gradient memory of a block, of that of a model by name."""
    return nested({name[len(block) + 1 :]: grad for name, grad in grads.items() if name.startswith(f"{block}.")})


def arrays_in(value):
    """Every array of a cache, however deep it lies."""
    if isinstance(value, np.ndarray):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ():
        yield from arrays_in(item)


def cache_bytes(cache):
    """Bytes of the arrays that a cache keeps alive, each memory once."""
    owners = {}
    for owner in arrays_in(cache):
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        owners[id(owner)] = owner.nbytes
    return sum(owners.values())


class Counted(np.ndarray):
    """Arrays that count the floating-point operations of every matrix product they take part in, by thread.

    Results are of this class again, so parameters and gradient memory made of it are enough.
    """

    tally = threading.local()

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        def plain(value):
            return value.view(np.ndarray) if isinstance(value, Counted) else value

        if out is not None:
            options["out"] = tuple(map(plain, out))
        result = getattr(ufunc, method)(*map(plain, inputs), **options)
        if ufunc is np.matmul:
            self.tally.total = getattr(self.tally, "total", 0) + 2 * result.size * inputs[0].shape[-1]
        if out is not None:
            return out[0]
        return result.view(Counted) if isinstance(result, np.ndarray) else result

    @classmethod
    def spent(cls):
        """Operations of this thread since the last call."""
        total, cls.tally.total = getattr(cls.tally, "total", 0), 0
        return total
