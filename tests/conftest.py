"""Set up every test run: one thread, since a tiny model is slower on several, and kernels that run anywhere."""

import os

import torch

torch.set_num_threads(1)

# Read by triton when it is first imported, which many tests lead to: kernels need its interpreter without a GPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
