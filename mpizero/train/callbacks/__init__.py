"""Call the user's functions during a training run, and write its figures for other programs."""
