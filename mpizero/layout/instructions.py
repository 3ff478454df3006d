"""Define the instructions of a pipeline stage: forward and backward passes of one chunk on one micro-batch."""

from __future__ import annotations

from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward_input"
BACKWARD_WEIGHTS = "backward_weights"


class Instruction(NamedTuple):
    """Describe one computation of one chunk on one micro-batch: a forward pass, a backward pass, or half of one.

    A backward pass has two halves: the input half computes the gradient of the chunk's input, the weight half computes
    the gradients of its weights.

    A forward pass needs the output of the previous chunk, and sends the chunk's output to the next chunk. A backward
    pass, or an input half, needs the chunk's forward pass and the input gradient of the next chunk, and sends the
    chunk's input gradient to the previous chunk. A weight half needs the input half and sends nothing.

    Attributes
    ----------
    kind : str
        "forward", "backward" (both halves), "backward_input" (the input half) or "backward_weights" (the weight half).
    chunk : int
        Number of the chunk, counted from the model's input.
    micro : int
        Number of the micro-batch.

    Examples
    --------
    >>> import mpizero as mz
    >>> backward = mz.layout.Instruction("backward", chunk=0, micro=2)
    >>> print(backward)
    backward of chunk 0, micro-batch 2
    >>> [str(needed) for needed in backward.needs(chunks=2)]
    ['forward of chunk 0, micro-batch 2', 'backward_input of chunk 1, micro-batch 2']
    """

    kind: str
    chunk: int
    micro: int

    def __str__(self) -> str:
        """Return kind, chunk and micro-batch as text for error messages."""
        return f"{self.kind} of chunk {self.chunk}, micro-batch {self.micro}"

    def needs(self, chunks: int) -> tuple[Instruction, ...]:
        """Return the instructions that must be complete before this one starts.

        ``chunks`` is the number of chunks of the whole model. A backward pass never appears in the tuple returned, only
        one of its halves, which the backward pass completes too (see :attr:`does`).
        """
        kind, chunk, micro = self
        if kind == BACKWARD_WEIGHTS:
            return (Instruction(BACKWARD_INPUT, chunk, micro),)
        if kind == FORWARD:
            return (Instruction(FORWARD, chunk - 1, micro),) if chunk else ()
        own = Instruction(FORWARD, chunk, micro)
        return (own,) if chunk == chunks - 1 else (own, Instruction(BACKWARD_INPUT, chunk + 1, micro))

    @property
    def does(self) -> tuple[Instruction, ...]:
        """The instructions that this one completes: both halves if it is a whole backward pass, otherwise itself."""
        if self.kind != BACKWARD:
            return (self,)
        _, chunk, micro = self
        return Instruction(BACKWARD_INPUT, chunk, micro), Instruction(BACKWARD_WEIGHTS, chunk, micro)
