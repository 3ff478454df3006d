"""Run one training on several layouts, and name the first number that differs, its place and its probable cause."""
