"""Run one training on several layouts; report the first number that differs, its location and probable cause."""
