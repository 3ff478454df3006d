"""Keep and replay steps whose gradients were not finite, and record where time goes."""
