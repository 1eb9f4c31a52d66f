"""The version of commgrid, which ranks compare before they start a grid."""

VERSION = "0.2.0"
