"""Kernels run on the GPU where there is one, and in Triton's interpreter on the CPU where there is none."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
