"""Compute gradients, sum them over the ranks, and apply them in separate calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpizero import kernels
from mpizero._util.checks import number, require
from mpizero._util.text import notice
from mpizero.comm.agreement import agree_arrays, agree_equal, collective, recorded
from mpizero.comm.reduce import gather_spans
from mpizero.errors import ArgumentError, ConfigError, LayoutError, NonFiniteError, StateError
from mpizero.layout.flat import FlatLayout
from mpizero.layout.mesh import GROUPS
from mpizero.parallel.batch.redistribute import Asked
from mpizero.parallel.batch.step_scalars import Totals
from mpizero.parallel.engine import Engine
from mpizero.parallel.model.core import Pending
from mpizero.parallel.model.gather_state import gather_pieces
from mpizero.parallel.model.inspection import Inspection
from mpizero.parallel.model.local_training import LocalTraining
from mpizero.parallel.model.saving import Saving
from mpizero.parallel.parameters.shards import Share
from mpizero.types import Array


@dataclass(frozen=True)
class Gradients:
    """Hold a gradient, which ``compute_gradients`` returns and ``apply_gradients`` takes.

    Attributes
    ----------
    values : 1-D array
        The gradient, one of three kinds; frozen and averaged parameters always have zeros.

        - Not synchronized: the gradient of the sum of losses over the samples that this rank computed.
        - Synchronized: the averaged gradient. DDP and ZeRO-1 have it of all parameters, ZeRO-2 and ZeRO-3 only of the
          ranges that this rank owns, as ``local_parameter_shard`` has the parameters.
        - Gathered (by ``gather=True``): the averaged gradient of the whole model, in the order of ``get_parameters``.

        In the first two kinds, a rank of a split model has only parameters of its pipeline stage and tensor part.
    weight : float
        Total weight of the samples of the global batch.
    loss : float
        Mean loss over the global batch.
    synchronized : bool
        Whether the values are summed over the ranks and divided by the weight.
    layout : FlatLayout or None
        Names and offsets of the parameters in a gathered gradient; None for the other kinds.

    Examples
    --------
    >>> import numpy as np
    >>> import mpizero as mz
    >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
    >>> with mz.DDPModel(mz.nn.MLP(2, [], 2), mz.ShardingConfig(comm="self")) as model:
    ...     gradients = model.compute_gradients(x, y, gather=True)
    ...     model.apply_gradients(gradients, learning_rate=0.1)
    >>> gradients.weight, gradients.synchronized, {name: g.shape for name, g in gradients.named().items()}
    (2.0, True, {'output.linear.weight': (2, 2), 'output.linear.bias': (2,)})
    """

    values: Array
    weight: float
    loss: float
    synchronized: bool
    layout: FlatLayout | None = None

    def named(self) -> dict[str, Array]:
        """Return the gradient of each parameter by its name, as views in the parameters' shapes. Not collective.

        Raises
        ------
        LayoutError
            If the gradient was not gathered by ``compute_gradients(..., gather=True)``.
        """
        if self.layout is None:
            raise LayoutError("this rank has a part of the gradient: ask for all, compute_gradients(x, y, gather=True)")
        entries = self.layout.parameters
        return {e.spec.name: e.spec.view(self.values[e.span.start : e.span.stop]) for e in entries}


class ManualGradients(Inspection, LocalTraining, Saving):
    """Compute gradients, sum them over the ranks, and apply them in separate calls, instead of one ``train``."""

    _told_replaced = False

    @recorded
    def compute_gradients(self, x: Any, y: Any, loss: Any = None, *, epoch: int = 0, gather: bool = False) -> Gradients:
        """Compute the gradient of the mean loss over the global batch; parameters stay unchanged.

        With ``auto_sync_gradients=False`` the returned gradient is only this rank's, not yet summed over the ranks. In
        any case the model keeps the gradient as the pending one, from which the optimizer's ``step`` updates.

        Parameters
        ----------
        x, y : array, or tree of arrays
            This rank's samples of the global batch, as in :meth:`train`.
        loss : Loss or None
            Loss to use instead of the model's own; not for black boxes.
        epoch : int
            As in :meth:`train`.
        gather : bool
            Whether to return the gradient of the whole model on every rank, in the order of ``get_parameters`` and with
            the same bits under every strategy.

        Raises
        ------
        ConfigError
            If ``gather`` is True with ``auto_sync_gradients=False``: the gradient is not summed over ranks then.
        """
        if gather and not self._config.auto_sync_gradients:
            raise ConfigError(
                "compute_gradients(gather=True) with auto_sync_gradients=False: these are the rank's own sums; call "
                "synchronize_gradients(gather=True) after it"
            )
        self.engine.asked = Asked(epoch, bool(gather))

        def compute(engine: Engine) -> tuple[Totals, Array | None]:
            with engine.runner.using_loss(loss):
                synced = self._config.auto_sync_gradients
                return engine.gradients(x, y) if synced else (engine.local_gradients(x, y), None)

        totals, reduced, *_ = self._pend(compute)
        if reduced is not None:
            return self._gradients(totals, reduced, gather=gather)
        engine = self.engine
        layout = engine.layout
        values = np.zeros(layout.size, engine.dtype)
        row = engine.local_sum()
        for entry in layout.entries:
            if entry.gradient >= 0 and not entry.spec.averaged:
                start = layout.gradient_bases[entry.unit] + entry.gradient
                values[entry.offset : entry.offset + entry.spec.size] += row[start : start + entry.spec.size]
        return Gradients(values, totals.weight, totals.mean, False)

    @collective
    def synchronize_gradients(self, *, gather: bool = False) -> Gradients:
        """Return the averaged pending gradient: its sum over the data group, divided by the weight of all samples.

        It is summed here if it was not before, and stays pending. ``gather`` is as in :meth:`compute_gradients`, and
        the same on all ranks.

        Raises
        ------
        RuntimeError
            If no gradient is pending.
        """
        totals, reduced, _ = self._reduced_pending("synchronize_gradients")
        return self._gradients(totals, reduced, gather=gather)

    @recorded
    def apply_gradients(self, gradients: Gradients, learning_rate: float) -> None:
        """Subtract ``learning_rate`` times a synchronized gradient from the parameters.

        Raises
        ------
        TypeError
            If ``gradients`` does not come from ``compute_gradients`` or ``synchronize_gradients``.
        LayoutError
            If the gradient is not synchronized, or not of this model.
        ConfigError
            If the learning rate is not a finite number or differs between ranks, or if a gradient of which all ranks
            have a copy (DDP, ZeRO-1, gathered) differs between them. The message names the first rank and parameter
            that differ.
        NonFiniteError
            If the gradient is infinite or NaN on some rank.
        """
        engine, comm = self.engine, self._config.communicator
        share, layout, grid = engine.store.share, engine.layout, engine.grid
        replicated = not (engine.placement.shard_gradients or self._mean_every)
        gathered = gradients.layout if isinstance(gradients, Gradients) else None

        def given() -> dict[str, Any]:
            self._check_gradients(gradients)
            rate = require("apply_gradients: learning_rate", learning_rate, number(-math.inf))
            parts = (gathered or layout).parameters if gathered or replicated else ()
            named = {f"the gradient of {e.spec.name!r}": gradients.values[e.span.start : e.span.stop] for e in parts}
            return {"the learning_rate": rate, **named}

        same_data = grid.axes.group(comm.rank, GROUPS["data"])[0] if replicated and not gathered else 0
        agree_arrays(comm, "apply_gradients", given, same_data)
        if grid.model.size > 1:
            agree_equal(comm, lambda: {"the learning_rate": float(learning_rate)}, "apply_gradients")
        rate, values = engine.dtype.type(float(learning_rate)), gradients.values
        if gathered:
            values = engine.whole.owned(values)
        owned = gathered is not None or engine.placement.shard_gradients
        for unit, span, offset in zip(layout.units, share.spans, share.offsets, strict=True):
            start = offset if owned else span.start
            self.engine.store.owned(unit.index)[:] -= rate * values[start : start + span.size]
        self.engine.exchange.finish(updated=True)
        self.engine.store.publish()
        self._pending = None
        self.invalidate_cache()

    def _check_gradients(self, gradients: Any) -> None:
        dtype = self.engine.dtype
        if not isinstance(gradients, Gradients):
            raise ArgumentError(
                "apply_gradients takes the Gradients that compute_gradients or synchronize_gradients returned, got "
                f"{type(gradients).__name__}"
            )
        values = gradients.values
        if not isinstance(values, np.ndarray) or values.dtype.kind != "f":
            got = f"{values.dtype} array" if isinstance(values, np.ndarray) else type(values).__name__
            raise ArgumentError(f"apply_gradients: the values of the Gradients are a {dtype} array, got {got}")
        if not gradients.synchronized:
            raise LayoutError(
                "apply_gradients takes a synchronized gradient, this one holds the rank's own sums: call "
                "synchronize_gradients first, and give what it returns"
            )
        sharded = self.engine.placement.shard_gradients
        expected = self.shard_size if sharded else self.engine.layout.size
        whose = "those of the ranges that this rank owns" if sharded else "all that this rank's stage and part hold"
        if gradients.layout is not None:
            expected, whose = self.parameter_count, "one for each parameter"
        if values.shape != (expected,):
            raise LayoutError(
                f"apply_gradients needs {expected} values, {whose}, got an array of shape {values.shape}: that of "
                "another model or layout"
            )
        if not kernels.all_finite(np.ascontiguousarray(values)):
            raise NonFiniteError(
                f"apply_gradients: the gradient is infinite or NaN, and the mean loss was {gradients.loss:g}: the "
                "parameters are as before; look at the values before they are applied, or use train or the optimizer's "
                "step, which skip such a step"
            )

    @recorded
    def apply_pending(self) -> None:
        """Update the parameters from the pending gradient with the bound optimizer; ``optimizer.step`` calls this.

        If the loss or the gradient is infinite or NaN, the update is skipped, and the report ``last_step`` says so.

        Raises
        ------
        RuntimeError
            If no gradient is pending.
        NonFiniteError
            After too many skipped steps in a row, as in ``train``.
        """
        engine, pending = self.engine, self._waiting("step")
        totals, sent = pending.totals, pending.sent
        if pending.calls > 1 and not self._told_replaced:
            self._told_replaced = True
            if engine.prints_notices:
                notice(
                    f"the step takes the gradient of the last of {pending.calls} calls of compute_gradients: those of "
                    "several calls are not added; ShardingConfig(accumulate=...) adds those of parts of a batch"
                )

        def reduced() -> Array:
            found = self._reduced_pending("step")[1]
            self._pending = None
            return found

        if self._mean_every:
            self._step_and_average(lambda engine: engine.step(totals, reduced, sent))
        else:
            self._stepped(engine.step(totals, reduced, sent))

    def _pend(self, compute: Callable[[Engine], tuple[Totals, Array | None]]) -> Pending:
        """Call ``compute``, and store the gradient that it returns as the pending one, until it is applied.

        ``compute`` returns the totals of the global batch and the averaged gradient, None if it is not summed yet.
        """

        def computed(engine: Engine) -> Pending:
            sent = engine.grid.bytes_sent
            return Pending(*compute(engine), sent)

        before = 0 if self._pending is None else self._pending.calls
        self._pending = None
        self._pending = self._with_room(computed)._replace(calls=before + 1)
        return self._pending

    def _waiting(self, name: str) -> Pending:
        if self._pending is None:
            updated = "train has updated the parameters already, by " if self._config.auto_sync_gradients else ""
            raise StateError(
                f"{name}: no gradient waits for it: {updated}auto_sync_gradients={self._config.auto_sync_gradients}; "
                "call compute_gradients before it, or train with auto_sync_gradients=False"
            )
        return self._pending

    def _reduced_pending(self, name: str) -> tuple[Totals, Array, int]:
        engine, pending = self.engine, self._waiting(name)
        reduced = pending.reduced if pending.reduced is not None else engine.reduce_local(pending.totals)
        self._pending = pending._replace(reduced=reduced)
        return pending.totals, reduced, pending.sent

    def _gradients(self, totals: Totals, reduced: Array, *, gather: bool) -> Gradients:
        """Copy an averaged gradient from the reducer's order of elements to the order of parameters.

        The result has the ranges that this rank owns if gradients are sharded, else all parameters of this rank's stage
        and tensor part; with ``gather`` it has those of the whole model.
        """
        engine, share = self.engine, self.engine.store.share
        if gather:
            whole = gather_pieces(engine, engine.dtype, lambda p: reduced[p.gradient : p.gradient + p.size])
            return Gradients(whole, totals.weight, totals.mean, True, engine.whole.layout)
        sharded = engine.placement.shard_gradients
        values = np.zeros(self.shard_size if sharded else engine.layout.size, engine.dtype)
        for piece in engine.pieces():
            start = piece.span.start
            if sharded:
                start += share.offsets[piece.entry.unit] - share.spans[piece.entry.unit].start
            values[start : start + piece.size] = reduced[piece.gradient : piece.gradient + piece.size]
        if not sharded:
            data = engine.grid.data
            spans = [Share(engine.layout, rank, data.size).spans for rank in range(data.size)]
            gather_spans(data, [values[s.start : s.stop] for s in share.spans], values, spans)
        return Gradients(values, totals.weight, totals.mean, True)
