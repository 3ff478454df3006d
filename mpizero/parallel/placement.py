"""Define the placement table: every strategy is one row, and one engine executes all rows.

[Note: waves in a context group] The ranks of a context group compute one part each of a grain. In the tree these parts
are neighbours, so none of a rank's own parts are, and the rank cannot add them alone. To sum gradients once a step, it
would have to keep as many copies of the whole gradient as it computes grains. Context groups are for sequences so long
that memory is short, and that computing a grain takes much longer than sending gradients. So ZeRO-1, where a rank needs
the sums of its shard only, then sums them in every wave, as ZeRO-2 does. DDP, where every node needs all sums, keeps
the copies and sends once a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mpizero._util.names import nearest
from mpizero.errors import ConfigError


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
    waves : bool
        Whether grains are computed in waves, and the gradients of each wave are reduced unit by unit.
    """

    strategy: str
    saved_as: str
    shard_parameters: bool
    shard_gradients: bool
    shard_optimizer: bool
    one_unit: bool
    waves: bool

    def in_contexts(self, contexts: int) -> Placement:
        """Return this row as it is executed with context groups of ``contexts`` ranks. Not collective.

        See [Note: waves in a context group].
        """
        return replace(self, waves=True, one_unit=False) if contexts > 1 and self.shard_optimizer else self


PLACEMENTS = {
    "ddp": Placement("DDP", "DDP", False, False, False, True, False),
    "zero1": Placement("ZeRO-1", "ZeRO-1", False, False, True, True, False),
    "zero2": Placement("ZeRO-2", "ZeRO-2", False, True, True, False, True),
    "zero3": Placement("ZeRO-3", "ZeRO-3", True, True, True, False, True),
    "fsdp": Placement("FSDP", "ZeRO-3", True, True, True, False, True),
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
