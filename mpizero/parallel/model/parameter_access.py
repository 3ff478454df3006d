"""Read, set and copy the parameters of a sharded model: as one 1-D array, as named arrays, as a copy of the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Self

import numpy as np

from mpizero._util.checks import number_array
from mpizero._util.names import nearest
from mpizero.comm.agreement import agree_arrays, agree_on_call, all_ranks, collective, recorded
from mpizero.errors import LayoutError, SharedMemoryError
from mpizero.layout.flat import ParameterUse
from mpizero.nn.layer import start_value
from mpizero.parallel.checkpointing import model_state
from mpizero.parallel.model.core import ShardedCore
from mpizero.parallel.model.private_fallback import in_private_memory
from mpizero.parallel.parameters.integer_state import named_integers
from mpizero.types import Array


class ParameterAccess(ShardedCore):
    """Read, set, export and copy all parameters of a model. Methods are collective unless they say otherwise."""

    @recorded
    def gather_full_parameters(self) -> Array:
        """Return all parameters of the model as a read-only 1-D array in declared order, on every rank.

        Until parameters change, further calls return the same array object.
        """
        whole = self.engine.whole
        # A rank that forgot its cache alone must not gather alone.
        cached = agree_on_call(self._config.communicator, (self._cache is not None,))[:, 0]
        if self._cache is None or not cached.all():
            self._cache = whole.vector()
            self._cache.flags.writeable = False
        return self._cache

    @recorded
    def get_parameters(self) -> Array:
        """Return a copy of all parameters of the model as a 1-D array in declared order, on every rank."""
        return self.gather_full_parameters().copy()

    @recorded
    def set_parameters(self, values: Array) -> None:
        """Set all parameters from a 1-D array in declared order, which must be the same on every rank.

        A moving average (``ShardingConfig(ema=...)``) begins anew with them. The optimizer's state stays, and so do
        gradients that compression has not sent yet: a program may change parameters between steps, to keep them within
        bounds, say.

        Raises
        ------
        LayoutError
            If the array does not have one element for each parameter element of the model.
        ConfigError
            If ranks pass different values. The message names the first rank and parameter that differ.
        """
        self._update_local_shard_from_full(self._checked("set_parameters", values))

    @recorded
    def with_parameters(self, values: Array) -> Self:
        """Return a new sharded model with the same wrapped model and the given parameters, without an optimizer.

        ``values`` are as for :meth:`set_parameters`. Integer arrays are copied from this model.
        """
        values = self._checked("with_parameters", values)
        copy = self._twin(self._wrapped)
        copy.engine.integers.copy_from(self.engine.integers)
        copy._update_local_shard_from_full(values)
        return copy

    def _checked(self, operation: str, values: Array) -> Array:
        array = np.empty(0)

        def given() -> dict[str, Array]:
            nonlocal array
            if isinstance(values, Mapping):
                raise LayoutError(
                    f"one vector of all parameters is taken, got a {type(values).__name__} by name: use load_named"
                )
            found = number_array(values, "the vector of all parameters", complex=False)
            array = found.astype(self.engine.dtype, copy=False)
            if array.shape != (self.parameter_count,):
                raise LayoutError(
                    f"got {array.size} values in an array of shape {array.shape}; the model has {self.parameter_count} "
                    f"parameters and takes an array of shape ({self.parameter_count},)"
                )
            return {_called(e): found[e.span.start : e.span.stop] for e in self.layout.parameters}

        agree_arrays(self._config.communicator, operation, given)
        return array

    @recorded
    def named_parameters(self) -> dict[str, Array]:
        """Return copies of all parameters and integer arrays of the whole model by name, on every rank."""
        return self.engine.whole.named(self.gather_full_parameters()) | self.engine.integers.all_values()

    @recorded
    def load_named(self, arrays: Mapping[str, Array]) -> None:
        """Set all parameters from arrays by name: a dictionary or an open ``.npz``, the same on every rank.

        Integer arrays are set, too, if they are among them. All else is as :meth:`set_parameters` says.

        Raises
        ------
        LayoutError
            If names or shapes differ from the model's.
        ConfigError
            If ranks pass different arrays. The message names the first rank and parameter that differ.
        """
        values = np.empty(self.parameter_count, self.engine.dtype)
        integers: dict[str, Array] = {}
        agree_arrays(self._config.communicator, "load_named", lambda: self._arrange(arrays, values, integers))
        self.engine.integers.set(integers)
        self._update_local_shard_from_full(values)

    def _arrange(self, arrays: Mapping[str, Array], values: Array, integers: dict[str, Array]) -> dict[str, Array]:
        """Check arrays by name, and copy them into ``values``, a 1-D array of the whole model. Not collective.

        Integer arrays are added to ``integers``. Return the arrays by the name that error messages use.
        """
        entries = {entry.spec.name: entry for entry in self.layout.parameters}
        if not isinstance(arrays, Mapping):
            raise LayoutError(
                f"load_named takes arrays by name, got {type(arrays).__name__}: for one vector use set_parameters"
            )
        held = named_integers(self.engine.integers.whole)
        missing, unknown = sorted(entries.keys() - arrays.keys()), sorted(arrays.keys() - entries.keys() - held.keys())
        if missing or unknown:
            hint = nearest(unknown[0], missing or entries) if unknown else ""
            raise LayoutError(f"parameters do not match the model: missing {missing[:5]}, unknown {unknown[:5]}{hint}")
        given = {}
        for name, entry in entries.items():
            array = number_array(arrays[name], f"parameter {name!r}", complex=entry.spec.complex)
            if array.shape != entry.spec.shape:
                raise LayoutError(f"parameter {name!r} has shape {array.shape}, the model's has {entry.spec.shape}")
            entry.spec.view(values[entry.span.start : entry.span.stop])[...] = array
            given[_called(entry)] = array
        for name, spec in held.items():
            if name in arrays:
                integers[name] = given[f"integer array {name!r}"] = start_value(name, spec, arrays[name])
        return given

    @recorded
    def export_npz(self, path: str | Path) -> None:
        """Write all parameters by name to one ``.npz`` file. Rank 0 writes it; no suffix is added to ``path``."""
        from mpizero.checkpoint.npz import write_arrays

        named = self.named_parameters()
        with all_ranks(self._config.communicator):
            if self.rank == 0:
                write_arrays(path, named)

    @recorded
    def import_npz(self, path: str | Path) -> None:
        """Set all parameters from an ``.npz`` file that every rank can read; nothing in it is unpickled.

        The file may be compressed. If its arrays have more bytes than those of this model can have, an error is raised.
        """
        from mpizero.checkpoint.npz import read_arrays

        with all_ranks(self._config.communicator, first=True):
            arrays = read_arrays(os.path.realpath(path), 16 * self.parameter_count)
        self.load_named(arrays)

    @collective
    def parameters_sha256(self) -> str:
        """Return the SHA-256, in hexadecimal, of the bytes of all parameters of the model in declared order.

        Integer arrays follow. Only one unit at a time is gathered, to save memory.
        """
        digest = hashlib.sha256()
        for values in self.engine.whole.units():
            digest.update(values.tobytes())
        for array in self.engine.integers.all_values().values():
            digest.update(array.tobytes())
        return digest.hexdigest()

    # ------------------------------------------------------------------ copies

    @recorded
    def clone(self) -> Self:
        """Return a sharded model with the same configuration and communicator and its own copy of the parameters.

        The clone has no optimizer: bind one with ``set_model``, or use :meth:`deep_copy`.
        """
        copy = self._twin(self._wrapped)
        copy.engine.store.copy_from(self.engine.store)
        return copy

    @recorded
    def deep_copy(self) -> Self:
        """Return a copy of this sharded model with copies of the parameters, wrapped model, optimizer and its state.

        ``train`` makes the same steps on the copy as on the original.
        """
        copy, engine = self._twin(deepcopy(self._wrapped)), self.engine
        shared = copy.engine.grid.node.size - engine.grid.node.size
        if shared > 0:
            copy._engine = in_private_memory(
                copy.engine, copy._parallel_layout, SharedMemoryError("the original does so")
            )
        elif shared < 0:
            copy.close()
            raise SharedMemoryError("deep_copy: the nodes have no shared memory for a second model; save and load it")
        copy.engine.store.copy_from(engine.store)
        model_state.copy_state(engine, copy.engine)
        if self._optimizer is not None:
            copy._optimizer = self._optimizer.for_copy(copy)
        return copy

    def _twin(self, wrapped: Any) -> Self:
        """Return a new sharded model of the same class around ``wrapped``, with initial parameters. Collective.

        Subclasses override this if their constructors take other arguments.
        """
        twin = type(self).__new__(type(self))
        twin._is_copy = True
        twin.__init__(wrapped, self._config)  # type: ignore[misc]
        return twin


def _called(entry: ParameterUse) -> str:
    return f"parameter {entry.spec.name!r}"
