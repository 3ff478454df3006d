"""Update parameters on a GPU, which keeps the optimizer state.

If a rank is alone in its data group, its gradients are on the GPU: :class:`DeviceUpdater` runs the same code as on the
host with arrays of the GPU, and copies nothing. Otherwise gradients are on the host: :class:`StagedUpdater` copies them
to the GPU.

[Note: an update on a GPU] Gradients on the host are copied as follows. The elements that a rank updates are numbered as
in the rank's optimizer state, and are updated in sections of successive elements, each as long as the pinned host
buffer. For each section, gradients are summed or copied into the pinned buffer and sent to the GPU, and the GPU's
kernels update the section. Then its updated parameters are copied to the node's shared window. If the GPU has a copy of
all parameters, the kernels update that copy. Otherwise the section's parameters are first copied to a buffer on the
GPU. Kernels work element by element, so the cut into sections and shards changes no bit. Each floating-point operation
is rounded by itself, as on the host ([Note: contraction] in ``kernels/cuda/launch.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpizero import kernels, optim
from mpizero.errors import ConfigError, UnsupportedError
from mpizero.kernels import jit
from mpizero.kernels.gpu import STAGING, Fill, Upload, copied
from mpizero.optim.elementwise import optimizer_name, plain
from mpizero.sharding.batch import Divisors
from mpizero.sharding.config import Config
from mpizero.sharding.device import DeviceParameters
from mpizero.sharding.params import ParameterStore, UpdatePiece, UpdateRun
from mpizero.sharding.update import Updater, UpdateScope
from mpizero.sharding.whole_tensors import home_of
from mpizero.types import Array

#: Number of threads for updates on a GPU: a rank uses its GPU only in the thread that has opened it.
_ONE_THREAD = 1


class _Cut(NamedTuple):
    """Describe ``size`` successive elements of ``of``, a range of the parameters that this rank updates.

    ``first`` is the index of the first of these elements in that range.
    """

    of: UpdateRun | UpdatePiece
    first: int
    size: int

    @property
    def state(self) -> int:
        """The index of the first element of this cut (range of parameters) in the arrays of the optimizer state."""
        return self.of.state + self.first

    @property
    def store(self) -> int:
        """The index of the first element of this cut (range of parameters) in the parameter store."""
        return self.of.store + self.first


class DeviceUpdater(Updater):
    """Run one of the library's optimizers, with state and gradients on a GPU, by the same code as on the host.

    Parameters
    ----------
    optimizer : FlatOptimizer
        One of the library's optimizers; other optimizers run on the host only.
    store : ParameterStore
        The parameters.
    scope : UpdateScope
        Says which ranges this rank updates.
    device_parameters : DeviceParameters
        The GPU's copy of ``store``.
    """

    def __init__(
        self, optimizer: Any, store: ParameterStore, scope: UpdateScope, device_parameters: DeviceParameters
    ) -> None:
        self.device_parameters, self.device = device_parameters, device_parameters.device
        super().__init__(optimizer, store, scope)

    def _new_state(self, size: int) -> Array:
        state = self.device.keep("optimizer state", size, self.dtype)
        state[:] = 0
        return state

    def release(self) -> None:
        """Stop counting the bytes of the optimizer state; the caller then drops the updater. Not collective."""
        for array in self.state.values():
            self.device.release("optimizer state", array)

    def host_state(self, *, fetch: bool = True) -> dict[str, Array]:
        """Return a copy on the host of the optimizer state: an array for each slot, such as "exp_avg". Not collective.

        With ``fetch=False`` nothing is copied from the GPU: the contents of the arrays are undefined.
        """
        host = {slot: np.empty(self.size, self.dtype) for slot in self.state}
        for slot, values in host.items() if fetch else ():
            self.device.read(self.state[slot], [(0, values)])
        return host

    def take_state(self, host: Mapping[str, Array]) -> None:
        """Copy optimizer state, an array for each slot, from the host to the GPU. Not collective."""
        for slot, values in host.items():
            self.device.write(self.state[slot], values)

    def update_fused(
        self, rows: Array, programs: tuple[Array, Array], divisors: Divisors, out: Array, threads: int
    ) -> None:
        """Sum the partial sums of gradients in ``rows`` on the GPU, divide the sum, and update the parameters from it.

        Collective over all ranks for optimizers that need norms. :meth:`Updater.update_fused` describes the parameters.
        """
        placed = Divisors(*map(self._placed, divisors))
        exact, rounded = map(self._placed, programs)
        super().update_fused(rows, (exact, rounded), placed, out, _ONE_THREAD)
        self.device_parameters.updated(on_host=False)

    def update(self, reduced: Array, threads: int, loss: float) -> None:
        """Update this rank's ranges of the parameters from ``reduced``, the averaged gradients on the GPU.

        Collective over all ranks for optimizers that need norms.
        """
        super().update(reduced, _ONE_THREAD, loss)
        self.device_parameters.updated(on_host=False)

    def to_device(self, reduced: Array) -> Array:
        """Copy the averaged gradient to the GPU and return the copy. Not collective."""
        return self.device.put(reduced)

    def swap_average(self) -> None:
        """Raise ``UnsupportedError``, because the parameters and their average are on the GPU. Not collective."""
        raise UnsupportedError(
            "ema=True: the average is on the GPU, where it cannot take the parameters' place; export it from a "
            'checkpoint (mpizero checkpoint export --ema), or set optimizer_device="cpu"'
        )

    def _placed(self, scalars: Array) -> Array:
        return self.device.put(scalars)

    def _parameters(self) -> Array:
        return self.device_parameters.current()


class StagedUpdater(DeviceUpdater):
    """Update on a GPU from gradients on the host.

    The gradients are copied to the GPU in sections of successive elements, each as long as the pinned host buffer.
    """

    def __init__(
        self, optimizer: Any, store: ParameterStore, scope: UpdateScope, device_parameters: DeviceParameters
    ) -> None:
        super().__init__(optimizer, store, scope, device_parameters)
        gradient, weights = buffer_sizes(
            self.size, self.dtype.itemsize, norms=self.optimizer.needs_tensor_norms, full=self.device_parameters.full
        )
        self._gradient = self.device.keep("buffers", gradient, self.dtype)
        self._weights = self.device.keep("buffers", weights, self.dtype)

    def release(self) -> None:
        """Stop counting the bytes of the optimizer state and the buffers on the GPU. Not collective."""
        super().release()
        for buffer in (self._gradient, self._weights):
            self.device.release("buffers", buffer)

    def to_device(self, reduced: Array) -> Array:
        """Return ``reduced``, the averaged gradient, which stays on the host. Not collective."""
        return reduced

    # ------------------------------------------------------------------ updates

    def update_fused(
        self, rows: Array, programs: tuple[Array, Array], divisors: Divisors, out: Array, threads: int
    ) -> None:
        """Sum the partial sums of gradients in ``rows`` on the host, and update parameters from the sum on the GPU.

        Collective over all ranks for optimizers that need norms. :meth:`Updater.update_fused` describes the parameters;
        ``out`` is not used.
        """
        exact, program = programs

        def tree(at: int, first: int, target: Array) -> None:
            args = (rows, at + first, rows[:0], 0, program, divisors.gradients, target)
            jit.run_range(kernels.backend(rows).update.tree_sum, args, 0, target.size, threads)

        def tied(piece: UpdatePiece, first: int, target: Array) -> None:
            tree(piece.gradient, first, target)
            other = np.empty_like(target)
            for use in piece.uses:
                tree(use, first, other)
                target += other

        self._average(self.store.values, rows, exact, divisors)
        fills: dict[UpdateRun | UpdatePiece, Fill] = {run: partial(tree, run.gradient) for run in self.plain_runs}
        self._update(fills | {piece: partial(tied, piece) for piece in self.tied})

    def update(self, reduced: Array, threads: int, loss: float) -> None:
        """Update this rank's ranges of the parameters from ``reduced``, the averaged gradients on the host.

        Collective over all ranks for optimizers that need norms.
        """
        if self.watch is not None:
            self.watch(reduced)
        self._take_averages(self.store.values, reduced)
        self._update({run: copied(reduced[run.gradient : run.gradient + run.size]) for run in self.runs})

    def _update(self, fills: Mapping[UpdateRun | UpdatePiece, Fill]) -> None:
        """Update this rank's ranges of the parameters, ``STAGING`` bytes of them at a time.

        ``fills`` holds, for each range, a function that writes gradients of its elements to a host array.
        """
        hypers, norms = self.hypers(), self.optimizer.needs_tensor_norms
        placed = {group: self._placed(hyper) for group, hyper in hypers.items()}
        for first, cuts in self._blocks(sorted(fills, key=lambda run: run.state)):
            base = 0 if norms else first  # directions are kept, all of them, until their norms are known
            size = sum(cut.size for cut in cuts)
            gradient = self._gradient[first - base : first - base + size]
            self.device.send(gradient, [Upload(cut.state - first, cut.size, _from(fills[cut.of], cut)) for cut in cuts])
            with self._block_parameters(first, cuts, changed=not norms) as weights:
                for cut, w in zip(cuts, weights, strict=True):
                    g = gradient[cut.state - first : cut.state - first + cut.size]
                    state = {slot: values[cut.state : cut.state + cut.size] for slot, values in self.state.items()}
                    act = self.optimizer.direction if norms else self.optimizer.apply
                    act(w, g, state, placed[cut.of.group])
        if norms:
            self._apply_stored_directions(hypers)
        self.device_parameters.updated(on_host=True)
        self._made()

    def _apply_stored_directions(self, hypers: dict[int, Array]) -> None:
        """Apply LAMB's update directions, which are on the GPU, each scaled by a ratio of two norms.

        Collective over all ranks. :meth:`Updater._apply_directions` does the same with directions on the host.
        """
        local = self.trees.pieces
        parameters = self.device_parameters.current() if self.device_parameters.full else self.store.values
        weights = self._square_sums(parameters, [piece.store for piece in local])
        steps = self._square_sums(self._gradient, [piece.state for piece in local])
        for first, cuts in self._blocks(self.pieces):
            with self._block_parameters(first, cuts, changed=True) as values:
                for cut, w in zip(cuts, values, strict=True):
                    assert isinstance(cut.of, UpdatePiece)
                    name = home_of(cut.of.entry.spec)
                    ratio = self.optimizer.trust_ratio(math.sqrt(weights[name]), math.sqrt(steps[name]))
                    direction = self._gradient[cut.state : cut.state + cut.size]
                    self.optimizer.apply_direction(w, direction, hypers[cut.of.group], ratio)
                    self._follow(w, cut.state)

    # ------------------------------------------------------------------ blocks

    def _blocks(self, runs: Sequence[UpdateRun | UpdatePiece]) -> Iterator[tuple[int, list[_Cut]]]:
        """Yield, for each section, its first index in the optimizer state, and the parts of ``runs`` that lie in it.

        A section is ``STAGING`` successive bytes of each array of the optimizer state. ``runs``, the ranges that this
        rank updates, are in ascending order of their indices in these arrays.
        """
        step = STAGING // self.dtype.itemsize
        for first in range(0, self.size, step):
            cuts = []
            for run in runs:
                low, high = max(run.state, first), min(run.state + run.size, first + step)
                if low < high:
                    cuts.append(_Cut(run, low - run.state, high - low))
            yield first, cuts

    @contextmanager
    def _block_parameters(self, first: int, cuts: Sequence[_Cut], *, changed: bool) -> Iterator[list[Array]]:
        """Yield views on the GPU of a section's parameters, one for each of ``cuts``, the parts of runs in the section.

        ``first`` is the section's first index in the optimizer state. If ``changed``, the parameters are copied to the
        host afterwards.
        """
        host = [self.store.values[cut.store : cut.store + cut.size] for cut in cuts]
        if self.device_parameters.full:
            source, starts = self.device_parameters.current(), [cut.store for cut in cuts]
        else:
            source, starts = self._weights[: sum(cut.size for cut in cuts)], [cut.state - first for cut in cuts]
            uploads = zip(starts, host, strict=True)
            self.device.send(source, [Upload(start, values.size, copied(values)) for start, values in uploads])
        yield [source[start : start + cut.size] for start, cut in zip(starts, cuts, strict=True)]
        if changed:
            self.device.read(source, sorted(zip(starts, host, strict=True), key=lambda target: target[0]))


def updates_on_device(config: Config, optimizer: Any) -> bool:
    """Tell whether an optimizer, returned by ``optim.elementwise.with_copies``, runs on a GPU. Not collective.

    The optimizer runs and keeps its state there if layers compute on a GPU, it is one of the library's that updates no
    whole tensors, and ``optimizer_device`` is not "cpu".

    Raises
    ------
    ConfigError
        If ``optimizer_device`` is "cuda", but the optimizer is not one of the library's or updates whole tensors.
    """
    if config.device == "cpu" or config.optimizer_device == "cpu":
        return False
    library = isinstance(plain(optimizer), optim.FlatOptimizer) and not optimizer.needs_whole_tensors
    if not library and config.optimizer_device is not None:
        raise ConfigError(
            f"optimizer_device={config.optimizer_device!r}: {optimizer_name(optimizer)}.update works on "
            "arrays of the host, only the library's optimizers that update no whole tensors run on a GPU: leave "
            "optimizer_device out"
        )
    return library


def buffer_sizes(size: int, itemsize: int, *, norms: bool, full: bool) -> tuple[int, int]:
    """Return the number of elements of a GPU's buffer for gradients, and of its buffer for parameters.

    Not collective.

    Parameters
    ----------
    size, itemsize : int
        Number of elements that the rank updates, and bytes of an element.
    norms : bool
        Whether the optimizer needs norms of its update directions. The buffer for gradients then keeps all directions.
    full : bool
        Whether the GPU has a copy of all parameters.
    """
    block = min(size, STAGING // itemsize)
    return size if norms else block, 0 if full else block


def _from(fill: Fill, cut: _Cut) -> Callable[[int, Array], object]:
    """Return a function that fills a buffer with gradients of the elements of ``cut``, by calling ``fill``.

    Both functions take the index of the first gradient and the buffer. The index for ``fill`` counts from the start of
    the range ``cut.of``, the index for the returned function from the start of ``cut``.
    """
    return lambda first, out: fill(cut.first + first, out)
