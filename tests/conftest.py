"""Set up every test run: tests share one core, and `import zoo` finds the modules in this folder."""

import torch

torch.set_num_threads(1)
