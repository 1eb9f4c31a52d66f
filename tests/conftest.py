"""What every test runs under."""

import torch
from hypothesis import settings

# Ranks are forked, and a forked child hangs if its parent has used several OpenMP threads.
torch.set_num_threads(1)

# The same examples in every run, however long one takes on a busy machine.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")
