"""Two grids that meet, for a transfer or a bridge, and the communicator over their ranks."""
