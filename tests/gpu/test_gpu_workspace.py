"""Captured products after torch has let go of the memory that cuBLAS works in."""

import pytest
import torch

from liveroll.decode import capture
from liveroll.decode.capture import CudaGraphs


def drop_a_step(graphs, step):
    graphs.record(step)


def capture_what_was_compiled(graphs, step):
    compiled = torch.compile(lambda square: square @ square, mode="reduce-overhead")
    for _ in range(3):
        compiled(torch.ones(64, 64, device="cuda", dtype=torch.bfloat16))


# To own a pool, torch captures nothing, and some versions of it warn that they did.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("let_go", [drop_a_step, capture_what_was_compiled])
def test_captured_products_write_to_nobodys_memory(let_go):
    """Guards against replays that write where cuBLAS once worked, into what has been put there since."""
    device = torch.device("cuda", torch.cuda.current_device())
    # A long sum for few results is computed in parts, which wait in that memory to be added.
    left, right = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in [(8, 2**16), (2**16, 64)])
    product = torch.empty(8, 64, device=device, dtype=torch.bfloat16)

    def step():
        torch.mm(left, right, out=product)

    graphs = CudaGraphs(device)
    graphs.warm_up(step)
    captured = graphs.record(step)
    captured.replay()
    expected = product.clone()
    let_go(graphs, step)
    stream, _ = capture._side_stream(device)
    with torch.cuda.stream(stream):
        others = [torch.zeros(2**25, dtype=torch.uint8, device=device) for _ in range(4)]
    torch.cuda.synchronize()
    captured.replay()
    assert product.equal(expected)
    assert not any(other.any() for other in others)
