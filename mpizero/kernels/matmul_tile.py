"""Generate the innermost loops of a matrix product for the vector registers of this CPU, and add arrays as a tree.

A tile is the part of a product that one such loop computes: up to ``HIGH`` rows by :func:`tile_columns` columns. Its
sums stay in registers while the loop runs over the inner axis. Numba has no way to request that, so the loop is written
as LLVM code. Each sum adds its terms in ascending order by fused multiply-adds, however large the tile is and however
wide the registers are: an element of a product has the same bits in every tile, and on every CPU with fused
multiply-adds. :func:`fold` adds whole arrays, in the order of the binary tree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from mpizero.kernels import backend, namespace
from mpizero.kernels.jit import Intrinsic, fetch_line
from mpizero.kernels.machine_code import instruction_set
from mpizero.types import Array

#: Vector registers across a tile's columns.
_ACROSS = 2
#: By instruction set: bytes of a vector register, the rows of a high and of a low tile, and the
#: positions of one step of the loop. The sums of a high tile and its operands fill the registers; those of a low one
#: are enough to hide the time that one addition takes. Several positions a step are for tiles of few sums, beside which
#: the instructions of the loop itself would count.
_REGISTERS = {"avx512": (64, 12, 4, 1), "avx2": (32, 6, 4, 4), "neon": (16, 12, 4, 1)}


@functools.cache
def registers() -> tuple[int, int, int, int]:
    """Return for this CPU, from ``_REGISTERS``: bytes of a vector register, rows of high and low tiles, loop positions.

    A tile is the part of a product that one loop computes; there are tiles with many and with few rows (high and low).
    The last number says how many positions of the inner axis one step of a tile's loop takes. On a CPU without fused
    multiply-adds all four numbers are 0.
    """
    return _REGISTERS.get(instruction_set(), (0, 0, 0, 0))


VECTOR, HIGH, LOW, UNROLL = registers()


def tile_columns(itemsize: int) -> int:
    """Return how many columns a tile of a matrix product has, for elements of ``itemsize`` bytes."""
    return _ACROSS * VECTOR // itemsize


class SumsTile(Intrinsic):
    """Compute ``rows`` x ``tile_columns`` sums of products, from packed operands, and write them to a matrix.

    Calls are ``tile(a, a_at, b, b_at, depth, c, c_at, c_step, columns, first, ahead, at, mask, step, line)``.

    Row i of the left operand at inner position p is element ``a_at + p * rows + i`` of ``a``; column j of the right one
    is element ``b_at + p * tile_columns + j`` of ``b``. The sum of row i and column j, over ``depth`` positions, goes
    to the element ``c_at + i * c_step + j`` of ``c`` for ``j < columns``: the sum overwrites the element if ``first``
    is not 0, otherwise it is added to it. Step p of the loop over positions prefetches an element of ``ahead`` for the
    next tiles: ``at + (p & mask) * step + (p & ~mask) * line``.
    """

    arguments = 15

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __call__(self, a: Any, a_at: int, b: Any, b_at: int, depth: int, c: Any, c_at: int, *rest: Any) -> None:
        """Compute the tile in Python, without fused multiply-adds."""
        (c_step, columns, first), wide = rest[:3], tile_columns(c.itemsize)
        left = a[a_at : a_at + depth * self.rows].reshape(depth, self.rows)
        right = b[b_at : b_at + depth * wide].reshape(depth, wide)
        for i, row in enumerate(left.T @ right):
            target = flat(c)[c_at + i * c_step :][:columns]
            target[...] = row[:columns] if first else target + row[:columns]

    def generate(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        """Write the operation as LLVM code."""
        write = _Vectors(context, builder, signature)
        a, b, c, ahead = (write.pointer(args, i) for i in (0, 2, 5, 10))
        depth, c_step, columns, first, mask, step, line = (args[i] for i in (4, 7, 8, 9, 12, 13, 14))
        outputs = [[write.moved(c, i, c_step, k) for k in range(_ACROSS)] for i in range(self.rows)]
        for i in range(self.rows):
            write.prefetch(outputs[i][0], written=True)
            write.prefetch(outputs[i][-1], written=True)
        sums = self._loop(write, a, b, depth, (ahead, mask, step, line))
        self._store(write, outputs, sums, columns, builder.icmp_signed("!=", first, write.number(0)))

    @staticmethod
    def _store(write: _Vectors, outputs: list[list[Any]], sums: list[list[Any]], columns: Any, first: Any) -> None:
        """Write LLVM code that stores the sums: without masks if the tile is whole and overwrites, else with masks."""
        builder, across = write.builder, len(outputs[0])
        is_full = builder.and_(builder.icmp_signed("==", columns, write.number(across * write.lanes)), first)
        pairs = [(k, *pair) for row in zip(outputs, sums, strict=True) for k, pair in enumerate(zip(*row, strict=True))]
        with builder.if_else(is_full) as (overwrite, others):
            with overwrite:
                for _, pointer, vector in pairs:
                    write.store(vector, pointer)
            with others:
                masks = [write.first_columns(columns, k) for k in range(across)]
                for k, pointer, vector in pairs:
                    write.add_masked(vector, pointer, masks[k], first)

    def _loop(self, write: _Vectors, a: Any, b: Any, depth: Any, ahead: tuple[Any, ...]) -> list[list[Any]]:
        """Write LLVM code for the loops over the inner axis; return the sums by row and vector register.

        Each step of ``UNROLL`` positions prefetches one cache line.
        """
        sums = [[write.zeros] * _ACROSS for _ in range(self.rows)]
        position = write.number(0)
        for count in sorted({UNROLL, 1}, reverse=True):
            position, added, end = write.loop(depth, count, position, sums)
            if count == UNROLL:
                self._prefetch(write, position, *ahead)
            for i in range(count):
                added = self._terms(write, a, b, write.builder.add(position, write.number(i)), added)
            position, sums = end(added)
        return sums

    @staticmethod
    def _prefetch(write: _Vectors, position: Any, memory: Any, mask: Any, step: Any, line: Any) -> None:
        """Write LLVM code that prefetches what the step of the loop at ``position`` has to prefetch."""
        builder = write.builder
        number = builder.udiv(position, write.number(UNROLL))
        near, far = builder.and_(number, mask), builder.and_(number, builder.not_(mask))
        write.prefetch(builder.gep(memory, [builder.add(builder.mul(near, step), builder.mul(far, line))]))

    def _terms(self, write: _Vectors, a: Any, b: Any, position: Any, sums: list[list[Any]]) -> list[list[Any]]:
        """Write LLVM code that adds the terms of one position to the sums; return the new sums."""
        builder = write.builder
        right = builder.gep(b, [builder.mul(position, write.number(_ACROSS * write.lanes))])
        left = builder.gep(a, [builder.mul(position, write.number(self.rows))])
        vectors = [write.load(builder.gep(right, [write.number(k * write.lanes)])) for k in range(_ACROSS)]
        added = []
        for i, row in enumerate(sums):
            factor = write.repeated(builder.load(builder.gep(left, [write.number(i)])))
            added.append([write.fused(factor, vector, total) for vector, total in zip(vectors, row, strict=True)])
        return added


class RunsTile(Intrinsic):
    """Compute sums of products of operands that lie in memory in runs (of successive positions), without packing.

    A tile has ``rows`` rows and as many columns as ``across`` vector registers have elements.

    Calls are ``tile(a, a_at, b, b_at, a_runs, a_first, b_runs, b_first, runs, length, a_step, b_step, start, start_at,
    start_step, c, c_at, c_step, columns)``.

    There are ``runs`` runs of ``length`` positions each. Run r of the left operand begins at element ``a_at +
    a_runs[a_first + r]`` of ``a``, that of the right one at ``b_at + b_runs[b_first + r]`` of ``b``. At position p,
    column j of the right operand is the element ``p * b_step + j`` from there. Row i of the left one is the element ``p
    + i * a_step`` if ``along`` is true (successive positions are neighbours in memory), else ``p * a_step + i``
    (successive rows are). Each sum begins with element ``start_at + i * start_step + j`` of ``start`` (zeros, or sums
    to go on with); terms are added in ascending order, run after run. The sum of row i and column j overwrites the
    element ``c_at + i * c_step + j`` of ``c`` for ``j < columns``. Elements of ``b`` and ``start`` are read for all
    columns of a tile.
    """

    arguments = 19
    #: Rows that share a pointer, where rows lie ``a_step`` apart: with a pointer each they would fill the registers.
    _SHARED = 3

    def __init__(self, rows: int, *, along: bool, across: int = _ACROSS) -> None:
        self.rows, self.along, self.across = rows, along, across

    def __call__(self, *args: Any) -> None:
        """Raise NotImplementedError, because without compiled code NumPy computes the convolutions."""
        raise NotImplementedError

    def generate(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        """Write the operation as LLVM code."""
        write = _Vectors(context, builder, signature)
        a, b, a_runs, b_runs, start, c = (write.pointer(args, i) for i in (0, 2, 4, 6, 12, 15))
        runs, length, a_step, b_step, start_step, c_step, columns = (args[i] for i in (8, 9, 10, 11, 14, 17, 18))
        first = [
            [write.load(write.moved(start, i, start_step, k)) for k in range(self.across)] for i in range(self.rows)
        ]
        run, sums, close = write.loop(runs, 1, write.number(0), first)
        left = builder.gep(a, [builder.load(builder.gep(a_runs, [run]))])
        right = builder.gep(b, [builder.load(builder.gep(b_runs, [run]))])
        lines = [left]
        if self.along:
            lines = [write.moved(left, i, a_step) for i in range(0, self.rows, self._SHARED)]
        position = write.number(0)
        for count in sorted({UNROLL, 1}, reverse=True):
            position, added, end = write.loop(length, count, position, sums)
            for i in range(count):
                at = builder.add(position, write.number(i))
                added = self._terms(write, lines, right, at, a_step, b_step, added)
            position, sums = end(added)
        _, sums = close(sums)
        outputs = [[write.moved(c, i, c_step, k) for k in range(self.across)] for i in range(self.rows)]
        SumsTile._store(write, outputs, sums, columns, write.true)

    def _terms(
        self, write: _Vectors, lines: list[Any], right: Any, at: Any, a_step: Any, b_step: Any, sums: list[list[Any]]
    ) -> list[list[Any]]:
        """Write LLVM code that adds the terms of one position to the sums; return the new sums."""
        builder = write.builder
        right = builder.gep(right, [builder.mul(at, b_step)])
        vectors = [write.load(builder.gep(right, [write.number(k * write.lanes)])) for k in range(self.across)]
        if self.along:
            places = [builder.add(at, builder.mul(write.number(i), a_step)) for i in range(self._SHARED)]
            factors = [builder.gep(lines[i // self._SHARED], [places[i % self._SHARED]]) for i in range(self.rows)]
        else:
            left = builder.gep(lines[0], [builder.mul(at, a_step)])
            factors = [builder.gep(left, [write.number(i)]) for i in range(self.rows)]
        added = []
        for pointer, row in zip(factors, sums, strict=True):
            factor = write.repeated(builder.load(pointer))
            added.append([write.fused(factor, vector, total) for vector, total in zip(vectors, row, strict=True)])
        return added


class VectorTranspose(Intrinsic):
    """Copy a small block of a matrix, transposed: ``transpose(x, at, step, out, out_at, out_step)``.

    The block has n columns, where n is the number of elements of a vector, and n rows; but if ``rows`` is not a
    multiple of n, the block has ``rows`` modulo n rows. Element (i, p) of the block is the element ``at + i * step +
    p`` of ``x``, and becomes the element ``out_at + p * out_step + i`` of ``out``. A whole vector is stored for every
    p, in ascending order; its elements after the block's rows are 0.
    """

    arguments = 6

    def __init__(self, rows: int = 0) -> None:
        self.rows = rows

    def _height(self, lanes: int) -> int:
        return self.rows % lanes or lanes

    def __call__(self, x: Any, at: int, step: int, out: Any, out_at: int, out_step: int) -> None:
        """Copy the block, transposed, in Python instead of machine code; the class describes the arguments."""
        lanes, source = VECTOR // x.itemsize, flat(x)
        for p in range(lanes):
            vector = out[out_at + p * out_step :][:lanes]
            vector[...] = 0
            for i in range(self._height(lanes)):
                vector[i] = source[at + i * step + p]

    def generate(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        """Write the operation as LLVM code."""
        write = _Vectors(context, builder, signature)
        x, out = write.pointer(args, 0), write.pointer(args, 3)
        height = self._height(write.lanes)
        vectors = [write.load(write.moved(x, i, args[2])) for i in range(height)]
        vectors += [write.zeros] * (write.lanes - height)
        half = write.lanes // 2
        for _ in range(write.lanes.bit_length() - 1):  # after each round, rows lie one bit of their number further
            pairs = [(vectors[i], vectors[i + half]) for i in range(half)]
            vectors = [write.interleaved(*pair, high=high) for pair in pairs for high in (False, True)]
        for p, vector in enumerate(vectors):
            write.store(vector, write.moved(out, p, args[5]))


class VectorCopy(Intrinsic):
    """Copy ``count`` elements, by default as many as ``across`` vectors have: ``copy(x, at, out, out_at)``."""

    arguments = 4

    def __init__(self, count: int | None = None, across: int = _ACROSS) -> None:
        self.count, self.across = count, across

    def __call__(self, x: Any, at: int, out: Any, out_at: int) -> None:
        """Copy the elements in Python."""
        count = self.count or self.across * VECTOR // x.itemsize
        out[out_at : out_at + count] = flat(x)[at : at + count]

    def generate(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        """Write the operation as LLVM code."""
        write = _Vectors(context, builder, signature)
        kind = write.of(self.count or self.across * write.lanes)
        write.store(write.load(write.pointer(args, 0), kind), write.pointer(args, 2))


class _Vectors:
    """Write LLVM code for vectors of the element type of a call's first argument."""

    def __init__(self, context: Any, builder: Any, signature: Any) -> None:
        from llvmlite import ir

        self._ir, self._context, self.builder, self._signature = ir, context, builder, signature
        self.element = context.get_data_type(signature.args[0].dtype)
        self.itemsize = context.get_abi_sizeof(self.element)
        self.lanes = VECTOR // self.itemsize
        self.integer, self.vector = ir.IntType(64), self.of(self.lanes)
        self.zeros = ir.Constant(self.vector, [0.0] * self.lanes)
        self.true = ir.Constant(ir.IntType(1), 1)

    def of(self, count: int) -> Any:
        """Return the type of a vector of ``count`` elements."""
        return self._ir.VectorType(self.element, count)

    def number(self, value: int) -> Any:
        """Return an integer constant."""
        return self._ir.Constant(self.integer, value)

    def pointer(self, args: Any, position: int) -> Any:
        """Return a pointer to an element of the array argument ``position``, whose index is the next argument."""
        array = self._context.make_array(self._signature.args[position])(self._context, self.builder, args[position])
        return self.builder.gep(array.data, [args[position + 1]])

    def moved(self, pointer: Any, count: int, step: Any, vectors: int = 0) -> Any:
        """Return ``pointer`` moved by ``count * step`` elements and ``vectors`` vectors."""
        moved = self.builder.mul(self.number(count), step)
        return self.builder.gep(pointer, [self.builder.add(moved, self.number(vectors * self.lanes))])

    def load(self, pointer: Any, kind: Any = None) -> Any:
        """Load a vector, which may begin at any element."""
        return self.builder.load(self.builder.bitcast(pointer, (kind or self.vector).as_pointer()), align=self.itemsize)

    def store(self, vector: Any, pointer: Any) -> None:
        """Store a vector, which may begin at any element."""
        self.builder.store(vector, self.builder.bitcast(pointer, vector.type.as_pointer()), align=self.itemsize)

    def loop(self, stop: Any, count: int, position: Any, sums: list[list[Any]]) -> tuple[Any, list[list[Any]], Any]:
        """Emit the begin of a loop whose steps take ``count`` positions each, from ``position`` on, up to ``stop``.

        Return variables of the emitted code, the position of a step and the ``sums`` before it, and a function that
        emits the end of the loop. It is called with the sums after the step, and returns the variables that hold the
        position and the sums after the loop.
        """
        builder, function = self.builder, self.builder.function
        before, head, body, after = builder.basic_block, *(function.append_basic_block("tile") for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        start, position = position, builder.phi(self.integer)
        totals = [[builder.phi(self.vector) for _ in row] for row in sums]
        further = builder.add(position, self.number(count))
        builder.cbranch(builder.icmp_signed("<=", further, stop), body, after)
        builder.position_at_end(body)

        def end(added: list[list[Any]]) -> tuple[Any, list[list[Any]]]:
            last = builder.basic_block
            builder.branch(head)
            position.add_incoming(start, before)
            position.add_incoming(further, last)
            for old, row, new in zip(sums, totals, added, strict=True):
                for first, total, value in zip(old, row, new, strict=True):
                    total.add_incoming(first, before)
                    total.add_incoming(value, last)
            builder.position_at_end(after)
            return position, totals

        return position, totals, end

    def prefetch(self, pointer: Any, *, written: bool = False) -> None:
        """Prefetch the cache line of ``pointer``, to be read or to be written."""
        fetch_line(self.builder, pointer, written=written)

    def repeated(self, element: Any) -> Any:
        """Return a vector all of whose elements are ``element``."""
        undefined, first = self._ir.Constant(self.vector, self._ir.Undefined), self._ir.IntType(32)
        single = self.builder.insert_element(undefined, element, self._ir.Constant(first, 0))
        return self.builder.shuffle_vector(single, undefined, self._indices([0] * self.lanes))

    def interleaved(self, left: Any, right: Any, *, high: bool) -> Any:
        """Return a vector that alternates the elements of the high (or low) halves of two vectors."""
        start = self.lanes // 2 if high else 0
        order = [start + i // 2 + (i % 2) * self.lanes for i in range(self.lanes)]
        return self.builder.shuffle_vector(left, right, self._indices(order))

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """Return ``a * b + c`` of vectors, rounded once."""
        kind = self._ir.FunctionType(self.vector, [self.vector] * 3)
        return self.builder.call(self._intrinsic("llvm.fma", kind), [a, b, c])

    def first_columns(self, columns: Any, vector: int) -> Any:
        """Return a mask of the elements of vector number ``vector`` that are in a tile's first ``columns`` columns."""
        ir, builder = self._ir, self.builder
        positions = [vector * self.lanes + i for i in range(self.lanes)]
        undefined = ir.Constant(ir.VectorType(self.integer, self.lanes), ir.Undefined)
        single = builder.insert_element(undefined, columns, ir.Constant(ir.IntType(32), 0))
        limits = builder.shuffle_vector(single, undefined, self._indices([0] * self.lanes))
        return builder.icmp_signed("<", ir.Constant(limits.type, positions), limits)

    def add_masked(self, vector: Any, pointer: Any, mask: Any, first: Any) -> None:
        """Store the elements of ``vector`` that ``mask`` selects, or add them to memory if ``first`` is false."""
        ir, builder = self._ir, self.builder
        pointer = builder.bitcast(pointer, vector.type.as_pointer())
        align = ir.Constant(ir.IntType(32), self.itemsize)
        kind = ir.FunctionType(vector.type, [pointer.type, align.type, mask.type, vector.type])
        before = builder.call(self._intrinsic("llvm.masked.load", kind, ".p0"), [pointer, align, mask, self.zeros])
        after = builder.select(first, vector, builder.fadd(before, vector))
        kind = ir.FunctionType(ir.VoidType(), [vector.type, pointer.type, align.type, mask.type])
        builder.call(self._intrinsic("llvm.masked.store", kind, ".p0"), [after, pointer, align, mask])

    def _intrinsic(self, name: str, kind: Any, suffix: str = "") -> Any:
        from numba.core.cgutils import get_or_insert_function

        full = f"{name}.v{self.lanes}f{8 * self.itemsize}{suffix}"
        return get_or_insert_function(self.builder.module, kind, full)

    def _indices(self, order: list[int]) -> Any:
        integer = self._ir.IntType(32)
        return self._ir.Constant(self._ir.VectorType(integer, self.lanes), order)


def flat(x: Any) -> Any:
    """Return a flat view of the memory from a matrix's first to its last element."""
    size = sum((count - 1) * step for count, step in zip(x.shape, x.strides, strict=True)) // x.itemsize + 1
    return np.lib.stride_tricks.as_strided(x, (size,), (x.itemsize,))


#: Elements of a block: a block of all terms is added before the next one, so it stays in the cache.
FOLD_BLOCK = 1 << 15
#: Kernels by the number of terms that they add in one pass.
_KERNELS = {2: "add_two", 4: "add_four", 8: "add_eight"}


def fold(operation: np.ufunc, terms: Sequence[Array] | Array, out: Array) -> None:
    """Combine the arrays ``terms`` by ``operation``, in the order of the binary tree, and write the result to ``out``.

    Term i is leaf i of the tree of ``layout/sum_tree.py``. So terms that are themselves sums of 2, 4, 8, ... successive
    leaves give the same bits as the leaves. Not collective. All arrays have the same shape, of at least one dimension.
    ``out`` may be the first term.
    """
    if len(terms) == 1:
        out[...] = terms[0]
    elif operation is np.add and out.flags.c_contiguous and _has_kernel(terms):
        _add([term.reshape(1, -1) for term in terms], 0, out.reshape(1, -1))
    else:
        _fold_in_blocks(operation, terms, out)


def sums_of_parts(terms: Sequence[Array], axis: int, sizes: Sequence[int]) -> list[Array]:
    """Return the sum of ``terms``, cut along ``axis`` into new contiguous arrays of the given sizes.

    The terms are added in the order of :func:`fold`. Not collective.
    """
    first = terms[0]
    before, after = first.shape[:axis], first.shape[axis + 1 :]
    parts = [namespace(first).empty((*before, size, *after), first.dtype) for size in sizes]
    bounds = pairwise(accumulate(sizes, initial=0))
    if _has_kernel(terms):
        rows, inner = prod(before), prod(after)
        matrices = [term.reshape(rows, first.shape[axis] * inner) for term in terms]
        for part, (start, stop) in zip(parts, bounds, strict=True):
            _add(matrices, start * inner, part.reshape(rows, (stop - start) * inner))
    else:
        for part, (start, stop) in zip(parts, bounds, strict=True):
            fold(np.add, [term[(*(slice(None),) * axis, slice(start, stop))] for term in terms], part)
    return parts


def _has_kernel(terms: Sequence[Array] | Array) -> bool:
    known = len(terms) in _KERNELS and terms[0].dtype.char in "fd"
    return known and all(term.flags.c_contiguous for term in terms)


def _add(terms: Sequence[Array], start: int, out: Array) -> None:
    """Add 2-D arrays, from column ``start`` on, by a kernel that reads all terms in one pass."""
    if out.size:
        getattr(backend(out).reduction, _KERNELS[len(terms)])(*terms, start, out)


def _fold_in_blocks(operation: np.ufunc, terms: Sequence[Array] | Array, out: Array) -> None:
    length = out.shape[0]
    in_blocks = len(terms) > 2 and isinstance(out, np.ndarray)  # on a GPU they would only cost launches
    step = max(1, FOLD_BLOCK * length // max(1, out.size)) if in_blocks else length
    for start in range(0, length, max(1, step)):
        _fold_block(operation, [term[start : start + step] for term in terms], out[start : start + step])


def _fold_block(operation: np.ufunc, terms: Sequence[Array], out: Array | None = None) -> Array:
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1  # the leaves below the root's left child
    left, right = _fold_block(operation, terms[:half], out), _fold_block(operation, terms[half:])
    result: Array = operation(left, right, out=out)
    return result
