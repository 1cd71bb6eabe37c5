"""Kernels run on the GPU where there is one, and in Triton's interpreter on the CPU where there is none."""

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
