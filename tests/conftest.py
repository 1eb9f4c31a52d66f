"""What every test runs under."""

import torch

# Ranks are forked, and a forked child hangs if its parent has used several OpenMP threads.
torch.set_num_threads(1)
