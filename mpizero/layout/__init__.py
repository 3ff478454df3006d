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
    from mpizero.layout.batch import GrainRule as GrainRule
    from mpizero.layout.batch import Grains as Grains
    from mpizero.layout.flat import Partition as Partition
    from mpizero.layout.flat import Span as Span
    from mpizero.layout.mesh import AXES as AXES
    from mpizero.layout.mesh import Axes as Axes
    from mpizero.layout.mesh import Coordinates as Coordinates
    from mpizero.layout.schedules import SCHEDULES as SCHEDULES
    from mpizero.layout.schedules import Costs as Costs
    from mpizero.layout.schedules import Instruction as Instruction
    from mpizero.layout.schedules import Schedule as Schedule
    from mpizero.layout.schedules import Simulation as Simulation
    from mpizero.layout.schedules import TimedInstruction as TimedInstruction
    from mpizero.layout.schedules import bubble_formula as bubble_formula
    from mpizero.layout.schedules import build_schedule as build_schedule
    from mpizero.layout.schedules import chunk_stages as chunk_stages
    from mpizero.layout.schedules import simulate as simulate
    from mpizero.layout.stages import balanced_chunks as balanced_chunks
    from mpizero.layout.stages import balanced_cuts as balanced_cuts
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
