"""Set up every test run: one thread, since a tiny model is slower on several."""

import torch

torch.set_num_threads(1)
