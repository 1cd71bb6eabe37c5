"""Ranks that share a call's work on GPUs: through gloo on one, and through NCCL where there are two."""

import pytest
import torch
from ranks import Crew
from torch import distributed as dist
from zoo import VOCAB_SIZE, build, ragged_prompts

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

WORLD = 2
COUNTS = (3, 13)
SAMPLED = SamplingConfig(max_new_tokens=24, temperature=1.0, n=2, seed=5, stop_token_ids=(7,))


def prompts():
    drawn = ragged_prompts(VOCAB_SIZE, seed=2, lengths=[3 + 5 * (index % 4) for index in range(sum(COUNTS))])
    return [drawn[: COUNTS[0]], drawn[COUNTS[0] :]]


def engine_on(device):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return RolloutEngine(build("llama").to(device), config=RolloutConfig(max_slots=8))


def share(rank, backend, gather):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(backend=backend)
    engine = engine_on("cuda")
    rounds = [engine.generate(prompts()[rank], SAMPLED, group=group, gather=gather) for _ in range(2)]
    captures = engine.captures
    engine.shutdown()
    dist.destroy_process_group(group)
    return [[c.token_ids for c in batch.completions] for batch in rounds], rounds[1].stats.new_tokens, captures


@pytest.fixture(scope="module")
def crew():
    with Crew(WORLD) as crew:
        yield crew


@pytest.mark.parametrize("gather", ["own", "all"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_as_one_rank_with_all_prompts(crew, backend, gather):
    """Guards against tensors on another device than the group's backend exchanges, and a queue that upsets captures."""
    if backend == "nccl" and torch.cuda.device_count() < WORLD:
        pytest.skip("NCCL needs a GPU for each rank")
    flat = [prompt for own in prompts() for prompt in own]
    alone = [completion.token_ids for completion in engine_on("cuda").generate(flat, SAMPLED).completions]
    reports = crew.run(share, backend, gather, patience=200)
    split = 2 * COUNTS[0]
    expected = [alone[:split], alone[split:]] if gather == "own" else [alone] * WORLD
    for (rounds, new, captures), own in zip(reports, expected, strict=True):
        assert rounds == [own, own]
        assert new > 0
        assert captures > 0
    assert sum(new for _, new, _ in reports) == sum(map(len, alone))
