"""Define the instructions that a pipeline stage executes."""

from __future__ import annotations

from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward_input"
BACKWARD_WEIGHTS = "backward_weights"


class Instruction(NamedTuple):
    """Describe one computation of one chunk on one micro-batch; its messages follow from it.

    A forward pass needs the output of the previous chunk, and sends its own output to the next chunk. A backward pass,
    or its input half, needs the chunk's forward pass and the input gradient of the next chunk, and sends its own input
    gradient to the previous chunk. A weight half needs its input half and sends nothing.

    Attributes
    ----------
    kind : str
        "forward", "backward" (both halves), "backward_input" or "backward_weights".
    chunk : int
        Number of the chunk, counted from the model's input.
    micro : int
        Number of the micro-batch.
    """

    kind: str
    chunk: int
    micro: int

    def __str__(self) -> str:
        """Return the instruction's name for error messages."""
        return f"{self.kind} of chunk {self.chunk}, micro-batch {self.micro}"

    def needs(self, chunks: int) -> tuple[Instruction, ...]:
        """Return the instructions that must be complete before this one; ``chunks`` is the number of all chunks.

        A whole backward completes its two halves, so only halves are named here (see :attr:`does`).
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
        """The instructions that this one completes: itself, or both halves of a whole backward."""
        if self.kind != BACKWARD:
            return (self,)
        _, chunk, micro = self
        return Instruction(BACKWARD_INPUT, chunk, micro), Instruction(BACKWARD_WEIGHTS, chunk, micro)
