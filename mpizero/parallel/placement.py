"""Define the placement table: every strategy is one row, and one engine executes all rows."""

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
        The strategy's name in a model's metadata.
    saved_as : str
        The strategy's name in checkpoints. It is the same for FSDP and ZeRO-3, which shard alike, so that a load which
        requires the same layout accepts a checkpoint of either.
    shard_parameters, shard_gradients, shard_optimizer : bool
        Whether each rank keeps only the shard that it owns; otherwise there is one copy per node (per rank if ranks
        share no memory).
    one_unit : bool
        Whether the whole model is one unit; otherwise each block is a unit.
    """

    strategy: str
    saved_as: str
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    one_unit: bool

    @property
    def waves(self) -> bool:
        """Tell whether grains are computed in waves, and the gradients of each wave are reduced unit by unit."""
        return self.shard_gradients


PLACEMENTS = {
    "ddp": Placement("DDP", "DDP", False, False, False, True),
    "zero1": Placement("ZeRO-1", "ZeRO-1", False, False, True, True),
    "zero2": Placement("ZeRO-2", "ZeRO-2", False, True, True, False),
    "zero3": Placement("ZeRO-3", "ZeRO-3", True, True, True, False),
    "fsdp": Placement("FSDP", "ZeRO-3", True, True, True, False),
}


def placement(strategy: str) -> Placement:
    """Return the placement table's row of ``strategy``: "ddp", "zero1", "zero2", "zero3" or "fsdp". Not collective.

    Raises
    ------
    ConfigError
        If ``strategy`` is another name.
    """
    if strategy not in PLACEMENTS:
        raise ConfigError(
            f"unknown strategy {strategy!r}: choose one of {', '.join(PLACEMENTS)}{nearest(strategy, PLACEMENTS)}"
        )
    return PLACEMENTS[strategy]
