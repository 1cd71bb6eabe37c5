"""Captured prefills on a GPU: the tokens of eager ones, counted exactly, for as long as parameters stay."""

import pytest
import torch
from device_waits import watching_waits
from zoo import ARCHITECTURES, VOCAB_SIZE, build, ragged_prompts

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig

GREEDY = SamplingConfig(max_new_tokens=12)
# Of 61, 65 and 330 tokens: filled up to 64, 128 and 384. The last spans blocks of the kernel.
PROMPTS = [ragged_prompts(VOCAB_SIZE, 11, lengths) for lengths in ((1, 20, 7, 30, 3), (40, 24, 1), (200, 64, 1, 65))]
# The experts of these are looped over with counts read from the device, unless a grouped implementation is set.
HOST_BOUND = {"mixtral", "qwen3_moe", "gpt_oss"}


def tokens(batch):
    return [completion.token_ids for completion in batch.completions]


def eager_tokens(model, prompts, **settings):
    config = RolloutConfig(capture=False, max_slots=8, **settings)
    return tokens(RolloutEngine(model, config=config).generate(prompts, GREEDY))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_captured_prefills_give_the_tokens_of_eager_ones(name):
    """Guards against windows, caps, sinks or neighbours that the kernel gets wrong, and lengths baked into a graph."""
    model = build(name).cuda()
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=8))
    expected = [eager_tokens(model, prompts, prefill_route="per_prompt") for prompts in PROMPTS]
    for _ in range(2):
        for prompts, rows in zip(PROMPTS, expected, strict=True):
            stats = (batch := engine.generate(prompts, GREEDY)).stats
            assert tokens(batch) == rows
            if stats.prefill_eager_reason is None:
                assert stats.prefill_replays == stats.prefill_forwards == 1
    if name not in HOST_BOUND:
        assert stats.prefill_eager_reason is None
    if stats.prefill_eager_reason is None:
        assert (engine.prefill_captures, engine.prefill_replays) == (3, 6)


@pytest.mark.parametrize("settings", [{}, {"fuse": True}, {"compile": True}, {"compile": True, "fuse": True}])
def test_refills_after_training(settings):
    """Guards against graphs of old weights, of memory that weights have left, and refills that disturb other rows."""
    model = build("qwen2").cuda()
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=2, page_size=2, **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.tensor([PROMPTS[0][1]], device="cuda")
    seen = []
    for _ in range(3):
        seen.append(tokens(engine.generate(PROMPTS[0], GREEDY)))
        assert seen[-1] == eager_tokens(model, PROMPTS[0])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0] != seen[1] != seen[2]
    captures = engine.prefill_captures
    assert captures == 1
    assert engine.recapture_reasons == []
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(-layer.weight.detach())
    assert tokens(engine.generate(PROMPTS[0], GREEDY)) == eager_tokens(model, PROMPTS[0])
    assert engine.prefill_captures == 2 * captures
    engine.shutdown()
    assert engine.memory().total == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_half_precision_stays_close(name, dtype):
    """Guards against a kernel that is off by more than rounding where no tokens can be compared."""
    model = build(name, head_dim=64).to("cuda", dtype)
    sampling = SamplingConfig(max_new_tokens=1, temperature=1.0, top_k=0, top_logprobs=5)
    for prompts in PROMPTS:
        captured, eager = (
            RolloutEngine(model, config=RolloutConfig(prefill_capture=capture)).generate(prompts, sampling)
            for capture in (True, False)
        )
        for ours, theirs in zip(captured.completions, eager.completions, strict=True):
            known, found = dict(theirs.top_logprobs[0]), dict(ours.top_logprobs[0])
            shared = known.keys() & found.keys()
            assert len(shared) >= 3
            assert sum(abs(known[token] - found[token]) for token in shared) / len(shared) < 0.15


def test_a_replayed_prefill_waits_for_nothing():
    """Guards against a number read from the device, or copied to it from memory that is not pinned."""
    engine = RolloutEngine(build("qwen3").cuda(), config=RolloutConfig(max_slots=8))
    engine.generate(PROMPTS[2], GREEDY)
    prefill = engine._decoder.prefill
    run, seen = prefill.run, []

    def watched(*arguments):
        with watching_waits("error"):
            seen.append(arguments[0])
            return run(*arguments)

    prefill.run = watched
    engine.generate(PROMPTS[2], GREEDY)
    assert seen == [384]


def test_graphs_of_all_sizes_share_their_memory():
    """Guards against a pool that grows by the whole of each size."""
    model = build("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, max_position_embeddings=4096)
    engine = RolloutEngine(model.cuda(), config=RolloutConfig(max_slots=8, max_length=2560))
    one = SamplingConfig(max_new_tokens=1)
    engine.generate(ragged_prompts(VOCAB_SIZE, 1, [2000]), one)
    first = engine.memory().graphs
    for length in (1500, 1000, 500, 100):
        engine.generate(ragged_prompts(VOCAB_SIZE, 1, [length]), one)
    assert engine.prefill_captures == 5
    assert engine.memory().graphs < 2 * first
