"""A GPT in float64 loses in every step what PyTorch's loses from the same weights, to the last bits."""

from __future__ import annotations

import numpy as np
import pytest

import mpizero as mz
from mpizero.nn import from_torch, initial_parameters, model_specs

torch = pytest.importorskip("torch")

from tests.peers import gpt_twin  # noqa: E402

STEPS = 40


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-14), ("float32", 1e-5)])
def test_forty_adamw_steps_of_a_gpt_have_the_losses_of_pytorch_s_fused_adamw(dtype, rtol):
    model = mz.nn.GPT(64, 2, 4, 64, dtype=dtype, seed=1)
    twin = gpt_twin.torch_twin(model, initial_parameters(model))
    names = dict(zip(gpt_twin.to_torch_names(model), model_specs(model), strict=False))
    groups = [
        {
            "params": [value for name, value in twin.named_parameters() if names[name].decay is decays],
            "weight_decay": rate,
        }
        for decays, rate in ((True, 0.1), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    losses, wanted = [], []
    with (
        mz.ShardingConfig(comm="self", micro_batch=8) as config,
        mz.distribute(model, mz.AdamW(lr=1e-3, weight_decay=0.1), strategy="zero1", config=config) as sharded,
    ):
        start = from_torch(model, twin.state_dict())
        sharded.set_parameters(np.concatenate([start[s.name].ravel() for s in model_specs(model) if s.tied is None]))
        for x, y in gpt_twin.text_batches(STEPS, sequence=64, batch=8):
            losses.append(sharded.train(x, y))
            optimizer.zero_grad()
            (loss := twin.mean_loss(x, y)).backward()
            optimizer.step()
            wanted.append(loss.item())
    np.testing.assert_allclose(losses, wanted, rtol=rtol)
    assert losses[-1] < losses[0] - 1.0
