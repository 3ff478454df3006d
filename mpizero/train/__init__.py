"""Implement the command line: train from a configuration file with checkpoints and resuming, plan, bench, doctor."""
