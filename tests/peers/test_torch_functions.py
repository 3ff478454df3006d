"""Functions of PyTorch that mpizero's kernels compute have PyTorch's values and derivatives, also second ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.nn import functional  # noqa: E402

from mpizero.adapters.torch import TorchModel, autograd  # noqa: E402
from mpizero.adapters.torch.autograd import MpizeroKernels  # noqa: E402
from mpizero.errors import ConfigError  # noqa: E402


def gelu(x: Any) -> Any:
    return functional.gelu(x, approximate="tanh")


def attention(q: Any, k: Any, v: Any) -> Any:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


FUNCTIONS = [(gelu, 1), (functional.silu, 1), (attention, 3)]


@pytest.fixture(autouse=True)
def _small_attention_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "FEW_SCORES", -1)


def inputs(count: int, shape: tuple[int, ...], dtype: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    strided = [torch.randn(shape, dtype=dtype, generator=generator).transpose(1, 2).contiguous() for _ in range(count)]
    return [x.transpose(1, 2).requires_grad_() for x in strided]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)], ids=str)
def test_values_and_gradients_are_those_of_pytorch(dtype: Any, tolerance: float) -> None:
    for function, count in FUNCTIONS:
        for shape in ((2, 3, 70, 8), (1, 1, 1, 1)):
            xs = inputs(count, shape, dtype)
            expected = function(*xs)
            dy = torch.randn(expected.shape, dtype=dtype)
            with MpizeroKernels():
                found = function(*xs)
            assert type(found.grad_fn).__name__ in ("_ElementwiseBackward", "_CausalAttentionBackward")
            ours, theirs = torch.autograd.grad(found, xs, dy), torch.autograd.grad(expected, xs, dy)
            for got, wanted in zip((found, *ours), (expected, *theirs), strict=True):
                torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning", "ignore:There is a performance drop")
@pytest.mark.parametrize(("function", "count"), FUNCTIONS, ids=lambda one: getattr(one, "__name__", ""))
def test_second_derivatives_and_transforms_are_those_of_pytorch(function: Callable[..., Any], count: int) -> None:
    xs = inputs(count, (1, 1, 4, 2), torch.float64)
    with MpizeroKernels():
        assert torch.autograd.gradcheck(function, xs)
        assert torch.autograd.gradgradcheck(function, xs)
        jacobian = torch.func.jacrev(function)(*xs)
        if count == 1:
            with forward_ad.dual_level():
                seen = forward_ad.unpack_dual(function(forward_ad.make_dual(xs[0].detach(), torch.ones_like(xs[0]))))
            torch.testing.assert_close(seen.tangent.flatten(), jacobian.reshape(8, 8).sum(1))
    torch.testing.assert_close(jacobian, torch.func.jacrev(function)(*xs))


def test_calls_that_the_kernels_do_not_know_are_pytorchs() -> None:
    (x,) = inputs(1, (2, 2, 6, 4), torch.float32)
    calls: list[Callable[[], Any]] = [
        lambda: functional.gelu(x),
        lambda: functional.silu(x.detach().clone(), inplace=True),
        lambda: gelu(x.to(torch.bfloat16)),
        lambda: functional.scaled_dot_product_attention(x, x, x),
        lambda: functional.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
        lambda: functional.scaled_dot_product_attention(x[:, :, :3], x, x, is_causal=True),
    ]
    for call in calls:
        expected = call()
        with MpizeroKernels():
            assert torch.equal(call(), expected)


def test_another_name_of_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TorchModel: kernels is 'torch' or 'mpizero', got 'fast'"):
        TorchModel(torch.nn.Linear(2, 2), torch.nn.MSELoss(reduction="sum"), kernels="fast")
