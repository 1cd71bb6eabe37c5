"""Planning on a GPU waits for the device no more often for many rows than for few."""

import warnings

from device_waits import watching_waits
from zoo import VOCAB_SIZE, build, left_pad, ragged_prompts

from liveroll import RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig


def test_one_read_for_any_number_of_rows():
    """Guards against lengths or masks that are read from the device row by row."""
    engine = RolloutEngine(build("llama").cuda(), config=RolloutConfig(prefill_route="auto", max_slots=64))
    sampling = SamplingConfig(max_new_tokens=4)
    waits = []
    for rows in (2, 64):
        prompts = ragged_prompts(VOCAB_SIZE, rows, [3 + row % 9 for row in range(rows)])
        ids, mask = (tensor.cuda() for tensor in left_pad(prompts, 0))
        engine.plan(RolloutRequest(ids, mask.bfloat16()), sampling)
        with watching_waits("warn"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan = engine.plan(RolloutRequest(ids, mask.bfloat16()), sampling)
        assert list(plan.lengths) == [len(prompt) for prompt in prompts]
        waits.append(len(caught))
    assert waits[0] == waits[1] >= 1
