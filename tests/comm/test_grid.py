from __future__ import annotations

import pytest

from mpizero.comm import ProcessGrid
from mpizero.errors import GridError
from mpizero.testing import run_in_threads


def view(grid: ProcessGrid) -> dict[str, object]:
    """What a grid says, with the world ranks of its groups."""
    result = {
        "data": grid.data.allgather_object(grid.world.rank),
        "node": grid.node.allgather_object(grid.world.rank),
        "peers": grid.peers.allgather_object(grid.world.rank),
        "nodes": grid.nodes,
        "position": grid.position,
    }
    grid.close()
    return result


def test_peers_have_the_same_place_on_their_node():
    views = run_in_threads(6, lambda comm: view(ProcessGrid.create(comm, ranks_per_node=2)))
    for rank, seen in enumerate(views):
        assert seen["data"] == [0, 1, 2, 3, 4, 5]
        assert seen["node"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert seen["peers"] == [rank % 2, rank % 2 + 2, rank % 2 + 4]
        assert seen["nodes"] == ((0, 1), (2, 3), (4, 5))
        assert seen["position"] == (0, 1, 2, 3, 4, 5)


def test_one_node_has_only_itself_as_peer(ranks):
    def specification(comm):
        seen = view(ProcessGrid.create(comm))
        assert seen["node"] == list(range(comm.size))
        assert seen["peers"] == [comm.rank]

    ranks(specification)


def test_without_shared_memory_every_rank_is_a_node(ranks):
    def specification(comm):
        grid = ProcessGrid.create(comm, share_node_memory=False)
        assert grid.node.shares_memory
        assert grid.local_size == 1
        seen = view(grid)
        assert seen["node"] == [comm.rank]
        assert seen["peers"] == list(range(comm.size))
        assert seen["nodes"] == tuple((rank,) for rank in range(comm.size))

    ranks(specification)


def test_unequal_nodes_fall_back_to_private_memory_and_say_so_once(capfd):
    views = run_in_threads(5, lambda comm: view(ProcessGrid.create(comm, ranks_per_node=2)))
    for rank, seen in enumerate(views):
        assert seen["node"] == [rank]
        assert seen["peers"] == [0, 1, 2, 3, 4]
    assert capfd.readouterr().err.count("nodes have 2, 2, 1 ranks") == 1


class Interleaved:
    """Ranks dealt to two nodes in turn, as some launchers do."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def split_node(self, ranks_per_node=None, name=""):
        return self._comm.split(self._comm.rank % 2, name=name)


def test_grains_are_dealt_node_after_node_while_ranks_keep_their_numbers():
    views = run_in_threads(6, lambda comm: view(ProcessGrid.create(Interleaved(comm))))
    for rank, seen in enumerate(views):
        assert seen["nodes"] == ((0, 2, 4), (1, 3, 5))
        assert seen["position"] == (0, 3, 1, 4, 2, 5)
        assert seen["node"] == [rank % 2, rank % 2 + 2, rank % 2 + 4]
        assert seen["peers"] == [rank // 2 * 2, rank // 2 * 2 + 1]


@pytest.mark.parametrize("bad", [0, -2, 1.5, "2"])
def test_a_node_size_that_makes_no_sense_names_itself(bad):
    with pytest.raises(GridError, match=f"ranks_per_node must be a positive integer or None, got {bad!r}"):
        run_in_threads(1, lambda comm: ProcessGrid.create(comm, ranks_per_node=bad))


def test_the_grid_counts_the_bytes_of_its_groups(ranks):
    def specification(comm):
        import numpy as np

        with ProcessGrid.create(comm) as grid:
            before = grid.bytes_sent
            grid.data.allgather(np.zeros(4), np.zeros(4 * comm.size))
            assert grid.bytes_sent - before == 32 * (comm.size - 1)

    ranks(specification)
