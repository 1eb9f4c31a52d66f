"""Live communicators: starting torch.distributed, agreeing, making a plan's groups."""
