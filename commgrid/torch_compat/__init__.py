"""The only place with names that are private to torch, or differ between its versions."""
