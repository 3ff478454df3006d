"""Compute which rank owns which elements, and which pipeline stage computes what, from integers and without MPI.

Examples
--------
>>> from mpizero.layout import AXES, SCHEDULES
>>> AXES  # slowest first
('pipeline', 'tensor', 'data', 'context')
>>> SCHEDULES
('gpipe', '1f1b', 'interleaved', 'zero_bubble', 'zero_bubble_v')
"""

from mpizero.layout.axes import AXES, Axes, Coordinates
from mpizero.layout.grains import GrainRule, Grains
from mpizero.layout.instructions import Instruction
from mpizero.layout.partition import Partition
from mpizero.layout.schedule import Schedule
from mpizero.layout.schedules import SCHEDULES, build_schedule, chunk_stages
from mpizero.layout.simulate import Costs, Simulation, TimedInstruction, bubble_formula, simulate
from mpizero.layout.stages import balanced_chunks, balanced_cuts
from mpizero.layout.unit import Span

__all__ = [
    "AXES",
    "SCHEDULES",
    "Axes",
    "Coordinates",
    "Costs",
    "TimedInstruction",
    "GrainRule",
    "Grains",
    "Instruction",
    "Partition",
    "Schedule",
    "Simulation",
    "Span",
    "balanced_chunks",
    "balanced_cuts",
    "bubble_formula",
    "build_schedule",
    "chunk_stages",
    "simulate",
]
