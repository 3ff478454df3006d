"""Train by a configuration file: the training loop, its folder, early stops and resuming."""
