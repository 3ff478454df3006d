"""Run the forward pass of a whole MLP or GPT in one kernel.

These kernels are for small batches on a CPU, where calling a NumPy function takes longer than its arithmetic. There is
no such kernel for GPUs, where the kernels and products of the layers are faster. All parameters are in one flat array,
``params``, in the order in which :mod:`mpizero.nn.models` packs them; a weight has the shape (inputs, outputs).
"""

from __future__ import annotations

import math
from typing import Any

from mpizero.kernels.elementary import exponential, hyperbolic_tangent
from mpizero.kernels.formulas import gelu, relu, silu
from mpizero.kernels.jit import kernel

RELU, GELU, SILU, TANH = 0, 1, 2, 3
#: Names of the activations; the index of a name is its code.
ACTIVATIONS = ("relu", "gelu", "silu", "tanh")


def _affine(x: Any, rows: Any, inputs: Any, weight: Any, bias: Any, outputs: Any, y: Any) -> None:
    """Write ``x @ weight + bias`` to ``y``, where ``x`` is (rows, inputs) and ``y`` is (rows, outputs), both flattened.

    Four rows of ``weight`` are read at a time, so that ``y`` is loaded and stored a quarter as often.
    """
    quads = inputs - inputs % 4
    for r in range(rows):
        row = y[r * outputs : (r + 1) * outputs]
        for j in range(outputs):
            row[j] = bias[j]
        source = x[r * inputs : (r + 1) * inputs]
        for k in range(0, quads, 4):
            a0, a1, a2, a3 = source[k], source[k + 1], source[k + 2], source[k + 3]
            w0 = weight[k * outputs : (k + 1) * outputs]
            w1 = weight[(k + 1) * outputs : (k + 2) * outputs]
            w2 = weight[(k + 2) * outputs : (k + 3) * outputs]
            w3 = weight[(k + 3) * outputs : (k + 4) * outputs]
            for j in range(outputs):
                row[j] += (a0 * w0[j] + a1 * w1[j]) + (a2 * w2[j] + a3 * w3[j])
        for k in range(quads, inputs):
            a0 = source[k]
            w0 = weight[k * outputs : (k + 1) * outputs]
            for j in range(outputs):
                row[j] += a0 * w0[j]


def _activate(x: Any, count: Any, kind: Any) -> None:
    T = x.dtype.type  # noqa: N806
    if kind == RELU:
        for i in range(count):
            x[i] = relu(x[i], T)
    elif kind == GELU:
        for i in range(count):
            x[i] = gelu(x[i], T)
    elif kind == SILU:
        for i in range(count):
            x[i] = silu(x[i], T)
    else:
        for i in range(count):
            x[i] = hyperbolic_tangent(x[i], T)


def _layernorm(x: Any, rows: Any, features: Any, weight: Any, bias: Any, eps: Any, y: Any) -> None:
    T = x.dtype.type  # noqa: N806
    for r in range(rows):
        source, target = x[r * features : (r + 1) * features], y[r * features : (r + 1) * features]
        mean = T(0)
        for i in range(features):
            mean += source[i]
        mean /= T(features)
        variance = T(0)
        for i in range(features):
            variance += (source[i] - mean) * (source[i] - mean)
        rstd = T(1) / math.sqrt(variance / T(features) + eps)
        for i in range(features):
            target[i] = (source[i] - mean) * rstd * weight[i] + bias[i]


def _attend(qkv: Any, length: Any, dim: Any, heads: Any, scale: Any, scores: Any, mixed: Any) -> None:
    """Write the causal self-attention of one sample to ``mixed`` (length, dim), before the output projection.

    ``qkv`` (length, 3 * dim) holds queries, keys and values, ``scale`` is the factor on scores, and ``scores`` is
    temporary memory of ``length`` elements.
    """
    T = qkv.dtype.type  # noqa: N806
    size = dim // heads
    for t in range(length):
        for h in range(heads):
            query = qkv[t * 3 * dim + h * size : t * 3 * dim + (h + 1) * size]
            highest = -T(math.inf)
            for s in range(t + 1):
                key = qkv[s * 3 * dim + dim + h * size : s * 3 * dim + dim + (h + 1) * size]
                total = T(0)
                for i in range(size):
                    total += query[i] * key[i]
                scores[s] = total * scale
                highest = max(highest, scores[s])
            norm = T(0)
            for s in range(t + 1):
                scores[s] = exponential(scores[s] - highest, T)
                norm += scores[s]
            target = mixed[t * dim + h * size : t * dim + (h + 1) * size]
            for i in range(size):
                target[i] = T(0)
            for s in range(t + 1):
                weight = scores[s] / norm
                value = qkv[s * 3 * dim + 2 * dim + h * size : s * 3 * dim + 2 * dim + (h + 1) * size]
                for i in range(size):
                    target[i] += weight * value[i]


def _add(x: Any, y: Any, count: Any) -> None:
    for i in range(count):
        x[i] += y[i]


@kernel("void(const T[::1], i8, const i8[::1], i8, const T[::1], T[::1], T[::1])")
def mlp(x: Any, rows: Any, widths: Any, activation: Any, params: Any, work: Any, out: Any) -> None:
    """Write the output of an MLP for ``rows`` samples ``x`` to ``out``.

    Layer k has ``widths[k]`` inputs and ``widths[k + 1]`` outputs. ``activation`` is an index into ``ACTIVATIONS``; the
    last layer has no activation. ``work`` is temporary memory of 2 * rows * (largest width) elements.
    """
    last = widths.size - 2
    half = work.size // 2
    for i in range(rows * widths[0]):
        work[i] = x[i]
    at = 0
    for layer in range(last + 1):
        inputs, outputs = widths[layer], widths[layer + 1]
        source = work[(layer % 2) * half :]
        target = out if layer == last else work[((layer + 1) % 2) * half :]
        bias = at + inputs * outputs
        _affine(source, rows, inputs, params[at:bias], params[bias : bias + outputs], outputs, target)
        at = bias + outputs
        if layer < last:
            _activate(target, rows * outputs, activation)


@kernel("void(const i8[::1], i8, const i8[::1], const T[::1], const T[::1], T[::1], T[::1])")
def gpt(ids: Any, length: Any, sizes: Any, scalars: Any, params: Any, work: Any, out: Any) -> None:
    """Write the logits of a GPT for all positions of sequences of token ids to ``out`` (number of ids, vocabulary).

    ``ids`` holds the sequences one after the other, each of ``length`` tokens. ``sizes`` is [dim, layers, heads,
    vocabulary, sequence]: dim is the number of features, sequence the number of rows of the position embedding.
    ``scalars`` holds the eps of the layer norms and the factor on attention scores. ``work`` is temporary memory of
    length * (9 * dim + 1) elements.
    """
    dim, layers, heads, vocabulary, sequence = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    eps, scale = scalars[0], scalars[1]
    count = length * dim
    x, normed = work[:count], work[count : 2 * count]
    wide, qkv, scores = work[2 * count : 6 * count], work[6 * count : 9 * count], work[9 * count :]
    for sample in range(ids.size // max(length, 1)):
        for t in range(length):
            token = ids[sample * length + t] * dim
            position = vocabulary * dim + t * dim
            for i in range(dim):
                x[t * dim + i] = params[token + i] + params[position + i]
        at = (vocabulary + sequence) * dim
        for _ in range(layers):
            _layernorm(x, length, dim, params[at:], params[at + dim :], eps, normed)
            at += 2 * dim
            _affine(normed, length, dim, params[at:], params[at + 3 * dim * dim :], 3 * dim, qkv)
            at += 3 * dim * dim + 3 * dim
            _attend(qkv, length, dim, heads, scale, scores, normed)
            _affine(normed, length, dim, params[at:], params[at + dim * dim :], dim, wide)
            _add(x, wide, count)
            at += dim * dim + dim
            _layernorm(x, length, dim, params[at:], params[at + dim :], eps, normed)
            at += 2 * dim
            _affine(normed, length, dim, params[at:], params[at + 4 * dim * dim :], 4 * dim, wide)
            at += 4 * dim * dim + 4 * dim
            _activate(wide, 4 * count, GELU)
            _affine(wide, length, 4 * dim, params[at:], params[at + 4 * dim * dim :], dim, normed)
            _add(x, normed, count)
            at += 4 * dim * dim + dim
        _layernorm(x, length, dim, params[at:], params[at + dim :], eps, normed)
        at += 2 * dim
        logits = out[sample * length * vocabulary : (sample + 1) * length * vocabulary]
        _affine(normed, length, dim, params[at:], params[at + dim * vocabulary :], vocabulary, logits)
