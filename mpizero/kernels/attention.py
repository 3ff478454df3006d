"""Compute causal attention on the CPU, head by head and sample by sample, with the tiles of :mod:`.matmul`.

Queries, keys and values are packed for the tiles directly from ``qkv``, the array that holds them, without a copy in
between. Tiles whose scores are all masked are skipped. The bits of a head's results do not depend on the other heads
and samples.

``geometry`` holds, in this order: the numbers of heads, of positions and of features of a head; and the distances, in
elements of ``qkv``, from queries to keys (and from keys to values), from one sample to the next, from one head to the
next, and from one position to the next.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from mpizero.kernels.cpu.attention import gradient_of_first, softmax_of_first
from mpizero.kernels.cpu.layers import SCRATCH
from mpizero.kernels.jit import apart, kernel
from mpizero.kernels.matmul import first_line, nothing_ahead, pack_left, pack_right, tiles
from mpizero.kernels.matmul_tile import HIGH, VECTOR, tile_columns
from mpizero.types import Array


@cache
def memory_size(length: int, size: int, itemsize: int) -> int:
    """Return the number of elements of temporary memory for sequences of ``length`` and heads of ``size`` features."""
    wide, slack = tile_columns(itemsize), 2 * (VECTOR + 64) // itemsize
    panels = -(-size // wide)
    return max(length * size + wide * size, HIGH * length + panels * wide * length) + slack


@kernel("void(T[::1], const i8[::1], i8, i8, const T[::1], T[::1], T[::1], T[::1], T[::1])", scratch=SCRATCH)
def causal_attention(
    qkv: Array, geometry: Array, start: int, stop: int, scale1: Array, probs: Array, out: Array, memory: Array,
    scratch: Array,
) -> None:  # fmt: skip
    """Write the attention of the heads ``start:stop`` to ``out`` (samples, length, heads, size).

    Heads are numbered over all samples. Their probabilities are written to ``probs`` (samples * heads, length, length);
    if ``probs`` has room for one head only, each head overwrites the one before. ``scale1`` has one element, the factor
    on scores. ``geometry`` is described in the docstring of the module.
    """
    heads, length, size, kind = geometry[0], geometry[1], geometry[2], geometry[3]
    sample, head, row = geometry[4], geometry[5], geometry[6]
    for pair in range(start, stop):
        at = pair // heads * sample + pair % heads * head
        weights = min(pair, probs.size // (length * length) - 1) * length * length
        causal_scores(qkv, at, row, qkv, at + kind, row, length, size, probs, weights, memory)
        for query in range(length):
            softmax_of_first(probs[weights + query * length :][:length], query + 1, scale1[0], scratch)
        to = (pair // heads * length * heads + pair % heads) * size
        causal_sums(probs, weights, True, qkv, at + 2 * kind, row, length, size, out, to, heads * size, memory)


@kernel(
    "void(T[::1], const i8[::1], i8, i8, const T[::1], T[::1], i8, T[::1], T[::1], T[::1], T[::1], T[::1])",
    scratch=SCRATCH,
)
def causal_attention_backward(
    qkv: Array, geometry: Array, start: int, stop: int, scale1: Array, probs: Array, stored: int, dout: Array,
    dqkv: Array, dscores: Array, memory: Array, scratch: Array,
) -> None:  # fmt: skip
    """Write the gradients of :func:`causal_attention` for the heads ``start:stop`` to ``dqkv``.

    ``dqkv`` is (samples, length, 3, heads, size), and ``dout`` the gradient of the output. If ``stored`` is 0,
    ``probs`` has room for one head, and the probabilities are computed again, with the bits that they had in the
    forward pass. ``dscores`` is temporary memory for one head's scores.
    """
    heads, length, size, kind = geometry[0], geometry[1], geometry[2], geometry[3]
    sample, head, row = geometry[4], geometry[5], geometry[6]
    width = heads * size
    for pair in range(start, stop):
        at = pair // heads * sample + pair % heads * head
        above = (pair // heads * length * heads + pair % heads) * size
        to = (pair // heads * length * heads * 3 + pair % heads) * size
        weights = pair * length * length if stored else 0
        if not stored:
            causal_scores(qkv, at, row, qkv, at + kind, row, length, size, probs, 0, memory)
            for query in range(length):
                softmax_of_first(probs[query * length :][:length], query + 1, scale1[0], scratch)
        causal_scores(dout, above, width, qkv, at + 2 * kind, row, length, size, dscores, 0, memory)
        causal_sums(probs, weights, False, dout, above, width, length, size, dqkv, to + 2 * width, 3 * width, memory)
        for query in range(length):
            p, dp = probs[weights + query * length :][:length], dscores[query * length :][:length]
            gradient_of_first(p, dp, query + 1, scale1[0], scratch)
        causal_sums(dscores, 0, True, qkv, at + kind, row, length, size, dqkv, to, 3 * width, memory)
        causal_sums(dscores, 0, False, qkv, at, row, length, size, dqkv, to + width, 3 * width, memory)


@apart
def causal_scores(
    x: Any, x_at: Any, x_step: Any, y: Any, y_at: Any, y_step: Any, length: Any, size: Any, out: Any, out_at: Any,
    memory: Any,
) -> None:  # fmt: skip
    """Write ``x[i] @ y[j]`` to element ``out_at + i * length + j`` of ``out`` for all ``j <= i``.

    Because whole tiles are computed, elements of some pairs with ``j > i`` are written, too.

    Row i of ``x`` consists of ``size`` elements, from index ``x_at + i * x_step`` on; row j of ``y`` likewise begins at
    index ``y_at + j * y_step``.
    """
    wide = tile_columns(out.itemsize)
    pack_left(x, x_at, x_step, True, length, size, memory, 0)
    right = first_line(memory, length * size + VECTOR // out.itemsize)
    for panel in range((length + wide - 1) // wide):
        left = panel * wide
        width, top = min(wide, length - left), left // HIGH * HIGH
        pack_right(y, y_at + left * y_step, y_step, False, width, 1, size, memory, right)
        to = out_at + top * length + left
        tiles(memory, top * size, right, length - top, size, out, to, length, width, True, memory, nothing_ahead())


@apart
def causal_sums(
    weights: Any, at: Any, by_rows: Any, y: Any, y_at: Any, y_step: Any, length: Any, size: Any, out: Any, out_at: Any,
    out_step: Any, memory: Any,
) -> None:  # fmt: skip
    """Write weighted sums of the rows of ``y``, with causally masked weights, to the rows of ``out``.

    Weight (i, j) is the element ``at + i * length + j`` of ``weights``; it is 0 for ``j > i``. With ``by_rows``, row i
    of ``out`` is the sum over j of weight (i, j) times row j of ``y``; otherwise row j of ``out`` is the sum over i of
    weight (i, j) times row i of ``y``. Row i of ``y`` begins at index ``y_at + i * y_step``, and row i of ``out`` at
    index ``out_at + i * out_step``.
    """
    wide = tile_columns(weights.itemsize)
    panels = (size + wide - 1) // wide
    right = first_line(memory, HIGH * length + VECTOR // weights.itemsize)
    for panel in range(panels):
        left = panel * wide
        pack_right(y, y_at + left, y_step, True, min(wide, size - left), 1, length, memory, right + left * length)
    for top in range(0, length, HIGH):
        rows = min(HIGH, length - top)
        begin, terms = (0, top + rows) if by_rows else (top, length - top)
        start = at + (top * length if by_rows else top * length + top)
        pack_left(weights, start, length, by_rows, rows, terms, memory, 0)
        for panel in range(panels):
            left = panel * wide
            panel_at, to = right + left * length + begin * wide, out_at + top * out_step + left
            width = min(wide, size - left)
            tiles(memory, 0, panel_at, rows, terms, out, to, out_step, width, True, memory, nothing_ahead())
