"""Look up, import and report on checkpoints for the command line."""
