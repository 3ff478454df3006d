"""Compute which range of a parameter, or of the positions of a sequence, a rank of a tensor group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpizero.errors import DataError
from mpizero.layout import Partition
from mpizero.nn.arrays import namespace
from mpizero.nn.layer import Layer
from mpizero.nn.layers.sequence_layer import SequenceLayer
from mpizero.nn.regions import complete
from mpizero.types import Array, Group, ParameterSpec, Params, Part, Run

Ranges = tuple[tuple[int, int], ...]


def own_range(length: int, group: Group) -> tuple[int, int]:
    """Return the range (start, stop) of ``length`` items that this rank holds by the shard rule. Not collective."""
    shard = Partition(length, group.size).shard(group.rank)
    return shard.start, shard.stop


def size_of(ranges: Ranges) -> int:
    """Return the number of items in the given ranges (start, stop) together. Not collective."""
    return sum(stop - start for start, stop in ranges)


def part_of(spec: ParameterSpec, axis: int, ranges: Ranges) -> ParameterSpec:
    """Return the spec of a part of a parameter: its ``ranges`` along ``axis``. Not collective.

    The part gets the same start values as it has in the whole parameter.
    """
    shape = (*spec.shape[:axis], size_of(ranges), *spec.shape[axis + 1 :])
    return replace(spec, shape=shape, part=Part(spec.shape, axis, ranges))


def complete_shared(layer: Layer, group: Group, grads: Params, tag: str) -> None:
    """Sum over the ranks, in place, the gradients of those parameters that every rank holds whole.

    ``layer`` has the parameters, and ``grads`` their gradients. Before, each rank has computed these gradients from its
    own positions of the sequences only. ``tag`` names the message in errors and traces.

    Collective over ``group``, with one message.
    """
    shared = [_found(grads, spec.name) for spec in layer.specs() if spec.part is None and spec.trainable]
    complete(group, shared, tag)


def _found(tree: Any, name: str) -> Array:
    for key in name.split("."):
        tree = tree[key]
    array: Array = tree
    return array


def located(run: Run, x: Array, group: Group, whole: SequenceLayer | None = None) -> Run:
    """Return ``run`` with the length of the whole sequences, and the ranges of positions that the group has.

    ``x`` (samples, positions, ...) is this rank's part of these positions. ``whole`` is the unsplit layer; None if it
    treats each position by itself. Collective over ``group`` if ``run.length`` is 0.

    Raises
    ------
    DataError
        ``x`` does not have as many positions as the shard rule gives this rank.
    """
    shape = None
    if not run.length:
        own = namespace(x).full(1, x.shape[1], np.int64)
        shape = x.shape[0], int(group.all_gather(own, 0, (1,) * group.size, "sequence lengths").sum())
    if whole is not None:
        run = whole.located(run, shape)
    elif shape is not None:
        run = run.on_whole(shape[1])
    start, stop = own_range(run.held, group)
    if x.shape[1] != stop - start:
        held = f"the {run.held} of its context rank{run.described}" if run.described else f"sequences of {run.held}"
        raise DataError(
            f"rank {group.rank} of a tensor group of {group.size} takes places {start} to {stop} of {held}, the input "
            f"has shape {tuple(x.shape)}: give every rank its own part, by the shard rule"
        )
    return run


def divisors(number: int) -> Sequence[int]:
    """List the numbers that divide ``number``, ascending. Not collective."""
    return [d for d in range(1, number + 1) if number % d == 0]
