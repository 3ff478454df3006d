"""Save and load sharded models and optimizers on any layout."""
