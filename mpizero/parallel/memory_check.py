"""Check whether a model fits into the shared memory of the nodes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import numpy as np

from mpizero._util.text import notice
from mpizero.comm import Communicator, ProcessGrid
from mpizero.comm.startup import available_memory
from mpizero.guard.reports import SHARED_FOLDER, taken_by_leftovers
from mpizero.layout.batch import DEFAULT_GRAINS, claimed_rows, contiguous_shares
from mpizero.layout.flat import FlatLayout
from mpizero.layout.sum_tree import rows_plan
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.parameters.allocator import paged
from mpizero.parallel.parameters.shards import Share
from mpizero.parallel.parameters.store import SLOTS
from mpizero.parallel.placement import Placement
from mpizero.parallel.step_rules import claims_grains, gathers_units, wave_slots


def fits_shared_memory(
    grid: ProcessGrid,
    layout: FlatLayout,
    item: int,
    placement: Placement,
    config: ShardingConfig,
    *,
    scratch: bool,
    in_place: bool = False,
) -> bool:
    """Tell whether parameters and gradients fit into the shared memory of every host; if not, print why on rank 0.

    Collective over all ranks; all get the same result.

    Parameters
    ----------
    grid : ProcessGrid
        The ranks.
    layout : FlatLayout
        The parameters of this rank's data group. Other data groups on the same host, with other parts of the model,
        are counted, too.
    item : int
        Bytes of one element of a parameter, or of a gradient.
    placement : Placement
        The row of the placement table.
    config : ShardingConfig
        The settings. If ``micro_batch`` is None, the check counts as many rows (copies of the whole gradient vector)
        as any batch of up to 16 grains can need. Otherwise it counts one row. If the first step needs more rows and
        they do not fit, :mod:`mpizero.parallel.model.private_fallback` handles that.
    scratch : bool
        Whether gradients that are added to a row at once have no row of their own.
    in_place : bool
        Whether the model is a function that writes the gradients of all units at once.
    """
    if grid.local_size == 1 and grid.data.size == grid.world.size:
        return True
    needed, room = 0, None
    if grid.local_size > 1:
        room = grid.node.shared_space()
        if grid.node.rank == 0:  # one rank of each node counts its windows
            claims = claims_grains(placement, config, grid, grid.model.size)
            rows = _rows(grid, config, scratch=scratch, claims=claims)
            needed = _window_bytes(grid, layout, item, placement, rows, in_place=in_place)
    told = grid.world.allgather_object((os.uname().nodename, needed, room, available_memory()), "shared memory")
    asked, rooms = Counter[str](), dict[str, int]()
    for host, window, free, _ in told:
        asked[host] += window
        if free is not None:
            rooms[host] = min(free, rooms.get(host, free))
    _tell_limit(grid.world, asked, {host: memory for host, _, _, memory in told if memory is not None})
    short = {host: asked[host] - free for host, free in rooms.items() if asked[host] > free}
    if short:
        host = max(short, key=lambda name: short[name])
        held = dict(grid.world.allgather_object((os.uname().nodename, taken_by_leftovers()), "leftovers"))[host]
        tell_private(
            grid.world,
            f"the model needs {asked[host]} bytes of shared memory on {host}, where {SHARED_FOLDER} has {rooms[host]} "
            f"left{held}; enlarge it (in a container --shm-size) or use fewer ranks per node",
        )
    return not short


def _tell_limit(world: Communicator, asked: Mapping[str, int], left: Mapping[str, int]) -> None:
    """Print on rank 0 which host may need more memory than ``left`` there for this job. Not collective."""
    if world.rank == 0 and (host := next((host for host in left if asked[host] > left[host]), "")):
        notice(
            f"the model may need {asked[host]} bytes of shared memory on {host}, where this job may take {left[host]}: "
            "a job that takes more is killed; ask for more memory (sbatch --mem), or more nodes"
        )


def tell_private(world: Communicator, reason: str) -> None:
    """Print on rank 0 of ``world`` that every rank keeps its own copy of the model, and why. Not collective."""
    if world.rank == 0:
        notice(f"every rank keeps its own copy of the model: {reason}")


def _window_bytes(
    grid: ProcessGrid, layout: FlatLayout, item: int, placement: Placement, rows: int, *, in_place: bool
) -> int:
    """Return the bytes of all shared windows that the ranks of this data group allocate on this node.

    ``rows`` is the number of rows of each rank, where gradients are kept in rows.
    """

    def window(elements: int) -> int:
        return paged(elements * item)

    if gathers_units(placement, grid.peers.size):
        shares = sum(Share(layout, rank, grid.data.size).size for rank in grid.node_ranks)
        parameters = window(shares) + SLOTS * window(layout.largest_gathered)
    else:
        parameters = window(layout.size)
    if placement.waves:
        slots = wave_slots(layout, grid.node.size, in_place=in_place)
        return parameters + grid.node.size * sum(window(size) for size in slots)
    return parameters + rows * grid.node.size * window(layout.gradient_size)


def _rows(grid: ProcessGrid, config: ShardingConfig, *, scratch: bool, claims: bool) -> int:
    """Return how many copies of the whole gradient vector to count for each rank before the first batch is known.

    That is the most that a batch of up to 16 grains can need, or 1 if the user has set ``micro_batch``. If the first
    batch needs more than is left, the model is moved out of shared memory then.
    """
    if config.micro_batch is not None:
        return 1
    counts = [grid.context.size * count for count in range(1, DEFAULT_GRAINS + 1)]
    shares, groups = [contiguous_shares(grid, count) for count in counts], grid.group_sizes
    plans = [rows_plan(own, groups, count, scratch=scratch) for own, count in zip(shares, counts, strict=True)]
    claimed = [claimed_rows(grid, count) for count in counts] if claims else []
    return int(np.max([plan.rows for plan in plans] + claimed))
