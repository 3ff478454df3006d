"""Models made of layers: MLP, GPT, and what can be done with any model of blocks."""
