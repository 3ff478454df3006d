"""Name the instructions of a pipeline stage."""

from __future__ import annotations

from typing import NamedTuple

FORWARD = "forward"
BACKWARD = "backward"
BACKWARD_INPUT = "backward_input"
BACKWARD_WEIGHTS = "backward_weights"


class Instruction(NamedTuple):
    """Describe one computation of one chunk on one micro-batch; its messages are implied.

    A forward needs the output of the chunk before and sends its own to the chunk after; a backward, or its input half,
    needs its forward and the input gradient of the chunk after, and sends its own to the chunk before. A weight half
    needs its input half and sends nothing.

    Attributes
    ----------
    kind : str
        "forward", "backward" (both halves), "backward_input" or "backward_weights".
    chunk : int
        Chunk of the model, counted from its input.
    micro : int
        Micro-batch.
    """

    kind: str
    chunk: int
    micro: int

    def __str__(self) -> str:
        """Name it as messages do."""
        return f"{self.kind} of chunk {self.chunk}, micro-batch {self.micro}"

    def needs(self, chunks: int) -> tuple[Instruction, ...]:
        """Return the instructions that must come before; a whole backward counts as both of its halves."""
        kind, chunk, micro = self
        if kind == BACKWARD_WEIGHTS:
            return (Instruction(BACKWARD_INPUT, chunk, micro),)
        if kind == FORWARD:
            return (Instruction(FORWARD, chunk - 1, micro),) if chunk else ()
        own = Instruction(FORWARD, chunk, micro)
        return (own,) if chunk == chunks - 1 else (own, Instruction(BACKWARD_INPUT, chunk + 1, micro))

    @property
    def does(self) -> tuple[Instruction, ...]:
        """The instructions that it completes: a whole backward is both of its halves."""
        if self.kind != BACKWARD:
            return (self,)
        _, chunk, micro = self
        return Instruction(BACKWARD_INPUT, chunk, micro), Instruction(BACKWARD_WEIGHTS, chunk, micro)
