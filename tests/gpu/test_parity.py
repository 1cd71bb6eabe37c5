"""In fp32 on a GPU, captured and eager, every route gives the tokens of `model.generate`."""

from functools import cache

import pytest
import torch
from zoo import ARCHITECTURES, VOCAB_SIZE, build, early_eos, ragged_prompts, with_eos

from liveroll import CostModel, RolloutConfig, RolloutEngine, SamplingConfig

BUDGET = 24
PROMPTS = ragged_prompts(VOCAB_SIZE, seed=11)
# Several buckets; auto takes them for the short prompts, and packed for the long ones.
COSTS = CostModel(fixed_ms=0.5, packed_fixed_ms=1.5, packed_token_ms=0.05)
# The experts of these are looped over with counts read from the device, unless a grouped implementation is set.
HOST_BOUND = {"mixtral", "qwen3_moe", "gpt_oss"}


@cache
def on_gpu(name):
    return build(name).cuda()


@cache
def expected(name, stop, penalty):
    model = on_gpu(name)
    with with_eos(model, stop):
        return [_reference(model, prompt, penalty) for prompt in PROMPTS]


def _reference(model, prompt, penalty):
    ids = torch.tensor([prompt], device="cuda")
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": BUDGET, "repetition_penalty": penalty}
    row = model.generate(ids, **given)[0, len(prompt) :].tolist()
    eos = model.generation_config.eos_token_id
    return row[: row.index(eos) + 1] if eos in row else row


@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("route", ["packed", "bucketed", "equal_width", "per_prompt", "auto"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_routes(name, route, capture):
    """Guards against kernels, capture or refills that change a token: 5 prompts on 2 slots, early EOS, penalty."""
    model = on_gpu(name)
    config = RolloutConfig(prefill_route=route, costs=COSTS, max_slots=2, capture=capture)
    engine = RolloutEngine(model, config=config)
    sampling = SamplingConfig(max_new_tokens=BUDGET)
    assert tokens(engine.generate(PROMPTS, sampling)) == expected(name, None, 1.0)
    stop = early_eos_of(name)
    with with_eos(model, stop):
        assert tokens(engine.generate(PROMPTS, sampling)) == expected(name, stop, 1.0)
        penalised = SamplingConfig(max_new_tokens=BUDGET, repetition_penalty=1.3)
        batch = engine.generate(PROMPTS, penalised)
        assert tokens(batch) == expected(name, stop, 1.3)
    if capture == "auto" and batch.stats.eager_reason is None:
        assert batch.stats.replays == batch.stats.decode_steps > 0
    if name not in HOST_BOUND and capture == "auto":
        assert batch.stats.eager_reason is None


@cache
def early_eos_of(name):
    return early_eos(build(name), PROMPTS, BUDGET)


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


def test_ordinary_route_on_gpu():
    """Guards against host tensors in the processors handed to `generate`."""
    engine = RolloutEngine(on_gpu("llama"), config=RolloutConfig(prefill_route="ordinary"))
    assert tokens(engine.generate(PROMPTS, SamplingConfig(max_new_tokens=BUDGET))) == expected("llama", None, 1.0)


@pytest.mark.parametrize("variant", [{"top_k": 0}, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}])
def test_samples_do_not_depend_on_slots_or_capture(variant):
    """Guards against random numbers that depend on the batch, the slot or the graph."""
    sampling = SamplingConfig(max_new_tokens=BUDGET, temperature=0.9, seed=5, n=3, **variant)
    results = {
        tuple(
            c.token_ids for c in RolloutEngine(on_gpu("qwen2"), config=config).generate(PROMPTS, sampling).completions
        )
        for config in (
            RolloutConfig(max_slots=1),
            RolloutConfig(max_slots=4, run_ahead=5),
            RolloutConfig(max_slots=16, capture=False),
            RolloutConfig(max_slots=16, prefill_route="equal_width"),
        )
    }
    assert len(results) == 1


@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("route", ["packed", "equal_width", "per_prompt", "ordinary"])
def test_interrupted_and_continued(route, capture):
    """Guards against steps in flight that reach past the end of a call, and continued rows that go on elsewhere."""
    config = RolloutConfig(prefill_route=route, capture=capture, max_slots=4, run_ahead=3)
    engine = RolloutEngine(on_gpu("qwen2"), config=config)
    sampling = SamplingConfig(max_new_tokens=BUDGET, temperature=0.9, top_k=0, seed=5, n=2)
    whole = engine.generate(PROMPTS, sampling)
    batch, calls = engine.generate(PROMPTS, sampling, max_total_tokens=40), 1
    while any(completion.finish_reason == "aborted" for completion in batch.completions):
        batch = engine.generate(continue_from=batch, sampling=sampling, max_total_tokens=40)
        calls += 1
    assert calls > 3
    assert tokens(batch) == tokens(whole)
    assert batch.loss_mask.is_cuda
    assert batch.loss_mask.equal(whole.loss_mask)


def test_rows_aborted_in_flight():
    """Guards against results in flight of an aborted row that reach the row which gets its slot and pages."""
    engine = RolloutEngine(on_gpu("qwen2"), config=RolloutConfig(max_slots=2, run_ahead=3, page_size=4))
    budgets = [SamplingConfig(max_new_tokens=count) for count in (BUDGET, 12, BUDGET, BUDGET, BUDGET)]
    rows = [row[: setting.max_new_tokens] for row, setting in zip(expected("qwen2", None, 1.0), budgets, strict=True)]
    seen = {}
    for completion in engine.stream(PROMPTS, budgets):
        if not seen:
            assert engine.abort(4) == 1
        seen[completion.prompt_index] = completion
        following = [row for row in range(5) if row not in seen and row != 1]
        if following:
            engine.abort(following[-1])
    for row in range(5):
        assert list(seen[row].token_ids) == rows[row][: len(seen[row].token_ids)]
    assert {completion.finish_reason for completion in seen.values()} == {"length", "aborted"}


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_half_precision_stays_close(name):
    """Guards against bf16 kernels that are off by more than rounding: teacher-forced log-probabilities."""
    model = build(name).to("cuda", torch.bfloat16)
    batch = RolloutEngine(model).generate(
        PROMPTS, SamplingConfig(max_new_tokens=BUDGET, temperature=1.0, top_k=0, seed=1)
    )
    for completion, prompt in zip(batch.completions, PROMPTS, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]], device="cuda")
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        forced = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        difference = (forced - torch.tensor(completion.logprobs)).abs()
        assert difference.mean() < 0.15, difference
