"""The commands of `commgrid`, a file each."""
