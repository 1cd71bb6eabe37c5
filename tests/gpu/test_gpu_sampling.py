"""Sampling kernels over a vocabulary of real size, captured and eager."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from device_waits import watching_waits
from plain_sampler import plain_greedy
from sampled_rows import admitted, moved, request_with
from zoo import VOCAB_SIZE, build, ragged_prompts

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.decode.sampler import Variant, sample
from liveroll.decode.state import Column, Setting
from liveroll.decode.truncation import find_bounds, keeps
from liveroll.scheduling.details import NOTHING, Wanted

VOCAB, SIZE = 151936, 151665
ALL = Wanted(raw=True, top=8, kept=1024)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"sampled": False},
    {"top_k": 50},
    {"top_k": 1, "temperature": 0.7},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.5},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"top_k": 5000, "top_p": 0.95, "min_p": 0.001},
    {"top_k": 100_000},
    {"repetition_penalty": 1.3, "response": range(0, 3000, 7)},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "response": [*range(500), *range(50)], "top_p": 0.9},
    {"logit_bias": tuple((token, 3.0) for token in range(0, 9000, 9)), "forbidden_tokens": tuple(range(100, 140))},
    {"top_k": 20, "forbidden_tokens": tuple(range(0, VOCAB, 3)), "sampled": True},
]


def made(shape: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of one shape on the CPU: those of a random head, those of a trained one, or with many ties."""
    generator = torch.Generator().manual_seed(rows)
    if shape == "flat":
        logits = torch.randn(rows, VOCAB, generator=generator)
    elif shape == "peaked":  # probabilities that fall off by a power of the rank, as those of words do
        order = torch.stack([torch.randperm(VOCAB, generator=generator) for _ in range(rows)])
        logits = 18 - 1.6 * (order + 1.0).log() + 0.3 * torch.randn(rows, VOCAB, generator=generator)
    else:
        logits = torch.randn(rows, VOCAB, generator=generator).mul(2).round()
    logits[1::2, 50_000:50_100] = -math.inf
    return logits.to(dtype)


def rows_on_gpu(settings):
    state, slots = admitted([request_with(**setting) for setting in settings], VOCAB, SIZE)
    return moved(state, torch.device("cuda")), slots.cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", ["flat", "peaked", "ties"])
def test_kernels_do_what_torch_does(shape, dtype):
    """Guards against scores, kept sets, draws or details that differ from the rule in a single token."""
    from liveroll.kernels.sample import sample_fused

    logits = made(shape, len(SETTINGS), dtype)
    state, slots = admitted([request_with(**setting) for setting in SETTINGS], VOCAB, SIZE)
    for variant in (Variant.FULL, Variant.PLAIN):
        expected = sample(logits, moved(state, torch.device("cpu")), slots, variant, ALL)
        found = sample_fused(logits.cuda(), moved(state, torch.device("cuda")), slots.cuda(), variant, ALL)
        ours, theirs = ALL.read(found.details.cpu().numpy()), ALL.read(expected.details.numpy())
        assert ours.kept_counts.tolist() == theirs.kept_counts.tolist()
        assert all(one.tolist() == other.tolist() for one, other in zip(ours.kept, theirs.kept, strict=True))
        assert found.tokens.cpu().equal(expected.tokens)
        torch.testing.assert_close(found.logprobs.cpu(), expected.logprobs, atol=3e-5, rtol=1e-5)
        torch.testing.assert_close(ours.raw_logprobs, theirs.raw_logprobs, atol=3e-5, rtol=1e-5)
        torch.testing.assert_close(ours.top_logprobs, theirs.top_logprobs, atol=3e-5, rtol=1e-5)
        possible = theirs.top_logprobs > -math.inf
        # Where a temperature divides outside of the scores kernel, its quotient may round otherwise.
        assert variant is Variant.PLAIN or (ours.top_ids == theirs.top_ids)[possible].all()


@pytest.mark.parametrize("rows", [1, 3, 32, 256])
def test_bounds_in_any_batch(rows):
    """Guards against a bound that depends on the rows beside it, or on how many there are."""
    from liveroll.kernels.scores import score
    from liveroll.kernels.truncate import find_bounds as find_on_gpu

    limits = [{"top_p": 0.8}, {"top_k": 40, "top_p": 0.9}, {"top_p": 0.99, "min_p": 0.01}]
    state, slots = rows_on_gpu([limits[row % 3] for row in range(rows)])
    logits = made("peaked", 3, torch.bfloat16).cuda()
    bounds = find_on_gpu(score(logits.repeat(86, 1)[:rows], state, slots), state, slots)
    scores = logits.float()[:, :SIZE]
    numbers, settings = (tensor[: min(rows, 3)] for tensor in (state.numbers, state.settings))
    own = numbers[:, Column.TOP_K], settings[:, Setting.TAIL], settings[:, Setting.LEAST]
    expected = keeps(scores[:rows], *find_bounds(scores[:rows], *own))
    for start in range(0, rows, 3):
        part = [tensor[start : start + 3] for tensor in bounds]
        assert keeps(scores[: len(part[0])], *part).equal(expected[: len(part[0])])


@pytest.mark.parametrize("wanted", [NOTHING, ALL], ids=["nothing", "all"])
@pytest.mark.parametrize("variant", [Variant.PLAIN, Variant.FULL])
def test_captured_and_without_a_look_from_the_host(variant, wanted):
    """Guards against a host read in a step, and values of the capture that stay in its replays."""
    from liveroll.kernels.sample import sample_fused

    state, slots = rows_on_gpu(SETTINGS)
    logits = made("peaked", len(SETTINGS), torch.bfloat16).cuda()
    sample_fused(logits, state, slots, variant, wanted)  # the first call compiles
    with watching_waits("error"):
        sample_fused(logits, state, slots, variant, wanted)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = sample_fused(logits, state, slots, variant, wanted)
    for seed in range(3):
        logits.copy_(made("flat" if seed == 1 else "peaked", len(SETTINGS), torch.bfloat16).roll(seed, 0))
        state.settings.copy_(state.settings.roll(1, 0))
        state.numbers.copy_(state.numbers.roll(1, 0))
        graph.replay()
        eager = sample_fused(logits, state, slots, variant, wanted)
        assert captured.tokens.equal(eager.tokens)
        assert captured.logprobs.equal(eager.logprobs)
        if wanted.rows:
            ours, theirs = wanted.read(captured.details.cpu().numpy()), wanted.read(eager.details.cpu().numpy())
            assert (ours.numbers == theirs.numbers).all()
            assert all((one == other).all() for one, other in zip(ours.kept, theirs.kept, strict=True))


def test_logits_that_are_not_numbers_show():
    """Guards against NaN that a filter hides."""
    from liveroll.kernels.sample import sample_fused

    state, slots = rows_on_gpu(SETTINGS)
    for value in (math.nan, -math.nan, math.inf):
        logits = made("peaked", len(SETTINGS), torch.float32).cuda()
        logits[:, 77_777] = value
        if value != math.inf:
            logits[3] = value
        for variant in (Variant.PLAIN, Variant.FULL):
            drawn = sample_fused(logits, state, slots, variant, ALL)
            assert drawn.logprobs.isnan().all()
            assert ((drawn.tokens >= 0) & (drawn.tokens < SIZE)).all()


@pytest.mark.parametrize("capture", ["auto", False])
def test_penalties_and_biases_in_an_engine(capture):
    """Guards against counts lost by captured steps, refills and preemption on a GPU."""
    model, prompts = build("qwen2"), ragged_prompts(VOCAB_SIZE, seed=31)
    sampling = [
        SamplingConfig(max_new_tokens=14, presence_penalty=1.5),
        SamplingConfig(max_new_tokens=14, frequency_penalty=0.8, logit_bias={7: 2.0}),
        SamplingConfig(max_new_tokens=14, repetition_penalty=1.3, forbidden_tokens=tuple(range(20, 60))),
        SamplingConfig(max_new_tokens=14),
        SamplingConfig(max_new_tokens=14, min_new_tokens=9, stop_token_ids=tuple(range(0, 97, 4))),
    ]
    batch = RolloutEngine(model, config=RolloutConfig(max_slots=2)).generate(prompts, sampling)
    expected = [plain_greedy(model, prompt, own) for prompt, own in zip(prompts, batch.sampling, strict=True)]
    assert [list(completion.token_ids) for completion in batch.completions] == expected
    model.cuda()
    for config in ({"max_slots": 2}, {"max_slots": 8, "kv_tokens": 64, "page_size": 4}):
        engine = RolloutEngine(model, config=RolloutConfig(capture=capture, **config))
        for _ in range(2):
            found = engine.generate(prompts, sampling)
            assert [list(completion.token_ids) for completion in found.completions] == expected


def test_everything_that_is_told_captured_and_eager():
    """Guards against details of another row or step in captured steps that run ahead of the host."""
    model, prompts = build("llama").cuda(), ragged_prompts(VOCAB_SIZE, seed=5)
    told = {"raw_logprobs": True, "top_logprobs": 5, "kept_tokens": 97, "seed": 3, "n": 2}
    sampling = SamplingConfig(max_new_tokens=12, temperature=1.5, top_p=0.9, presence_penalty=0.2, **told)
    configs = (RolloutConfig(max_slots=4, run_ahead=4), RolloutConfig(max_slots=16, capture=False))
    ours, theirs = (RolloutEngine(model, config=config).generate(prompts, sampling).completions for config in configs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.kept_tokens == other.kept_tokens
        assert one.raw_logprobs == pytest.approx(other.raw_logprobs, abs=1e-4)
        for token, logprob, pairs in zip(one.token_ids, one.logprobs, one.top_logprobs, strict=True):
            assert dict(pairs).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
