"""Train the members of an ensemble side by side, and summarize them."""
