"""Plan sums in the order of one fixed binary tree, so that the order does not depend on the number of ranks.

The node ``(level, position)`` of the tree is the sum of its children ``(level-1, 2*position)`` and
``(level-1, 2*position+1)``. Where the right child does not exist, the node equals its left child. The leaves are the
gradients of the grains, which are fixed slices of the global batch (or the elements of a tensor). All sums follow this
tree, so the bits of the root depend on the leaves alone. A *row* is an array with one gradient vector or one partial
sum of them; a *worker* is a rank that computes grains. There are three kinds of plans: workers compute grains in rounds
(:func:`round_plan`), each worker sums its own grains first (:func:`rows_plan`), or workers that share memory take the
next part of their grains whenever they are free (:func:`dynamic_parts`).

[Note: tree programs] A sum is passed to the kernels as a *program*, a tuple of integers that is executed by a stack
machine over the rows of a matrix: ``v >= 0`` pushes row v, ``-1`` pops the top of the stack and adds it to the entry
below, and ``v <= -2`` adds row ``-2 - v`` to the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeVar

from mpizero.types import Array

Program = tuple[int, ...]
T = TypeVar("T")

#: Name of this order of additions, for checkpoints.
ORDER = "binary tree"


class TreeNode(NamedTuple):
    """Identify one node of the tree: the sum of ``2**level`` leaves, from leaf ``position * 2**level`` on."""

    level: int
    position: int

    def leaves(self, total: int) -> range:
        """Return the indices of the leaves (of grains, say) whose sum this node is, in a tree of ``total`` leaves."""
        return range(self.position << self.level, min((self.position + 1) << self.level, total))


def cover(start: int, stop: int, total: int) -> tuple[TreeNode, ...]:
    """Return, in order, the fewest nodes of a tree of ``total`` leaves that together sum leaves ``start:stop``."""
    nodes: list[TreeNode] = []
    while start < stop:
        level = 0
        while start % (2 << level) == 0 and min(start + (2 << level), total) <= stop and (1 << level) < total:
            level += 1
        nodes.append(TreeNode(level, start >> level))
        start = min(start + (1 << level), total)
    return tuple(nodes)


@dataclass(frozen=True)
class Leaves:
    """Say which leaf of the tree each part of a grain is, where grains are computed in several parts.

    Part i, counted over all grains, is part ``i % parts`` of grain ``i // parts``. Each grain has a subtree of its own,
    with as many leaves as the least power of two that is not below ``parts``; the last of these leaves may be missing.
    So the parts of a grain are added first, and grains are added in the same order, however many parts they have.

    Parameters
    ----------
    count : int
        Number of parts of all grains.
    parts : int
        Number of parts of a grain.
    """

    count: int
    parts: int = 1

    @classmethod
    def of(cls, total: int | Leaves) -> Leaves:
        """Return ``total`` as an object of this class; if it is a number of grains, each is computed in one part."""
        return total if isinstance(total, Leaves) else cls(total)

    @cached_property
    def wide(self) -> int:
        """The number of leaves of a grain's subtree (the part of the tree that adds the grain's parts).

        Missing leaves count, too.
        """
        return 1 << (self.parts - 1).bit_length()

    def number(self, part: int) -> int:
        """Return the index of the tree's leaf for part number ``part``, counted over all grains."""
        return part if self.wide == self.parts else part // self.parts * self.wide + part % self.parts

    @cached_property
    def end(self) -> int:
        """The index after that of the last leaf of the tree."""
        return self.number(self.count - 1) + 1 if self.count else 0

    def missing(self, leaf: int) -> bool:
        """Tell whether the tree has no leaf of index ``leaf``.

        There is none after the last part of a grain in the grain's subtree, and none after the last part of all grains.
        """
        return leaf >= self.end or leaf % self.wide >= self.parts


def _climb(node: TreeNode, leaves: Leaves) -> TreeNode:
    """Return the highest node of the tree that is the sum of the same leaves as ``node``.

    A parent has the value of its left child if it has no right child.
    """
    while (
        (1 << node.level) < leaves.end and node.position % 2 == 0 and leaves.missing((node.position + 1) << node.level)
    ):
        node = TreeNode(node.level + 1, node.position // 2)
    return node


def _joined(left: Program, right: Program) -> Program:
    return (*left, -2 - right[0]) if len(right) == 1 else (*left, *right, -1)


def merge(nodes: Iterable[tuple[TreeNode, Program]], total: int | Leaves) -> tuple[tuple[TreeNode, Program], ...]:
    """Plan sums of the given nodes: replace two children by their parent as often as possible.

    Parameters
    ----------
    nodes : iterable of (TreeNode, program)
        Nodes without common leaves, each with the program (which rows to add in which order, see [Note: tree programs])
        that computes its value.
    total : int or Leaves
        The leaves of the whole tree, or their number.

    Returns
    -------
    tuple of (TreeNode, program)
        The nodes after all replacements, in the order of their leaves, each with the program that computes its value.
    """
    leaves, stack = Leaves.of(total), list[tuple[TreeNode, Program]]()
    for node, program in sorted(nodes, key=lambda item: item[0].position << item[0].level):
        top, sums = _climb(node, leaves), program
        while top.position % 2 and stack and stack[-1][0] == TreeNode(top.level, top.position - 1):
            _, left = stack.pop()
            top, sums = _climb(TreeNode(top.level + 1, top.position // 2), leaves), _joined(left, sums)
        stack.append((top, sums))
    return tuple(stack)


def evaluate(program: Program, values: Sequence[float] | Array) -> float:
    """Return the sum that a program computes if row v is the number ``values[v]``; an empty program gives 0.

    A program says which rows to add in which order, see [Note: tree programs].
    """
    stack: list[float] = []
    for v in program:
        if v >= 0:
            stack.append(float(values[v]))
        elif v == -1:
            right = stack.pop()
            stack[-1] += right
        else:
            stack[-1] += float(values[-2 - v])
    return stack[0] if stack else 0.0


@cache
def leaves_program(count: int) -> Program:
    """Return the program (which rows to add in which order) that sums rows 0 to ``count`` - 1 as the leaves of a tree.

    The program is empty if ``count`` is 0.
    """
    merged = merge(((TreeNode(0, row), (row,)) for row in range(count)), count)
    return merged[0][1] if merged else ()


class FoldStep(NamedTuple):
    """Describe one step of a :class:`FoldPlan`: a rank computes a grain, then adds the gradient to stored partial sums.

    A row is an array that holds a gradient or a partial sum. The gradient of grain ``grain`` is written to row ``row``,
    or to no row if ``row`` is None. The gradient is then added to row ``targets[0]``, the resulting sum to row
    ``targets[1]``, and so on.
    """

    grain: int
    row: int | None
    targets: tuple[int, ...]


@dataclass(frozen=True)
class FoldPlan:
    """Describe how one rank sums the gradients of its grains while it computes them, with few rows of memory.

    A row is an array that holds a gradient or a partial sum.

    Attributes
    ----------
    folds : tuple of FoldStep
        The steps, one for each grain.
    sums : tuple of (TreeNode, int)
        The partial sums at the end: nodes of the tree, each with the index of the row that holds its value.
    rows : int
        How many rows the rank needs.
    """

    folds: tuple[FoldStep, ...]
    sums: tuple[tuple[TreeNode, int], ...]
    rows: int

    @property
    def uses_scratch(self) -> bool:
        """Tell whether some grain's gradient gets no row of its own, so that the rank writes it to a scratch array."""
        return any(fold.row is None for fold in self.folds)


class Folding:
    """Plan how one rank sums the gradients of its grains, grain by grain, without knowing its later grains.

    Parameters
    ----------
    total : int or Leaves
        Number of grains of all ranks, or their parts.
    limit : int or None
        If ``limit`` is given, a gradient that is immediately added to another row gets a row of its own only if one of
        the first ``limit`` rows is free. Without a row of its own, a gradient is written part by part to a scratch
        array, and each part is added to the other row before the next part is written. Gradients that are added later
        always get a row.

    Attributes
    ----------
    sums : list of (TreeNode, int)
        The partial sums so far: nodes of the tree, each with the index of the row that holds its value.
    rows : int
        How many rows have been used.
    """

    def __init__(self, total: int | Leaves, limit: int | None = None) -> None:
        self.sums: list[tuple[TreeNode, int]] = []
        self.rows = 0
        self._leaves, self._limit = Leaves.of(total), limit

    def add(self, grain: int) -> FoldStep:
        """Return the rows to which the gradient of ``grain`` is written and then added.

        Grains are passed in ascending order. A row is memory for one gradient or partial sum.
        """
        taken = {row for _, row in self.sums}
        node, targets = _climb(TreeNode(0, self._leaves.number(grain)), self._leaves), list[int]()
        while node.position % 2 and self.sums and self.sums[-1][0] == TreeNode(node.level, node.position - 1):
            targets.append(self.sums.pop()[1])
            node = _climb(TreeNode(node.level + 1, node.position // 2), self._leaves)
        row = next(r for r in range(len(taken) + 1) if r not in taken)
        has_row = not targets or self._limit is None or row < self._limit
        self.rows = max(self.rows, row + 1 if has_row else 0)
        self.sums.append((node, [row, *targets][-1]))
        return FoldStep(grain, row if has_row else None, tuple(targets))


def fold_plan(grains: Iterable[int], total: int | Leaves, *, limit: int | None = None) -> FoldPlan:
    """Plan how one rank sums the gradients of ``grains``, ascending indices below ``total``, by :class:`Folding`.

    Only neighbours in the tree can be added. So consecutive grains need few rows (memory for one gradient or partial
    sum), and grains that are separated by grains of other ranks need one row each.
    """
    folding = Folding(total, limit)
    folds = tuple(folding.add(grain) for grain in grains)
    return FoldPlan(folds, tuple(folding.sums), folding.rows)


class Merge(NamedTuple):
    """Describe one sum of a round: an owner of gradients executes ``program`` and writes the sum to a stack row.

    Attributes
    ----------
    row : int
        Index of the stack row (a row of the owner that keeps a partial sum from round to round).
    program : tuple of int
        Which rows to add in which order, see [Note: tree programs].
    """

    row: int
    program: Program


@dataclass(frozen=True)
class Round:
    """Describe one round: every worker computes at most one grain, then owners sum as far as the order allows.

    A *worker* is a rank that computes grains. Workers form groups, for example one per node. Each group sums the
    gradients of its grains, as far as the order of the tree allows, and sends the partial sums to the owners. An
    *owner* is a rank that owns a shard of the gradients, and keeps partial sums of earlier rounds in its *stack rows*.

    Attributes
    ----------
    grains : tuple of int or None
        The grain of each worker; None for a worker without a grain in this round.
    group_programs : tuple of tuple of program
        For each group, one program (which rows to add in which order, see [Note: tree programs]) for each partial sum
        that the group sends. In these programs row w is the gradient of the group's worker w. With a single group there
        are no programs.
    merges : tuple of Merge
        The sums that every owner computes from the arriving rows and its stack rows. In their programs, rows below
        ``arrivals`` are the rows that have arrived: the partial sums of the first group in order, then those of the
        second group and so on (with a single group, the gradients of its workers). Row ``arrivals + r`` is stack row r.
    arrivals : int
        Number of rows that arrive at every owner in this round.
    """

    grains: tuple[int | None, ...]
    group_programs: tuple[tuple[Program, ...], ...]
    merges: tuple[Merge, ...]
    arrivals: int


@dataclass(frozen=True)
class RoundPlan:
    """Describe all rounds of a global batch.

    Attributes
    ----------
    rounds : tuple of Round
        The rounds, in order.
    rows : int
        How many stack rows every owner of gradients needs to keep partial sums from round to round.
    root : int
        Index of the stack row that holds the sum of all grains after the last round.
    """

    rounds: tuple[Round, ...]
    rows: int
    root: int


def round_plan(total: int | Leaves, groups: Sequence[int]) -> RoundPlan:
    """Assign ``total`` grains, or parts of grains, to workers in rounds and plan the sums of each round.

    A worker is a rank that computes grains, and ``groups[i]`` is how many workers group i has (those of node i, say).
    Of n workers, worker w computes grain k * n + w in round k.
    """
    workers, leaves = sum(groups), Leaves.of(total)
    stack: list[tuple[TreeNode, int]] = []
    rounds: list[Round] = []
    used = 1
    for first in range(0, leaves.count, workers):
        grains = tuple(g if g < leaves.count else None for g in range(first, first + workers))
        programs, arrived, count = _arrivals(grains, groups, leaves)
        merged = merge([*arrived, *((node, (count + row,)) for node, row in stack)], leaves)
        free = [r for r in range(len(stack) + len(merged) + 1) if r not in {row for _, row in stack}]
        stack, merges = _choose_rows(merged, count, free)
        used = max([used, *(row + 1 for _, row in stack)])
        rounds.append(Round(grains, programs, merges, count))
    return RoundPlan(tuple(rounds), used, stack[0][1] if stack else 0)


def _arrivals(
    grains: Sequence[int | None], groups: Sequence[int], total: Leaves
) -> tuple[tuple[tuple[Program, ...], ...], list[tuple[TreeNode, Program]], int]:
    """Return the sums that the groups compute in a round, and the rows that then arrive at the owners.

    ``grains`` are the grains of all workers in this round (None for a worker without a grain), and ``groups[i]`` is the
    number of workers of group i. An owner is a rank that owns a shard of the gradients.

    Returns
    -------
    tuple
        For each group, the programs (which rows to add in which order) of the sums that it sends; the tree nodes whose
        values arrive at an owner, each with the number of its arriving row, as a program of one row; and the number of
        arriving rows.
    """
    leaves: list[list[tuple[TreeNode, Program]]]
    leaves = [
        [(TreeNode(0, total.number(g)), (i,)) for i, g in enumerate(group) if g is not None]
        for group in _cut(grains, groups)
    ]
    if len(groups) == 1:
        return ((),), leaves[0], groups[0]
    programs, arrived = _sent(leaves, total)
    return programs, arrived, len(arrived)


def _cut(items: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """Cut a sequence into parts of the given sizes."""
    return [items[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


def _sent(
    groups: Iterable[Iterable[tuple[TreeNode, Program]]], total: int | Leaves
) -> tuple[tuple[tuple[Program, ...], ...], list[tuple[TreeNode, Program]]]:
    """Return the programs by which each group sums its nodes of the tree, and the nodes that all groups send.

    A program says which rows to add in which order. Each node that is sent comes with a program of one row, by which
    the receiver reads it: the index of its row among the rows that all groups send.
    """
    sums = [merge(nodes, total) for nodes in groups]
    programs = tuple(tuple(program for _, program in group) for group in sums)
    return programs, [(node, (row,)) for row, (node, _) in enumerate(chain.from_iterable(sums))]


def _choose_rows(
    merged: Sequence[tuple[TreeNode, Program]], arrivals: int, free: list[int]
) -> tuple[list[tuple[TreeNode, int]], tuple[Merge, ...]]:
    """Choose a stack row for every node of ``merged``: a stack row that the node's program reads, or else a free one.

    A stack row is memory in which the owner of gradients keeps a partial sum from round to round. A program says which
    rows to add in which order: its rows below ``arrivals`` are those that arrive from workers in this round, and its
    row ``arrivals + r`` is stack row r.

    ``free`` lists the free stack rows. Return the nodes with their stack rows, and the sums that write these rows (a
    node whose value is already in its stack row needs no sum).
    """
    stack, merges = [], []
    for node, program in merged:
        reusable = [row - arrivals for row in _rows_read(program) if row >= arrivals]
        row = reusable[0] if reusable else free.pop(0)
        stack.append((node, row))
        if program != (arrivals + row,):
            merges.append(Merge(row, program))
    return stack, tuple(merges)


def _rows_read(program: Program) -> list[int]:
    return [v if v >= 0 else -2 - v for v in program if v != -1]


@dataclass(frozen=True)
class RowsPlan:
    """Describe the sum of all grains where every worker first sums those of its grains that are neighbours in the tree.

    A *worker* is a rank that computes grains, and a *row* is an array that holds a gradient or a partial sum. Workers
    form groups, for example one per node, and each group sums the rows of its workers before it sends any.

    Attributes
    ----------
    folds : tuple of FoldPlan
        How each worker sums its own grains.
    rows : int
        Number of rows that every worker allocates: the most that any worker uses.
    group_programs : tuple of tuple of program
        For each group, one program (which rows to add in which order, see [Note: tree programs]) for each partial sum
        that the group sends. In these programs row ``w * rows + r`` is row r of the group's worker w. With a single
        group there are no programs.
    root : program
        The program that computes the sum of all grains from the partial sums that the groups have sent. With a single
        group it computes the sum from the rows of the workers, numbered as in ``group_programs``.
    arrivals : int
        Number of rows that ``root`` reads from: those that arrive, or with a single group all rows of its workers.
    """

    folds: tuple[FoldPlan, ...]
    rows: int
    group_programs: tuple[tuple[Program, ...], ...]
    root: Program
    arrivals: int


def rows_plan(
    assigned: Sequence[Iterable[int]],
    groups: Sequence[int],
    total: int | Leaves,
    *,
    scratch: bool = False,
    rows: int | None = None,
) -> RowsPlan:
    """Plan the sum of ``total`` grains where worker w computes and sums the grains ``assigned[w]``.

    ``groups[i]`` is how many workers group i has (those of node i, say). The workers of a group are consecutive.
    A worker has ``rows`` rows, arrays for one gradient or partial sum each; None means as few as possible. ``scratch``
    says whether a gradient that is added to a row immediately may do without a row of its own, see :class:`Folding`.
    """

    def planned(limit: int | None) -> tuple[FoldPlan, ...]:
        return tuple(fold_plan(grains, total, limit=limit) for grains in assigned)

    if rows is None:
        rows = max([1, *(plan.rows for plan in planned(0 if scratch else None))])
    folds = planned(rows)
    sums = [[(n, (w * rows + r,)) for w, plan in enumerate(part) for n, r in plan.sums] for part in _cut(folds, groups)]
    programs, arrived = _sent(sums, total) if len(groups) > 1 else ((), sums[0])
    root = merge(arrived, total)
    arrivals = len(arrived) if len(groups) > 1 else groups[0] * rows
    return RowsPlan(folds, rows, programs, root[0][1] if root else (), arrivals)


def dynamic_parts(grains: range, workers: int) -> tuple[range, ...]:
    """Cut consecutive grains into parts, in order, for ``workers`` ranks that each take the next part when free.

    Each part is a node of the binary tree in which gradients are summed, so its grains are added to one another first.
    The number of grains in a part is at most that of the remaining grains, divided by twice the number of workers
    (guided self-scheduling, Polychronopoulos and Kuck 1987, divides by the number of workers). So parts become smaller
    towards the end, down to single grains.
    """
    parts: list[range] = []
    start = grains.start
    while start < grains.stop:
        most = max(1, (grains.stop - start) // (2 * workers))
        size = 1 << most.bit_length() - 1
        while start % size:
            size //= 2
        parts.append(range(start, start + size))
        start += size
    return tuple(parts)


def dynamic_rows(parts: Sequence[range], workers: int, total: int) -> int:
    """Return how many rows each of ``workers`` ranks needs to take the ``parts`` of a sum of ``total`` grains.

    A row holds one partial sum. A rank keeps the sums of the parts that it has taken; the sums of two parts that are
    children of one tree node become one sum. To take a part of ``2**k`` grains, a rank needs up to k + 1 free rows;
    with fewer it takes no further part. The returned number of rows is enough for any selection of parts, or for twice
    a rank's equal share of the parts, whichever needs fewer rows. So at most half of the ranks stop early, and the
    others take all remaining parts.
    """
    most, limit = 1, -(-2 * len(parts) // workers)
    sums: list[tuple[TreeNode, int]] = []  # nodes; most sums of a node on a rank that lacks some of it
    for part in parts:
        node, count = TreeNode(_level(part), part.start >> _level(part)), 0
        most = max(most, min(sum(max(1, n) for _, n in sums), limit) + rows_of_part(part))
        while node.position % 2 and sums and sums[-1][0] == TreeNode(node.level, node.position - 1):
            left = sums.pop()[1]
            count = max(left + max(count, 1), max(left, 1) + count)
            node = TreeNode(node.level + 1, node.position // 2)
        sums.append((node, count))
    return min(most, total)


def rows_of_part(part: range) -> int:
    """Return how many free rows (for one partial sum each) a rank needs to add up the gradients of a part's grains."""
    return _level(part) + 1


def _level(part: range) -> int:
    return len(part).bit_length() - 1
