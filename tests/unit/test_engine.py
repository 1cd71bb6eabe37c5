"""The life of an engine, and every way to size its memory: the tokens are the same."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
import zoo
from snapshots import left_as_found

from liveroll import EngineStateError, PromptError, RolloutConfig, RolloutEngine, SamplingConfig

MODEL = zoo.build("llama")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
BUDGET = 12
GREEDY = SamplingConfig(max_new_tokens=BUDGET)
EXPECTED = [zoo.reference(MODEL, prompt, max_new_tokens=BUDGET) for prompt in PROMPTS]
LONGEST = max(map(len, PROMPTS)) + BUDGET
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, KV heads, dimensions, bytes of fp32


def engine(**settings):
    return RolloutEngine(MODEL, config=RolloutConfig(**settings))


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


@pytest.mark.parametrize("route", ["packed", "ordinary"])
def test_shutdown_and_again(route):
    """Guards against memory that stays after a shutdown, or an engine that is of no use behind it."""
    rollouts = engine(prefill_route=route)
    rollouts.shutdown()
    for _ in range(2):
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED
        assert bool(rollouts.memory().kv) == (route == "packed")
        rollouts.shutdown()
        rollouts.shutdown()
        assert rollouts.memory().total == 0


def test_a_context():
    """Guards against a block that leaves memory behind, or hides its error."""
    with engine() as rollouts:
        assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED
        assert rollouts.memory().kv > 0
    assert rollouts.memory().total == 0

    def fail():
        with rollouts:
            rollouts.generate(PROMPTS, GREEDY)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert rollouts.memory().total == 0
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED


def test_a_context_left_with_an_open_stream():
    """Guards against a block that cannot be left, or a stream that goes on over memory given back."""
    with engine() as rollouts:
        stream = rollouts.stream(PROMPTS, GREEDY)
        next(stream)
    assert rollouts.memory().total == 0
    other = rollouts.stream(PROMPTS, GREEDY)
    next(other)
    with pytest.raises(EngineStateError, match="left while this stream was open"):
        next(stream)
    with pytest.raises(EngineStateError, match="still open"):
        rollouts.generate(PROMPTS, GREEDY)
    other.close()
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED


def test_a_context_left_by_an_error_inside_a_stream():
    """Guards against an error of the caller's turning into one of the engine's."""
    rollouts = engine()

    def fail():
        with rollouts:
            for _ in rollouts.stream(PROMPTS, GREEDY):
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert tokens(rollouts.generate(PROMPTS, GREEDY)) == EXPECTED


def test_several_engines_of_one_model():
    """Guards against an engine that takes another's attention for the model's own."""
    engines = [engine(), engine(prefill_route="equal_width"), engine(prefill_route="ordinary")]
    streams = [rollouts.stream(PROMPTS, GREEDY) for rollouts in engines]
    rows = [{} for _ in engines]
    for _ in PROMPTS:
        for stream, row in zip(streams, rows, strict=True):
            completion = next(stream)
            row[completion.prompt_index] = list(completion.token_ids)
    assert all([row[index] for index in range(len(PROMPTS))] == EXPECTED for row in rows)
    assert MODEL.config._attn_implementation == "sdpa"


def in_threads(*calls):
    """Run calls side by side, many times over; what each gave."""
    start = Barrier(len(calls))

    def run(call):
        start.wait()
        return [call() for _ in range(5)]

    with ThreadPoolExecutor(len(calls)) as pool:
        return [result for results in pool.map(run, calls) for result in results]


@pytest.mark.parametrize("route", ["packed", "equal_width", "ordinary"])
def test_models_in_several_threads(route):
    """Guards against the layers of one thread's model attending over the pages of another's."""
    engines = [RolloutEngine(zoo.build("llama"), config=RolloutConfig(prefill_route=route)) for _ in range(4)]
    calls = [lambda rollouts=rollouts: tokens(rollouts.generate(PROMPTS, GREEDY)) for rollouts in engines]
    assert in_threads(*calls) == [EXPECTED] * 20


def test_one_model_in_several_threads():
    """Guards against a mode or attention put back by one thread while another still runs: one at a time, or refused."""
    model = zoo.build("llama").train()
    shared = RolloutEngine(model)

    def call(rollouts):
        try:
            return tokens(rollouts.generate(PROMPTS, GREEDY))
        except EngineStateError:
            return None

    engines = [shared, shared, RolloutEngine(model), RolloutEngine(model)]
    with left_as_found(model):
        results = in_threads(*(lambda rollouts=rollouts: call(rollouts) for rollouts in engines))
    assert EXPECTED in results
    assert all(result in (EXPECTED, None) for result in results)
    assert call(shared) == EXPECTED


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 64, 1000])
def test_page_sizes(page_size):
    """Guards against rows that begin, end or grow exactly where a page does."""
    batch = engine(page_size=page_size, max_slots=3).generate(PROMPTS, GREEDY)
    assert tokens(batch) == EXPECTED
    assert batch.stats.peak_pages >= math.ceil((LONGEST - 1) / page_size)


@pytest.mark.parametrize("max_slots", [1, 2, 5, 1000])
def test_slots(max_slots):
    """Guards against a batch that fits the slots exactly, not at all, or leaves most of them empty."""
    assert tokens(engine(max_slots=max_slots).generate(PROMPTS, GREEDY)) == EXPECTED


@pytest.mark.parametrize(
    "memory",
    [
        {"kv_tokens": 32, "page_size": 4},
        {"kv_tokens": 33, "page_size": 4},
        {"kv_tokens": 48, "page_size": 1},
        {"kv_tokens": 10**9},
        {"kv_bytes": 32 * TOKEN_BYTES, "page_size": 4},
        {"kv_bytes": 2**40},
        {"kv_fraction": 1e-3},
        {"kv_fraction": 1.0},
    ],
    ids=str,
)
def test_kv_memory(memory):
    """Guards against rows that lose their tokens with their pages, and against more memory than was allowed."""
    batch = engine(**memory).generate(PROMPTS, GREEDY)
    assert tokens(batch) == EXPECTED
    allowed = memory.get("kv_bytes", memory.get("kv_tokens", 10**9) * TOKEN_BYTES)
    scratch = 2 * 4 * 256 + memory.get("page_size", 16) * TOKEN_BYTES  # a page, and the rounding of each tensor
    assert batch.stats.kv_bytes <= allowed + scratch
    if memory.get("kv_tokens") == 32 or memory.get("kv_bytes") == 32 * TOKEN_BYTES:
        assert batch.stats.peak_pages == 8


def test_the_default_takes_no_more_than_it_needs():
    """Guards against half of the free memory being taken for five short rows: eight slots of 256 tokens are enough."""
    rollouts = engine(max_slots=8, page_size=4)
    rollouts.generate(PROMPTS, GREEDY)
    assert rollouts.memory().kv <= (8 * 256 + 4) * TOKEN_BYTES


def test_a_fixed_length():
    """Guards against storage made anew for each shape of a call, where one length was to serve all."""
    rollouts = engine(max_length=64, max_slots=4, page_size=4)
    seen = set()
    for width, budget in ((1, 1), (30, 34), (60, 4), (5, 59)):
        prompts = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=width, lengths=(width, width))
        batch = rollouts.generate(prompts, SamplingConfig(max_new_tokens=budget))
        assert tokens(batch) == [zoo.reference(MODEL, prompt, max_new_tokens=budget) for prompt in prompts]
        seen.add((batch.stats.kv_bytes, rollouts.generate([[1]], SamplingConfig(max_new_tokens=2)).stats.kv_bytes))
    assert len(seen) == 1
    assert rollouts.recapture_reasons == []
    with pytest.raises(PromptError, match=r"together 65, and RolloutConfig.max_length is 64"):
        rollouts.generate([[1] * 60], SamplingConfig(max_new_tokens=5))


def test_calls_of_any_shape_one_after_the_other():
    """Guards against what a larger call left in the pages, slots or histories of a smaller one."""
    rollouts = engine(max_slots=3, page_size=4)
    generator = torch.Generator().manual_seed(0)
    for call in range(12):
        rows, budget = (int(torch.randint(1, high, (1,), generator=generator)) for high in (7, 20))
        lengths = torch.randint(1, 30, (rows,), generator=generator).tolist()
        penalty = 1.0 if call % 3 else 1.3
        prompts = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=call, lengths=lengths)
        batch = rollouts.generate(prompts, SamplingConfig(max_new_tokens=budget, repetition_penalty=penalty))
        kwargs = {"max_new_tokens": budget, "repetition_penalty": penalty}
        assert tokens(batch) == [zoo.reference(MODEL, prompt, **kwargs) for prompt in prompts]


def test_many_samples_of_identical_prompts():
    """Guards against samples of equal prompts being equal, or depending on how they were asked for."""
    sampling = SamplingConfig(max_new_tokens=4, n=40, temperature=1.0, seed=3)
    together = engine(max_slots=64).generate([[1, 2]], sampling)
    apart = engine(max_slots=7).generate([[1, 2]] * 40, SamplingConfig(max_new_tokens=4, temperature=1.0, seed=3))
    assert tokens(together) == tokens(apart)
    assert len(set(map(tuple, tokens(together)))) > 30


def test_numpy_and_tensor_prompts():
    """Guards against prompts of other kinds or widths of integers being read as something else."""
    kinds = [list, tuple, np.array, torch.tensor, lambda p: np.array(p, np.uint8), lambda p: torch.tensor(p).int()]
    for kind in kinds:
        assert tokens(engine().generate([kind(prompt) for prompt in PROMPTS], GREEDY)) == EXPECTED
    assert tokens(engine().generate(tuple(PROMPTS), GREEDY)) == EXPECTED
