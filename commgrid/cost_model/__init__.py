"""From a model and a cluster to a grid: where groups lie, what a step takes, which grid is best."""
