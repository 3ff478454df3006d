"""Run a submodule of PyTorch as a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from mpizero.adapters.derived_seed import derived_seed
from mpizero.adapters.torch.arrays import as_array, as_tensor, gradient_leaves, put
from mpizero.adapters.torch.backward import (
    Gradients,
    Pass,
    PendingWeights,
    half_times,
    input_half,
    weight_half,
    whole_backward,
)
from mpizero.adapters.torch.bound import Held, in_places, plain_state
from mpizero.adapters.torch.process import TorchSettings, torch_pass
from mpizero.adapters.torch.saved import SavedParameters
from mpizero.errors import ConfigError, DataError, LayoutError
from mpizero.nn.layer import Layer
from mpizero.sampletree import leaves_of, map_leaves, paths_of
from mpizero.types import EVALUATE, Array, IntegerSpec, ParameterSpec, Params, Run

#: Largest time of both halves of a backward pass over that of the whole with which zero-bubble schedules are allowed,
#: and the seconds by which both must exceed it to be refused.
MOST_OF_HALVES, LEAST_EXCESS = 1.15, 5e-3


@dataclass(frozen=True)
class BlockTensors:
    """Hold what a block's module holds, and how mpizero stores it.

    Attributes
    ----------
    stored : tuple of Held
        The parameters, and the buffers that are stored like parameters: statistics, which are averaged, and constants,
        which are frozen.
    specs : tuple of ParameterSpec
        Their descriptions, in the same order, with names relative to the block.
    kept : tuple of Held
        The other buffers, which stay in the module; no forward pass may change them.
    integers : tuple of Held
        Buffers of whole numbers, such as counters of batches.
    integer_specs : tuple of IntegerSpec
        Their descriptions, in the same order.
    parameters : frozenset of str
        Names of those in ``stored`` that are parameters of the module, not buffers.
    unused : frozenset of str
        Names of parameters that need no gradient in every forward pass.
    """

    stored: tuple[Held, ...]
    specs: tuple[ParameterSpec, ...]
    kept: tuple[Held, ...] = ()
    integers: tuple[Held, ...] = ()
    integer_specs: tuple[IntegerSpec, ...] = ()
    parameters: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    paths: tuple[tuple[str, ...], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "paths", tuple(tuple(spec.name.split(".")) for spec in self.specs))


@dataclass
class _Cache:
    """Hold the graph of a forward pass; or its input alone, of an evaluation, whose backward pass runs it again.

    ``paths`` names the outputs of the graph within the output's tree. ``averages`` and ``numbers`` are the new values
    of statistics and of buffers of whole numbers.
    """

    x: Any
    run: Run
    graph: Pass | None = None
    paths: tuple[str, ...] = ()
    averages: Sequence[torch.Tensor] = ()
    numbers: Sequence[torch.Tensor] = ()
    saved: SavedParameters | None = None


@dataclass(frozen=True, eq=False)
class TorchBlock(Layer):
    """Run a submodule of PyTorch as a layer: autograd computes both halves of its backward pass.

    The module holds no values; each call puts the arrays that it is given in the places of its parameters, without a
    copy. A tuple as input becomes several arguments of the module, a dictionary keyword arguments.

    Parameters
    ----------
    module : torch.nn.Module
        The module.
    number : int
        Number of the block within the model; its random numbers depend on it.
    tensors : BlockTensors
        Its parameters and buffers.
    settings : TorchSettings
        Settings of the process during a pass.
    training : tuple of (torch.nn.Module, bool)
        Every submodule, and whether it was in training mode when the model was made.
    """

    module: torch.nn.Module
    number: int
    tensors: BlockTensors
    settings: TorchSettings
    training: tuple[tuple[torch.nn.Module, bool], ...]
    #: Whose memory the arrays of a pass are in, which the planner cannot count.
    memory_of: ClassVar[str] = "PyTorch"

    @property
    def fingerprint(self) -> Any:
        """Parts of the block that ranks compare."""
        return {"module": self.module, "specs": self.tensors.specs, "number": self.number}

    def kept_buffers(self) -> dict[str, Held]:
        """Return the buffers that stay in the module, by name. Not collective."""
        return {one.name: one for one in self.tensors.kept}

    def own_integers(self) -> tuple[IntegerSpec, ...]:
        """Describe the buffers of whole numbers that ``state_dict()`` has. Not collective."""
        return self.tensors.integer_specs

    def own_specs(self) -> tuple[ParameterSpec, ...]:
        """Describe the parameters of the module, with their names in ``state_dict()``. Not collective."""
        return self.tensors.specs

    def forward(self, params: Params, x: Any, run: Run = EVALUATE) -> tuple[Any, Any]:
        """Return the module's output for ``x``, and the graph of the pass; without training, only ``x`` is kept.

        Not collective.
        """
        cache = _Cache(x, run)
        if not run.training:
            with self._pass(run), torch.no_grad():
                given = self._given(params)
                y, _ = self._call([*given, *self._numbers(params)], map_leaves(as_tensor, x))
                self._check_values(params, given)
                return map_leaves(as_array, y), cache
        y = self._record(params, cache)
        if (saved := cache.saved) is not None:  # what lies in a parameter is overwritten before the next block reads it
            y = map_leaves(lambda leaf: leaf if saved.parameter_of(leaf) is None else leaf.detach().clone(), y)
        return map_leaves(as_array, y), cache

    def _record(self, params: Params, cache: _Cache) -> Any:
        """Run the module with autograd's graph, put the graph into the cache, and return the output's tensors."""
        with self._pass(cache.run), torch.enable_grad():
            tensors = self._given(params)
            given = [t.clone() if s.averaged else t for t, s in zip(tensors, self.tensors.specs, strict=True)]
            weights = [t.requires_grad_() for t, s in zip(given, self.tensors.specs, strict=True) if s.optimized]
            x = map_leaves(as_tensor, cache.x)
            inputs = gradient_leaves(x) if self.number else []  # block 0 takes samples, which need no gradient
            for tensor in inputs:
                tensor.requires_grad_()
            hooks: Any = nullcontext()
            if getattr(params, "gathered", False):
                cache.saved = SavedParameters(tensors)
                hooks = saved_tensors_hooks(cache.saved.pack, cache.saved.unpack)
            with hooks:
                y, after = self._call([*given, *self._numbers(params)], x)
            outputs = {path: tensor for path, tensor in paths_of(y=y) if tensor.requires_grad}
            self._check_values(params, given)
            cache.averages = [t.detach() for t, s in zip(after, self.tensors.specs, strict=False) if s.averaged]
            cache.numbers = after[len(given) :]
            cache.graph, cache.paths = Pass(list(outputs.values()), inputs, weights), tuple(outputs)
            return y

    def backward(self, params: Params, cache: Any, dy: Any, grads: Params) -> Any:
        """Write the gradients of the parameters to ``grads``; return that of the input, or None. Not collective."""
        graph, given = self._graph(params, cache, dy)
        with torch_pass(self.settings), self._placed(params):
            inputs, weights = whole_backward(graph, given)
            self._write(grads, weights, cache)
            return self._input_gradient(cache, graph, inputs)

    def backward_input(self, params: Params, cache: Any, dy: Any) -> tuple[Any, Any]:
        """Return the gradient of the input, or None, and what :meth:`backward_weights` needs. Not collective."""
        graph, given = self._graph(params, cache, dy)
        with torch_pass(self.settings), self._placed(params):
            self._check_halves(graph, given)
            if self.number in self.settings.whole:
                inputs, weights = whole_backward(graph, given)
                pending = PendingWeights((), {}, (), weights)
            else:
                inputs, pending = input_half(graph, given)
            return self._input_gradient(cache, graph, inputs), pending

    def backward_weights(self, params: Params, cache: Any, pending: PendingWeights, grads: Params) -> None:
        """Write the gradients of the parameters to ``grads``. Not collective."""
        if cache.saved is not None:
            cache.saved.tensors = self._tensors(params)
        with torch_pass(self.settings), self._placed(params):
            self._write(grads, weight_half(cache.graph, pending), cache)

    def _check_halves(self, graph: Pass, given: Sequence[torch.Tensor]) -> None:
        """Raise :class:`ConfigError` if the halves of the first backward pass take much longer than the whole.

        If they do not compute the same, the pass is not divided from then on.
        """
        if self.number in self.settings.divided or not graph.outputs or not graph.weights:
            return
        times = half_times(graph, given)
        if not times.equal:  # a hook on a tensor, for example, would run in both halves
            self.settings.whole.add(self.number)
        elif times.ratio > MOST_OF_HALVES and times.inputs + times.weights - times.whole > LEAST_EXCESS:
            raise ConfigError(
                f"a zero-bubble schedule divides the backward pass, and for {type(self.module).__name__} both halves "
                f"take {times.ratio:.2f} times as long as the whole ({times.inputs * 1e3:.2f} ms for inputs and "
                f"{times.weights * 1e3:.2f} ms for weights, {times.whole * 1e3:.2f} ms together): use schedule '1f1b' "
                "or 'interleaved', or let its autograd functions look at ctx.needs_input_grad"
            )
        self.settings.divided.add(self.number)

    def _graph(self, params: Params, cache: _Cache, dy: Any) -> tuple[Pass, list[torch.Tensor]]:
        """Return the graph of the forward pass, and the gradients of its outputs as tensors."""
        if cache.graph is None:
            self._record(params, cache)
        assert cache.graph is not None
        if cache.saved is not None:
            cache.saved.tensors = self._tensors(params)
        found = dict(paths_of(y=dy))  # the blocks after this one may use some of its outputs only
        used = [(t, found[path]) for path, t in zip(cache.paths, cache.graph.outputs, strict=True) if path in found]
        return cache.graph._replace(outputs=[t for t, _ in used]), [as_tensor(gradient) for _, gradient in used]

    def _input_gradient(self, cache: _Cache, graph: Pass, found: Gradients) -> Any:
        """Return the gradients of the input as a tree like the input, with None for leaves that have none."""
        if not self.number:
            return None
        left = iter(found)

        def gradient(leaf: Any) -> Any:
            if getattr(getattr(leaf, "dtype", None), "kind", "") not in ("f", "c"):
                return None
            tensor = next(left)
            return np.zeros_like(leaf) if tensor is None else as_array(tensor)

        return map_leaves(gradient, cache.x)

    def _write(self, grads: Params, weights: Gradients, cache: _Cache) -> None:
        """Write the gradients of parameters and the new values of buffers to ``grads``."""
        for integer, number in zip(self.tensors.integer_specs, cache.numbers, strict=True):
            put(_found(grads, integer.name.split(".")), number)
        gradients, statistics = iter(weights), iter(cache.averages)
        for spec, path in zip(self.tensors.specs, self.tensors.paths, strict=True):
            if not spec.trainable:
                continue
            value = next(statistics) if spec.averaged else next(gradients)
            if value is not None:
                put(_found(grads, path), value)
            elif spec.name in self.tensors.unused:
                _found(grads, path)[...] = 0
            else:
                raise LayoutError(
                    f"{type(self.module).__name__}: the loss does not depend on parameter {spec.name!r}, so it has no "
                    "gradient: freeze it (frozen=), or name it in unused= if only some samples use it"
                )

    def _tensors(self, params: Params) -> list[torch.Tensor]:
        return [as_tensor(_found(params, path)) for path in self.tensors.paths]

    def _placed(self, params: Params) -> AbstractContextManager[None]:
        """Put the parameters into the module for a backward pass, in which hooks and functions may read them."""
        specs = self.tensors.specs
        tensors = [t.requires_grad_(s.optimized) for t, s in zip(self._tensors(params), specs, strict=True)]
        return in_places(self.tensors.stored, tensors)

    def _numbers(self, params: Params) -> list[torch.Tensor]:
        """Return copies of the buffers of whole numbers, which a forward pass may change."""
        return [as_tensor(_found(params, spec.name.split("."))).clone() for spec in self.tensors.integer_specs]

    def _given(self, params: Params) -> list[torch.Tensor]:
        """Return the tensors for a forward pass; the first pass gets copies, which a wrong module may change."""
        tensors = self._tensors(params)
        return tensors if self.number in self.settings.tried else [tensor.clone() for tensor in tensors]

    @contextmanager
    def _pass(self, run: Run) -> Iterator[None]:
        """Prepare the process and the module for a forward pass."""
        with torch_pass(self.settings, derived_seed(run, self.number)):
            for module, was in self.training:
                module.training = was and run.training
            yield

    def _call(self, tensors: Sequence[torch.Tensor], x: Any) -> tuple[Any, list[torch.Tensor]]:
        """Call the module on ``x`` with these parameters; return its output, and what then is in their places."""
        own, x, first = self.tensors, self._input(x), self.number not in self.settings.tried
        state = plain_state(self.module) if first else {}
        kept = [one.now for one in own.kept]
        inputs = [(leaf, leaf._version) for leaf in leaves_of(x)]
        versions = [tensor._version for tensor in (*tensors, *kept)]
        with in_places((*own.stored, *own.integers), tensors):
            if isinstance(x, tuple):
                y = self.module(*x)
            elif isinstance(x, Mapping):
                y = self.module(**x)
            else:
                y = self.module(x)
            after = [one.now for one in (*own.stored, *own.integers, *own.kept)]
        if odd := [leaf for leaf in leaves_of(y) if not isinstance(leaf, torch.Tensor)]:
            raise DataError(
                f"{type(self.module).__name__} returned a {type(odd[0]).__name__}: a block returns tensors, alone or "
                "in tuples, lists and dictionaries"
            )
        for number, (before, version, now) in enumerate(zip((*tensors, *kept), versions, after, strict=True)):
            if now is not before or now._version != version:
                self._refuse_change(number)
        if first and (
            changed := [name for name, value in plain_state(self.module).items() if state.get(name) != value]
        ):
            raise LayoutError(
                f"{type(self.module).__name__} changes its attribute {changed[0]!r} in its forward pass: what it keeps "
                "outside of buffers depends on which rank runs it, and is not saved; make it a buffer"
            )
        if any(leaf._version != version for leaf, version in inputs):
            self._note_changed_input()
        self.settings.tried.add(self.number)
        return y, after[: len(tensors)]

    def _check_values(self, params: Params, given: Sequence[torch.Tensor]) -> None:
        """Raise :class:`LayoutError` if the first pass has changed a parameter behind autograd's back (``.data``)."""
        if self.number in self.settings.compared:
            return
        for number, (spec, tensor, value) in enumerate(
            zip(self.tensors.specs, given, self._tensors(params), strict=True)
        ):
            if not spec.averaged and not torch.equal(tensor.detach(), value):
                self._refuse_change(number)
        self.settings.compared.add(self.number)

    def _input(self, x: Any) -> Any:
        """Return ``x``, or copies for a module that changes its input in place: others still need it.

        The first pass always gets copies, and so finds out.
        """
        settings = self.settings
        copied = self.number not in settings.tried or self.number in settings.changing
        return map_leaves(torch.clone, x) if copied else x

    def _note_changed_input(self) -> None:
        if self.number in self.settings.tried and self.number not in self.settings.changing:
            raise LayoutError(
                f"{type(self.module).__name__} changes its input in place, which it did not at first: samples and the "
                "output of the block before are overwritten; leave out inplace=True, or compute with a copy"
            )
        self.settings.changing.add(self.number)

    def _refuse_change(self, number: int) -> None:
        """Raise :class:`LayoutError` unless the forward pass may change what it has changed."""
        specs, what, advice = self.tensors.specs, "buffer", "name it in averaged= if it is a statistic of the samples"
        integers = len(self.tensors.integers)
        if number < len(specs):
            if specs[number].averaged:
                return
            name = specs[number].name
            if name in self.tensors.parameters:
                what, advice = "parameter", "compute with a changed copy"
        elif number < len(specs) + integers:
            return
        else:
            name = self.tensors.kept[number - len(specs) - integers].name
        raise LayoutError(f"{type(self.module).__name__} changes its {what} {name!r} in its forward pass: {advice}")


def _found(tree: Mapping[str, Any], path: Sequence[str]) -> Array:
    found: Any = tree
    for part in path:
        found = found[part]
    return found  # type: ignore[no-any-return]
