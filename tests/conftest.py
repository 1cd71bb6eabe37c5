"""Set up every test run: one thread, since a tiny model is slower on several, and kernels that run anywhere."""

import os
from collections import Counter
from zlib import crc32

import torch

torch.set_num_threads(1)

# Read by triton when it is first imported, which many tests lead to: kernels need its interpreter without a GPU.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="run all cases of tests that are marked as thinned")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "thinned(n): without --thorough only one of about n cases runs, always the same, and the first"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("thorough"):
        return
    seen, kept, left_out = Counter(), [], []
    for item in items:
        marker = item.get_closest_marker("thinned")
        test = item.nodeid.partition("[")[0]
        # By the hash of its name, so that no parameter is the same in all cases that are left.
        is_kept = marker is None or seen[test] == 0 or crc32(item.nodeid.encode()) % marker.args[0] == 0
        seen[test] += 1
        (kept if is_kept else left_out).append(item)
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)
