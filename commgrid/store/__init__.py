"""The key-value store at which ranks meet: its search, its clients, and its standby."""
