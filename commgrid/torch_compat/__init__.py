"""The only door to what is private to torch, or differs between its versions."""
