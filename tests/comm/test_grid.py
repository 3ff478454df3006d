"""The groups of a job with several axes, against the integers they come from."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from mpizero.comm import ProcessGrid
from mpizero.errors import GridError, MpizeroError
from mpizero.layout.mesh import GROUPS, Axes
from mpizero.testing import run_in_threads
from tests.comm.specification import on_ranks

ORDERS = (
    "pipeline,tensor,data",
    "pipeline,data,tensor",
    "context,data,tensor,pipeline",
    "data,pipeline,context,tensor",
)


def factorizations(ranks):
    """Every pipeline x tensor x data x context of so many ranks."""
    return [sizes for sizes in product(range(1, ranks + 1), repeat=4) if np.prod(sizes) == ranks]


def grids(ranks):
    """Every factorization, the orders dealt to them in turn."""
    for turn, (p, t, d, c) in enumerate(factorizations(ranks)):
        yield Axes.build(ranks, pipeline=p, tensor=t, data=d, context=c, order=ORDERS[turn % len(ORDERS)])


def members(grid, name):
    """The world ranks of a group, by the communicator itself."""
    group = getattr(grid, name)
    found = group.allgather_object(grid.world.rank)
    assert found[group.rank] == grid.world.rank
    return tuple(found)


def check(world, axes, **options):
    """Compare all that a grid says with the axes."""
    with ProcessGrid.create(world, axes=axes, **options) as grid:
        assert grid.axes == axes
        assert grid.coordinates == axes.coordinates(world.rank)
        for name, differing in GROUPS.items():
            assert members(grid, name) == axes.group(world.rank, differing), name
        data = axes.group(world.rank, ("data", "context"))
        assert grid.data.rank == data.index(world.rank)
        assert (grid.batch is grid.data) == (axes.context == 1)
        assert sorted(grid.order) == list(range(grid.data.size))
        assert grid.order[grid.order_index] == grid.data.rank
        assert members(grid, "node") == tuple(data[rank] for rank in grid.node_ranks)
        assert members(grid, "inter_node") == tuple(data[rank] for rank in grid.inter_node_ranks)
        assert {grid.node.size} == set(grid.group_sizes)
        assert grid.node.shares_memory
        shared = grid.node.allocate_shared(8 * grid.node.size)
        shared.buffer.view(np.int64)[grid.node.rank] = world.rank
        grid.node.node_barrier(shared)
        assert shared.buffer.view(np.int64).tolist() == [data[rank] for rank in grid.node_ranks]
        shared.close()
        return [len(ranks) for ranks in grid.nodes]


@pytest.mark.parametrize("ranks", [1, 3, 6, 8])
def test_groups_are_those_of_the_axes_for_every_factorization(ranks):
    def work(world):
        for axes in grids(ranks):
            size = axes.data * axes.context
            assert check(world, axes) == [size]
            assert check(world, axes, share_node_memory=False) == [1] * size

    run_in_threads(ranks, work)


@pytest.mark.mpi
def test_groups_over_mpi_are_those_of_the_axes_for_every_factorization(world):
    """On more than three ranks with nodes simulated too; each factorization then has one kind of memory in turn."""
    memories = ({"share_node_memory": True}, {"share_node_memory": False}, {"ranks_per_node": 2})
    for turn, axes in enumerate(grids(world.size)):
        for memory in memories[:2] if world.size <= 3 else (memories[(turn + world.size // 4) % 3],):
            check(world, axes, **memory)


@pytest.mark.parametrize("order", ORDERS)
def test_a_node_of_the_data_group_is_what_it_has_of_consecutive_ranks(order):
    def work(world):
        axes = Axes.build(8, pipeline=2, tensor=2, data=2, order=order)
        data = axes.group(world.rank, ("data", "context"))
        for per_node in (1, 2, 4, 8):
            same = len({rank // per_node for rank in data}) == 1
            assert check(world, axes, ranks_per_node=per_node) == ([2] if same else [1, 1])

    run_in_threads(8, work)


def test_data_groups_may_differ_in_their_nodes_but_one_uneven_group_makes_all_ranks_private_and_says_so_once(capfd):
    def work(world):
        # Nodes 012 and 345 cut only the middle one of the data groups 01, 23, 45.
        with ProcessGrid.create(world, axes=Axes(tensor=3, data=2), ranks_per_node=3) as grid:
            even = grid.local_size
        # Nodes 0123 and 45 cut the data groups into 012 and 3 | 45.
        with ProcessGrid.create(world, axes=Axes(pipeline=2, data=3), ranks_per_node=4) as grid:
            assert members(grid, "inter_node") == members(grid, "data")
            return even, grid.nodes

    private = ((0,), (1,), (2,))
    assert run_in_threads(6, work) == [(size, private) for size in (2, 2, 1, 1, 2, 2)]
    told = capfd.readouterr().err
    assert told.count("nodes have 1, 2 ranks of a data group") == told.count("every rank keeps its own copy") == 1


def test_groups_of_the_same_ranks_are_one_communicator():
    def work(world):
        with ProcessGrid.create(world, axes=Axes(pipeline=2, data=2)) as grid:
            assert grid.model is grid.pipeline
            assert grid.tensor is grid.context
            assert len(grid.communicators) == 4  # alone (also peers), data, pipeline, node

    run_in_threads(4, work)


@on_ranks
def test_data_parallelism_makes_no_other_groups(comm):
    with ProcessGrid.create(comm) as grid:
        assert grid.batch is grid.data
        assert grid.coordinates == (0, 0, comm.rank, 0)
        for group in (grid.tensor, grid.context, grid.pipeline, grid.model):
            assert type(group).__name__ == "InMemoryCommunicator"
            assert group.size == 1
        assert grid.tensor_group.size == grid.context_group.size == 1


@on_ranks(limit=1000)
def test_the_groups_of_split_layers_add_alike_inside_and_between_nodes(comm):
    size = comm.size // 2 if comm.size % 2 == 0 else comm.size
    for name in ("tensor", "context"):
        axes, seen = Axes.build(comm.size, **{name: size}), set()
        for options in ({}, {"ranks_per_node": 1}, {"ranks_per_node": 2}, {"share_node_memory": False}):
            with ProcessGrid.create(comm, axes=axes, **options) as grid:
                group = grid.tensor_group if name == "tensor" else grid.context_group
                line = axes.group(comm.rank, [name])
                assert (group.rank, group.size) == (line.index(comm.rank), size)
                x = np.random.default_rng(comm.rank).standard_normal((3, 1000)).astype(np.float32)
                seen.add(group.all_reduce(x).tobytes())
                whole = group.all_gather(np.array([[comm.rank]]), 1, [1] * size)
                assert whole.tolist() == [list(line)]
                shared = group.size > 1 and getattr(grid, name).shares_memory
                assert (group.shared_bytes > 0) == shared
        assert len(seen) == 1


def test_groups_inside_nodes_share_memory():
    def work(world):
        for fast, slow in (("tensor", "context"), ("context", "tensor")):
            axes = Axes.build(4, order=f"pipeline,data,{fast},{slow}", **{fast: 2})
            for memory in ({}, {"ranks_per_node": 2}, {"ranks_per_node": 1}, {"share_node_memory": False}):
                with ProcessGrid.create(world, axes=axes, **memory) as grid:
                    assert getattr(grid, fast).shares_memory == (memory in ({}, {"ranks_per_node": 2}))

    run_in_threads(4, work)


@on_ranks
def test_closing_the_grid_closes_every_group_and_not_the_world(comm):
    grid = ProcessGrid.create(comm, axes=Axes.build(comm.size, tensor=comm.size))
    group = grid.tensor_group
    assert grid.tensor_group is group
    group.all_reduce(np.ones(3))
    made = grid.communicators
    grid.close()
    grid.close()
    for one in made:
        with pytest.raises(MpizeroError):
            one.barrier()
    comm.barrier()


def test_bytes_of_all_groups_are_counted_once():
    def work(world):
        with ProcessGrid.create(world, axes=Axes(2, 2, 2), share_node_memory=False) as grid:
            before = grid.bytes_sent
            for name in GROUPS:
                group = getattr(grid, name)
                group.allgather(np.zeros(4), np.zeros(4 * group.size))
            assert grid.bytes_sent - before == 32 * (0 + 1 + 1 + 1 + 1 + 3)

    run_in_threads(8, work)


@on_ranks
def test_describe_is_a_table_of_coordinates_and_nodes(comm):
    axes = Axes.build(comm.size, pipeline=comm.size)
    with ProcessGrid.create(comm, axes=axes, ranks_per_node=2, share_node_memory=False) as grid:
        table = grid.describe()
    assert table == axes.describe([rank // 2 for rank in range(comm.size)])
    rows = [line.split() for line in table.splitlines()[-comm.size :]]
    assert [row[0] for row in rows] == [str(rank) for rank in range(comm.size)]


@on_ranks
def test_axes_for_another_number_of_ranks_name_all_numbers(comm):
    with pytest.raises(GridError, match=rf"pipeline=2 x tensor=3 x data=7 x context=1 needs 42 .* has {comm.size}"):
        ProcessGrid.create(comm, axes=Axes(2, 3, 7))


class Interleaved:
    """Ranks dealt to two nodes in turn, as some launchers do."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def split_node(self, ranks_per_node=None, name=""):
        return self._comm.split(self._comm.rank % 2, name=name)


def test_peers_have_the_same_place_on_their_node_and_ranks_keep_their_numbers():
    def view(grid):
        with grid:
            return members(grid, "node"), members(grid, "inter_node"), grid.nodes, grid.position

    for rank, seen in enumerate(run_in_threads(6, lambda comm: view(ProcessGrid.create(comm, ranks_per_node=2)))):
        node, peers = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2, rank % 2 + 4)
        assert seen == (node, peers, ((0, 1), (2, 3), (4, 5)), (0, 1, 2, 3, 4, 5))
    for rank, seen in enumerate(run_in_threads(6, lambda comm: view(ProcessGrid.create(Interleaved(comm))))):
        node, peers = (rank % 2, rank % 2 + 2, rank % 2 + 4), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert seen == (node, peers, ((0, 2, 4), (1, 3, 5)), (0, 3, 1, 4, 2, 5))


@pytest.mark.parametrize("bad", [0, 1.5])
def test_a_node_size_that_makes_no_sense_names_itself(bad):
    with pytest.raises(GridError, match=f"ranks_per_node must be a positive integer or None, got {bad!r}"):
        run_in_threads(1, lambda comm: ProcessGrid.create(comm, ranks_per_node=bad))


def test_rank_0_says_how_groups_that_are_on_several_nodes_come_to_lie_on_one(capfd):
    def make(comm, order):
        with ProcessGrid.create(comm, axes=Axes(tensor=2, data=2, order=order), ranks_per_node=2):
            pass

    run_in_threads(4, lambda comm: make(comm, ("pipeline", "tensor", "data", "context")))
    said = capfd.readouterr().err
    assert said.count("ranks of one tensor group are on several nodes") == 1
    assert "order='pipeline,data,context,tensor' puts each tensor group on one node" in said
    run_in_threads(4, lambda comm: make(comm, ("pipeline", "data", "context", "tensor")))
    assert not capfd.readouterr().err
