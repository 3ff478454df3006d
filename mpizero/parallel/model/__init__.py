"""The public classes: sharded models, their optimizers, and what they offer."""
