"""Split self-attention over a tensor group by heads (Shoeybi et al., 2019, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from mpizero.errors import ConfigError
from mpizero.nn.layers.attention import AttentionBase, CausalSelfAttention
from mpizero.nn.split.linear import ColumnLinear, RowLinear
from mpizero.nn.split.parts import divisors, own_range
from mpizero.types import Group


@dataclass(frozen=True)
class SplitAttention(AttentionBase):
    """Compute attention with this rank's heads; the map to queries, keys and values is split by columns.

    Parameters
    ----------
    whole : CausalSelfAttention
        The unsplit layer; the group's size must divide its number of heads. Its projection is split by rows. If it is
        a context-parallel form, this rank's heads attend to the keys of the whole context group.
    group : Group
        The ranks that the layer is split over.
    sequence : bool
        Whether inputs and outputs hold only this rank's positions of the sequences: (samples, positions of this rank,
        dim). The gradient of the projection's bias is then computed from these positions only; the block that uses the
        layer sums it over the ranks.

    Raises
    ------
    ConfigError
        The number of ranks does not divide the number of heads.
    """

    whole: CausalSelfAttention
    group: Group
    sequence: bool = False

    def __post_init__(self) -> None:
        heads, size = self.whole.heads, self.group.size
        if heads % size:
            raise ConfigError(
                f"heads={heads} cannot be split evenly over a tensor group of {size} ranks; choose a tensor size that "
                f"divides them ({', '.join(map(str, divisors(heads)))}), or a multiple of {size} heads"
            )

    @property
    def features(self) -> int:
        """Number of features of the input."""
        return self.whole.dim

    def own_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a sample that the group works on. Not collective."""
        return self.whole.own_shape(shape)

    @cached_property
    def own_heads(self) -> tuple[CausalSelfAttention, int]:
        """A layer that computes the attention of this rank's heads, and its first head's number in the whole layer.

        Only the attention of the returned layer is used, not its linear maps.
        """
        whole, size = self.whole, self.group.size
        own = replace(whole, dim=whole.dim // size, heads=whole.heads // size)
        return own, self.group.rank * own.heads

    @cached_property
    def _layers(self) -> tuple[ColumnLinear, RowLinear]:
        into_qkv, projection = self.whole._layers
        start, stop = own_range(self.whole.dim, self.group)
        columns = tuple((kind * self.whole.dim + start, kind * self.whole.dim + stop) for kind in range(3))
        return (
            ColumnLinear(into_qkv, self.group, columns, self.sequence),
            RowLinear(projection, self.group, self.sequence),
        )
