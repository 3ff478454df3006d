"""Read a user's list of blocks, and make layers and start values of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpizero._util.names import nearest
from mpizero.adapters.derived_seed import derived_seed
from mpizero.adapters.jax.compiled_block import CompiledBlock
from mpizero.adapters.jax.jax_block import JaxBlock
from mpizero.adapters.jax.parameter_tree import ParameterTree, named_leaves, real_type
from mpizero.adapters.jax.traced_function import TracedFunction
from mpizero.errors import ConfigError
from mpizero.types import Array, ParameterSpec, Run

_PAIRS = "pairs (init, apply) or (parameters, apply), in a list or by name"


class Block(NamedTuple):
    """Hold a block as the user gave it: its parameters, or a function of a key that makes them, and its function."""

    parameters: Any
    apply: TracedFunction


def read_blocks(parameters: Any, blocks: Any) -> dict[str, Block]:
    """Return the blocks by name; those of a list are named "0", "1", ...

    ``parameters`` is None, or has the parameters of every block, where ``blocks`` has only their functions.

    Raises
    ------
    ConfigError
        If ``blocks`` is something else.
    """
    if isinstance(blocks, str | bytes) or not isinstance(blocks, Mapping | Sequence) or not blocks:
        raise ConfigError(f"JaxModel: blocks are {_PAIRS}; got {blocks!r:.60}")
    named = dict(blocks) if isinstance(blocks, Mapping) else {str(i): block for i, block in enumerate(blocks)}
    given = parameters
    if isinstance(parameters, list | tuple):
        given = {str(i): part for i, part in enumerate(parameters)}
    if given is not None and (not isinstance(given, Mapping) or set(given) != set(named)):
        has = sorted(map(str, given)) if isinstance(given, Mapping) else type(parameters).__name__
        raise ConfigError(f"JaxModel: the blocks are {list(named)}, parameters are given for {has}")
    found = {}
    for name, block in named.items():
        if given is not None and callable(block):
            pair = (given[name], block)
        elif given is None and isinstance(block, tuple | list) and len(block) == 2 and callable(block[1]):
            pair = (block[0], block[1])
        elif given is not None:
            raise ConfigError(f"JaxModel: block {name!r} is {block!r:.60}: give its function, or parameters=None")
        else:
            raise ConfigError(f"JaxModel: block {name!r} is {block!r:.60}: blocks are {_PAIRS}")
        found[str(name)] = Block(pair[0], TracedFunction(pair[1], f"apply of block {name!r}", "parameters", "x"))
    return found


class StartValues(Mapping[str, Array]):
    """Make start values by name, one block at a time.

    Parameters
    ----------
    blocks : mapping of str to Block
        The blocks.
    seed : int
        Seed of the keys that functions ``init`` are given.
    """

    def __init__(self, blocks: Mapping[str, Block], seed: int) -> None:
        self._blocks, self._seed = blocks, seed
        self._homes: dict[str, str] = {}
        self._last: tuple[str, dict[str, Array]] = ("", {})

    def of_block(self, name: str) -> tuple[ParameterTree, dict[str, Array]]:
        """Return structure and values of the parameters of a block."""
        block, number = self._blocks[name], list(self._blocks).index(name)
        tree = block.parameters
        if callable(tree):
            seed = derived_seed(Run(seed=self._seed, step=-1), number)
            try:
                tree = tree(jax.random.fold_in(jax.random.key(seed & 0xFFFFFFFF), seed >> 32 & 0xFFFFFFFF))
            except TypeError as error:
                error.add_note(f"In block {name!r}: init is called as init(key), and returns a pytree of parameters")
                raise
        if not jax.tree_util.tree_leaves(tree):
            return ParameterTree((), jax.tree_util.tree_structure(tree)), {}
        structure, leaves = named_leaves(tree, f"JaxModel: block {name!r}")
        arrays = {f"{name}.{leaf}": np.asarray(value) for leaf, value in zip(structure.names, leaves, strict=True)}
        for parameter in arrays:
            if self._homes.setdefault(parameter, name) != name:
                raise ConfigError(f"JaxModel: blocks {self._homes[parameter]!r} and {name!r} both have {parameter!r}")
        return structure, arrays

    def __getitem__(self, name: str) -> Array:
        """Return the values of one parameter."""
        block, last = self._homes[name], self._last
        if last[0] != block:
            last = self._last = (block, self.of_block(block)[1])
        return last[1][name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._homes)

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self._homes)


def make_layers(
    blocks: Mapping[str, Block], start: StartValues, frozen: frozenset[str]
) -> tuple[dict[str, JaxBlock], np.dtype[Any]]:
    """Return a layer for each block, and the dtype of all parameters.

    Raises
    ------
    ConfigError
        If parameters have different dtypes, there are none, or ``frozen`` names an unknown one.
    """
    trees: dict[str, tuple[ParameterTree, dict[str, tuple[int, ...]]]] = {}
    dtypes: dict[str, np.dtype[Any]] = {}
    for name in blocks:
        tree, arrays = start.of_block(name)
        dtypes |= {parameter: array.dtype for parameter, array in arrays.items()}
        trees[name] = tree, {parameter: array.shape for parameter, array in arrays.items()}
    if unknown := sorted(frozen - set(dtypes)):
        raise ConfigError(f"frozen names {unknown}, but the parameters are {list(dtypes)}{nearest(unknown[0], dtypes)}")
    kinds = {real_type(dtype): f"{name!r} is {dtype}" for name, dtype in reversed(dtypes.items())}
    if len(kinds) != 1:
        told = ", ".join(kinds.values()) or "there are none"
        raise ConfigError(
            f"JaxModel: all parameters must be float32 or complex64, or all float64 or complex128; {told}"
        )
    (dtype,) = kinds
    compiled: dict[Any, CompiledBlock] = {}
    layers = {}
    for number, (name, (tree, shapes)) in enumerate(trees.items()):
        specs = tuple(
            ParameterSpec(
                full[len(name) + 1 :],
                shape,
                decay=len(shape) > 1,
                trainable=full not in frozen,
                complex=dtypes[full].kind == "c",
            )
            for full, shape in shapes.items()
        )
        apply = blocks[name].apply
        form = (id(apply.function), tree, tuple((s.shape, s.trainable) for s in specs), number == 0)
        if form not in compiled:
            compiled[form] = CompiledBlock(
                apply, tree, [i for i, s in enumerate(specs) if s.trainable], first=number == 0
            )
        layers[name] = JaxBlock(apply.function, specs, number, dtype, compiled[form])
    return layers, dtype
