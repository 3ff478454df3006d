"""Plan in integers which rank updates which whole tensor, and which elements it exchanges for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from mpizero._util.checks import require, whole
from mpizero.errors import ConfigError
from mpizero.layout import Span
from mpizero.layout.flat import FlatLayout, ParameterUse, owners_by_cost
from mpizero.optim.elementwise import optimizer_name, takes_whole
from mpizero.parallel.optimizer.tied_parameters import home_of
from mpizero.parallel.parameters.shards import Share
from mpizero.types import ParameterSpec


class Move(NamedTuple):
    """Describe elements of a tensor that data rank ``source`` has and ``target`` needs; both may be the same rank.

    ``tensor`` is the number of the tensor, ``span`` the range of its elements in the flat vector of all parameters.
    """

    tensor: int
    span: Span
    source: int
    target: int


@dataclass(frozen=True)
class TensorPlan:
    """Compute the owners of tensors, and the elements that ranks exchange; equal on all ranks of a data group.

    A tensor is divided among its *holders*: shard j of the shard rule is held by data rank j, or with replicated
    optimizer state by all peers of rank j, one on each node.

    Attributes
    ----------
    layout : FlatLayout
        The parameters.
    tensors : tuple of ParameterUse
        The parameters that are updated as whole tensors, in declared order.
    owners : tuple of int
        For each tensor, the data rank that updates it and keeps its state.
    nodes : sequence of sequences of int
        The data ranks of every node.
    replicated : bool
        Whether every node keeps the whole optimizer state (DDP).
    """

    layout: FlatLayout
    tensors: tuple[ParameterUse, ...]
    owners: tuple[int, ...]
    nodes: Sequence[Sequence[int]]
    replicated: bool

    @classmethod
    def of(cls, optimizer: Any, layout: FlatLayout, nodes: Sequence[Sequence[int]], *, replicated: bool) -> TensorPlan:
        """Choose the tensors that ``optimizer`` takes and divide them over the data ranks by their costs.

        Raises
        ------
        ConfigError
            If the optimizer takes a tensor of which a rank holds a slice only, or a complex one, or if a cost is not a
            whole number.
        """
        tensors = tuple(entry for entry in layout.parameters if takes_whole(optimizer, entry.spec))
        for entry in tensors:
            _check(optimizer, entry.spec)
        costs = [tensor_cost(optimizer, entry.spec.shape) for entry in tensors]
        return cls(layout, tensors, owners_by_cost(costs, sum(map(len, nodes))), nodes, replicated)

    @property
    def names(self) -> frozenset[str]:
        """The names of the tensors."""
        return frozenset(entry.spec.name for entry in self.tensors)

    def owned(self, rank: int) -> list[int]:
        """Return the numbers of the tensors that data rank ``rank`` owns."""
        return [number for number, owner in enumerate(self.owners) if owner == rank]

    def gathers(self, rank: int) -> Sequence[Move]:
        """Return the elements of gradients that data rank ``rank`` sends to owners or, as one, gets from holders."""
        return self._gathers.get(rank, ())

    def returns(self, rank: int) -> Sequence[Move]:
        """Return the elements of updated tensors that data rank ``rank`` gets from owners or sends as one."""
        return self._returns.get(rank, ())

    @cached_property
    def _gathers(self) -> dict[int, list[Move]]:
        return _by_rank(
            Move(number, span, self._source(self.owners[number], shard), self.owners[number])
            for number, shard, span in self._parts
        )

    @cached_property
    def _returns(self) -> dict[int, list[Move]]:
        return _by_rank(
            Move(number, span, self.owners[number], target)
            for number, shard, span in self._parts
            for target in self._holders[shard]
        )

    def _source(self, owner: int, shard: int) -> int:
        """Return the holder of a shard that sends its elements to ``owner``: itself, or one on its node if there is."""
        node = next(ranks for ranks in self.nodes if owner in ranks)
        return owner if owner in self._holders[shard] else next((r for r in node if r in self._holders[shard]), shard)

    @cached_property
    def _parts(self) -> list[tuple[int, int, Span]]:
        """The range of every tensor that each shard has, as (tensor, shard, range); empty ranges are left out."""
        shards = [Share(self.layout, rank, len(self._holders)).spans for rank in range(len(self._holders))]
        return [
            (number, shard, part)
            for number, entry in enumerate(self.tensors)
            for shard, spans in enumerate(shards)
            if (part := entry.span.intersect(spans[entry.unit])).size
        ]

    @cached_property
    def _holders(self) -> list[tuple[int, ...]]:
        """For each shard, the data ranks that hold its elements of gradients and of optimizer state."""
        places = {rank: ranks.index(rank) for ranks in self.nodes for rank in ranks}
        if not self.replicated:
            return [(rank,) for rank in range(len(places))]
        return [tuple(ranks[places[rank]] for ranks in self.nodes) for rank in range(len(places))]


def tensor_cost(optimizer: Any, shape: tuple[int, ...]) -> int:
    """Return the floating-point operations that an optimizer tells for the update of a tensor, after a check."""
    return require(f"{optimizer_name(optimizer)}.cost({shape})", optimizer.cost(shape), whole())


def _by_rank(moves: Iterable[Move]) -> dict[int, list[Move]]:
    """Return, for each rank, the moves in which it takes part, in their order."""
    found: dict[int, list[Move]] = {}
    for move in moves:
        for rank in {move.source, move.target}:
            found.setdefault(rank, []).append(move)
    return found


def _check(optimizer: Any, spec: ParameterSpec) -> None:
    name = optimizer_name(optimizer)
    if spec.part is not None and spec.part.shape != spec.shape:
        raise ConfigError(
            f"{name} updates whole tensors, and a tensor group splits {home_of(spec)!r} of shape {spec.part.shape}: "
            "train with tensor_parallel_size=1 (data, pipeline and context ranks work), or exclude it"
        )
    if spec.complex:
        raise ConfigError(
            f"{name}.takes chooses {home_of(spec)!r}, which is complex: tensors of real numbers only can be taken"
        )
