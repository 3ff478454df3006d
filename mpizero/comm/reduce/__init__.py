"""Sum gradients over the data ranks in a fixed order, and gather parameters and other sharded arrays."""
