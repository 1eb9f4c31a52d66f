"""Pictures of grids, schedules and runs.

`commgrid show -o FILE` draws them; `.svg`, `.png` and `.pdf` need matplotlib (`pip install
matplotlib`), `.html` is one page that needs nothing. `view` works out the drawing, without
torch or matplotlib.
"""
