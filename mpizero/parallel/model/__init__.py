"""Define the public classes: sharded models and their optimizers."""
