"""Define :class:`Mesh`: the ranks that train together, their coordinates on the parallel axes, and shared resources.

A mesh owns all resources that must be closed: communicators, process groups and the thread that watches for timeouts.
Training settings, which are plain data, are in :class:`~mpizero.sharding.config.Config`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Any, Self
from weakref import WeakSet

from mpizero._util.checks import Unexpected, flag, is_whole, whole
from mpizero._util.names import explains
from mpizero._util.settings import Settings, duration, many, optional, setting
from mpizero.comm import Communicator, ProcessGrid, as_communicator
from mpizero.comm.agreement import check_call
from mpizero.errors import GridError
from mpizero.guard import guard
from mpizero.guard.watchdog import Watchdog
from mpizero.layout import Axes
from mpizero.layout.fields import Box, Cut

#: The axes that split a model; the axis ``data`` replicates it. A domain takes the place of the axis ``context``.
SPLITTING = ("pipeline", "tensor", "context")
#: The default order of the axes, slowest first.
ORDER = "pipeline,tensor,data"


def _replicas(value: Any) -> int:
    if not is_whole(value, 1) and value != -1:
        raise Unexpected("-1 (all remaining ranks) or a whole number >= 1")
    return int(value)


def _axis_order(value: Any) -> str:
    order = ORDER if value is None else value
    try:
        Axes.build(1, order=order if isinstance(order, str) else "")
    except GridError:
        raise Unexpected(
            "pipeline, tensor and data once each (and context, which else comes last), slowest first, "
            "separated by commas"
        ) from None
    return str(order)


@dataclass(frozen=True, kw_only=True)
class AxisSettings(Settings):
    """Hold the sizes and the order of the parallel axes; :class:`Mesh` describes the settings."""

    pipeline: int = setting(1, whole(1), resume="free")
    tensor: int = setting(1, whole(1), resume="free")
    context: int = setting(1, whole(1), resume="free")
    domain: tuple[int, ...] = setting(
        (), many(whole(1), what="the number of parts of each axis of space, such as (2, 2)"), resume="free"
    )
    data: int = setting(-1, _replicas, resume="free")
    order: str = setting(ORDER, _axis_order, resume="free")

    def check_combination(self) -> None:
        """Raise an error if a domain is cut too finely, or combined with a tensor or context group."""
        super().check_combination()
        if not self.domain:
            return
        try:
            Cut(self.domain)
        except GridError as error:
            raise self.reject("domain", str(error).partition("not allowed: ")[2]) from None
        for axis in ("tensor", "context"):
            if getattr(self, axis) > 1:
                raise self.reject(
                    axis, f"must be 1 with {self.named('domain')}: the ranks that share space have all layers whole"
                )

    @property
    def sample_parts(self) -> int:
        """Number of ranks that share each sample: by its sequence or by its space."""
        return self.context * prod(self.domain)

    @property
    def splits_model(self) -> bool:
        """True if a rank holds only a part of the model or of each sample."""
        return self.pipeline * self.tensor * self.sample_parts > 1

    def axes_of(self, ranks: int) -> Axes:
        """Return the sizes and the order of the axes for a job of ``ranks`` ranks.

        Raises
        ------
        GridError
            If the product of the sizes is not the number of ranks.
        """
        sizes = self.values_of(AxisSettings) | {"context": self.sample_parts}
        del sizes["domain"]
        try:
            return Axes.build(ranks, **sizes)
        except GridError as error:
            if not self.domain:
                raise
            raise GridError(str(error).replace(f"context={self.sample_parts}", f"domain={self.domain}")) from None


@dataclass(frozen=True, kw_only=True)
class NodeSettings(Settings):
    """Hold the settings that say which ranks share memory; :class:`Mesh` describes them."""

    ranks_per_node: int | None = setting(None, optional(whole(1)), resume="free")
    share_node_memory: bool = setting(True, flag, resume="free")
    shard_nodes: int | None = setting(None, optional(whole(1)), resume="free")


@explains
@dataclass(frozen=True, eq=False, kw_only=True)
class Mesh(NodeSettings, AxisSettings):
    """Hold the ranks that train together, as a grid of pipeline x tensor x data x context ranks. A context manager.

    The first use of the communicator or of a group is collective over ``comm``, and so is :meth:`close`. Close the
    models before the mesh, or create them in a ``with`` block inside the ``with`` block of the mesh.

    Parameters
    ----------
    comm : mpi4py communicator, InMemoryCommunicator, "self" or None
        Communicator of the ranks that train together; the library duplicates it. None means all ranks that a launcher
        such as mpiexec has started, or one process without a launcher; "self" means this process alone.
    pipeline, tensor, context : int
        Number of pipeline stages, of ranks over which each layer is split, and of ranks over which each sequence is
        split. Values above 1 need a model of blocks (docs/concepts.md).
    domain : tuple of int
        Number of parts of each axis of space into which fields are cut, such as (2, 2); () cuts none. The ranks that
        share each sample, as many as the parts of a field, take the place of a context group (docs/fields.md); tensor
        and context must be 1.
    data : int
        Number of replicas of the model; -1 makes as many as the number of ranks allows.
    order : str or None
        Names of the axes, slowest first: ranks that differ only on the last axis have consecutive numbers. None is
        "pipeline,tensor,data". The context axis comes last if it is not named.
    ranks_per_node : int or None
        Number of consecutive ranks in each simulated node; None uses the real nodes.
    share_node_memory : bool
        Whether replicated data has one copy per node, in an MPI-3 shared window; otherwise every rank has a copy of its
        own.
    shard_nodes : int or None
        Number of nodes over which ZeRO-3 (FSDP) shards parameters; each group of so many nodes keeps all of them.
        Gradients and optimizer state are sharded over all nodes. Must divide the number of nodes; None, and a number
        not less than that of the nodes, shards over all nodes (docs/nodes.md).
    timeout : float or None
        A rank that has been inside one collective for this many seconds ends the job with a report of every rank's
        Python line; None is no timeout. The seconds count from the last bytes of files or messages that have moved.
    embedded : bool
        Whether the process belongs to another program, which only calls this library. The library then installs no
        hooks, signal handlers or allocator options, starts no threads and opens no ports. It ends no process: an
        error is always an exception, and there is no timeout (docs/embedding.md).

    Raises
    ------
    ConfigError
        If a value is invalid.
    GridError
        If the product of the axis sizes is not the number of ranks; raised when the axes or groups are first used.

    Examples
    --------
    >>> import mpizero as mz
    >>> def picture(comm):
    ...     with mz.Mesh(comm, pipeline=2, tensor=2) as mesh:
    ...         return str(mesh)
    >>> print(mz.testing.run_in_threads(8, picture)[0])
    8 ranks: pipeline 2 x tensor 2 x data 2
    pipeline 0: tensor 0: 0 1, tensor 1: 2 3
    pipeline 1: tensor 0: 4 5, tensor 1: 6 7
    """

    comm: Any = field(default=None, kw_only=False)
    timeout: float | None = setting(600.0, optional(duration), resume="free")
    embedded: bool = setting(False, flag)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` if a value is invalid; the message names the setting."""
        super().__post_init__()
        if self.embedded:
            guard.current().release_to_host()

    # ------------------------------------------------------------------ ranks

    @cached_property
    def communicator(self) -> Communicator:
        """The library's duplicate of ``comm``; the first access makes it and is collective over ``comm``."""
        made = as_communicator(self.comm, timeout=self.timeout, embedded=self.embedded)
        if made.size > 1 and self.timeout is not None and not self.is_guest:
            self.__dict__["_watchdog"] = watchdog = Watchdog(made, self.timeout)
            watchdog.start()
        return made

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.communicator.size

    @property
    def axes(self) -> Axes:
        """The sizes and the order of the axes.

        Raises
        ------
        GridError
            If the product of the sizes is not the number of ranks.
        """
        return self.axes_of(self.size)

    @property
    def is_guest(self) -> bool:
        """Tell whether ``embedded`` or the environment variable MPIZERO_EMBEDDED is set. Not collective."""
        return guard.current().is_guest(self.embedded)

    def __str__(self) -> str:
        """Return a diagram of the ranks, with a line for each coordinate on the slowest axis."""
        axes = self.axes
        named = [axis for axis in axes.order if axes.sizes[axis] > 1]
        ranks = f"{axes.size} rank{'s' if axes.size > 1 else ''}"
        if not named:
            return ranks
        head = f"{ranks}: " + " x ".join(f"{axis} {axes.sizes[axis]}" for axis in named)
        text = head if len(named) == 1 else "\n".join([head, *_lines(axes, named)])
        cut = " x ".join(map(str, self.domain))
        return (
            text.replace(f"context {prod(self.domain)}", f"domain {cut}").replace("context", "domain") if cut else text
        )

    def slab(self, shape: Sequence[int]) -> Box:
        """Return this rank's part of fields, as slices of the axes of space. Not collective after the first use.

        Parameters
        ----------
        shape : sequence of int
            Extents of the whole field: one for each axis of the domain.

        Raises
        ------
        GridError
            If ``shape`` has fewer axes than the domain cuts, or the mesh has no domain.

        Examples
        --------
        >>> import mpizero as mz
        >>> def part(comm):
        ...     with mz.Mesh(comm, domain=(2, 1)) as mesh:
        ...         return mesh.slab((37, 53))
        >>> mz.testing.run_in_threads(2, part)
        [(slice(0, 19, None), slice(0, 53, None)), (slice(19, 37, None), slice(0, 53, None))]
        """
        if not self.domain or len(shape) != len(self.domain):
            raise GridError(
                f"slab({tuple(shape)}): the mesh has domain={self.domain}; give one extent for each axis of its domain"
            )
        return Cut(self.domain).box(shape, self.axes.coordinates(self.rank).context)

    # ------------------------------------------------------------------ groups

    @property
    def grid(self) -> ProcessGrid:
        """The process groups for a model that is split along the axes of the mesh. The first access is collective."""
        return self.grid_of(self.axes if self.splits_model else None)

    def grid_of(self, axes: Axes | None, *, private: bool = False) -> ProcessGrid:
        """Return the process groups for ``axes``, the sizes and the order of the parallel axes.

        ``axes=None`` means that the model is not split. With ``private=True`` ranks share no memory, for a model that
        does not fit into the nodes' shared memory. The first call with given arguments is collective.
        """
        grids = self._grids
        if (axes, private) not in grids:
            grids[axes, private] = ProcessGrid.create(
                self.communicator,
                share_node_memory=self.share_node_memory and not private,
                ranks_per_node=self.ranks_per_node,
                shard_nodes=self.shard_nodes,
                axes=axes,
            )
        return grids[axes, private]

    @property
    def _grids(self) -> dict[tuple[Axes | None, bool], ProcessGrid]:
        # No cached_property: before Python 3.12 all threads, which meet when a grid is made, would share its lock.
        grids: dict[tuple[Axes | None, bool], ProcessGrid] = self.__dict__.setdefault("_made_grids", {})
        return grids

    # ------------------------------------------------------------------ what was made on these ranks

    @property
    def unbound(self) -> WeakSet[Any]:
        """The optimizers that were created for these ranks and have no model yet. Not collective."""
        optimizers: WeakSet[Any] = self.__dict__.setdefault("_unbound", WeakSet())
        return optimizers

    def number_model(self) -> str:
        """Count a new model on this mesh; return its label: "" for the first, then "model 2", ... Not collective."""
        number = self.__dict__["_models"] = self.__dict__.get("_models", 0) + 1
        self.__dict__["_open"] = self.__dict__.get("_open", 0) + 1
        return f"model {number}" if number > 1 else ""

    def drop_model(self, *, last_closes: bool) -> None:
        """Record that a model was closed; with ``last_closes``, close the mesh after its last model (collective)."""
        self.__dict__["_open"] -= 1
        if last_closes and not self.__dict__["_open"]:
            self._free()

    def comparable(self) -> dict[str, Any]:
        """Return the settings that must be equal on every rank, by name: all but ``comm``. Not collective."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name != "comm"}

    # ------------------------------------------------------------------ closing

    def close(self) -> None:
        """Free the communicators made for this mesh, and stop the thread that watches for timeouts. Collective.

        Close the models first. If the mesh was never used or is already closed, do nothing. A mesh that is used again
        makes new communicators, and has to be closed again.
        """
        self._close("Mesh.close")

    def _close(self, call: str) -> None:
        if "communicator" in self.__dict__:
            check_call(self.communicator, call)
            self.communicator.run_deferred_closes()
            self._free()

    def _free(self) -> None:
        """Free communicators and groups without first checking that all ranks call :meth:`close`. Collective.

        After an exception in a ``with`` block, all ranks call this method when they create their next model.
        """
        made = self.__dict__
        if "_watchdog" in made:
            made.pop("_watchdog").stop()
        while self._grids:
            self._grids.popitem()[1].close()
        if "communicator" in made:
            communicator = made.pop("communicator")
            if communicator is not self.comm:
                communicator.close()

    def __enter__(self) -> Self:
        """Return this mesh. Not collective."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close the mesh (collective); after an exception, which others may not have, when all ranks create a model."""
        if error is None:
            self.close()
        elif "communicator" in self.__dict__:  # the other ranks may not have raised
            self.communicator.defer_close(self._free)


def _lines(axes: Axes, named: list[str]) -> Iterator[str]:
    """Yield a line for each coordinate on the first of the axes ``named``: the ranks that have this coordinate.

    The ranks of a line are grouped by their coordinates on the axes between the first and the last.
    """
    *outer, _ = named
    coordinates = [[getattr(axes.coordinates(rank), axis) for axis in outer] for rank in range(axes.size)]
    for first, ranks in groupby(range(axes.size), key=lambda rank: coordinates[rank][0]):
        parts = []
        for inner, members in groupby(ranks, key=lambda rank: coordinates[rank][1:]):
            where = "".join(f"{axis} {number}: " for axis, number in zip(outer[1:], inner, strict=True))
            parts.append(where + " ".join(map(str, members)))
        yield f"{outer[0]} {first}: " + ", ".join(parts)
