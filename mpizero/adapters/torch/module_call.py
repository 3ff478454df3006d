"""Call a block's module with given values of its parameters, and refuse what a forward pass must not do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from mpizero._util.pytree import leaves_of, map_leaves
from mpizero.adapters.derived_seed import derived_seed
from mpizero.adapters.torch.arrays import Placed, as_tensor
from mpizero.adapters.torch.bound import BlockTensors, Held, bring, in_places
from mpizero.adapters.torch.calling import called
from mpizero.adapters.torch.first.copies import Copies, seeded
from mpizero.adapters.torch.first.first_pass import FirstPass
from mpizero.adapters.torch.process import TorchSettings, check_contexts, torch_pass
from mpizero.errors import DataError, LayoutError
from mpizero.types import Array, Params, Run


class Passed(NamedTuple):
    """Hold the results of a forward pass.

    Attributes
    ----------
    output : tree of torch.Tensor
        What the module returned.
    given : list of torch.Tensor
        The tensors that were in the places of ``stored``.
    averages, numbers : list of torch.Tensor
        The new values of statistics, and of buffers of whole numbers.
    """

    output: Any
    given: list[torch.Tensor]
    averages: list[torch.Tensor]
    numbers: list[torch.Tensor]


@dataclass
class _Seen:
    """Hold what earlier passes have shown.

    Attributes
    ----------
    modes : set of bool
        Whether they were in training.
    changes_input : bool
        Whether the module changes its input in place.
    """

    modes: set[bool] = field(default_factory=set)
    changes_input: bool = False


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """Call a module with tensors that share the memory of given arrays in the places of its parameters.

    The first pass in training, and that in evaluation, get copies of parameters and input, and compare them afterwards:
    a module that changes its parameters is refused before it does harm, and one that changes its input gets copies from
    then on. Before, copies of the module run ([Note: first passes] in first/first_pass.py).

    Parameters
    ----------
    module : torch.nn.Module
        The module. It holds no values of its own.
    number : int
        Number of the block within the model; its random numbers depend on it.
    tensors : BlockTensors
        Its parameters and buffers.
    settings : TorchSettings
        Settings of the process during a pass.
    training : tuple of (torch.nn.Module, bool)
        Every submodule, and whether it was in training mode when the model was made.
    first_pass : FirstPass
        Looks at the first passes.
    uses_data : bool
        Whether its code may change parameters by way of ``.data``, where autograd does not see it.
    """

    module: torch.nn.Module
    number: int
    tensors: BlockTensors
    settings: TorchSettings
    training: tuple[tuple[torch.nn.Module, bool], ...]
    first_pass: FirstPass
    uses_data: bool
    _seen: _Seen = field(default_factory=_Seen)
    _copies: Copies = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_copies", Copies(self.module, self.tensors, self.training, self.settings))

    @property
    def shown(self) -> str:
        """The name of the module's class, for messages."""
        return type(self.module).__name__

    @property
    def random(self) -> bool:
        """Tell whether passes so far have drawn random numbers."""
        return self.first_pass.random

    @property
    def new(self) -> bool:
        """Tell whether no pass in the present mode was completed yet."""
        return self.module.training not in self._seen.modes

    def values(self, params: Params) -> list[torch.Tensor]:
        """Return tensors that share the memory of the arrays in ``params`` of all that is stored. Not collective."""
        return [as_tensor(array_of(params, spec.name)) for spec in self.tensors.specs]

    @contextmanager
    def placed(self, params: Params) -> Iterator[None]:
        """Put the parameters into the module for a backward pass, in which hooks and functions may read them.

        Of what a forward pass may change these are copies: ``torch.utils.checkpoint`` runs another one.
        """
        own = self.tensors
        values = zip(self.values(params), own.specs, strict=True)
        tensors = [t.clone() if s.averaged else t.requires_grad_(s.optimized) for t, s in values]
        with in_places((*own.stored, *own.integers), tensors + self._numbers(params)), self.settings.functions():
            yield

    @contextmanager
    def prepared(self, run: Run) -> Iterator[None]:
        """Prepare the process and the module for a forward pass."""
        check_contexts()
        with torch_pass(self.settings, derived_seed(run, self.number)):
            for module, was in self.training:
                module.training = was and run.training
            yield

    def given(self, params: Params) -> list[torch.Tensor]:
        """Return the tensors for the places of ``stored``, inside :meth:`prepared`: copies where they may change."""
        own, new, values = self.tensors, self.new, self.values(params)
        bring(own.kept, self._device(values))
        tensors = [t.clone() if spec.averaged or new else t for t, spec in zip(values, own.specs, strict=True)]
        if not self.uses_data:
            return tensors
        return [Placed.of(t) if s.name in own.parameters else t for t, s in zip(tensors, own.specs, strict=True)]

    def __call__(self, params: Params, given: list[torch.Tensor], x: Any, run: Run) -> Passed:
        """Call the module on ``x``, a tree of tensors, inside :meth:`prepared`. Not collective.

        ``given`` comes from :meth:`given`. A tuple becomes several arguments, a dictionary keyword arguments.

        Raises
        ------
        DataError
            If the module returns something else than tensors.
        LayoutError
            If the module has changed what a forward pass must not change.
        """
        own, new = self.tensors, self.new
        numbers = self._numbers(params)
        self._look(given, numbers, x, run)
        x = x if not new and not self._seen.changes_input else map_leaves(torch.clone, x)
        watched = self._watched(given)
        versions = [tensor._version for _, _, tensor in watched]
        inputs = [(leaf, leaf._version) for leaf in leaves_of(x)]
        with in_places((*own.stored, *own.integers), [*given, *numbers]):
            with self.settings.functions():
                output = called(self.module, x)
            averages = [one.now.detach() for one, spec in zip(own.stored, own.specs, strict=True) if spec.averaged]
            numbers = [one.now for one in own.integers]
            changed = [
                one
                for (one, _, before), version in zip(watched, versions, strict=True)
                if one.now is not before or before._version != version
            ]
        if odd := [leaf for leaf in leaves_of(output) if not isinstance(leaf, torch.Tensor)]:
            raise DataError(
                f"{self.shown} returned a {type(odd[0]).__name__}: a block returns tensors, alone or in tuples, lists "
                "and dictionaries"
            )
        if new:
            before = dict(zip(map(id, own.stored), self.values(params), strict=True))
            changed += [one for one, _, now in watched if id(one) in before and not torch.equal(now, before[id(one)])]
        if changed:
            raise self._change_of(changed[0])
        self._note_input(any(leaf._version != version for leaf, version in inputs))
        return Passed(output, given, averages, numbers)

    def on_zeros(self, x: Any, dtype: np.dtype[Any], mode: AbstractContextManager[Any]) -> Any:
        """Return what a copy of the module returns for ``x`` in training, where all that is stored is zero.

        ``mode`` is the context of the pass. Not collective.
        """
        kinds = (dtype, np.result_type(dtype, np.complex64))
        values = [as_tensor(np.zeros(spec.shape, kinds[spec.complex])) for spec in self.tensors.specs]
        numbers = [as_tensor(np.zeros(spec.shape, spec.dtype)) for spec in self.tensors.integer_specs]
        fresh = self._copies.maker(values, numbers)()
        with torch_pass(self.settings), seeded(), mode:
            return fresh.run(x, training=True, gradients=False, of_input=False).output

    def _numbers(self, params: Params) -> list[torch.Tensor]:
        """Return copies of the buffers of whole numbers, where the parameters are."""
        numbers = [as_tensor(array_of(params, spec.name)) for spec in self.tensors.integer_specs]
        device = self._device(self.values(params)) if numbers else None
        return [number.to(device, copy=True) for number in numbers]

    @staticmethod
    def _device(values: Sequence[torch.Tensor]) -> torch.device:
        """Return where the parameters are; the host for a block without parameters."""
        return values[0].device if values else torch.device("cpu")

    def _look(self, given: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor], x: Any, run: Run) -> None:
        """Let copies of the module make the first passes on samples of new shapes."""
        training = self.module.training
        kind = self.first_pass.new_kind(x, training=training, counted=run.count > 0)
        if kind is not None:
            self.first_pass.check(self._copies.maker(given, numbers), x, training=training)
            self._seen.changes_input |= self.first_pass.changes_input
        if self.first_pass.follows(run.count, new=kind is not None):
            self.first_pass.follow(self._copies.maker(given, numbers), x, run.count, training=training)
        if kind is not None:
            self.first_pass.seen.add(kind)

    def _watched(self, given: Sequence[torch.Tensor]) -> list[tuple[Held, bool, torch.Tensor]]:
        """Return what no forward pass may change: what it is, whether it is stored, and the tensor in its place."""
        own = self.tensors
        stored = zip(own.stored, own.specs, given, strict=True)
        return [(one, True, t) for one, spec, t in stored if not spec.averaged] + [(k, False, k.now) for k in own.kept]

    def _change_of(self, one: Held) -> LayoutError:
        if one.name in self.tensors.parameters:
            what, advice = "parameter", "compute with a changed copy"
        else:
            what = "buffer"
            advice = "name it in averaged= if it is a statistic of the samples, or of weights, as in spectral_norm"
        return LayoutError(f"{self.shown} changes its {what} {one.name!r} in its forward pass: {advice}")

    def _note_input(self, changed: bool) -> None:
        """Remember whether the first pass has changed its input in place; refuse it if a later pass is the first to."""
        if changed and not self.new and not self._seen.changes_input:
            raise LayoutError(
                f"{self.shown} changes its input in place, which it did not at first: samples and the output of the "
                "block before are overwritten; leave out inplace=True, or compute with a copy"
            )
        self._seen.changes_input |= changed
        self._seen.modes.add(self.module.training)


def array_of(tree: Mapping[str, Any], name: str) -> Array:
    """Return the array that has a dotted name in nested dictionaries. Not collective."""
    found: Any = tree
    for part in name.split("."):
        found = found[part]
    return found  # type: ignore[no-any-return]
