"""Plan sums in the order of one fixed binary tree, so that every number of ranks adds in the same order.

The node ``(level, position)`` of the tree is the sum of its children ``(level-1, 2*position)`` and
``(level-1, 2*position+1)``. Where the right child does not exist, the node equals its left child. The leaves are the
gradients of the grains (or the elements of a tensor). All sums follow this tree, so the bits of the root depend on the
leaves alone. A *row* is one copy of the gradient vector, held by one rank; a *worker* is a rank that computes grains.

[Note: tree programs] A sum is passed to the kernels as a program for a stack machine over the rows of a matrix:
``v >= 0`` pushes row v, ``-1`` pops the top of the stack and adds it to the entry below, and ``v <= -2`` adds row
``-2 - v`` to the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Program = tuple[int, ...]


class TreeNode(NamedTuple):
    """Identify one node of the tree: the sum of ``1 << level`` leaves, from leaf ``position << level`` on."""

    level: int
    position: int

    def leaves(self, total: int) -> range:
        """Return the range of the leaves below this node in a tree of ``total`` leaves."""
        return range(self.position << self.level, min((self.position + 1) << self.level, total))


def cover(start: int, stop: int, total: int) -> tuple[TreeNode, ...]:
    """Return the largest nodes, in order, that together cover the leaves ``start:stop`` of ``total`` leaves."""
    nodes: list[TreeNode] = []
    while start < stop:
        level = 0
        while start % (2 << level) == 0 and min(start + (2 << level), total) <= stop and (1 << level) < total:
            level += 1
        nodes.append(TreeNode(level, start >> level))
        start = min(start + (1 << level), total)
    return tuple(nodes)


def _climb(node: TreeNode, total: int) -> TreeNode:
    """Replace a node by its parent as long as the parent has no right child, and so has the same value."""
    while (1 << node.level) < total and node.position % 2 == 0 and (node.position + 1) << node.level >= total:
        node = TreeNode(node.level + 1, node.position // 2)
    return node


def _joined(left: Program, right: Program) -> Program:
    return (*left, -2 - right[0]) if len(right) == 1 else (*left, *right, -1)


def merge(held: Iterable[tuple[TreeNode, Program]], total: int) -> tuple[tuple[TreeNode, Program], ...]:
    """Plan the additions of the given nodes, as far as the tree allows: two children give their parent.

    Parameters
    ----------
    held : iterable of (TreeNode, program)
        Nodes without common leaves, each with the program that computes its value.
    total : int
        Number of leaves of the whole tree.

    Returns
    -------
    tuple of (TreeNode, program)
        The nodes that remain, in the order of their leaves, each with the program that computes its value.
    """
    stack: list[tuple[TreeNode, Program]] = []
    for node, program in sorted(held, key=lambda item: item[0].position << item[0].level):
        top, sums = _climb(node, total), program
        while top.position % 2 and stack and stack[-1][0] == TreeNode(top.level, top.position - 1):
            _, left = stack.pop()
            top, sums = _climb(TreeNode(top.level + 1, top.position // 2), total), _joined(left, sums)
        stack.append((top, sums))
    return tuple(stack)


class FoldStep(NamedTuple):
    """Describe one step of a :class:`FoldPlan`: a rank computes a grain, then adds rows.

    The gradient of ``grain`` is written to row ``row``. Then, for each pair (target, source) of ``additions`` in order,
    row ``source`` is added to row ``target``.
    """

    grain: int
    row: int
    additions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FoldPlan:
    """Describe how one rank sums contiguous grains while it computes them, in as few rows as possible.

    Attributes
    ----------
    folds : tuple of FoldStep
        The steps, one for each grain.
    held : tuple of (TreeNode, int)
        The partial sums at the end: the nodes of the tree, each with the row that holds it.
    rows : int
        Number of rows that are needed.
    """

    folds: tuple[FoldStep, ...]
    held: tuple[tuple[TreeNode, int], ...]
    rows: int


def fold_plan(start: int, stop: int, total: int) -> FoldPlan:
    """Plan how one rank sums grains ``start:stop`` of ``total`` while it computes them, one after the other."""
    stack: list[tuple[TreeNode, int]] = []
    folds: list[FoldStep] = []
    used = 0
    for grain in range(start, stop):
        taken = {row for _, row in stack}
        row = next(r for r in range(len(taken) + 1) if r not in taken)
        used = max(used, row + 1)
        node, target, additions = _climb(TreeNode(0, grain), total), row, []
        while node.position % 2 and stack and stack[-1][0] == TreeNode(node.level, node.position - 1):
            _, left = stack.pop()
            additions.append((left, target))
            node, target = _climb(TreeNode(node.level + 1, node.position // 2), total), left
        stack.append((node, target))
        folds.append(FoldStep(grain, row, tuple(additions)))
    return FoldPlan(tuple(folds), tuple(stack), used)


class Merge(NamedTuple):
    """Describe one sum of an owner in a wave: the value of ``program`` is written to row ``row`` of its stack rows."""

    row: int
    program: Program


@dataclass(frozen=True)
class Wave:
    """Describe one wave: every worker computes at most one grain, then the owners add what they can.

    An *owner* is a rank that owns a shard of the gradients; it keeps its partial sums of earlier waves in *stack rows*.

    Attributes
    ----------
    grains : tuple of int or None
        The grain of each worker; None for a worker without a grain in this wave.
    group_programs : tuple of tuple of program
        For each group, the programs, over the rows of its workers, that compute the nodes that the group sends.
    merges : tuple of Merge
        The sums that every owner then computes. In their programs, rows below ``arrivals`` are those that have arrived
        (the groups in order, and each group's nodes in order; with a single group the rows of its workers). Row
        ``arrivals + r`` is stack row r.
    arrivals : int
        Number of rows that arrive in this wave.
    """

    grains: tuple[int | None, ...]
    group_programs: tuple[tuple[Program, ...], ...]
    merges: tuple[Merge, ...]
    arrivals: int


@dataclass(frozen=True)
class WavePlan:
    """Describe all waves of a global batch.

    An owner needs ``rows`` stack rows; at the end the sum of all grains is in stack row ``root``.
    """

    waves: tuple[Wave, ...]
    rows: int
    root: int


def wave_plan(total: int, groups: Sequence[int]) -> WavePlan:
    """Assign ``total`` grains to workers in waves and plan the sums of each wave; group i has ``groups[i]`` workers."""
    workers = sum(groups)
    stack: list[tuple[TreeNode, int]] = []
    waves: list[Wave] = []
    used = 1
    for first in range(0, total, workers):
        grains = tuple(g if g < total else None for g in range(first, first + workers))
        programs, arrived, count = _arrivals(grains, groups, total)
        merged = merge([*arrived, *((node, (count + row,)) for node, row in stack)], total)
        free = [r for r in range(len(stack) + len(merged) + 1) if r not in {row for _, row in stack}]
        stack, merges = _place(merged, count, free)
        used = max([used, *(row + 1 for _, row in stack)])
        waves.append(Wave(grains, programs, merges, count))
    return WavePlan(tuple(waves), used, stack[0][1] if stack else 0)


def _arrivals(
    grains: Sequence[int | None], groups: Sequence[int], total: int
) -> tuple[tuple[tuple[Program, ...], ...], list[tuple[TreeNode, Program]], int]:
    """Return the programs of each group in a wave, the nodes that arrive at an owner, and how many rows arrive."""
    programs: list[tuple[Program, ...]] = []
    arrived: list[tuple[TreeNode, Program]] = []
    first = 0
    for size in groups:
        leaves: list[tuple[TreeNode, Program]] = [
            (TreeNode(0, g), (i,)) for i, g in enumerate(grains[first : first + size]) if g is not None
        ]
        if len(groups) == 1:
            return ((),), leaves, size
        sent = merge(leaves, total)
        arrived += [(node, (len(arrived) + i,)) for i, (node, _) in enumerate(sent)]
        programs.append(tuple(program for _, program in sent))
        first += size
    return tuple(programs), arrived, len(arrived)


def _place(
    merged: Sequence[tuple[TreeNode, Program]], arrivals: int, free: list[int]
) -> tuple[list[tuple[TreeNode, int]], tuple[Merge, ...]]:
    """Choose a stack row for every merged node: a row that its own sum reads, otherwise a free row."""
    stack, merges = [], []
    for node, program in merged:
        own = [row - arrivals for row in _rows_read(program) if row >= arrivals]
        row = own[0] if own else free.pop(0)
        stack.append((node, row))
        if program != (arrivals + row,):
            merges.append(Merge(row, program))
    return stack, tuple(merges)


def _rows_read(program: Program) -> list[int]:
    return [v if v >= 0 else -2 - v for v in program if v != -1]


@dataclass(frozen=True)
class RowsPlan:
    """Describe the sum of all grains where every worker first sums its own contiguous grains.

    Attributes
    ----------
    folds : tuple of FoldPlan
        How each worker sums its own grains.
    rows : int
        Number of rows that every worker allocates: the most that any worker uses.
    group_programs : tuple of tuple of program
        For each group, the programs that compute the nodes that it sends. In them row ``w * rows + r`` is row r of the
        group's worker w. Empty with a single group.
    root : program
        The program that computes the sum of all grains from the rows that arrive (with a single group: from the rows of
        its workers).
    arrivals : int
        Number of rows that arrive.
    """

    folds: tuple[FoldPlan, ...]
    rows: int
    group_programs: tuple[tuple[Program, ...], ...]
    root: Program
    arrivals: int


def rows_plan(assigned: Sequence[range], groups: Sequence[int], total: int) -> RowsPlan:
    """Plan the sum of ``total`` grains where worker w computes the grains ``assigned[w]``.

    The workers are divided into groups; group i has the next ``groups[i]`` workers.
    """
    folds = tuple(fold_plan(grains.start, grains.stop, total) for grains in assigned)
    rows = max([1, *(plan.rows for plan in folds)])
    programs: list[tuple[Program, ...]] = []
    arrived: list[tuple[TreeNode, Program]] = []
    first = 0
    for size in groups:
        leaves = [(n, (w * rows + r,)) for w, plan in enumerate(folds[first : first + size]) for n, r in plan.held]
        sent = merge(leaves, total)
        if len(groups) == 1:
            arrived = list(sent)
        else:
            arrived += [(node, (len(arrived) + i,)) for i, (node, _) in enumerate(sent)]
            programs.append(tuple(program for _, program in sent))
        first += size
    root = merge(arrived, total)
    arrivals = len(arrived) if len(groups) > 1 else groups[0] * rows
    return RowsPlan(folds, rows, tuple(programs), root[0][1] if root else (), arrivals)
