"""Copy host memory past the caches, and read and write memory to measure its bandwidth.

:func:`copy_past_cache` uses nontemporal stores. An ordinary store first loads the cache line that it overwrites, so a
copy moves three bytes through memory where two are enough. libc's ``memcpy`` avoids that only for very large blocks
(3/4 of the last-level cache: 190 MB on some machines). After this copy, the data is not in the cache, so use it for
data that is not read soon.

The kernels after :func:`copy_past_cache` do little but read and write memory. An array that is both read and written is
updated in place, as in mpizero's other kernels. The arithmetic is at most one addition per element, far less than what
a core can do while it waits for the element.
"""

from __future__ import annotations

from typing import Any

from mpizero.kernels.jit import Intrinsic, kernel
from mpizero.types import Array

#: Bytes of one cache line; the address of a copy's target is a multiple of it.
LINE = 64
PAGE = 4096


class _StoreLine(Intrinsic):
    """Copy ``LINE`` bytes, from byte ``index`` of ``source`` on, to the same bytes of ``target``, past the cache.

    The address of byte ``index`` of ``target`` must be a multiple of ``LINE``.
    """

    arguments = 3

    def __call__(self, target: Array, index: int, source: Array) -> None:
        """Copy the bytes in Python, through the cache."""
        target[index : index + LINE] = source[index : index + LINE]

    def generate(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        """Write an unaligned load and a store that is marked as nontemporal."""
        from llvmlite import ir

        line = ir.VectorType(ir.IntType(8), LINE)
        to, index, from_ = args
        source, destination = (
            builder.bitcast(
                builder.gep(context.make_array(kind)(context, builder, array).data, [index]), line.as_pointer()
            )
            for kind, array in ((signature.args[2], from_), (signature.args[0], to))
        )
        stored = builder.store(builder.load(source, align=1), destination, align=LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


class _Fence(Intrinsic):
    """Order the stores of a thread: other threads see all stores before the fence earlier than any store after it."""

    arguments = 0

    def __call__(self) -> None:
        """Do nothing, because Python needs no fence."""

    def generate(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        """Write a sequentially consistent fence."""
        builder.fence("seq_cst")


_store_line, _fence = _StoreLine(), _Fence()


@kernel("void(const u1[::1], u1[::1])")
def copy_past_cache(source: Array, target: Array) -> None:
    """Copy all bytes of ``source`` to ``target``, past the cache, as one stream.

    Both arrays have the same size, and the address of ``target`` is a multiple of ``LINE``. Copying lines of four pages
    in turn, as glibc does for large blocks, took 2.6 times as long as an ordinary copy on a third-generation AMD EPYC.
    """
    lines = source.size // LINE
    for line in range(lines):
        _store_line(target, line * LINE, source)
    rest, tail = source[lines * LINE :], target[lines * LINE :]
    for i in range(rest.size):
        tail[i] = rest[i]
    _fence()


@kernel("i8(const i8[::1])")
def read(x: Array) -> int:
    """Read one array and return the exclusive or of its integers, which can be vectorized (a sum of floats cannot)."""
    total = 0
    for i in range(x.size):
        total ^= x[i]
    return total


@kernel("void(const T[::1], T[::1])")
def copy(x: Array, out: Array) -> None:
    """Read one array and write another: copy ``x`` to ``out``."""
    for i in range(out.size):
        out[i] = x[i]


@kernel("void(const T[::1], const T[::1], T[::1])")
def add_two(a: Array, b: Array, out: Array) -> None:
    """Read two arrays and write another: write ``a + b`` to ``out``."""
    for i in range(out.size):
        out[i] = a[i] + b[i]


@kernel("void(const T[::1], const T[::1], const T[::1], const T[::1], T[::1])")
def add_four(a: Array, b: Array, c: Array, d: Array, out: Array) -> None:
    """Read four arrays and write another: write ``(a + b) + (c + d)`` to ``out``."""
    for i in range(out.size):
        out[i] = (a[i] + b[i]) + (c[i] + d[i])


@kernel("void(const T[::1], T[::1], T[::1], T[::1])")
def update(g: Array, w: Array, m: Array, v: Array) -> None:
    """Read four arrays and write three of them: add ``g`` to ``w``, ``m`` and ``v``, as an optimizer's step does."""
    for i in range(w.size):
        w[i] = w[i] + g[i]
        m[i] = m[i] + g[i]
        v[i] = v[i] + g[i]


@kernel("void(const T[::1], const T[::1], T[::1], T[::1], T[::1])")
def add_and_update(a: Array, b: Array, w: Array, m: Array, v: Array) -> None:
    """Read five arrays and write three of them: add ``a`` to ``w`` and ``v``, and ``b`` to ``m``."""
    for i in range(w.size):
        w[i] = w[i] + a[i]
        m[i] = m[i] + b[i]
        v[i] = v[i] + a[i]
