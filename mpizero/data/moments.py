"""Compute mean, standard deviation and range of samples by channel, with the same bits on any number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.names import explains
from mpizero._util.text import write_atomic
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.data.batches import RankedModel, Ranks, ranks_of
from mpizero.data.source import Source, check_source, check_unchanging, sample_block
from mpizero.errors import DataError
from mpizero.layout.flat import Partition
from mpizero.layout.sum_tree import Program, TreeNode, merge
from mpizero.types import Array

#: Number of samples of a leaf of the tree; part of the result's definition, never to be changed.
LEAF = 64


@dataclass(frozen=True)
class Moments:
    """Hold number, mean, sum of squared deviations and range of some elements of each channel."""

    count: int
    mean: Array
    squares: Array
    least: Array
    most: Array

    @classmethod
    def of(cls, values: Array, channel: int | None) -> Self:
        """Return the moments of an array (samples, ...) by channel, in float64; None means one channel for all."""
        axes = tuple(axis for axis in range(values.ndim) if axis != channel)
        numbers = values.astype(np.float64)
        mean = numbers.mean(axis=axes, keepdims=True)
        squares = np.square(numbers - mean).sum(axis=axes)
        count = numbers.size // max(1, squares.size)
        return cls(count, mean.reshape(squares.shape), squares, numbers.min(axis=axes), numbers.max(axis=axes))

    def joined(self, other: Moments) -> Moments:
        """Return the moments of the elements of this object and those of ``other`` together.

        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979,
        equation 2.1: the formula subtracts no large sums.
        """
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.squares + other.squares + np.square(apart) * (self.count * other.count / count),
            np.minimum(self.least, other.least),
            np.maximum(self.most, other.most),
        )


FORMAT = "mpizero statistics 1"


@dataclass(frozen=True)
class Statistics:
    """Hold statistics of all samples of a source, by the path of an array (such as ``x`` or ``x['wind']``).

    Attributes
    ----------
    samples : int
        Number of samples.
    mean, std, least, most : mapping of str to array
        Mean, standard deviation (of the population), smallest and largest element of each channel, float64; arrays of
        shape (channels,), or () without channels.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.arange(5.0), np.arange(5))
    >>> with mz.Mesh("self") as mesh, tempfile.TemporaryDirectory() as folder:
    ...     mz.data.statistics(source, mesh).save(Path(folder, "statistics.json"))
    ...     known = mz.data.Statistics.load(Path(folder, "statistics.json"))
    >>> known.samples, float(known.least["x"]), float(known.most["x"]), float(known.mean["x"])
    (5, 0.0, 4.0, 2.0)
    """

    samples: int
    mean: Mapping[str, Array]
    std: Mapping[str, Array]
    least: Mapping[str, Array]
    most: Mapping[str, Array]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file atomically, from which :meth:`load` reads the same bits. Not collective."""
        document: dict[str, Any] = {"format": FORMAT, "samples": self.samples}
        for name in ("mean", "std", "least", "most"):
            document[name] = {array: values.tolist() for array, values in getattr(self, name).items()}
        write_atomic(Path(path), json.dumps(document, indent=1).encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that :meth:`save` has written. Not collective.

        Raises
        ------
        DataError
            If the file is missing, or no file of statistics.
        """
        try:
            with open(path, encoding="utf-8") as file:
                document = json.load(file)
            if document.pop("format") != FORMAT:
                raise ValueError("it has another format")
            arrays = {
                name: {array: np.array(values, np.float64) for array, values in document[name].items()}
                for name in ("mean", "std", "least", "most")
            }
            return cls(int(document["samples"]), **arrays)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{os.fspath(path)}: no file of statistics that Statistics.save has written: {error}"
            ) from None


@explains
def statistics(source: Source, ranks: Ranks | RankedModel, channel: int | None = None) -> Statistics:
    """Compute the statistics of all samples of a source, of which each rank reads a part.

    Collective over ``ranks``. Statistics of blocks of 64 samples are combined in the order of a binary tree, as
    gradients of grains are, so the bits of the result do not depend on the ranks.

    Parameters
    ----------
    source : Source
        The samples, such as the training part of a split.
    ranks : sharded model, Mesh or ShardingConfig
        The ranks.
    channel : int or None
        Axis of a sample (without the axis of samples) whose indices are channels; an array without this axis is one
        channel, and with None every array is one channel.

    Raises
    ------
    DataError
        If there are no samples, or samples that are no arrays of real numbers or have elements that are NaN or
        infinite.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> source = mz.data.ArraySource(np.array([[[1.0, 10.0]], [[3.0, 30.0]]]), np.zeros(2))  # (samples, place, channel)
    >>> with mz.Mesh("self") as mesh:
    ...     known = mz.data.statistics(source, mesh, channel=1)
    >>> known.mean["x"], known.std["x"]
    (array([ 2., 20.]), array([ 1., 10.]))
    """
    comm, _ = ranks_of(ranks, None)
    with all_ranks(comm, "statistics"):
        check_source(source, "statistics")
        if channel is not None:
            require("channel", channel, whole(0))
        check_unchanging(source, "statistics", "changes samples at random: give its source")
    arguments = {"source": source.describe(), "channel": channel}
    agree_equal(comm, lambda: {"the arguments of statistics": arguments}, "agree statistics")
    total = -(-len(source) // LEAF)
    shard = Partition(total, comm.size).shard(comm.rank)
    with all_ranks(comm, "statistics"):
        leaves = [_leaf(source, leaf, channel) for leaf in range(shard.start, shard.stop)]
    nodes = merge(((TreeNode(0, shard.start + i), (i,)) for i in range(len(leaves))), total)
    local = [(node, _evaluate(program, leaves)) for node, program in nodes]
    parts = [part for rank in comm.allgather_object(local, tag="statistics") for part in rank]
    ((_, program),) = merge([(node, (i,)) for i, (node, _) in enumerate(parts)], total)
    root = _evaluate(program, [value for _, value in parts])
    return Statistics(
        len(source),
        {path: moments.mean for path, moments in root.items()},
        {path: np.sqrt(moments.squares / moments.count) for path, moments in root.items()},
        {path: moments.least for path, moments in root.items()},
        {path: moments.most for path, moments in root.items()},
    )


def _leaf(source: Source, leaf: int, channel: int | None) -> dict[str, Moments]:
    """Return the moments of each array, by path, over 64 samples: block number ``leaf``, a leaf of the sums' tree."""
    first = leaf * LEAF
    moments = {}
    for path, values in sample_block(source, first, LEAF, "statistics:").named:
        if values.dtype.kind == "c":
            raise DataError(f"statistics: {path} has complex numbers: give its real and imaginary parts as two arrays")
        if not (finite := np.isfinite(values)).all():
            bad = first + int(np.argwhere(~finite)[0][0])
            raise DataError(f"statistics: {path} of sample {bad} has elements that are NaN or infinite")
        moments[path] = Moments.of(values, channel + 1 if channel is not None and values.ndim > channel + 1 else None)
    return moments


def _evaluate(program: Program, rows: Iterable[dict[str, Moments]]) -> dict[str, Moments]:
    """Combine ``rows``, the moments of single blocks of samples, by :meth:`Moments.joined`, in the order of a tree.

    ``program`` says in which order: [Note: tree programs] in layout/sum_tree.py.
    """
    values, stack = list(rows), list[dict[str, Moments]]()
    for step in program:
        if step >= 0:
            stack.append(values[step])
            continue
        right = stack.pop() if step == -1 else values[-2 - step]
        left = stack.pop()
        stack.append({path: left[path].joined(right[path]) for path in left})
    return stack[0]
