"""Mixtures of experts in bf16 on a GPU: transformers' grouped experts read nothing from the device, so they capture."""

import pytest
import torch
from zoo import VOCAB_SIZE, build, ragged_prompts

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

ROWS = 8
PROMPTS = ragged_prompts(VOCAB_SIZE, 3, list(range(2, 2 + ROWS)))
SAMPLING = SamplingConfig(max_new_tokens=16)


def tokens(batch):
    return [completion.token_ids for completion in batch.completions]


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_grouped_experts_are_captured(name):
    """Guards against a routing of tokens that is baked into a captured step."""
    model = build(name).to("cuda", torch.bfloat16)
    eager = RolloutEngine(model, config=RolloutConfig(max_slots=ROWS, capture=False, prefill_capture=False))
    expected = tokens(eager.generate(PROMPTS, SAMPLING))
    assert len(set(expected)) == ROWS
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=ROWS, prefill_capture=False))
    batch = engine.generate(PROMPTS, SAMPLING)
    assert batch.stats.eager_reason is None
    assert batch.stats.replays == batch.stats.decode_steps > 0
    assert tokens(batch) == expected
    whole = RolloutEngine(model, config=RolloutConfig(max_slots=ROWS)).generate(PROMPTS, SAMPLING)
    assert whole.stats.prefill_eager_reason is None
    assert whole.stats.prefill_replays == 1
