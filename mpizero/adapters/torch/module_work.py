"""Count the work of a module's forward and backward pass, by running a copy of it on zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mpizero.adapters.pass_work import PassWork, efficient_samples
from mpizero.adapters.torch.arrays import as_tensor
from mpizero.adapters.torch.module_call import ModuleCall
from mpizero.sampletree import leaves_of, map_leaves

#: Kernel calls, and work, of a forward and backward pass over those of the forward pass.
_BOTH = 3


@dataclass(frozen=True, eq=False)
class WorkCounter:
    """Find with how many samples a grain's fixed cost is small.

    Parameters
    ----------
    calls : tuple of ModuleCall
        The blocks in the order in which they run.
    dtype : dtype
        Type of the parameters.
    """

    calls: tuple[ModuleCall, ...]
    dtype: np.dtype[Any]
    _found: dict[Any, int | None] = field(default_factory=dict)

    def enough_samples(self, x: Any) -> int | None:
        """Return the number of samples; None if the modules do not run on zeros. Not collective.

        ``x`` is a tree of samples, of which only shapes and types count.
        """
        kind = tuple((leaf.shape[1:], leaf.dtype) for leaf in leaves_of(x))
        if kind not in self._found:
            self._found[kind] = self._counted(x)
        return self._found[kind]

    def _counted(self, x: Any) -> int | None:
        parameters = sum(int(spec.size) for call in self.calls for spec in call.tensors.specs)
        return efficient_samples(lambda samples: self._work(x, samples), parameters)

    def _work(self, x: Any, samples: int) -> PassWork:
        counter = _Counter()
        x = map_leaves(lambda leaf: as_tensor(np.zeros((samples, *leaf.shape[1:]), leaf.dtype)), x)
        for call in self.calls:
            x = call.on_zeros(x, self.dtype, counter)
        return counter.work


class _Counter(TorchDispatchMode):  # type: ignore[misc]
    """Count the kernels that PyTorch calls in forward passes, and their work, times :data:`_BOTH`."""

    def __init__(self) -> None:
        super().__init__()
        self.work = PassWork()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise the first kernel loads PyTorch's compiler, which takes as long as PyTorch itself."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the kernel, and count it, unless it makes a view or a copy."""
        kwargs = dict(kwargs or {})
        output = function(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, torch.Tensor)]
        if not function.is_view and function is not torch.ops.aten.clone.default and tensors:
            operations: Callable[..., int] | None = flop_registry.get(function.overloadpacket)
            count = operations(*args, **kwargs, out_val=output) if operations is not None else 0
            moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            one = PassWork(1, "convolution" in str(function), count, moved)
            self.work = self.work.plus(PassWork(*(_BOTH * int(number) for number in one)))
        return output
