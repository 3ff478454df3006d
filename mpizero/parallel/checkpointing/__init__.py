"""Save and load sharded models and optimizers; a checkpoint can be loaded with any number of ranks and any strategy."""
