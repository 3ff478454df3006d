"""Compute which rank owns which elements, and which pipeline stage computes what, from integers and without MPI.

Examples
--------
>>> from mpizero.layout import AXES, SCHEDULES
>>> AXES  # slowest first
('pipeline', 'tensor', 'data', 'context')
>>> SCHEDULES
('gpipe', '1f1b', 'interleaved', 'zero_bubble', 'zero_bubble_v')
"""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.layout.axes import AXES as AXES
    from mpizero.layout.axes import Axes as Axes
    from mpizero.layout.axes import Coordinates as Coordinates
    from mpizero.layout.grains import GrainRule as GrainRule
    from mpizero.layout.grains import Grains as Grains
    from mpizero.layout.instructions import Instruction as Instruction
    from mpizero.layout.partition import Partition as Partition
    from mpizero.layout.schedule import Schedule as Schedule
    from mpizero.layout.schedules import SCHEDULES as SCHEDULES
    from mpizero.layout.schedules import build_schedule as build_schedule
    from mpizero.layout.schedules import chunk_stages as chunk_stages
    from mpizero.layout.simulation import Costs as Costs
    from mpizero.layout.simulation import Simulation as Simulation
    from mpizero.layout.simulation import TimedInstruction as TimedInstruction
    from mpizero.layout.simulation import bubble_formula as bubble_formula
    from mpizero.layout.simulation import simulate as simulate
    from mpizero.layout.stages import balanced_chunks as balanced_chunks
    from mpizero.layout.stages import balanced_cuts as balanced_cuts
    from mpizero.layout.unit import Span as Span
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
