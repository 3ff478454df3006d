"""Read and check the configuration of a run, and build its objects."""
