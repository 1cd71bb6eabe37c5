"""A model on another GPU than the current one, as on `--device cuda:1`."""

import pytest
import torch
from zoo import VOCAB_SIZE, build, ragged_prompts

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

PROMPTS = ragged_prompts(VOCAB_SIZE, seed=11)

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("settings", [{}, {"capture": False}, {"compile": True, "fuse": True}])
@pytest.mark.parametrize("route", ["packed", "equal_width", "ordinary"])
def test_tokens_and_times_of_a_model_on_the_second_gpu(route, settings):
    """Guards against kernels and events that go to the current GPU, whatever tensors they are about."""
    sampling = SamplingConfig(max_new_tokens=24, temperature=1.0, top_p=0.95, seed=3)
    config = RolloutConfig(max_slots=4, prefill_route=route, profile=True, **settings)
    model = build("qwen2")
    expected = RolloutEngine(model.cuda(0), config=config).generate(PROMPTS, sampling)
    engine = RolloutEngine(model.to("cuda:1"), config=config)
    for _ in range(2):
        batch = engine.generate(PROMPTS, sampling)
        assert batch.input_ids.equal(expected.input_ids.to("cuda:1"))
        assert batch.stats.profile.decode_device_ms > 0
        assert torch.cuda.current_device() == 0
    streamed = {completion.prompt_index: completion.token_ids for completion in engine.stream(PROMPTS, sampling)}
    assert [streamed[row] for row in range(len(PROMPTS))] == [c.token_ids for c in expected.completions]
    engine.sleep()
    assert engine.generate(PROMPTS, sampling).input_ids.equal(batch.input_ids)
    engine.shutdown()
