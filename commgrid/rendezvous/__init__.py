"""Rendezvous of ranks at a store, as protocols on plain values that no clock or network is in."""
