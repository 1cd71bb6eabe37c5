"""The drawing kernel draws what the torch sampler draws."""

import pytest
import torch

from liveroll.decode.sampler import Rows, Variant, sample


def rows_of(device, count, sampled, seed):
    generator = torch.Generator().manual_seed(seed)
    return Rows(
        position=torch.randint(0, 5000, (count,), generator=generator).to(device),
        stream=torch.randint(-(2**31), 2**31, (count, 2), generator=generator).to(device),
        sampled=torch.tensor(sampled, device=device),
        temperature=torch.where(torch.tensor(sampled), 0.3 + torch.rand(count, generator=generator), 1.0).to(device),
        top_k=torch.zeros(count, dtype=torch.int64, device=device),
        tail=torch.zeros(count, device=device),
        min_p=torch.zeros(count, device=device),
        penalty=torch.ones(count, device=device),
        seen=None,
        stops=torch.full((count, 1), -1, device=device),
        held=torch.zeros(count, dtype=torch.bool, device=device),
    )


def on_cpu(rows):
    return Rows(**{name: None if value is None else value.cpu() for name, value in vars(rows).items()})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 4096, 9001])
def test_same_tokens_and_logprobs(device, dtype, vocab):
    """Guards against other noise, other ties or a lost block: greedy and sampled rows mixed."""
    from liveroll.kernels.draw import draw

    sampled = [True, False, True, True, False, True]
    rows = rows_of(device, len(sampled), sampled, seed=vocab)
    logits = (3 * torch.randn(len(sampled), vocab, generator=torch.Generator().manual_seed(1))).to(device, dtype)
    logits[:, vocab // 2] = float("-inf")
    tokens, logprobs = draw(logits, rows.temperature, rows.sampled, rows.stream, rows.position)
    expected_tokens, expected = sample(logits.cpu(), on_cpu(rows), Variant.PLAIN)
    assert tokens.cpu().equal(expected_tokens)
    torch.testing.assert_close(logprobs.cpu(), expected, atol=2e-5, rtol=1e-5)
