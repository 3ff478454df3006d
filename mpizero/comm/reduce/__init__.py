"""Sum and gather gradients and parameters over the data ranks, exactly."""
