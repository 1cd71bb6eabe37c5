"""The device's own time in the profile of a call, on a GPU."""

import pytest
import torch
from zoo import build

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

GREEDY = SamplingConfig(max_new_tokens=16)


@pytest.mark.parametrize("route", ["packed", "equal_width", "per_prompt", "ordinary"])
@pytest.mark.parametrize("capture", [True, False])
def test_the_device_is_timed_without_being_waited_for(route, capture):
    """Guards against events that are read too early, and against one of a kind of step counted to the other."""
    engine = RolloutEngine(
        build("qwen3").cuda(), config=RolloutConfig(max_slots=4, profile=True, prefill_route=route, capture=capture)
    )
    prompts = [[1 + (row * 7 + column) % 90 for column in range(12)] for row in range(10)]
    for _ in range(2):
        batch = engine.generate(prompts, GREEDY)
        torch.cuda.synchronize()
        profile = batch.stats.profile
        assert profile.prefill_device_ms > 0
        assert profile.decode_device_ms > 0
        # The device's time of prefill and of decode lies within the call, apart from one another.
        assert profile.prefill_device_ms + profile.decode_device_ms <= profile.wall_ms * 1.02
        assert profile.wall_ms == pytest.approx(batch.stats.seconds * 1e3, rel=1e-9)
