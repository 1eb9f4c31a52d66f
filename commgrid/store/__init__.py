"""The key-value store at which ranks meet: where it is, how to ask it, what stands in for it."""
