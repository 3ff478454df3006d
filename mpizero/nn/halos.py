"""Define functions for a user's own layers of fields: they move parts between ranks and sum over space; and adjoints.

A layer whose fields may be cut over ranks has a method ``domain_form(domain)``, which returns the layer for a rank's
part of the field; it gives ``domain`` as ``group`` to the functions of this module. ``group=None`` means that one rank
has the whole field, so that one code serves both. :func:`halo_exchange` brings the neighbours' positions around a part,
:func:`redistribute` cuts a field in another way, :func:`domain_sum` adds up all of space.

Values that are moved keep their bits, and :func:`domain_sum` has the same bits on every cut: it adds one partial sum
for each spatial tile, by the binary tree. The adjoints of the first two add copies of a position. How many there are
depends on the cut, so their sums are the same within rounding only. A layer that wants the bits of one process calls
:func:`halo_exchange` for the gradient of its output, too, and adds up each element of the gradient of its input in an
order of its own (docs/domain.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mpizero._util.checks import is_whole
from mpizero._util.names import explains
from mpizero.errors import ConfigError, DataError, GridError
from mpizero.layout.fields import Cut, tree_sum
from mpizero.nn.fields import require_field
from mpizero.nn.space import WHOLE, Domain, Space, Wanted
from mpizero.types import Array

#: Number of positions around a part: one number for all axes, or for each axis a number or a pair (before, after).
Widths = int | Sequence[int | tuple[int, int]]


@explains
def halo_exchange(
    x: Array, widths: Widths, *, periodic: bool | Sequence[bool] = False, group: Space | None = None
) -> Array:
    """Return this rank's part of a field with the positions around it, which other ranks have. Collective.

    Parameters
    ----------
    x : Array
        This rank's part (samples, space, channels) of a field, float32 or float64.
    widths : int or sequence
        Number of positions on each side: for all axes, or for each axis a number or a pair (before, after). If they
        are more than the next rank has, ranks further away send positions, too.
    periodic : bool or sequence of bool
        What the positions outside of the field hold, for all axes or by axis: True continues the field with its other
        end, False with zeros.
    group : Domain or None
        The ranks that share the field: the argument of the layer's ``domain_form``. None: ``x`` is the whole field.

    Returns
    -------
    Array
        An array whose axes of space are longer by their widths, or ``x`` itself if all widths are 0.

    Raises
    ------
    ConfigError
        If ``widths`` or ``periodic`` do not fit the axes of space.
    DataError
        On all ranks, if their parts do not make up one field.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.comm.model_group import CommunicatorGroup
    >>> from mpizero.layout.fields import Cut
    >>> from mpizero.nn.space import Domain
    >>> u = np.arange(10.0).reshape(1, 10, 1)
    >>> mz.nn.halo_exchange(u, [(1, 0)], periodic=True).ravel()  # one process
    array([9., 0., 1., 2., 3., 4., 5., 6., 7., 8., 9.])
    >>> def halo(comm):
    ...     domain = Domain(Cut((2,)), CommunicatorGroup(comm))  # in a model, domain_form(domain) gets it
    ...     part = u[:, slice(0, 5) if comm.rank == 0 else slice(5, 10)]
    ...     return mz.nn.halo_exchange(part, 2, group=domain).ravel()
    >>> for part in mz.testing.run_in_threads(2, halo):
    ...     print(part)
    [0. 0. 0. 1. 2. 3. 4. 5. 6.]
    [3. 4. 5. 6. 7. 8. 9. 0. 0.]
    """
    x, space = require_field(x, None, "halo_exchange"), group or WHOLE
    sides, modes = _around(x.ndim - 2, widths, periodic, "halo_exchange")
    extents = _extents(x, space, "halo_exchange", _called(sides, modes))
    return space.fetch(x, extents, _wide(space, extents, sides), "halo exchange", modes)


@explains
def halo_exchange_adjoint(
    dy: Array, widths: Widths, *, periodic: bool | Sequence[bool] = False, group: Space | None = None
) -> Array:
    """Return the adjoint of :func:`halo_exchange`: each position gets the sum of its copies' gradients. Collective.

    The copies of a position are added in the order of the ranks that have them. The result is exact within rounding,
    but its bits depend on the cut: where the field is cut, positions have copies that they do not have in one process.

    Parameters
    ----------
    dy : Array
        This rank's gradient of what :func:`halo_exchange` has returned.
    widths, periodic, group
        Those of the call of :func:`halo_exchange`.

    Returns
    -------
    Array
        The gradient of this rank's part of the field.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> mz.nn.halo_exchange_adjoint(np.ones((1, 6, 1)), 1, periodic=True).ravel()  # both ends have a copy
    array([2., 1., 1., 2.])
    """
    dy, space = require_field(dy, None, "halo_exchange_adjoint"), group or WHOLE
    sides, modes = _around(dy.ndim - 2, widths, periodic, "halo_exchange_adjoint")
    for n, (before, after) in zip(dy.shape[1:-1], sides, strict=True):
        if n < before + after:
            raise DataError(
                f"halo_exchange_adjoint: dy has {dy.shape[1:-1]} positions, fewer than the widths {sides} around a "
                "part; give the gradient of what halo_exchange has returned, and the widths that it was given"
            )
    inner = (slice(b, n - a) for n, (b, a) in zip(dy.shape[1:-1], sides, strict=True))
    extents = _extents(dy[(slice(None), *inner)], space, "halo_exchange_adjoint", _called(sides, modes))
    return space.fetch_adjoint(dy, extents, _wide(space, extents, sides), "halo exchange adjoint", modes)


@explains
def redistribute(
    x: Array, source: Sequence[int] | None, target: Sequence[int] | None, *, group: Space | None = None
) -> Array:
    """Return this rank's part of a field by another cut: positions move between ranks. Collective.

    For example, a cut (1, n) gives each rank whole lines of the first axis, for a transform along it.

    Parameters
    ----------
    x : Array
        This rank's part (samples, space, channels) of a field by the cut ``source``, float32 or float64.
    source : sequence of int or None
        Number of parts of each axis; their product is the number of ranks. None is the cut of ``group``.
    target : sequence of int or None
        As ``source``, or 1 for all axes: every rank gets the whole field.
    group : Domain or None
        The ranks that share the field: the argument of the layer's ``domain_form``. None: ``x`` is the whole field.

    Returns
    -------
    Array
        The part by the cut ``target``, or ``x`` itself if both cuts are the same.

    Raises
    ------
    GridError
        If a cut has another number of parts than there are ranks.
    DataError
        On all ranks, if their parts do not make up one field.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.comm.model_group import CommunicatorGroup
    >>> from mpizero.layout.fields import Cut
    >>> from mpizero.nn.space import Domain
    >>> u = np.arange(48.0).reshape(1, 8, 6, 1)
    >>> def lines(comm):
    ...     domain = Domain(Cut((2, 1)), CommunicatorGroup(comm))  # in a model, domain_form(domain) gets it
    ...     part = u[:, slice(0, 4) if comm.rank == 0 else slice(4, 8)]
    ...     columns = mz.nn.redistribute(part, None, (1, 2), group=domain)
    ...     back = mz.nn.redistribute(columns, (1, 2), None, group=domain)
    ...     return columns.shape, np.array_equal(back, part)
    >>> mz.testing.run_in_threads(2, lines)
    [((1, 8, 3, 1), True), ((1, 8, 3, 1), True)]
    """
    x = require_field(x, None, "redistribute")
    space, aim = _cuts(x.ndim - 2, source, target, group or WHOLE)
    extents = _extents(x, space, "redistribute", f"target={aim.parts}")
    return space.fetch(x, extents, _boxes(aim, extents), "redistribute", target=aim)


@explains
def redistribute_adjoint(
    dy: Array, source: Sequence[int] | None, target: Sequence[int] | None, *, group: Space | None = None
) -> Array:
    """Return the adjoint of :func:`redistribute`: the gradients of all copies of a position, added up. Collective.

    If every rank has got the whole field, each rank gets the sum, over the ranks in ascending order, of the gradients
    of its part. In all other cases it is ``redistribute(dy, target, source)``.

    Parameters
    ----------
    dy : Array
        This rank's gradient of what :func:`redistribute` has returned.
    source, target, group
        Those of the call of :func:`redistribute`.

    Returns
    -------
    Array
        The gradient of this rank's part by the cut ``source``.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> from mpizero.comm.model_group import CommunicatorGroup
    >>> from mpizero.layout.fields import Cut
    >>> from mpizero.nn.space import Domain
    >>> def summed(comm):
    ...     domain = Domain(Cut((2,)), CommunicatorGroup(comm))
    ...     return mz.nn.redistribute_adjoint(np.full((1, 8, 1), 1.0 + comm.rank), None, (1,), group=domain).ravel()
    >>> mz.testing.run_in_threads(2, summed)
    [array([3., 3., 3., 3.]), array([3., 3., 3., 3.])]
    """
    dy = require_field(dy, None, "redistribute_adjoint")
    space, aim = _cuts(dy.ndim - 2, source, target, group or WHOLE)
    at_aim = Domain(aim, space.group) if isinstance(space, Domain) and aim.size > 1 else WHOLE
    extents = _extents(dy, at_aim, "redistribute_adjoint", f"target={aim.parts}")
    return space.fetch_adjoint(dy, extents, _boxes(aim, extents), "redistribute adjoint", target=aim)


def _of_space(*parts: Array) -> Array:
    """Return the sum over space of the first of ``parts``, a spatial tile of a field: (samples, channels)."""
    total: Array = parts[0].sum(axis=tuple(range(1, parts[0].ndim - 1)))
    return total


@explains
def domain_sum(
    x: Array | Sequence[Array],
    function: Callable[..., Any] = _of_space,
    *,
    group: Space | None = None,
    share: bool = False,
) -> Array:
    """Return a sum over all of space, with the same bits however space is cut. Collective.

    Each spatial tile has a partial sum; the partial sums are added by the binary tree.

    Parameters
    ----------
    x : Array or sequence of Array
        This rank's part (samples, space, channels) of one field, or of each of several fields of the same extents.
    function : callable
        Computes the partial sum of a tile from the tile's part of each field, which is empty where an axis has fewer
        positions than tiles. The default sums over space, and returns (samples, channels).
    group : Domain or None
        The ranks that share the fields: the argument of the layer's ``domain_form``. None: ``x`` has whole fields.
    share : bool
        True returns this rank's share: the shares of all ranks add up to the sum, as gradients of parameters must.
        False returns the sum on all ranks.

    Returns
    -------
    Array
        The sum of the partial sums of all tiles.

    Raises
    ------
    DataError
        If the fields have different extents. On all ranks, if their parts do not make up one field.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> u = np.arange(12.0).reshape(1, 12, 1)
    >>> mz.nn.domain_sum(u)
    array([[66.]])
    >>> float(mz.nn.domain_sum([u, u], lambda u, v: (u * v).sum()))
    506.0
    """
    fields = [require_field(one, None, "domain_sum") for one in ([x] if hasattr(x, "shape") else x)]
    if len({one.shape[:-1] for one in fields}) != 1:
        raise DataError(
            f"domain_sum: takes fields of the same samples and positions, got {[one.shape for one in fields]}"
        )
    space, axes = group or WHOLE, fields[0].ndim - 2
    nodes = space.boxes(space.extents(fields[0], "domain_sum", f"share={share}"))
    sums = [
        [np.asarray(function(*(_tile(one, box) for one in fields))) for box in boxes[:, 3 - axes :].tolist()]
        for boxes in nodes
    ]
    if not share:
        return _added(space.gather_tiles(np.stack([one for node in sums for one in node]), 0, "domain sum"))
    return space.add_up(np.stack([_added(np.stack(node)) for node in sums]), "domain sum")


@explains
def domain_sum_adjoint(dy: Array, shape: Sequence[int], *, group: Space | None = None) -> Array:
    """Return the adjoint of :func:`domain_sum` with its default function: a field with one value at all positions.

    Collective. The gradients ``dy`` of all ranks are added up, because :func:`domain_sum` gives every rank the sum.

    Parameters
    ----------
    dy : Array
        This rank's gradient of the sum, (samples, channels).
    shape : sequence of int
        Shape (samples, space, channels) of this rank's part of the field.
    group : Domain or None
        That of the call of :func:`domain_sum`.

    Returns
    -------
    Array
        The gradient of this rank's part of the field. It cannot be written to.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> mz.nn.domain_sum_adjoint(np.array([[2.0]]), (1, 4, 1)).ravel()
    array([2., 2., 2., 2.])
    """
    total = group.group.all_reduce(np.ascontiguousarray(dy), "domain sum adjoint") if isinstance(group, Domain) else dy
    samples, *space, channels = shape
    if total.shape != (samples, channels):
        raise DataError(
            f"domain_sum_adjoint: dy has shape {total.shape}, the sum over space of a field of shape {tuple(shape)} "
            f"has {(samples, channels)}"
        )
    return np.broadcast_to(total.reshape(samples, *(1,) * len(space), channels), tuple(shape))


def _added(terms: Array) -> Array:
    """Return the sum of the terms on the first axis, whose number is a power of two, by the binary tree."""
    return np.asarray(tree_sum(terms, np.add))


def _tile(x: Array, box: Sequence[Sequence[int]]) -> Array:
    """Return a spatial tile of a field as a contiguous array: then the bits of its sum do not depend on its strides."""
    return np.ascontiguousarray(x[(slice(None), *(slice(*pair) for pair in box))])


def _extents(x: Array, space: Space, where: str, settings: str) -> tuple[int, ...]:
    """Return the extents of the whole field; raise :class:`DataError` if it has no positions.

    ``settings`` describes the call; it must be the same on all ranks.
    """
    extents = space.extents(x, where, settings)
    if min(extents) < 1:
        raise DataError(f"{where}: a field of extents {extents} has no positions; give at least one on each axis")
    return extents


def _around(
    axes: int, widths: Widths, periodic: bool | Sequence[bool], where: str
) -> tuple[list[tuple[int, int]], list[str]]:
    """Return by axis the widths before and after a part, and what is outside of the field: "periodic" or "zeros"."""
    by_axis = [widths] * axes if is_whole(widths, 0) else list(widths) if isinstance(widths, Sequence) else []
    sides = [(one, one) if is_whole(one, 0) else one for one in by_axis]
    pairs = [tuple(pair) for pair in sides if isinstance(pair, Sequence) and len(pair) == 2]
    if len(pairs) != axes or len(sides) != axes or not all(is_whole(n, 0) for pair in pairs for n in pair):
        raise ConfigError(
            f"{where}: widths={widths!r} is not allowed; expected a whole number >= 0, or one for each of the {axes} "
            "axes of space, or a pair (before, after) for each"
        )
    flags = [periodic] * axes if isinstance(periodic, bool) else list(periodic)
    if len(flags) != axes:
        raise ConfigError(f"{where}: periodic={periodic!r} has {len(flags)} values for {axes} axes of space")
    return [(int(b), int(a)) for b, a in pairs], ["periodic" if flag else "zeros" for flag in flags]


def _called(sides: Sequence[tuple[int, int]], modes: Sequence[str]) -> str:
    return f"widths={list(sides)}, periodic={[mode == 'periodic' for mode in modes]}"


def _wide(space: Space, extents: Sequence[int], sides: Sequence[tuple[int, int]]) -> Wanted:
    """Return, for each axis and each of the parts into which ranks cut it, a range: its positions and those around it.

    ``sides`` is, by axis, how many positions are added before and after a part.
    """
    return space.wanted(extents, lambda axis, first, stop: (first - sides[axis][0], stop + sides[axis][1]))


def _boxes(cut: Cut, extents: Sequence[int]) -> Wanted:
    """Return, for each axis and each of the parts into which ``cut`` cuts it, the range of its positions."""
    return tuple(tuple(pairwise(starts)) for starts in cut.starts(extents))


def _cuts(axes: int, source: Sequence[int] | None, target: Sequence[int] | None, space: Space) -> tuple[Space, Cut]:
    """Return a :class:`Space` whose fields are cut as ``source`` says, and the cut that ``target`` says.

    Both are the numbers of parts of each axis; None is the cut of ``space``. Raise :class:`GridError` if they do not
    fit the ranks of ``space``.
    """
    own = space.cut_of(axes)
    before, after = (own if parts is None else Cut(tuple(parts)) for parts in (source, target))
    for name, cut, sizes in (("source", before, {own.size}), ("target", after, {own.size, 1})):
        if len(cut.parts) != axes or cut.size not in sizes:
            whole = "" if name == "source" else f", or {(1,) * axes}: the whole field on every rank"
            raise GridError(
                f"redistribute: {name}={cut.parts} makes {cut.size} parts of {len(cut.parts)} axes; expected as many "
                f"parts as there are ranks, {own.size}, of the field's {axes} axes{whole}"
            )
    return (Domain(before, space.group) if isinstance(space, Domain) else space), after
