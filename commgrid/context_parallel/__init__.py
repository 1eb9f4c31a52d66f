"""Context parallelism: attention over sequences that are cut over the ranks of a group."""
