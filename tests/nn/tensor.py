"""What tests of split models share: groups on threads and over MPI, a group that counts, parts put together."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np

from mpizero.comm.model_group import CommunicatorGroup
from mpizero.nn import initial_parameters, model_specs
from mpizero.testing import run_in_threads


def on_ranks(size, function):
    """Call ``function(group)`` on every rank of a tensor group of threads; results by rank."""
    return run_in_threads(size, lambda comm: function(CommunicatorGroup(comm)))


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
    return {s.name: taken(named[s.name], s.part) for s in model_specs(model) if s.tied is None}


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
    return {spec.name: spec for spec in model_specs(model) if spec.tied is None}


def perturbed(model, scale=0.2):
    """Start values with noise: biases and norms are then not at their special values."""
    rng = np.random.default_rng(1)
    return {n: v + rng.normal(0, scale, v.shape).astype(v.dtype) for n, v in initial_parameters(model).items()}


def cache_bytes(cache):
    """Bytes of the arrays that a cache keeps alive, each memory once."""
    owners = {}

    def walk(value):
        if isinstance(value, np.ndarray):
            owner = value
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            owners[id(owner)] = owner.nbytes
        elif isinstance(value, (tuple, list)):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            walk(list(value.values()))

    walk(cache)
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
