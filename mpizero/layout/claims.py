"""Cut the grains of a node into parts that its ranks claim one after the other: whole subtrees of the sum."""

from __future__ import annotations

from collections.abc import Sequence

from mpizero.layout.tree import TreeNode


def claim_parts(grains: range, workers: int) -> tuple[range, ...]:
    """Cut consecutive grains into parts, in order, for ``workers`` ranks that each claim the next part when free.

    Each part is a node of the binary tree in which gradients are summed: its grains are added before anything else.
    A part has at most a ``2 * workers``-th of the grains that are left (guided self-scheduling, Polychronopoulos and
    Kuck 1987, with half of their sizes), so that the parts become smaller towards the end, down to single grains.
    """
    parts: list[range] = []
    start = grains.start
    while start < grains.stop:
        share = max(1, (grains.stop - start) // (2 * workers))
        size = 1 << share.bit_length() - 1
        while start % size:
            size //= 2
        parts.append(range(start, start + size))
        start += size
    return tuple(parts)


def claim_rows(parts: Sequence[range], workers: int, total: int) -> int:
    """Return the number of rows that each of ``workers`` ranks needs to claim ``parts``, in a sum of ``total`` grains.

    A row holds one partial sum. A rank holds the parts that it has claimed, of which two that are children of one node
    of the tree are one sum; for the next part of ``2**k`` grains it needs up to k + 1 rows more, and where it has fewer
    left it claims nothing. The rows are enough for whatever it claims, or for twice a rank's share of the parts, if
    these are fewer. So not more than half of the ranks stop, and the others claim all that is left.
    """
    most, share = 1, -(-2 * len(parts) // workers)
    held: list[tuple[TreeNode, int]] = []  # nodes, with the most partial sums that a rank holds of each, if not all
    for part in parts:
        node, count = TreeNode(_level(part), part.start >> _level(part)), 0
        most = max(most, min(sum(max(1, n) for _, n in held), share) + rows_of_part(part))
        while node.position % 2 and held and held[-1][0] == TreeNode(node.level, node.position - 1):
            left = held.pop()[1]
            count = max(left + max(count, 1), max(left, 1) + count)
            node = TreeNode(node.level + 1, node.position // 2)
        held.append((node, count))
    return min(most, total)


def rows_of_part(part: range) -> int:
    """Return how many rows a rank needs while it computes a part, besides those of the partial sums that it holds."""
    return _level(part) + 1


def _level(part: range) -> int:
    return len(part).bit_length() - 1
