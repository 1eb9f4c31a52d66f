"""Ranks that are started from here: for tests, audits and dry runs, and what they leave behind."""
