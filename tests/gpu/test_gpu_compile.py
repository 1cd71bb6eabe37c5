"""Compiled and fused steps of half precision, whose gates and norms are parts of products, beside the trainer's own."""

import pytest
import torch
import zoo

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.decode import feeding
from liveroll.model.rewriting import rewrite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 64, 70])
def test_logprobs_are_the_trainers(dtype, rows, monkeypatch):
    """Guards against a rewritten product that is right by itself and wrong where it stands in a model."""
    counts = []

    def count(graph):
        counts.append(rewrite(graph))

    monkeypatch.setattr(feeding, "rewrite", count)
    model = zoo.build("qwen2").to("cuda", dtype)
    config = RolloutConfig(max_slots=80, compile=True, fuse=True)
    prompts = zoo.ragged_prompts(zoo.VOCAB_SIZE, 3, [2 + index % 9 for index in range(rows)])
    with RolloutEngine(model, config=config) as engine:
        batch = engine.generate(prompts, SamplingConfig(max_new_tokens=12, temperature=1.0, top_k=0, seed=1))
        assert engine.compilations
    assert min(counts) == 3 * model.config.num_hidden_layers
    exact = zoo.build("qwen2").to("cuda", torch.float64)
    exact.load_state_dict({name: tensor.double() for name, tensor in model.state_dict().items()})
    ours, own = [], []
    for completion, prompt in zip(batch.completions, prompts, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]], device="cuda")
        with torch.no_grad():
            logits, rounded = (net(ids).logits[0, len(prompt) - 1 : -1].double() for net in (exact, model))
        chosen = torch.tensor(completion.token_ids, device="cuda")[:, None]
        expected, trainer = (values.log_softmax(-1).gather(1, chosen)[:, 0] for values in (logits, rounded))
        ours.append((torch.tensor(completion.logprobs, device="cuda").double() - expected).abs())
        own.append((trainer - expected).abs())
    # Single tokens are off by as much as 2 in either: weights are large here. A product that is wrong moves them all.
    assert torch.cat(ours).mean() <= 2 * torch.cat(own).mean() + 0.01
