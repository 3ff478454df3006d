"""Compute some functions of PyTorch with mpizero's kernels, which take less time on CPUs.

A mode of PyTorch sees the calls of functions while a module runs. GELU in its tanh form, SiLU, and causal attention
without mask and dropout, unless it is small, are computed by the kernels of :mod:`mpizero.nn`'s layers, where tensors
are float32 or float64 on the host; all other calls run as they are. A gradient whose own gradient is asked for
(``create_graph=True``), and tensors inside ``torch.func``'s transforms and forward-mode derivatives, are computed by
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd.function import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from mpizero import kernels
from mpizero.nn.transformer import CausalSelfAttention

#: Attention of no more scores takes less time in PyTorch, which calls no Python function for it.
FEW_SCORES = 1 << 14


class OwnKernels(TorchFunctionMode):  # type: ignore[misc]
    """Let mpizero's kernels compute the functions that they know, for one thread."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return ``func(*args, **kwargs)``, by a kernel if there is one."""
        kwargs = kwargs or {}
        known = _KNOWN.get(func)
        found = NotImplemented if known is None else known(*args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found


def _gelu(input: Any, *, approximate: str = "none") -> Any:
    if approximate != "tanh" or not _is_plain(input):
        return NotImplemented
    return _Elementwise.apply(input, "gelu", lambda x: functional.gelu(x, approximate="tanh"))


def _silu(input: Any, inplace: bool = False) -> Any:
    if inplace or not _is_plain(input):
        return NotImplemented
    return _Elementwise.apply(input, "silu", functional.silu)


def _attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
               *, scale: float | None = None, enable_gqa: bool = False) -> Any:  # fmt: skip
    plain = all(map(_is_plain, (query, key, value))) and query.ndim == 4
    alike = plain and query.shape == key.shape == value.shape and query.dtype == key.dtype == value.dtype
    if not (alike and is_causal and attn_mask is None and dropout_p == 0 and scale is None):
        return NotImplemented
    samples, heads, length, _ = query.shape
    if samples * heads * length**2 <= FEW_SCORES:
        return NotImplemented
    return _CausalAttention.apply(query, key, value)


_KNOWN: dict[Any, Callable[..., Any]] = {
    functional.gelu: _gelu,
    functional.silu: _silu,
    functional.scaled_dot_product_attention: _attention,
}


def _is_plain(tensor: Any) -> bool:
    """Tell whether a kernel can read a tensor: numbers of the host, outside of PyTorch's transforms."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and torch.autograd.forward_ad._current_level < 0
    )


def _again(function: Callable[..., torch.Tensor], inputs: tuple[torch.Tensor, ...], dy: torch.Tensor) -> Any:
    """Return PyTorch's own gradients of ``function`` at ``inputs``, which can be differentiated again."""
    with torch._C.DisableTorchFunction():
        wanted = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(function(*inputs), wanted, dy, create_graph=True))
    return [next(found) if x.requires_grad else None for x in inputs]


class _Elementwise(Function):  # type: ignore[misc]
    """Apply a function to each element by the kernel ``name``, and its derivative by ``name_backward``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return the function of ``x``."""
        ctx.save_for_backward(x)
        ctx.name, ctx.function = name, function
        x = x.contiguous()
        y = torch.empty_like(x)
        getattr(kernels.cpu.activation, name)(_flat(x), _flat(y))
        return y

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return ``dy`` times the derivative."""
        (x,), (dy,) = ctx.saved_tensors, grad_outputs
        if torch.is_grad_enabled():
            return *_again(ctx.function, (x,), dy), None, None
        x = x.contiguous()
        dx = torch.empty_like(x)
        getattr(kernels.cpu.activation, f"{ctx.name}_backward")(_flat(x), _flat(dy.contiguous()), _flat(dx))
        return dx, None, None


class _CausalAttention(Function):  # type: ignore[misc]
    """Compute causal attention of queries, keys and values (samples, heads, length, features)."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        """Return the weighted sums of the values."""
        samples, heads, length, features = inputs[0].shape
        apart = torch.empty(3, samples, heads, length, features, dtype=inputs[0].dtype)
        for place, tensor in zip(apart, inputs, strict=True):
            place.copy_(tensor)
        mixed, (_, stored, ctx.run, _) = CausalSelfAttention(heads * features, heads).attend_heads(apart.numpy())
        ctx.save_for_backward(*inputs, apart, None if stored is None else torch.from_numpy(stored))
        return torch.from_numpy(mixed).view(samples, length, heads, features).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Return the gradients of queries, keys and values."""
        (*inputs, apart, stored), (dy,) = ctx.saved_tensors, grad_outputs
        if torch.is_grad_enabled():
            return tuple(_again(_torch_attention, tuple(inputs), dy))
        samples, heads, length, features = dy.shape
        layer = CausalSelfAttention(heads * features, heads)
        seen = (apart.numpy(), None if stored is None else stored.numpy(), ctx.run, 0)
        rows = dy.transpose(1, 2).reshape(samples, length, heads * features)
        found = torch.from_numpy(layer.attend_backward(seen, rows.numpy()))
        return tuple(found.view(samples, length, 3, heads, features).permute(2, 0, 3, 1, 4))


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    # The fused kernels of PyTorch cannot be differentiated twice.
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _flat(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array of all elements that shares the memory of a contiguous tensor."""
    array: np.ndarray[Any, np.dtype[Any]] = tensor.detach().numpy()
    return array.reshape(-1)
