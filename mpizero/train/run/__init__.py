"""Train by a configuration file: the trainer, its folder, and what stops and continues a run."""
