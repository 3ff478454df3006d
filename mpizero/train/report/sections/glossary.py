"""Explain the words of a report."""

from __future__ import annotations

import re

from mpizero.train.report.markup import Markup, element, section

_WORDS = {
    "1f1b": "a schedule of a pipeline: each stage alternates one forward and one backward pass as soon as it can",
    "agreement": "the phase in which ranks exchange samples, losses and norms, and agree on what is next",
    "chunk": "consecutive blocks of the model, which one stage of the pipeline computes",
    "counted": "of memory: added up where the library allocates it, while the run trains",
    "ddp": "every replica has all parameters, gradients and optimizer state",
    "global batch": "all samples of one step, over all ranks",
    "grain": "the smallest piece of the global batch that one rank computes; sums over grains have a fixed order",
    "group buffers": "memory for messages in the groups of ranks that share a layer (tensor and context groups)",
    "micro-batch": "the samples that go through the model or the pipeline at once",
    "planned": "of memory: what a plan computes before the first step, as mpizero plan does",
    "publication": "the phase in which updated parameters are sent to the ranks that need them",
    "replica": "ranks that hold one copy of the model together, and compute their part of the global batch",
    "skipped": "of a step: its gradient was not finite, so that nothing was updated",
    "stage": "the ranks that hold one section of the model's depth in a pipeline",
    "tensor part": "the part of every layer's parameters that one rank of a tensor group holds",
    "visit": "one start or resume of a run",
    "zero1": "optimizer state is divided among replicas",
    "zero2": "optimizer state and gradients are divided among replicas",
    "zero3": "optimizer state, gradients and parameters are divided among replicas",
}


def glossary(page: str) -> Markup:
    """Return the meanings of the words that a page has."""
    found = [(word, meaning) for word, meaning in _WORDS.items() if re.search(rf"\b{word}", page, re.IGNORECASE)]
    entries = [part for word, text in found for part in (element("dt", word), element("dd", f"{text}."))]
    return section("Words", element("dl", *entries), name="words") if entries else Markup("")
