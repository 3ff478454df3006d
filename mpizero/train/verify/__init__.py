"""Run one training on several layouts and name the first number that differs, where, and probably why."""
