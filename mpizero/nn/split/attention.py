"""Self-attention of which each rank of a tensor group has some of the heads (Shoeybi et al., 2019, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mpizero.errors import ConfigError
from mpizero.nn.layer import Layer, known, require_sequences
from mpizero.nn.layers.affine import Affine
from mpizero.nn.operations import Operations
from mpizero.nn.split.linear import ColumnLinear, RowLinear
from mpizero.nn.split.parts import divisors, own_range
from mpizero.types import EVALUATE, Array, Group, Params, Run

if TYPE_CHECKING:
    from mpizero.nn.layers.attention import CausalSelfAttention


@dataclass(frozen=True)
class SplitAttention(Affine):
    """Attend with the own heads: their queries, keys and values are columns, their outputs rows of the two matrices.

    Parameters
    ----------
    whole : CausalSelfAttention
        The unsplit layer; the group's size divides its heads.
    group : Group
        The ranks it is split over.
    sequence : bool
        Whether inputs and outputs are parts of sequences, (samples, own places, dim). The gradient of the
        projection's bias is then the own part's term.

    Raises
    ------
    ConfigError
        The heads cannot be dealt evenly.
    """

    whole: CausalSelfAttention
    group: Group
    sequence: bool = False

    def __post_init__(self) -> None:
        heads, size = self.whole.heads, self.group.size
        if heads % size:
            raise ConfigError(
                f"heads={heads} cannot be dealt evenly to a tensor group of {size} ranks; choose a tensor size that "
                f"divides them ({', '.join(map(str, divisors(heads)))}), or a multiple of {size} heads"
            )

    @cached_property
    def _own(self) -> CausalSelfAttention:
        """The own heads as a layer, of which only the part between the two matrices is used."""
        whole, size = self.whole, self.group.size
        return replace(whole, dim=whole.dim // size, heads=whole.heads // size)

    @cached_property
    def _layers(self) -> tuple[ColumnLinear, RowLinear]:
        into_qkv, projection = self.whole.children().values()
        start, stop = own_range(self.whole.dim, self.group)
        columns = tuple((kind * self.whole.dim + start, kind * self.whole.dim + stop) for kind in range(3))
        return (
            ColumnLinear(into_qkv, self.group, columns, self.sequence),  # type: ignore[arg-type]
            RowLinear(projection, self.group, self.sequence),  # type: ignore[arg-type]
        )

    def children(self) -> dict[str, Layer]:
        """Give ``qkv`` and ``projection``. Not collective."""
        into_qkv, projection = self._layers
        return {"qkv": into_qkv, "projection": projection}

    def product(self, params: Params, x: Array, run: Run = EVALUATE) -> tuple[Array, Any]:
        """Attend within each sample of ``x`` (samples, length or own places, dim). Collective over the group."""
        require_sequences(x, self.whole.dim, "CausalSelfAttention")
        into_qkv, projection = self._layers
        qkv, qkv_cache = into_qkv.product(params["qkv"], x, run)
        bias, first = into_qkv.last_bias(params["qkv"]), self.group.rank * self._own.heads
        mixed, seen = self._own.attend(qkv, bias, run, first)
        y, projection_cache = projection.product(params["projection"], mixed, run)
        return y, (qkv_cache, seen, projection_cache)

    def last_bias(self, params: Params) -> Array | None:
        """Give the projection's. Not collective."""
        return self._layers[1].last_bias(params["projection"])

    def backward_input(self, params: Params, cache: Any, dy: Array) -> tuple[Array | None, Any]:
        """Compute the gradient of ``x``. Collective over the group."""
        into_qkv, projection = self._layers
        qkv_cache, seen, projection_cache = cache
        dmixed, projection_pending = projection.backward_input(params["projection"], projection_cache, dy)
        dqkv = self._own.attend_backward(seen, known(dmixed))
        dx, qkv_pending = into_qkv.backward_input(params["qkv"], qkv_cache, dqkv)
        return dx, (qkv_pending, projection_pending)

    def backward_weights(self, params: Params, cache: Any, pending: Any, grads: Params) -> None:
        """Overwrite the own parts' gradients. Collective over the group if sequences are split."""
        into_qkv, projection = self._layers
        projection.backward_weights(params["projection"], cache[2], pending[1], grads["projection"])
        into_qkv.backward_weights(params["qkv"], cache[0], pending[0], grads["qkv"])

    def operations(self, shape: tuple[int, ...]) -> Operations:
        """Count the products of the own heads. Not collective."""
        into_qkv, projection = self._layers
        own = self._own.attend_operations(shape[0])
        return into_qkv.operations(shape) + projection.operations((shape[0], self.whole.dim)) + own
