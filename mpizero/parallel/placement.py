"""Define the placement table: every strategy is one row, and one engine executes all of them."""

from __future__ import annotations

from dataclasses import dataclass

from mpizero.errors import ConfigError
from mpizero.names import nearest


@dataclass(frozen=True)
class Placement:
    """Describe what a strategy shards and how it assigns grains.

    Attributes
    ----------
    strategy : str
        The name in metadata.
    saved_as : str
        The name in checkpoints: rows that shard alike have the same, so that a strict layout takes both.
    shard_parameters, shard_gradients, shard_optimizer : bool
        Whether each owner keeps its part only; otherwise there is one copy per node (per rank with private memory).
    one_unit : bool
        Whether the whole model is one unit; otherwise each block is one.
    """

    strategy: str
    saved_as: str
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    one_unit: bool

    @property
    def waves(self) -> bool:
        """Tell whether grains are assigned in waves, so that owners meet them in order and keep no full gradient."""
        return self.shard_gradients


PLACEMENTS = {
    "ddp": Placement("DDP", "DDP", False, False, False, True),
    "zero1": Placement("ZeRO-1", "ZeRO-1", False, False, True, True),
    "zero2": Placement("ZeRO-2", "ZeRO-2", False, True, True, False),
    "zero3": Placement("ZeRO-3", "ZeRO-3", True, True, True, False),
    "fsdp": Placement("FSDP", "ZeRO-3", True, True, True, False),
}


def placement(strategy: str) -> Placement:
    """Return the row of ``strategy`` ("ddp", "zero1", "zero2", "zero3" or "fsdp"). Not collective.

    Raises
    ------
    ConfigError
        If there is no such row.
    """
    if strategy not in PLACEMENTS:
        raise ConfigError(
            f"unknown strategy {strategy!r}: choose one of {', '.join(PLACEMENTS)}{nearest(strategy, PLACEMENTS)}"
        )
    return PLACEMENTS[strategy]
