"""What every sharded model offers: training, gradients by hand, parameters, saving, and questions about the model."""

from __future__ import annotations

import hashlib
from abc import ABC
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Self

import numpy as np

from mpizero.checkpoint import LocalArray
from mpizero.comm.agreement import agree_equal, all_ranks
from mpizero.comm.exact import gather_spans
from mpizero.errors import LayoutError
from mpizero.layout import FlatLayout, Span
from mpizero.parallel import persistence
from mpizero.parallel.compute import blocks_of
from mpizero.parallel.config import ShardingConfig
from mpizero.parallel.engine import Engine, StepReport
from mpizero.parallel.inspection import Inspection, same_parameters
from mpizero.parallel.means import mean_over_ranks
from mpizero.parallel.metadata import ModelMetadata, describe
from mpizero.parallel.ownership import Share
from mpizero.parallel.placement import placement
from mpizero.parallel.scalars import Totals, tree_total
from mpizero.types import Array


@dataclass(frozen=True)
class Gradients:
    """What ``compute_gradients`` returns.

    Attributes
    ----------
    values : 1-D array
        Synchronized: the averaged gradient, whole for DDP and ZeRO-1, of the owned ranges for ZeRO-2 and 3 (as long as
        ``local_parameter_shard``). Otherwise this rank's weighted sum over all parameters. Frozen parameters: zeros.
    weight : float
        Total weight of the global batch.
    loss : float
        Mean loss over the global batch.
    synchronized : bool
        Whether the values are summed over the ranks.
    """

    values: Array
    weight: float
    loss: float
    synchronized: bool


class ShardedModelBase(Inspection, ABC):
    """A model whose parameters, gradients and optimizer state are placed over the ranks of ``config.comm``.

    Construction, and every method that is not marked otherwise, is collective over ``config.comm``. The model holds
    windows and communicators: close it, or use it as a context manager.

    Parameters
    ----------
    wrapped_model : BlockModel or BlackBoxModel
        What is trained. It is never changed; parameters live in the sharded model.
    config : ShardingConfig
        The ranks and how they work together.

    Raises
    ------
    TypeError
        If an argument is None or no model.
    """

    strategy: ClassVar[str]

    def __init__(self, wrapped_model: Any, config: ShardingConfig) -> None:
        if wrapped_model is None or config is None:
            raise TypeError(
                f"{type(self).__name__} needs a model and a ShardingConfig, got {wrapped_model!r} and {config!r}"
            )
        self._wrapped, self._config = wrapped_model, config
        self._on_before_initialize_sharding()
        self._initialize_sharding()

    # ------------------------------------------------------------------ hooks

    def _on_before_initialize_sharding(self) -> None:
        """Do what a subclass must do before its parameters are placed."""

    def _initialize_sharding(self) -> None:
        """Place parameters, gradients and state; a subclass may extend it."""
        communicator = self._config.communicator
        with all_ranks(communicator):
            blocks = blocks_of(self._wrapped)
        agree_equal(communicator, "the parameter table", {"dtype": str(np.dtype(self._wrapped.dtype)), **blocks})
        if not hasattr(self._wrapped, "blocks"):
            agree_equal(communicator, "the start values", dict(self._wrapped.parameters))
        agree_equal(communicator, "the sharding configuration", self._config.comparable())
        self.engine = Engine(self._wrapped, self._config, placement(self.strategy))
        self._pending: tuple[Totals, Array | None] | None = None
        self._cache: Array | None = None
        self._mean_every = 0
        self.last_step: StepReport | None = None
        self._open = True

    def _update_local_shard_from_full(self, values: Array) -> None:
        """Take this rank's part, and every copy's, from a full vector."""
        self.engine.store.fill(values)
        self.invalidate_cache()

    # ------------------------------------------------------------------ properties (not collective)

    @property
    def wrapped_model(self) -> Any:
        """The model as it was given."""
        return self._wrapped

    @property
    def config(self) -> ShardingConfig:
        """The configuration."""
        return self._config

    @property
    def sharding_configuration(self) -> ShardingConfig:
        """The configuration, by its long name."""
        return self._config

    @property
    def layout(self) -> FlatLayout:
        """Names, shapes and offsets of all parameters."""
        return self.engine.layout

    @property
    def rank(self) -> int:
        """Number of this rank in the data group."""
        return self._config.communicator.rank

    @property
    def world_size(self) -> int:
        """Ranks of the data group."""
        return self._config.communicator.size

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model."""
        return self.layout.size

    @property
    def owned(self) -> tuple[Span, ...]:
        """The ranges of the flat order that this rank owns, one a unit."""
        return self.engine.store.share.spans

    @property
    def local_parameter_shard(self) -> Array:
        """A copy of the parameters this rank owns: the concatenation of :attr:`owned`."""
        store = self.engine.store
        return np.concatenate([store.values[:0], *(store.owned(unit.index) for unit in self.layout.units)])

    @property
    def shard_start(self) -> int:
        """Where the first owned range starts."""
        return self.owned[0].start if self.owned else 0

    @property
    def shard_size(self) -> int:
        """Number of owned parameters."""
        return self.engine.store.share.size

    @property
    def default_loss_function(self) -> Any:
        """The model's own loss; None for a black box, whose function contains it."""
        return getattr(self._wrapped, "loss", None)

    # ------------------------------------------------------------------ training

    def train(self, x: Any, y: Any) -> float:
        """Train one step on this rank's samples of the global batch; return the mean loss over all of it.

        Rank r's samples follow rank r-1's; a rank may have none. With ``auto_sync_gradients=False`` nothing is
        updated: the gradient stays pending until ``synchronize_gradients`` and the optimizer's ``step``.
        """
        if not self._config.auto_sync_gradients:
            totals = self.engine.local_gradients(x, y)
            self._pending = (totals, None)
            return totals.loss / totals.weight
        self.last_step = self.engine.train(x, y)
        self._pending = None
        self.invalidate_cache()
        return self._local_loss(self.last_step) if self._mean_every else self.last_step.loss

    def compute_gradients(self, x: Any, y: Any, loss: Any = None) -> Gradients:
        """Return the gradient of the mean loss without changing the parameters.

        Parameters
        ----------
        x, y : array
            This rank's samples of the global batch.
        loss : Loss or None
            Used in place of the model's own; not for black boxes.
        """
        with self.engine.evaluator.using_loss(loss):
            if self._config.auto_sync_gradients:
                totals, reduced = self.engine.gradients(x, y)
                self._pending = (totals, reduced)
                return self._gradients(totals, reduced)
            totals = self.engine.local_gradients(x, y)
        self._pending = (totals, None)
        values = np.zeros(self.parameter_count, self.engine.dtype)
        row = self.engine.rows.local_sum()
        for entry in self.layout.entries:
            if entry.gradient >= 0:
                start = self.layout.gradient_bases[entry.unit] + entry.gradient
                values[entry.offset : entry.offset + entry.spec.size] += row[start : start + entry.spec.size]
        return Gradients(values, totals.weight, totals.loss / totals.weight, False)

    def synchronize_gradients(self) -> Gradients:
        """Average the pending gradient over the data group, weighted by sample count.

        Raises
        ------
        RuntimeError
            If there is no gradient yet.
        """
        totals, reduced = self._take_pending("synchronize_gradients")
        if reduced is None:
            reduced = self.engine.reduce_local(totals)
        self._pending = (totals, reduced)
        return self._gradients(totals, reduced)

    def apply_gradients(self, gradients: Gradients, learning_rate: float) -> None:
        """Subtract ``learning_rate`` times a synchronized gradient from the parameters.

        Raises
        ------
        LayoutError
            If the gradient is not synchronized, or not of this model.
        """
        share = self.engine.store.share
        expected = self.shard_size if self.engine.placement.shard_gradients else self.parameter_count
        if not gradients.synchronized or gradients.values.shape != (expected,):
            raise LayoutError(
                f"apply_gradients needs a synchronized gradient of {expected} values, got synchronized="
                f"{gradients.synchronized} with shape {gradients.values.shape}: call synchronize_gradients first"
            )
        rate = self.engine.dtype.type(learning_rate)
        for unit, span, offset in zip(self.layout.units, share.spans, share.offsets, strict=True):
            start = offset if self.engine.placement.shard_gradients else span.start
            self.engine.store.owned(unit.index)[:] -= rate * gradients.values[start : start + span.size]
        self.engine.store.publish()
        self.invalidate_cache()

    def apply_pending(self) -> None:
        """Update the parameters from the pending gradient with the bound optimizer; what ``optimizer.step`` does.

        Raises
        ------
        RuntimeError
            If no gradient is pending.
        """
        totals, reduced = self._take_pending("step")
        if reduced is None:
            reduced = self.engine.reduce_local(totals)
        self.engine.step_number += 1
        self.engine.apply(reduced)
        self._pending = None
        self.invalidate_cache()

    def evaluate(self, x: Any, y: Any) -> tuple[float, float, int | None]:
        """Return loss sum, weight and number of right answers over all ranks' samples, without training.

        The last is None where the prediction is not one score a class.
        """
        return self.engine.evaluate(x, y)

    def predict(self, x: Any) -> Any:
        """Return the prediction for this rank's ``x``; ranks may ask for different numbers of samples."""
        return self.engine.evaluator.predict(x)

    def _take_pending(self, name: str) -> tuple[Totals, Array | None]:
        if self._pending is None:
            raise RuntimeError(f"{name}: no gradient exists yet; call train or compute_gradients first")
        return self._pending

    def _gradients(self, totals: Totals, reduced: Array) -> Gradients:
        """Arrange a reduced gradient in parameter order: the owned ranges, or all of them where replicated."""
        engine, share = self.engine, self.engine.store.share
        sharded = engine.placement.shard_gradients
        values = np.zeros(self.shard_size if sharded else self.parameter_count, engine.dtype)
        for piece in engine.pieces():
            start = piece.span.start
            if sharded:
                start += share.offsets[piece.entry.unit] - share.spans[piece.entry.unit].start
            values[start : start + piece.size] = reduced[piece.gradient : piece.gradient + piece.size]
        if not sharded:
            data = engine.grid.data
            spans = [Share(self.layout, rank, data.size).spans for rank in range(data.size)]
            gather_spans(data, [values[s.start : s.stop] for s in share.spans], values, spans)
        return Gradients(values, totals.weight, totals.loss / totals.weight, True)

    # ------------------------------------------------------------------ parameters

    def gather_full_parameters(self) -> Array:
        """Return all parameters, 1-D in declared order; the same read-only array until parameters change."""
        if self._cache is None:
            parts = [self.engine.store.gathered(unit) for unit in self.layout.units]
            self._cache = np.concatenate([self.engine.store.values[:0], *parts])
            self._cache.flags.writeable = False
        return self._cache

    def get_parameters(self) -> Array:
        """Return a copy of all parameters, 1-D in declared order."""
        return self.gather_full_parameters().copy()

    def set_parameters(self, values: Array) -> None:
        """Set all parameters from the same full vector on every rank.

        Raises
        ------
        ValueError
            If its length is not the number of parameters.
        """
        values = np.asarray(values, self.engine.dtype)
        if values.shape != (self.parameter_count,):
            raise ValueError(
                f"set_parameters got an array of shape {values.shape}; the model has {self.parameter_count} parameters"
            )
        self._update_local_shard_from_full(values)

    def with_parameters(self, values: Array) -> Self:
        """Return a new sharded model of the same wrapped model with other parameters."""
        copy = type(self)(self._wrapped, self._config)
        copy.set_parameters(values)
        return copy

    def named_parameters(self) -> dict[str, Array]:
        """Return full copies of all parameters by name, on every rank."""
        full = self.gather_full_parameters()
        return {e.spec.name: full[e.span.start : e.span.stop].reshape(e.spec.shape).copy() for e in self._stored()}

    def load_named(self, arrays: Mapping[str, Array]) -> None:
        """Set all parameters from arrays by name, the same on every rank (a dictionary, or an open ``.npz``).

        Raises
        ------
        LayoutError
            If names or shapes differ from the model's.
        """
        entries = {entry.spec.name: entry for entry in self._stored()}
        missing, unknown = sorted(entries.keys() - arrays.keys()), sorted(arrays.keys() - entries.keys())
        if missing or unknown:
            raise LayoutError(f"parameters do not match the model: missing {missing[:5]}, unknown {unknown[:5]}")
        values = np.empty(self.parameter_count, self.engine.dtype)
        for name, entry in entries.items():
            array = np.asarray(arrays[name])
            if array.shape != entry.spec.shape:
                raise LayoutError(f"parameter {name!r} has shape {array.shape}, the model's has {entry.spec.shape}")
            values[entry.span.start : entry.span.stop] = array.reshape(-1)
        self._update_local_shard_from_full(values)

    def export_npz(self, path: str | Path) -> None:
        """Write all parameters by name to one ``.npz`` file."""
        named = self.named_parameters()
        with all_ranks(self._config.communicator):
            if self.rank == 0:
                np.savez(path, **named)  # type: ignore[arg-type]

    def import_npz(self, path: str | Path) -> None:
        """Set all parameters from an ``.npz`` file that every rank can read; nothing in it is unpickled."""
        with all_ranks(self._config.communicator), np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        self.load_named(arrays)

    def parameters_sha256(self) -> str:
        """Return the hash over all parameters' bytes in declared order; no rank holds more than one unit."""
        digest = hashlib.sha256()
        for unit in self.layout.units:
            digest.update(self.engine.store.gathered(unit).tobytes())
        return digest.hexdigest()

    def invalidate_cache(self) -> None:
        """Forget the gathered parameters. Not collective."""
        self._cache = None

    def _stored(self) -> tuple[Any, ...]:
        return self.layout.parameters

    # ------------------------------------------------------------------ copies and closing

    def clone(self) -> Self:
        """Return a sharded model with the same configuration and communicator and its own copy of the parameters."""
        copy = type(self)(self._wrapped, self._config)
        copy.engine.store.copy_from(self.engine.store)
        return copy

    def deep_copy(self) -> Self:
        """Return a clone with its own wrapped model and, where an optimizer is bound, its own optimizer state."""
        copy = type(self)(deepcopy(self._wrapped), self._config)
        copy.engine.store.copy_from(self.engine.store)
        copy.engine.copy_state(self.engine)
        return copy

    def close(self) -> None:
        """Free windows; a second call does nothing."""
        if self._open:
            self._open = False
            self.engine.close()

    def __enter__(self) -> Self:
        """Return itself. Not collective."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the model, unless an error leaves it on this rank only."""
        if error is None:
            self.close()

    # ------------------------------------------------------------------ local training

    def become_local(self, every: int) -> None:
        """Train alone from now on, on private parameters, averaged every ``every`` steps; see LocalSGDOptimizer."""
        values = self.get_parameters()
        self.engine.close()
        self.engine = Engine(self._wrapped, self._config.replace(comm=None), placement(self.strategy))
        self._mean_every = every
        self._update_local_shard_from_full(values)

    def average_parameters(self) -> None:
        """Replace private parameters by their mean over the ranks."""
        self._update_local_shard_from_full(mean_over_ranks(self._config.communicator, self.engine.store.values))

    def _local_loss(self, report: StepReport) -> float:
        """Average when it is time, and return the mean loss of all ranks' batches."""
        comm = self._config.communicator
        sent = comm.counters.bytes_sent
        if self.engine.step_number % self._mean_every == 0:
            self.average_parameters()
        table = np.empty((comm.size, 2))
        comm.allgather(np.array([report.loss * report.weight, report.weight]), table.reshape(-1), "losses")
        loss, weight = tree_total(table).tolist()
        self.last_step = replace(report, loss=loss / weight, weight=weight, bytes_sent=comm.counters.bytes_sent - sent)
        return self.last_step.loss

    def _replace_wrapped(self, wrapped: Any) -> None:
        same_parameters(blocks_of(self._wrapped), blocks_of(wrapped))
        self._wrapped = wrapped
        self.engine.exchange_model(wrapped)

    # ------------------------------------------------------------------ saving

    def checkpoint_arrays(self) -> list[LocalArray]:
        """Return this rank's owned ranges of parameters and optimizer state, as views. Not collective."""
        arrays = persistence.local_arrays(self.engine)
        return arrays if self.rank == 0 or not self._mean_every else [replace(a, pieces=()) for a in arrays]

    def checkpoint_attributes(self) -> dict[str, Any]:
        """Return what a checkpoint must know besides arrays. Not collective."""
        return {"mpizero": persistence.attributes(self.engine)}

    def restore_arrays(self, reader: Any) -> None:
        """Take parameters and optimizer state from an open checkpoint."""
        persistence.restore(self.engine, reader)
        self.invalidate_cache()

    def save_model(self, path: str | Path) -> None:
        """Write parameters and optimizer state to the folder ``path``, in place of what was there."""
        persistence.save(self, path)

    def load_model(self, path: str | Path, *, strict_layout: bool = False) -> None:
        """Read what ``save_model`` wrote, on any number of ranks and any strategy.

        Raises
        ------
        FileNotFoundError
            If there is nothing at ``path``.
        CheckpointError
            On damage or another model, naming file, array and reason; with ``strict_layout`` also on another layout.
        """
        persistence.load(self, path, strict_layout=strict_layout)

    def serialize(self) -> bytes:
        """Return parameters and optimizer state as an HDF5 image, the same bytes on every rank."""
        return persistence.to_bytes(self)

    def deserialize(self, data: bytes) -> None:
        """Take what ``serialize`` returned; ``data`` is the same on every rank."""
        persistence.from_bytes(self, data)

    def save_state(self, file: IO[bytes]) -> None:
        """Write :meth:`serialize`'s bytes to an open binary file (of rank 0; the others may pass any)."""
        data = self.serialize()
        with all_ranks(self._config.communicator):
            if self.rank == 0:
                file.write(data)
                file.flush()

    def load_state(self, file: IO[bytes]) -> None:
        """Read what ``save_state`` wrote, from an open binary file of each rank."""
        with all_ranks(self._config.communicator):
            data = file.read()
        self.deserialize(data)

    def metadata(self) -> ModelMetadata:
        """Return placement and measured figures. Not collective."""
        return describe(self.engine, self.last_step.bytes_sent if self.last_step is not None else 0)
