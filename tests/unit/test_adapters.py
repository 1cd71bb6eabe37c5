"""PEFT adapters: a rollout runs with those that are in force, and notices when others are."""

from __future__ import annotations

import pytest
import torch
import zoo
from snapshots import left_as_found

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig, UnsupportedModelError

peft = pytest.importorskip("peft")

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
GREEDY = SamplingConfig(max_new_tokens=8)

pytestmark = [
    pytest.mark.parametrize("route", ROUTES),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),  # peft asks by the old name
]


def lora(**settings):
    return peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False, **settings
    )


def adapted(**settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = peft.get_peft_model(zoo.build("llama"), lora(**settings))
        model.add_adapter("second", lora(**settings))
    return model.eval()


def engine(model, route):
    return RolloutEngine(model, config=RolloutConfig(prefill_route=route, page_size=4))


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


def references(model):
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def test_an_adapter(route):
    """Guards against the base model answering for the adapted one."""
    model = adapted(lora_dropout=0.3).train()
    with left_as_found(model.get_base_model()):
        rolled = tokens(engine(model, route).generate(PROMPTS, GREEDY))
    assert rolled == references(model.eval())
    assert rolled != references(zoo.shared("llama"))


def test_adapters_that_change_between_calls(route):
    """Guards against a captured step that replays the adapter it was captured with."""
    model = adapted()
    rollouts = engine(model, route)
    seen = []

    def check():
        expected = references(model)
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == expected
        seen.append(expected)

    check()
    model.set_adapter("second")
    check()
    with model.disable_adapter():
        check()
    model.merge_adapter()
    check()
    model.unmerge_adapter()
    check()
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.set_scale("second", 0.25)
    check()
    first, second, base, merged, unmerged, scaled = seen
    assert second == merged == unmerged
    assert len({str(rows) for rows in (first, second, base, scaled)}) == 4
    if route != "ordinary":
        assert len(rollouts.recapture_reasons) == 5
        assert all("adapters" in reason for reason in rollouts.recapture_reasons)


def test_an_adapter_merged_for_good(route):
    """Guards against an engine that still looks into the wrapper."""
    model = adapted()
    expected = references(model)
    assert tokens(engine(model.merge_and_unload(), route).generate(PROMPTS, GREEDY)) == expected


def test_training_an_adapter(route):
    """Guards against a step on the adapter alone that the next rollout does not see, or frozen weights that thaw."""
    model = adapted().train()
    rollouts = engine(model, route)
    before = tokens(rollouts.generate(PROMPTS, GREEDY))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    ids = torch.tensor([PROMPTS[-1]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    after = tokens(rollouts.generate(PROMPTS, GREEDY))
    assert before != after == references(model.eval())
    assert rollouts.recapture_reasons == []


def test_virtual_tokens_are_refused(route):
    """Guards against a prompt-learning adapter whose tokens the engine would not feed."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        engine(peft.get_peft_model(zoo.build("llama"), config), route)
