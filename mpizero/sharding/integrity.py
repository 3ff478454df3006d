"""Find corrupted memory, and gradients that a model has not written.

:class:`Integrity` compares parameters and optimizer state with their last hash, and copies on different ranks with each
other. :class:`WriteCheck` finds models that leave a part of their gradients unwritten, or add to the old values instead
of overwriting them; :class:`GradientDict` refuses to bind another array to the name of a gradient.

[Note: what a check sees] Right after an update, a rank computes the CRC32 of the parameters and optimizer state that it
has written. The rank computes the CRC32 again just before the next update. The forward and backward passes in between
change neither parameters nor state. If the two CRC32s differ, bits have flipped in that time. The comparison works for
shards and for replicated state. Then all ranks exchange their CRC32s: copies of the same elements must have equal ones.
Copies exist on different nodes, on tensor ranks that all hold a whole parameter, and on pipeline stages that share a
tied parameter. This second comparison also finds bits that flipped at any earlier time. A CRC32 detects every change of
up to 32 neighbouring bits.

[Note: sentinels] Gradients are written into memory that every step reuses. An element that a layer does not write keeps
the value of an earlier step. Therefore, in the first step of a model, every element is first set to one fixed NaN, the
sentinel. No arithmetic on other numbers results in the sentinel's bits. When a block's backward pass has ended, the
check looks for these bits. Adding to the sentinel gives the sentinel again, so the check also finds layers that add to
the old values. A NaN with other bits was computed by the layer. Only the first step in which a rank computes is
checked, or all steps if ``MPIZERO_DEBUG=gradients`` is set. A function that writes its gradients in place is checked in
every step, but after the first only the first and the last element of each gradient are set to the sentinel.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mpizero._util.checks import named
from mpizero._util.names import nearest
from mpizero._util.numbers import crc32
from mpizero.comm import ProcessGrid
from mpizero.errors import IntegrityError, LayoutError
from mpizero.kernels import to_host
from mpizero.layout.flat import flat_names, joined
from mpizero.nn.layer import Layer
from mpizero.sharding.batch import world_of
from mpizero.sharding.params import ParameterStore
from mpizero.sharding.update import Updater
from mpizero.sharding.whole_tensors import home_of
from mpizero.types import Array, ParameterSpec, Part, as_reals

#: The most damaged ranges that an error message names.
MAX_NAMED = 4


class _Tensor(NamedTuple):
    """Identify an array of parameters or optimizer state.

    ``kind`` is "parameters", or the name of a state array as in "optimizer/exp_avg"; ``name`` is the parameter's name.
    ``part`` is the slice of the whole tensor that this tensor rank holds, or None if the rank holds the whole tensor.
    """

    kind: str
    name: str
    part: Part | None

    def __str__(self) -> str:
        kind = "parameter" if self.kind == "parameters" else self.kind
        return f"{kind} {self.name!r}"


class _Range(NamedTuple):
    """Describe elements ``start:stop`` of a flattened parameter or state array ``tensor``, which a rank updates."""

    tensor: _Tensor
    start: int
    stop: int


class _Plan(NamedTuple):
    """List the ranges of parameters and optimizer state that each rank updates.

    Ranges of different ranks that overlap are cut until they are equal or disjoint, so that copies can be compared.

    Attributes
    ----------
    ranges : list of list of _Range
        The ranges of each rank.
    views : list of array
        The values of this rank's ranges; the only attribute that differs between ranks.
    copies : list of list of (int, int)
        For each range that several ranks hold: pairs of a rank and the index of the range in ``ranges[rank]``.
    """

    ranges: list[list[_Range]]
    views: list[Array]
    copies: list[list[tuple[int, int]]]

    @property
    def counts(self) -> list[int]:
        return [2 * len(ranges) for ranges in self.ranges]


class Integrity:
    """Compute and compare hashes of one model's parameters and optimizer state.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    store : ParameterStore
        The parameters that this rank holds.
    every : int
        Number of steps between two hashes that :meth:`after_step` computes; 0 means none.
    """

    def __init__(self, grid: ProcessGrid, store: ParameterStore, every: int) -> None:
        self.grid, self.store, self.every = grid, store, every
        self.world = world_of(grid)
        self._updater: Updater | None = None
        self._plan: _Plan | None = None
        self._taken: tuple[int, Array] | None = None

    def watch(self, updater: Updater) -> None:
        """Include the optimizer state of ``updater`` from now on, instead of an earlier updater's. Not collective."""
        self._updater, self._plan = updater, None
        self.forget()

    def forget(self) -> None:
        """Drop the last hash, because values were changed on purpose. Not collective, but every rank must call it."""
        self._taken = None

    def after_step(self, step: int) -> None:
        """Compute and keep hashes of this rank's parameters and state if ``step`` is a multiple of ``every``.

        The first computation after :meth:`watch` is collective over all ranks.
        """
        if step % self.every == 0:
            self._taken = (self.store.version, self._hashes())

    def verify(self) -> None:
        """Call :meth:`check`, which is collective, and drop the last hash; do nothing if no hash is kept.

        Raises
        ------
        IntegrityError
            On every rank, if memory is corrupted.
        """
        if self._taken is not None:
            self.check()
            self.forget()

    def check(self) -> None:
        """Compare copies with each other, and the state with its last hash if one is kept. Collective over all ranks.

        Raises
        ------
        IntegrityError
            On every rank, if memory is corrupted. The message names the damaged tensors, elements and ranks.
        """
        now, taken = self._hashes(), self._taken
        changed = now != taken[1] if taken and taken[0] == self.store.version else np.zeros(now.size, bool)
        plan = self._planned()
        gathered = np.empty(sum(plan.counts), np.uint32)
        self.world.allgatherv(np.concatenate([now, changed.astype(np.uint32)]), gathered, plan.counts, "integrity")
        halves = [part.reshape(2, -1) for part in np.split(gathered, np.cumsum(plan.counts)[:-1])]
        hashes, flags = [hashes for hashes, _ in halves], [flags for _, flags in halves]
        damaged = [(rank, index) for rank, flagged in enumerate(flags) for index in np.flatnonzero(flagged).tolist()]
        differing = [copies for copies in plan.copies if len({int(hashes[r][p]) for r, p in copies}) > 1]
        if damaged or differing:
            raise IntegrityError(self._report(plan, hashes, damaged, differing))

    # ------------------------------------------------------------------ what ranks hold

    def _hashes(self) -> Array:
        self.store.wait()
        self.store.refresh()  # bits may have turned over where the values come from
        return np.fromiter((crc32(to_host(view).view(np.uint8)) for view in self._planned().views), np.uint32)

    def _planned(self) -> _Plan:
        """Return which ranges each rank updates. The first call after :meth:`watch` is collective over all ranks."""
        if self._plan is None:
            local = list(self._local_ranges())
            gathered = self.world.allgather_object([rng for rng, _ in local], "what ranks hold")
            cuts: dict[_Tensor, set[int]] = defaultdict(set)
            for rng in (rng for ranges in gathered for rng in ranges):
                cuts[rng.tensor] |= {rng.start, rng.stop}
            bounds = {tensor: sorted(members) for tensor, members in cuts.items()}
            ranges = [[part for rng in of_rank for part in _cut(rng, bounds[rng.tensor])] for of_rank in gathered]
            holders: dict[_Range, list[tuple[int, int]]] = defaultdict(list)
            for rank, rank_ranges in enumerate(ranges):
                for index, rng in enumerate(rank_ranges):
                    holders[rng].append((rank, index))
            views = [
                view[part.start - rng.start : part.stop - rng.start]
                for rng, view in local
                for part in _cut(rng, bounds[rng.tensor])
            ]
            self._plan = _Plan(ranges, views, [members for members in holders.values() if len(members) > 1])
        return self._plan

    def _local_ranges(self) -> Iterator[tuple[_Range, Array]]:
        """Yield every range of parameters and optimizer state that this rank updates, with a view of its values."""
        store, updater = self.store, self._updater
        for shard in store.kept_shards:
            for entry, part, _ in shard.pieces():
                values = store.values[slice(*store.stored_span(shard, entry.unit, part))]
                yield from _named("parameters", entry.spec, part.start - entry.offset, values)
        if updater is None:
            return
        for slot in sorted(updater.state):
            for piece in updater.state_pieces(slot):
                values = updater.state[slot][piece.state : piece.state + piece.size]
                yield from _named(f"optimizer/{slot}", piece.spec, piece.start, values)

    # ------------------------------------------------------------------ comparison

    def _report(
        self,
        plan: _Plan,
        hashes: Sequence[Array],
        damaged: Sequence[tuple[int, int]],
        differing: Sequence[Sequence[tuple[int, int]]],
    ) -> str:
        """Return the text of the error, equal on all ranks, which lists damaged ranges. Collective over all ranks.

        ``damaged`` are the ranges that changed between two updates, as pairs (rank, index into the rank's ranges).
        ``differing`` has, for each range whose copies are not equal, a list of pairs (rank, index).
        """
        hosts = self.world.allgather_object(os.uname().nodename, "integrity")
        lines = [
            f"{_describe(plan.ranges[rank][index])} changed on rank {rank} ({hosts[rank]}) between two updates"
            for rank, index in damaged
        ]
        for copies in differing:
            if set(copies) & set(damaged):
                continue  # the cause is known
            values = {rank: int(hashes[rank][index]) for rank, index in copies}
            rng = _describe(plan.ranges[copies[0][0]][copies[0][1]])
            lines.append(f"{rng} {_minority(values, hosts)}")
        more = f"; and {len(lines) - MAX_NAMED} ranges more" if len(lines) > MAX_NAMED else ""
        split = (
            ". If a layer of your own is split over the tensor group, see first whether its ranks compute different "
            "gradients of it: mpizero.testing.assert_same_as_serial"
        )
        return (
            f"state in memory is damaged: {'; '.join(lines[:MAX_NAMED])}{more}; nothing was saved since it was found. "
            "Resume from the last checkpoint; if it happens on the same host again, take that one out of service"
            f"{split if self.grid.tensor.size > 1 and not damaged else ''}"
        )


def _named(kind: str, spec: ParameterSpec, start: int, values: Array) -> Iterator[tuple[_Range, Array]]:
    if values.size:
        yield _Range(_Tensor(kind, home_of(spec), spec.part), start, start + values.size), values


def _cut(rng: _Range, bounds: Sequence[int]) -> list[_Range]:
    inside = [bound for bound in bounds if rng.start <= bound <= rng.stop]
    return [rng._replace(start=start, stop=stop) for start, stop in pairwise(inside)]


def _describe(rng: _Range) -> str:
    return f"{rng.tensor}, elements {rng.start} to {rng.stop - 1},"


def _minority(values: dict[int, int], hosts: Sequence[str]) -> str:
    """Return a text that names the ranks whose copies differ from the majority, or says that there is no majority.

    ``values`` maps ranks to the hashes of their copies of one range.
    """
    counted = Counter(values.values()).most_common()
    if len(counted) > 1 and counted[0][1] == counted[1][1]:
        who = ", ".join(f"{rank} ({hosts[rank]})" for rank in values)
        return f"differs between ranks {who}, and with so few copies none can be said to be right"
    wrong = [rank for rank, value in values.items() if value != counted[0][0]]
    who = ", ".join(f"{rank} ({hosts[rank]})" for rank in wrong)
    return f"on rank {who} differs from its {counted[0][1]} equal copies"


#: By bytes of an element: the unsigned integer type of that size, and the sentinel, a quiet NaN with a rare payload.
_SENTINELS: dict[int, tuple[Any, int]] = {4: (np.uint32, 0x7FCA5C3E), 8: (np.uint64, 0x7FFA5C3E9B71D42F)}


def write_sentinel(view: Any, *, ends: bool = False) -> None:
    """Set all elements of a gradient, or only the first and the last, to the sentinel, one fixed NaN.

    Not collective. The gradient is an array on the host or on a GPU. ``ends`` selects the first and the last.
    """
    reals = as_reals(view)
    bits, value = _SENTINELS[reals.dtype.itemsize]
    reals.view(bits)[:: max(1, reals.size - 1) if ends else 1] = value


def count_sentinels(view: Any) -> int:
    """Return how many elements of a gradient are the sentinel (never written), in the real or imaginary part.

    Not collective.
    """
    host = as_reals(to_host(view))
    bits, value = _SENTINELS[host.dtype.itemsize]
    return int((host.view(bits) == value).reshape(view.size, -1).any(axis=1).sum()) if view.size else 0


class GradientDict(dict[str, Any]):
    """Hold nested views that gradients are written to, by name; assigning another array to a name raises an error."""

    __slots__ = ()
    #: The name of the argument, and whose parameters they are, as errors say it.
    argument, owner = "grads", "this layer"

    def __init__(self, views: Mapping[str, Any]) -> None:
        super().__init__({name: GradientDict(v) if isinstance(v, dict) else v for name, v in views.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        """Raise ``LayoutError`` if ``value`` is not the view with that name.

        ``grads[name] += ...`` assigns the same view again, and is allowed.
        """
        if name not in self:
            raise LayoutError(f"{self.owner} has no parameter {name!r}{nearest(name, self)}: it has {sorted(self)}")
        if value is not self[name]:
            raise LayoutError(
                f"{self.argument}[{name!r}] = ... binds a name to another array, which nobody reads: write into the "
                f"array that is there, {self.argument}[{name!r}][...] = value"
            )

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Raise ``LayoutError`` if one of the given values is not the view with its name."""
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Make pickling and copying return a plain ``dict``."""
        return dict, (dict(self),)


class FunctionGradients(GradientDict):
    """Hold the views that a function writes its gradients to, by the parameters' names."""

    __slots__ = ()
    argument, owner = "gradients", "the model"


class WriteCheck:
    """Write sentinels to gradients before a backward pass, and find those left after it ([Note: sentinels]).

    Parameters
    ----------
    unwritten : callable
        Takes the name of a block, the name of a parameter in it, how many elements of its gradient are sentinels, and
        how many elements the gradient has; returns the error to raise.
    frozen : frozenset of str
        Full names of the frozen parameters, whose gradients are not checked.
    always : bool
        Whether to check every step, not only the first step in which this rank computes gradients.
    ends : bool
        Whether to check, in all other steps, the first and the last element of each gradient.
    """

    def __init__(
        self,
        unwritten: Callable[[str, str, int, int], LayoutError],
        frozen: frozenset[str],
        *,
        always: bool,
        ends: bool = False,
    ) -> None:
        self.unwritten, self.frozen, self.always, self.ends = unwritten, frozen, always, ends
        self._first = True
        self._looked = self._has_missed = False

    @property
    def on(self) -> bool:
        """Tell whether the caller must write sentinels (one fixed NaN) to gradients before this step's backward pass.

        Not collective.
        """
        return self._first or self.ends

    def write_sentinels(self, views: Mapping[str, Any]) -> None:
        """Set a unit's gradients, or only the first and last element of each, to the sentinel (one fixed NaN).

        Not collective. ``views`` are the gradients, nested by block.
        """
        for block, tree in views.items():
            for _, view in self._trained(block, tree):
                write_sentinel(view, ends=not self._first)
        self._looked = True

    def missed(self, block: str, views: Any) -> LayoutError | None:
        """Return an error to raise if ``block`` has left gradients unwritten, at the sentinel; None if it has not.

        Not collective. ``views`` are the nested views of the block's gradients.
        """
        for name, view in self._trained(block, views):
            if left := count_sentinels(view):
                self._has_missed = True
                return self.unwritten(block, name, left, view.size)
        return None

    def end(self, *, failed: bool) -> None:
        """End a step; if all checked gradients were written and no layer raised, end the check of whole gradients.

        With ``always`` the check never ends. Not collective. ``failed`` tells whether a layer has raised.
        """
        if self._looked and not (self._has_missed or failed):
            self._first = self.always
        self._looked = self._has_missed = False

    def _trained(self, block: str, tree: Any) -> Iterator[tuple[str, Any]]:
        views = ((name, view) for name, view in flat_names(tree) if view.dtype.kind not in "iub")
        return ((name, view) for name, view in views if joined(block, name) not in self.frozen)


def check_layers(layers: Mapping[str, Any], frozen: frozenset[str], *, always: bool) -> WriteCheck:
    """Return a check of the gradients that ``layers`` write: this rank's blocks, by name. Not collective."""

    def unwritten(block: str, name: str, left: int, size: int) -> LayoutError:
        owner, path = _owner(layers[block], name)
        return LayoutError(
            f"block {block!r}, {type(owner).__name__}: the backward pass {_what(left, size)} the gradient of {path!r}, "
            f"or has added to what stood there ({_method(owner)}): a layer overwrites all of its gradient in every "
            f"call, unused rows included, grads[{path!r}][...] = value"
        )

    return WriteCheck(unwritten, frozen, always=always)


def check_function(function: Callable[..., Any], frozen: frozenset[str], *, always: bool) -> WriteCheck:
    """Return a check of the gradients that ``function``, a black box, writes in place. Not collective."""

    def unwritten(block: str, name: str, left: int, size: int) -> LayoutError:
        path = joined(block, name)
        return LayoutError(
            f"{named(function, 'loss_and_grad')} {_what(left, size)} the gradient of {path!r}, or has added to what "
            f"stood there: it overwrites all of each gradient in every call, zeros included, and in the arrays of this "
            f"call, gradients[{path!r}][...] = value"
        )

    return WriteCheck(unwritten, frozen, always=always, ends=True)


def _what(left: int, size: int) -> str:
    return "has not written" if left == size else f"has not written {left} of the {size} elements of"


def _owner(layer: Any, name: str) -> tuple[Any, str]:
    """Return the innermost layer that has the parameter ``name`` of ``layer``, and the parameter's name in it."""
    layer = getattr(layer, "stands_for", layer)
    while True:
        children = layer.children() if hasattr(layer, "children") else {}
        child = next((child for child in children if name.startswith(f"{child}.")), None)
        if child is not None:
            layer, name = children[child], name[len(child) + 1 :]
        elif hasattr(getattr(layer, "layer", None), "specs"):  # Checkpointed and its like keep the names
            layer = layer.layer
        else:
            return layer, name


def _method(layer: Any) -> str:
    """Return the name of the method that writes the layer's gradients, with the method's file and line."""
    for kind in type(layer).__mro__:
        for method in ("backward_weights", "backward"):
            if method not in vars(kind):
                continue
            if kind is Layer:
                return f"{type(layer).__name__} defines no backward_weights"
            return named(vars(kind)[method], f"{kind.__name__}.{method}")
    return f"{type(layer).__name__}.backward"
