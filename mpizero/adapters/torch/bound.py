"""Find the tensors of a module, and run the module with other tensors in their places."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from mpizero._util.names import nearest
from mpizero.errors import ConfigError
from mpizero.layout.flat import joined
from mpizero.types import IntegerSpec, ParameterSpec

#: The dtypes that parameters may have.
DTYPES: dict[Any, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}

#: A dictionary of a module (its parameters or buffers), and a key of it.
Place = tuple[dict[str, Any], str]


@dataclass(frozen=True)
class Held:
    """Describe one parameter or buffer of a module.

    Attributes
    ----------
    name : str
        Its first name in ``module.state_dict()``.
    shape : tuple of int
        Its shape.
    trainable : bool
        Whether it is a parameter that is trained.
    places : tuple of Place
        Every place in which the module holds it.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    places: tuple[Place, ...] = field(compare=False, repr=False)

    @property
    def now(self) -> torch.Tensor:
        """The tensor that is in the first of the places."""
        place, key = self.places[0]
        return place[key]


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
    integers : tuple of Held
        Buffers of whole numbers, such as counters of batches.
    integer_specs : tuple of IntegerSpec
        Their descriptions, in the same order.
    kept : tuple of Held
        The other buffers, which stay in the module; no forward pass may change them.
    parameters : frozenset of str
        Names of those in ``stored`` that are parameters of the module, not buffers.
    unused : frozenset of str
        Names of parameters that need no gradient in every forward pass.
    """

    stored: tuple[Held, ...]
    specs: tuple[ParameterSpec, ...]
    integers: tuple[Held, ...] = ()
    integer_specs: tuple[IntegerSpec, ...] = ()
    kept: tuple[Held, ...] = ()
    parameters: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()

    def with_frozen(self, block: str, names: Collection[str]) -> BlockTensors:
        """Return the same, with parameters that have one of these global names, or are tied to one, not trained."""
        specs = (
            replace(spec, trainable=spec.trainable and (spec.tied or joined(block, spec.name)) not in names)
            for spec in self.specs
        )
        return replace(self, specs=tuple(specs))


def without_values(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module whose parameters have no memory; buffers are copied. Not collective."""
    empty = {
        id(p): torch.nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    try:
        twin = copy.deepcopy(module, dict(empty))
    except Exception as error:
        raise ConfigError(
            f"TorchModel: the module {type(module).__name__} cannot be copied (copy.deepcopy: {type(error).__name__}: "
            f"{error}); keep what cannot be copied out of it; torch.nn.utils.parametrizations has weight_norm and "
            "spectral_norm that can be"
        ) from error
    for inner in twin.modules():
        if isinstance(inner, torch.nn.Embedding | torch.nn.EmbeddingBag):
            inner.sparse = False  # their gradients would be of a kind that is not added up here
    begin_training(twin)
    return twin


def held_parameters(module: torch.nn.Module, prefix: str = "") -> dict[int, Held]:
    """Return the parameters of a module by the identity of the tensor, in the order of ``state_dict()``."""
    return _held(module, prefix, "_parameters")


def held_buffers(module: torch.nn.Module, prefix: str = "") -> dict[int, Held]:
    """Return the buffers of a module by the identity of the tensor, in the order of ``state_dict()``."""
    return _held(module, prefix, "_buffers")


def _held(module: torch.nn.Module, prefix: str, kind: str) -> dict[int, Held]:
    places: dict[int, list[Place]] = {}
    names: dict[int, tuple[str, torch.Tensor]] = {}
    for path, inner in module.named_modules(prefix=prefix, remove_duplicate=False):
        held = getattr(inner, kind)
        for key, tensor in held.items():
            if tensor is None:
                continue
            names.setdefault(id(tensor), (f"{path}.{key}" if path else key, tensor))
            if not any(held is known and key == name for known, name in places.get(id(tensor), ())):
                places.setdefault(id(tensor), []).append((held, key))
    return {
        number: Held(name, tuple(tensor.shape), tensor.requires_grad, tuple(places[number]))
        for number, (name, tensor) in names.items()
    }


def dtype_of(module: torch.nn.Module) -> np.dtype[Any]:
    """Return the dtype that all parameters of a module have. Not collective.

    Raises
    ------
    ConfigError
        If there is no parameter, one has no shape yet, or they are neither all float32 nor all float64.
    """
    first: dict[torch.dtype, str] = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(f"TorchModel: parameter {name!r} has no shape yet: run the lazy module once before")
        first.setdefault(parameter.dtype, name)
    if not first:
        raise ConfigError(f"TorchModel: the module {type(module).__name__} has no parameters, so nothing is trained")
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"TorchModel: {type(module).__name__} is compiled by torch.jit, and holds its parameters where nothing "
            "else can be put: give the module that it was made of"
        )
    if numbers := next((name for dtype, name in first.items() if dtype.is_complex), None):
        raise ConfigError(
            f"TorchModel: parameter {numbers!r} is complex: register its parts as one real parameter, "
            "nn.Parameter(torch.view_as_real(value)), and compute with torch.view_as_complex of it, which has the same "
            "gradient"
        )
    if len(first) > 1 or next(iter(first)) not in DTYPES:
        told = ", ".join(f"{name!r} is {str(dtype).removeprefix('torch.')}" for dtype, name in first.items())
        raise ConfigError(
            f"TorchModel: all parameters must be float32, or all float64; {told}: convert them, module.float()"
        )
    return DTYPES[next(iter(first))]


def begin_training(module: torch.nn.Module) -> None:
    """Call each ``train()`` of the user's own, which may keep submodules in evaluation mode. Not collective.

    What is in evaluation mode already stays so.
    """
    modes = [(inner, inner.training) for inner in module.modules()]
    for inner, was in modes:
        if was and type(inner).train is not torch.nn.Module.train:
            inner.train()
    for inner, was in modes:
        inner.training &= was


def running_statistics(module: torch.nn.Module) -> set[int]:
    """Return the identities of the buffers that are running statistics of norms. Not collective."""
    kind = torch.nn.modules.batchnorm._NormBase
    norms = (inner for inner in module.modules() if isinstance(inner, kind) and inner.training)
    buffers = (buffer for norm in norms for buffer in norm._buffers.values())
    return {id(buffer) for buffer in buffers if buffer is not None and buffer.is_floating_point()}


@contextmanager
def in_places(held: Sequence[Held], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put tensors in the places of a module's parameters and buffers, and afterwards what was there before.

    Not collective. Only one thread may do so at a time.
    """
    before = [[place[place_key] for place, place_key in one.places] for one in held]
    try:
        for one, tensor in zip(held, tensors, strict=True):
            for place, key in one.places:
                place[key] = tensor
        yield
    finally:
        for one, old in zip(held, before, strict=True):
            for (place, key), tensor in zip(one.places, old, strict=True):
                place[key] = tensor


def bring(held: Sequence[Held], device: torch.device) -> None:
    """Move tensors that a module holds to a device, in every place, if they are not there. Not collective."""
    for one in held:
        if one.now.device != device:
            moved = one.now.to(device)
            for place, key in one.places:
                place[key] = moved


def chosen_blocks(module: torch.nn.Module, blocks: Any) -> dict[str, torch.nn.Module]:
    """Return the submodules that ``blocks`` chooses, by their names in ``module``, in order. Not collective.

    ``blocks`` is an ``nn.Sequential``, or a list of submodules and of names with wildcards.
    """
    known = dict(module.named_modules(remove_duplicate=False))
    name_of = {id(inner): name for name, inner in reversed(known.items())}
    if isinstance(blocks, torch.nn.Sequential | torch.nn.ModuleList):
        listed: list[Any] = list(blocks)
    elif isinstance(blocks, list | tuple):
        listed = list(blocks)
    else:
        raise ConfigError(
            f"TorchModel: blocks is an nn.Sequential, or a list of submodules or of their names, got {blocks!r:.80}"
        )
    found: dict[str, torch.nn.Module] = {}
    for one in listed:
        if isinstance(one, str):
            names = [name for name in known if name and name.count(".") == one.count(".") and fnmatchcase(name, one)]
            if not names:
                raise ConfigError(
                    f"TorchModel: blocks: no submodule is called {one!r}{nearest(one, known)}; there are "
                    f"{', '.join(n for n in known if n and '.' not in n)}"
                )
        elif isinstance(one, torch.nn.Module) and id(one) in name_of:
            names = [name_of[id(one)]]
        else:
            raise ConfigError(f"TorchModel: blocks: {type(one).__name__} is no submodule of {type(module).__name__}")
        for name in names:
            if name in found:
                raise ConfigError(f"TorchModel: blocks names {name!r} twice")
            found[name] = known[name]
    if not found:
        raise ConfigError("TorchModel: blocks is empty: name at least one submodule, or leave it out")
    return found


def check_all_held(module: torch.nn.Module, blocks: dict[str, torch.nn.Module]) -> None:
    """Raise :class:`ConfigError` if a parameter is in none of the blocks, or a block contains another one."""
    names = list(blocks)
    for i, name in enumerate(names):
        if inner := next((other for other in names[:i] + names[i + 1 :] if other.startswith(f"{name}.")), None):
            raise ConfigError(f"TorchModel: blocks: {inner!r} is a part of {name!r}; name one of them")
    held = {id(p) for block in blocks.values() for p in block.parameters()}
    held |= {id(b) for block in blocks.values() for b in block.buffers()}
    left = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if id(t) not in held]
    if left:
        raise ConfigError(
            f"TorchModel: no block holds {', '.join(map(repr, left[:4]))}{' and others' if len(left) > 4 else ''}: a "
            "model of blocks runs its blocks one after the other and nothing else of the module; put it into a "
            "submodule that is one of the blocks, or leave blocks out"
        )
