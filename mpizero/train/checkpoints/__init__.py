"""What the command line does with checkpoints: look them up, import and report."""
