"""Convert weights of a GPT from and to PyTorch's names and layout.

[Note: names in PyTorch] The names are those of GPT-2's published state dict, which nanoGPT and Hugging Face's
``GPT2LMHeadModel`` share. :func:`from_torch` also reads names without the prefix ``transformer.``, as in Hugging Face's
``GPT2Model``:

============================================  ==========================================
mpizero                                       PyTorch
============================================  ==========================================
embedding.token.weight                        transformer.wte.weight
embedding.position.weight                     transformer.wpe.weight
blocks.I.norm1.weight, .bias                  transformer.h.I.ln_1.weight, .bias
blocks.I.attention.qkv.weight, .bias          transformer.h.I.attn.c_attn.weight, .bias
blocks.I.attention.projection.weight, .bias   transformer.h.I.attn.c_proj.weight, .bias
blocks.I.norm2.weight, .bias                  transformer.h.I.ln_2.weight, .bias
blocks.I.feed_forward.expand.weight, .bias    transformer.h.I.mlp.c_fc.weight, .bias
blocks.I.feed_forward.projection.weight,      transformer.h.I.mlp.c_proj.weight, .bias
.bias
head.norm.weight, .bias                       transformer.ln_f.weight, .bias
head.projection.weight (untied models only)   lm_head.weight
============================================  ==========================================

``torch.nn.Linear`` stores weights as (outputs, inputs), mpizero as (inputs, outputs) (:class:`mpizero.nn.Linear`), so
the four matrices of a block are transposed. GPT-2's own ``Conv1D`` stores them as (inputs, outputs), too. The shape of
``c_attn``, which is never square, shows which of the two layouts a state dict has. The tables (``wte``, ``wpe``,
``lm_head``) have the same layout everywhere. Causal masks saved as buffers (``attn.bias``, ``attn.masked_bias``) are
ignored. mpizero's GELU is the tanh form: ``torch.nn.GELU(approximate="tanh")``, GPT-2's "gelu_new". A model trained
with GELU's exact form gives slightly different logits in mpizero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpizero.errors import LayoutError
from mpizero.nn.models.block_model import model_specs
from mpizero.nn.models.gpt import GPT
from mpizero.types import Array

_PREFIX = "transformer."
_LAYERS = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.expand": "mlp.c_fc",
    "feed_forward.projection": "mlp.c_proj",
}
_ENDS = {
    "embedding.token.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.projection.weight": "lm_head.weight",
}


def torch_name(name: str) -> str:
    """Translate the name of a GPT's parameter into PyTorch's; see [Note: names in PyTorch]."""
    if name in _ENDS:
        return _ENDS[name]
    _, index, rest = name.split(".", 2)
    layer, _, kind = rest.rpartition(".")
    return f"{_PREFIX}h.{index}.{_LAYERS[layer]}.{kind}"


def from_torch(model: GPT, state: Mapping[str, Any]) -> dict[str, Array]:
    """Convert a PyTorch state dict into a GPT's named parameters.

    Parameters
    ----------
    model : GPT
        The model that the parameters are for; values are cast to its dtype.
    state : mapping of str to tensor or array
        A state dict; tensors may lie on any device.

    Returns
    -------
    dict of str to Array
        One contiguous array for each parameter, by global name, as :func:`mpizero.nn.bind` takes them. Tied uses have
        none.

    Raises
    ------
    LayoutError
        An entry of the state dict is missing or has another shape; the message names it.

    Examples
    --------
    >>> import mpizero as mz
    >>> gpt = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=16)
    >>> state = mz.nn.to_torch(gpt, mz.nn.initial_parameters(gpt))  # or a PyTorch model's state_dict()
    >>> named = mz.nn.from_torch(gpt, state)
    >>> named["blocks.0.attention.qkv.weight"].shape  # inputs first
    (8, 24)
    """
    prefix = "" if "wte.weight" in state else _PREFIX
    turned = _stores_outputs_first(model, state, prefix)
    named: dict[str, Array] = {}
    for spec in model_specs(model):
        if spec.tied is not None:
            continue
        key = torch_name(spec.name)
        key = prefix + key[len(_PREFIX) :] if key.startswith(_PREFIX) else key
        if key not in state:
            raise LayoutError(f"the state dict has no {key!r}, which {spec.name} comes from")
        value = _as_array(state[key])
        value = value.T if turned and _is_matrix(spec.name) else value
        if value.shape != spec.shape:
            raise LayoutError(f"{key!r} has shape {value.shape} (inputs first), {spec.name} needs {spec.shape}")
        named[spec.name] = np.array(value, model.dtype, order="C")
    return named


def to_torch(model: GPT, named: Mapping[str, Array]) -> dict[str, Array]:
    """Convert a GPT's named parameters to PyTorch's names and the layout of ``torch.nn.Linear``.

    Returns
    -------
    dict of str to Array
        NumPy arrays by PyTorch's names. Apply ``torch.from_numpy`` to each value to get a state dict.
        ``lm_head.weight`` is always included; if the model is tied, it is the same array as ``transformer.wte.weight``.

    Examples
    --------
    >>> import mpizero as mz
    >>> gpt = mz.nn.GPT(dim=8, layers=1, heads=2, sequence=16)
    >>> state = mz.nn.to_torch(gpt, mz.nn.initial_parameters(gpt))
    >>> state["transformer.h.0.attn.c_attn.weight"].shape  # outputs first, as torch.nn.Linear has it
    (24, 8)
    """
    state = {}
    for spec in model_specs(model):
        value = np.asarray(named[spec.tied or spec.name])
        state[torch_name(spec.name)] = np.ascontiguousarray(value.T) if _is_matrix(spec.name) else value
    return state


def _is_matrix(name: str) -> bool:
    layer, _, kind = name.rpartition(".")
    return kind == "weight" and layer.startswith("blocks.") and not layer.endswith(("norm1", "norm2"))


def _stores_outputs_first(model: GPT, state: Mapping[str, Any], prefix: str) -> bool:
    key = f"{prefix}h.0.attn.c_attn.weight"
    if key not in state:
        raise LayoutError(f"the state dict has no {key!r}: it is not a GPT-2's, its names are {sorted(state)[:3]}...")
    return tuple(state[key].shape) == (3 * model.dim, model.dim)


def _as_array(value: Any) -> Array:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value  # NumPy has no such type
        value = value.numpy()
    return np.asarray(value)
