"""The parts of train_gpt: model, data, flags, trainer, log, and what happens between steps."""
