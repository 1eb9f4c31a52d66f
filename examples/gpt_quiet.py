"""Imported before torch: keeps it from warning that numpy is missing, which nothing here needs."""

import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
