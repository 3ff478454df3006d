"""Save and load sharded models and optimizers; a checkpoint can be loaded with any number of ranks and any strategy.

The modules of this package are imported on first use.
"""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_modules

if TYPE_CHECKING:
    from mpizero.parallel.checkpointing import learning_rate as learning_rate
    from mpizero.parallel.checkpointing import model_state as model_state
    from mpizero.parallel.checkpointing import restore as restore

__getattr__ = lazy_modules(__name__)
