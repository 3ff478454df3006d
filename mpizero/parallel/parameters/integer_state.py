"""Keep a model's arrays of whole numbers, which layers may change and on whose new values all grains must agree.

[Note: agreement] Every rank keeps the arrays of its stage. In a step each micro-batch is given the values of the step's
beginning, and may write new ones. These must be the same for all micro-batches: an average of whole numbers is none. A
rank compares those of its own micro-batches. Then all ranks exchange a hash of what they have found. Ranks that had no
micro-batch are sent the new values if these differ from the old ones. A step that updates the parameters takes the new
values; one that is skipped drops them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from mpizero.comm import ProcessGrid
from mpizero.errors import LayoutError
from mpizero.layout.flat import joined, nested
from mpizero.layout.mesh import GROUPS
from mpizero.nn.layer import integers_of, start_integers
from mpizero.types import Array, IntegerSpec

#: What a rank tells about its new values: that it has none, that they are the old ones, that they are others.
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
        The ranks.

    Attributes
    ----------
    whole : dict of str to tuple of IntegerSpec
        The integer arrays of the whole model by block.
    values : dict of str to Array
        The arrays of this stage by global name.
    """

    def __init__(self, model: Any, blocks: Iterable[str], grid: ProcessGrid) -> None:
        self.grid, self.whole = grid, integers_of(model)
        here = frozenset(blocks)
        self._own = {block: specs for block, specs in self.whole.items() if block in here}
        self.values: dict[str, Array] = {}
        self._written: dict[str, Array] = {}
        for name, spec in named_integers(self._own).items():
            self.values[name], self._written[name] = (np.zeros(spec.shape, spec.dtype) for _ in range(2))
        self._found: dict[str, Array] = {}
        self._from: tuple[int, int] = (0, 0)

    def begin(self, model: Any) -> None:
        """Set all arrays to the start values of ``model``. Not collective."""
        self.set(start_integers(model))

    def set(self, given: Mapping[str, Array]) -> None:
        """Set arrays of this stage to those of ``given``, which may have others, too. Not collective."""
        for name in self.values.keys() & given.keys():
            self.values[name][...] = given[name]

    def copy_from(self, other: IntegerState) -> None:
        """Copy the values of another state of the same stage. Not collective."""
        self.set(other.values)

    # ------------------------------------------------------------------ what layers see (not collective)

    def given(self, block: str) -> dict[str, Any]:
        """Return read-only views of a block's arrays, nested by local name."""
        return self._views(block, self.values, writeable=False)

    def targets(self, block: str) -> dict[str, Any]:
        """Return the arrays that a block writes new values to, nested by local name."""
        return self._views(block, self._written, writeable=True)

    def _views(self, block: str, arrays: dict[str, Array], *, writeable: bool) -> dict[str, Any]:
        found = {}
        for spec in self._own.get(block, ()):
            found[spec.name] = arrays[joined(block, spec.name)].view()
            found[spec.name].flags.writeable = writeable
        return nested(found)

    def forget(self) -> None:
        """Drop the new values of a step that has not ended."""
        self._found = {}

    def prepare(self, blocks: Iterable[str]) -> None:
        """Set what ``blocks`` write to to the values of the step: what is not written stays as it is."""
        for name in self._names(blocks):
            self._written[name][...] = self.values[name]

    def take(self, block: str, first: int, count: int) -> LayoutError | None:
        """Keep the new values that ``block`` has written; return an error if an earlier micro-batch had others.

        ``first`` and ``count`` are the number of the micro-batch's first sample, and its number of samples.
        """
        for name in self._names([block]):
            written = self._written[name]
            if name not in self._found:
                self._found[name], self._from = written.copy(), (first, count)
            elif (self._found[name] != written).any():
                mine = f"{_shown(self._found[name])} after {_samples(*self._from)}, {_shown(written)} after"
                return _differ(name, f"{mine} {_samples(first, count)}")
        return None

    def _names(self, blocks: Iterable[str]) -> Iterator[str]:
        return (joined(block, spec.name) for block in blocks for spec in self._own.get(block, ()))

    # ------------------------------------------------------------------ agreement

    def agree(self) -> None:
        """Compare the new values of all ranks, and give them to ranks that had no micro-batch.

        Collective over the world if the model has any integer array; else it does nothing.

        Raises
        ------
        LayoutError
            On all ranks, if new values differ between the ranks of a stage.
        """
        if not self.whole:
            return
        world, state = self.grid.world, _NONE
        if self._found:
            changed = any((self.values[name] != value).any() for name, value in self._found.items())
            state = _NEW if changed else _OLD
        told = np.empty((world.size, 2), np.int64)
        digest = blake2b(b"".join(self._found[name].tobytes() for name in sorted(self._found)), digest_size=8).digest()
        world.allgather(np.array([state, int.from_bytes(digest, "little", signed=True)]), told.reshape(-1), "integers")
        stages = [self.grid.axes.coordinates(rank).pipeline for rank in range(world.size)]
        for stage in set(stages):
            hashes = {int(told[r, 1]) for r in range(world.size) if stages[r] == stage and told[r, 0] != _NONE}
            if len(hashes) > 1:
                self._explain(stages)
        group = [int(told[rank, 0]) for rank in self.grid.axes.group(world.rank, GROUPS["data"])]
        if _NONE in group and _NEW in group:
            for name, value in self.values.items():
                found = self._found.setdefault(name, value.copy())
                self.grid.data.broadcast(found, group.index(_NEW), "integers")

    def _explain(self, stages: list[int]) -> None:
        """Raise the error that names the first array on whose new values the ranks of a stage do not agree.

        Collective over the world.
        """
        everyone = self.grid.world.allgather_object((self._found, self._from), "integers")
        first: dict[tuple[int, str], int] = {}
        for rank, (found, place) in enumerate(everyone):
            for name, value in found.items():
                other = first.setdefault((stages[rank], name), rank)
                known, where = everyone[other]
                if (known[name] != value).any():
                    raise _differ(
                        name,
                        f"{_shown(known[name])} after {_samples(*where)} on rank {other}, {_shown(value)} after "
                        f"{_samples(*place)} on rank {rank}",
                    )

    def commit(self) -> None:
        """Take the new values, at the end of a step that has updated the parameters. Not collective."""
        for name, value in self._found.items():
            self.values[name][...] = value
        self._found = {}

    def all_values(self) -> dict[str, Array]:
        """Return copies of the integer arrays of the whole model by name. Collective over the model group."""
        if not self.whole:
            return {}
        found: dict[str, Array] = {}
        for held in self.grid.model.allgather_object(self.values, "integers"):
            found |= held
        return {name: found[name].copy() for name in named_integers(self.whole)}


def named_integers(integers: dict[str, tuple[IntegerSpec, ...]]) -> dict[str, IntegerSpec]:
    """Return integer arrays, given by block, by their global names. Not collective."""
    return {joined(block, spec.name): spec for block, specs in integers.items() for spec in specs}


def _differ(name: str, how: str) -> LayoutError:
    return LayoutError(
        f"the new value of integer array {name!r} differs between micro-batches: {how}; it must follow from the value "
        "that each is given, not from the samples"
    )


def _samples(first: int, count: int) -> str:
    return f"samples {first} to {first + count - 1}" if count > 1 else f"sample {first}"


def _shown(value: Array) -> str:
    return str(value.tolist()) if value.size <= 4 else f"{value.reshape(-1)[:4].tolist()} and {value.size - 4} more"
