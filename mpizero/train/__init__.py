"""Train by one configuration file: runs that are checkpointed and can be resumed."""
