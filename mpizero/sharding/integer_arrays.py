"""Keep the integer arrays of a model, which its layers read and may change in a step: counters, or tables of indices.

[Note: agreement] Every rank keeps the integer arrays of its stage, which layers may change. In a step each micro-batch
reads the values from before the step, and may write new values. The new values must be equal for all micro-batches,
because integers cannot be averaged. A rank compares the new values of its own micro-batches. Then all ranks exchange
hashes of their new values. Ranks without a micro-batch receive the new values if these differ from the old ones. A step
that updates the parameters adopts the new values; a skipped step drops them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.errors import LayoutError
from mpizero.layout.flat import by_global_name, joined, nested
from mpizero.layout.mesh import GROUPS
from mpizero.nn.layer import integers_of, start_integers
from mpizero.types import Array

#: What a rank reports in :meth:`IntegerState.agree`: no new values, new values equal to the old ones, others.
_NONE, _OLD, _NEW = range(3)


class IntegerState:
    """Keep the integer arrays of one rank's pipeline stage.

    Parameters
    ----------
    model : BlockModel or BlackBoxModel
        The whole model.
    blocks : iterable of str
        The blocks of this rank's stage.
    grid : ProcessGrid
        The process groups of this rank.

    Attributes
    ----------
    specs : dict of str to tuple of IntegerSpec
        The integer arrays of the whole model by block.
    values : dict of str to Array
        The arrays of this stage by global name.
    """

    def __init__(self, model: Any, blocks: Iterable[str], grid: ProcessGrid) -> None:
        self.grid, self.specs = grid, integers_of(model)
        local_blocks = frozenset(blocks)
        self._local = {block: specs for block, specs in self.specs.items() if block in local_blocks}
        self.values: dict[str, Array] = {}
        self._written: dict[str, Array] = {}
        for name, spec in by_global_name(self._local).items():
            self.values[name], self._written[name] = (np.zeros(spec.shape, spec.dtype) for _ in range(2))
        self._new: dict[str, Array] = {}
        self._from: tuple[int, int] = (0, 0)

    def begin(self, model: Any) -> None:
        """Set this stage's arrays to the initial values of ``model``. Not collective."""
        self.set(start_integers(model))

    def set(self, arrays: Mapping[str, Array]) -> None:
        """Set this stage's arrays from ``arrays``, by name; arrays of other stages are ignored. Not collective."""
        for name in self.values.keys() & arrays.keys():
            self.values[name][...] = arrays[name]

    def copy_from(self, other: IntegerState) -> None:
        """Copy the integer arrays of ``other``, a state of the same stage. Not collective."""
        self.set(other.values)

    # ------------------------------------------------------------------ values for layers (not collective)

    def readonly_views(self, block: str) -> dict[str, Any]:
        """Return read-only views of a block's integer arrays, nested by local name."""
        return self._views(block, self.values, writeable=False)

    def targets(self, block: str) -> dict[str, Any]:
        """Return the arrays to which a block writes new values of its integer arrays, nested by local name."""
        return self._views(block, self._written, writeable=True)

    def _views(self, block: str, arrays: dict[str, Array], *, writeable: bool) -> dict[str, Any]:
        by_name = {}
        for spec in self._local.get(block, ()):
            by_name[spec.name] = arrays[joined(block, spec.name)].view()
            by_name[spec.name].flags.writeable = writeable
        return nested(by_name)

    def forget(self) -> None:
        """Drop the new values of integer arrays from a step that has not ended."""
        self._new = {}

    def prepare(self, blocks: Iterable[str]) -> None:
        """Copy the integer arrays of ``blocks`` to those that the blocks write new values to.

        So elements that a block does not write keep their values.
        """
        for name in self._names(blocks):
            self._written[name][...] = self.values[name]

    def take(self, block: str, first: int, count: int) -> LayoutError | None:
        """Store the values that ``block`` has written to its integer arrays, after a micro-batch.

        Return an error if they are not equal to those of an earlier micro-batch of the step.

        ``first`` is the index of the micro-batch's first sample in the global batch, ``count`` its number of samples.
        """
        for name in self._names([block]) if self._local else ():
            written = self._written[name]
            if name not in self._new:
                self._new[name], self._from = written.copy(), (first, count)
            elif (self._new[name] != written).any():
                earlier = f"{_excerpt(self._new[name])} after {_samples(*self._from)}, {_excerpt(written)} after"
                return _differ(name, f"{earlier} {_samples(first, count)}")
        return None

    def _names(self, blocks: Iterable[str]) -> Iterator[str]:
        return (joined(block, spec.name) for block in blocks for spec in self._local.get(block, ()))

    # ------------------------------------------------------------------ agreement

    def agree(self) -> None:
        """Check that all ranks have equal new values of integer arrays; send them to ranks without a micro-batch.

        Collective over the world; for models that have an integer array.

        Raises
        ------
        LayoutError
            On all ranks, if new values differ between the ranks of a stage.
        """
        world, state = self.grid.world, _NONE
        if self._new:
            changed = any((self.values[name] != value).any() for name, value in self._new.items())
            state = _NEW if changed else _OLD
        table = np.empty((world.size, 2), np.int64)
        digest = blake2b(b"".join(self._new[name].tobytes() for name in sorted(self._new)), digest_size=8).digest()
        world.allgather(np.array([state, int.from_bytes(digest, "little", signed=True)]), table.reshape(-1), "integers")
        stages = [self.grid.axes.coordinates(rank).pipeline for rank in range(world.size)]
        for stage in set(stages):
            hashes = {int(table[r, 1]) for r in range(world.size) if stages[r] == stage and table[r, 0] != _NONE}
            if len(hashes) > 1:
                self._explain(stages)
        group = [int(table[rank, 0]) for rank in self.grid.axes.group(world.rank, GROUPS["data"])]
        if _NONE in group and _NEW in group:
            for name, value in self.values.items():
                target = self._new.setdefault(name, value.copy())
                self.grid.data.broadcast(target, group.index(_NEW), "integers")

    def _explain(self, stages: list[int]) -> None:
        """Raise an error that names the first array whose new values differ between ranks of a stage.

        Collective over the world.
        """
        gathered = self.grid.world.allgather_object((self._new, self._from), "integers")
        first: dict[tuple[int, str], int] = {}
        for rank, (new, samples) in enumerate(gathered):
            for name, value in new.items():
                other = first.setdefault((stages[rank], name), rank)
                known, where = gathered[other]
                if (known[name] != value).any():
                    raise _differ(
                        name,
                        f"{_excerpt(known[name])} after {_samples(*where)} on rank {other}, {_excerpt(value)} after "
                        f"{_samples(*samples)} on rank {rank}",
                    )

    def commit(self) -> None:
        """Make the new values of integer arrays the current ones, after a step that has updated the parameters.

        Not collective.
        """
        for name, value in self._new.items():
            self.values[name][...] = value
        self._new = {}

    def all_values(self) -> dict[str, Array]:
        """Return copies of the integer arrays of the whole model by name. Collective over the model group."""
        if not self.specs:
            return {}
        gathered: dict[str, Array] = {}
        for values in self.grid.model.allgather_object(self.values, "integers"):
            gathered |= values
        return {name: gathered[name].copy() for name in by_global_name(self.specs)}


def _differ(name: str, how: str) -> LayoutError:
    return LayoutError(
        f"the new value of integer array {name!r} differs between micro-batches: {how}; it must follow from the value "
        "that each is given, not from the samples"
    )


def _samples(first: int, count: int) -> str:
    return f"samples {first} to {first + count - 1}" if count > 1 else f"sample {first}"


def _excerpt(value: Array) -> str:
    return str(value.tolist()) if value.size <= 4 else f"{value.reshape(-1)[:4].tolist()} and {value.size - 4} more"
