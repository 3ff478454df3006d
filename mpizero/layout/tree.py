"""Plan sums in the order of the canonical binary tree: one order of additions for every number of ranks.

TreeNode ``(level, position)`` is the sum of its children ``(level-1, 2*position)`` and ``(level-1, 2*position+1)``; a
missing right child passes the left one through. Leaves are grains (or elements of a tensor). All sums follow this
tree, so the bits of the root depend on the leaves alone.

[Note: tree programs] A sum is passed to the kernels as a program for a stack machine over the rows of a matrix:
``v >= 0`` pushes row v, ``-1`` pops the top and adds it to the one beneath, ``v <= -2`` adds row ``-2 - v`` to the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Program = tuple[int, ...]


class TreeNode(NamedTuple):
    """Identify one node of the tree: the sum of leaves ``position << level`` to ``(position + 1) << level``."""

    level: int
    position: int

    def leaves(self, total: int) -> range:
        """Return the leaves below this node in a tree of ``total`` leaves."""
        return range(self.position << self.level, min((self.position + 1) << self.level, total))


def cover(start: int, stop: int, total: int) -> tuple[TreeNode, ...]:
    """Return the largest nodes, in order, that together are the leaves ``start:stop`` of ``total``."""
    nodes: list[TreeNode] = []
    while start < stop:
        level = 0
        while start % (2 << level) == 0 and min(start + (2 << level), total) <= stop and (1 << level) < total:
            level += 1
        nodes.append(TreeNode(level, start >> level))
        start = min(start + (1 << level), total)
    return tuple(nodes)


def _climb(node: TreeNode, total: int) -> TreeNode:
    """Pass a node up through every parent whose right child is missing."""
    while (1 << node.level) < total and node.position % 2 == 0 and (node.position + 1) << node.level >= total:
        node = TreeNode(node.level + 1, node.position // 2)
    return node


def _joined(left: Program, right: Program) -> Program:
    return (*left, -2 - right[0]) if len(right) == 1 else (*left, *right, -1)


def merge(held: Iterable[tuple[TreeNode, Program]], total: int) -> tuple[tuple[TreeNode, Program], ...]:
    """Add held nodes as far as the tree allows.

    Parameters
    ----------
    held : iterable of (TreeNode, program)
        Disjoint nodes, each with the program that gives its value.
    total : int
        Leaves of the whole tree.

    Returns
    -------
    tuple of (TreeNode, program)
        Disjoint maximal nodes in the order of their leaves.
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
    """Compute ``grain`` into ``row``; then, for each pair, add row ``source`` to row ``target``."""

    grain: int
    row: int
    additions: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class FoldPlan:
    """Describe how one rank sums contiguous grains while it computes them, with few rows."""

    folds: tuple[FoldStep, ...]
    held: tuple[tuple[TreeNode, int], ...]
    rows: int


def fold_plan(start: int, stop: int, total: int) -> FoldPlan:
    """Plan the streaming sum of grains ``start:stop`` of ``total`` with a binary counter of rows."""
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
    """Write the value of ``program`` into row ``row`` of the stack."""

    row: int
    program: Program


@dataclass(frozen=True)
class Wave:
    """Describe one wave: at most one grain a worker, then the sums that its arrival allows.

    Attributes
    ----------
    grains : tuple of int or None
        The grain of each worker, ``None`` where it is absent.
    group_programs : tuple of tuple of program
        For each group, the programs (over its workers' rows) of the nodes it sends.
    merges : tuple of Merge
        The sums of an owner: rows below ``arrivals`` are arrived ones (groups in order, their nodes in order;
        with a single group the workers' rows themselves), the others are rows of its stack.
    arrivals : int
        Number of arriving rows.
    """

    grains: tuple[int | None, ...]
    group_programs: tuple[tuple[Program, ...], ...]
    merges: tuple[Merge, ...]
    arrivals: int


@dataclass(frozen=True)
class WavePlan:
    """Describe all waves of a global batch; the total stands in row ``root`` of ``rows`` stack rows at the end."""

    waves: tuple[Wave, ...]
    rows: int
    root: int


def wave_plan(total: int, groups: Sequence[int]) -> WavePlan:
    """Assign ``total`` grains in waves to groups of ``groups[i]`` workers and plan the owners' streaming sums."""
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
    """Return the programs of each group, the arriving nodes, and the number of arriving rows."""
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
    """Give every merged node a stack row: one that its own sum reads, else a free one."""
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
    """Describe the sum of contiguous grains: every worker sums its own, then all rows are summed once.

    Attributes
    ----------
    folds : tuple of FoldPlan
        One per worker.
    rows : int
        Rows that every worker needs (the most that any of them uses).
    group_programs : tuple of tuple of program
        For each group, the programs of the nodes it sends; row ``w * rows + r`` is row r of the group's worker w.
    root : program
        The total, over the arriving rows (with a single group: over the workers' rows).
    arrivals : int
        Number of arriving rows.
    """

    folds: tuple[FoldPlan, ...]
    rows: int
    group_programs: tuple[tuple[Program, ...], ...]
    root: Program
    arrivals: int


def rows_plan(assigned: Sequence[range], groups: Sequence[int], total: int) -> RowsPlan:
    """Plan the sum of ``total`` grains of which worker w holds the contiguous ``assigned[w]``."""
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
