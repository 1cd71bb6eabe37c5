"""Ways in which rollouts for training are known to go wrong without a sound, each as a test under its name.

All of them were reported of trainers or rollout engines in public. Most are covered in more depth elsewhere; here each
stands by itself, on every route.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import zoo
from texts import bpe_tokenizer

from liveroll import RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=31)
BUDGET = 16
GREEDY = SamplingConfig(max_new_tokens=BUDGET)

pytestmark = pytest.mark.parametrize("route", ROUTES)


def engine(route, model=None, tokenizer=None, **settings):
    settings = {"page_size": 4, "max_slots": 3, **settings}
    return RolloutEngine(model or zoo.shared("llama"), tokenizer, RolloutConfig(prefill_route=route, **settings))


def tokens(batch):
    return [list(completion.token_ids) for completion in batch.completions]


def alone(model=None, **kwargs):
    return [zoo.reference(model or zoo.shared("llama"), row, max_new_tokens=BUDGET, **kwargs) for row in PROMPTS]


def test_pad_equal_to_eos(route):
    """Guards against an end that is masked out of the loss as padding, or padding that counts as an end."""
    model = zoo.shared("llama")
    stop = zoo.early_eos(model, PROMPTS, BUDGET)
    with zoo.with_eos(model, stop, pad=stop):
        batch = engine(route).generate(PROMPTS, GREEDY)
        expected = alone()
    assert tokens(batch) == expected
    assert {row[-1] == stop for row in expected} == {True, False}
    assert batch.loss_mask.sum(1).tolist() == [len(row) for row in expected]


def test_several_eos_ids(route):
    """Guards against an engine that knows the first of them only."""
    model = zoo.shared("llama")
    stops = sorted({row[3 + index] for index, row in enumerate(alone())})[:3]
    with zoo.with_eos(model, stops, pad=0):
        batch, expected = engine(route).generate(PROMPTS, GREEDY), alone()
    assert tokens(batch) == expected
    assert len({completion.stop for completion in batch.completions} - {None}) > 1


def test_a_left_padded_batch_equals_its_prompts_alone(route):
    """Guards against positions, masks or penalties that see the padding."""
    ids, mask = zoo.left_pad(PROMPTS, pad_id=5)
    assert tokens(engine(route).generate(RolloutRequest(ids, mask), GREEDY)) == alone()


def test_company_does_not_change_a_sample(route):
    """Guards against a sample that depends on what shares its batch."""
    sampling = SamplingConfig(max_new_tokens=BUDGET, temperature=1.5, top_k=0, seed=2)
    together = tokens(engine(route, max_slots=8).generate(PROMPTS, sampling))
    assert together == [tokens(engine(route).generate([prompt], sampling))[0] for prompt in PROMPTS]


@torch.no_grad()
def test_log_probabilities_at_another_temperature_than_1(route):
    """Guards against log-probabilities of the unscaled logits, of which the sample was not drawn."""
    sampling = SamplingConfig(max_new_tokens=BUDGET, temperature=0.6, top_k=0, seed=2)
    for completion in engine(route).generate(PROMPTS, sampling).completions:
        ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
        logits = zoo.shared("llama")(ids).logits[0, len(completion.prompt_ids) - 1 : -1]
        chosen = torch.tensor(completion.token_ids)[:, None]
        scaled, plain = ((logits / t).log_softmax(-1).gather(1, chosen)[:, 0] for t in (0.6, 1.0))
        assert completion.logprobs == pytest.approx(scaled.tolist(), abs=3e-5)
        assert completion.logprobs != pytest.approx(plain.tolist(), abs=1e-2)


def test_a_seed_does_not_make_a_group_equal(route):
    """Guards against a group whose samples all draw the same numbers, since they have one seed: then no advantage."""
    sampling = SamplingConfig(max_new_tokens=BUDGET, temperature=1.5, top_k=0, seed=2, n=8)
    batch = engine(route).generate([PROMPTS[2], PROMPTS[2], PROMPTS[3]], sampling)
    assert len({completion.stream for completion in batch.completions}) == 24
    assert len(set(map(tuple, tokens(batch)))) == 24
    assert len({completion.token_ids[0] for completion in batch.completions[:8]}) > 1


def test_a_stop_string_split_over_tokens(route):
    """Guards against a string that is found only where it is a token of its own."""
    tokenizer = bpe_tokenizer()
    model = zoo.build("llama", vocab_size=len(tokenizer))
    row = zoo.reference(model, [40, 41], max_new_tokens=BUDGET)
    texts = [tokenizer.decode(row[:count]) for count in range(BUDGET + 1)]
    # The place where a string of two tokens, neither of which has it, comes up for the first time.
    for place, (before, after) in enumerate(pairwise(texts)):
        stop = after[len(before) - 1 : len(before) + 1]
        if place > 2 and stop.isascii() and len(stop) == 2 and stop not in before and after.startswith(before):
            break
    else:
        raise ValueError("no such place: give another prompt")
    batch = engine(route, model, tokenizer).generate([[40, 41]], SamplingConfig(max_new_tokens=BUDGET, stop=stop))
    assert tokens(batch) == [row[: place + 1]]
    assert all(stop not in tokenizer.decode([token]) for token in row[: place + 1])


def test_sampling_in_training_mode(route):
    """Guards against dropout in the rollout of a model that is left in training mode."""
    model = zoo.build("llama", attention_dropout=0.9)
    model.train()
    batch = engine(route, model).generate(PROMPTS, GREEDY)
    assert model.training
    assert tokens(batch) == alone()


def test_gradient_checkpointing_on(route):
    """Guards against checkpointing that turns the cache off, so that every step sees its own token only."""
    model = zoo.build("llama")
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    model.train()
    model.config.use_cache = False
    batch = engine(route, model).generate(PROMPTS, GREEDY)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert model.config.use_cache is False
    assert tokens(batch) == alone()


def test_a_prompt_of_one_token(route):
    """Guards against a prefill of one token being taken for a decode step."""
    for token in (0, 50, zoo.VOCAB_SIZE - 1):
        expected = zoo.reference(zoo.shared("llama"), [token], max_new_tokens=BUDGET)
        assert tokens(engine(route).generate([[token]], GREEDY)) == [expected]


def test_eos_as_the_first_token(route):
    """Guards against a response that goes on behind it, comes back empty, or leaves the batch of one without width."""
    model = zoo.shared("llama")
    rows = alone()
    with zoo.with_eos(model, rows[1][0], pad=rows[1][0]):
        batch = engine(route).generate(PROMPTS, GREEDY)
        single = engine(route).generate(PROMPTS[1:2], GREEDY)
        expected = alone()
    assert tokens(batch) == expected
    assert tokens(single) == [rows[1][:1]]
    assert single.completions[0].stop == rows[1][0]
    assert single.loss_mask.tolist() == [[1]]


def test_ids_of_a_padded_vocabulary(route):
    """Guards against sampling a row of the embedding that is there to make its size a round number."""
    tokenizer = bpe_tokenizer()
    known = len(tokenizer)
    model = zoo.build("llama", vocab_size=known + 13)
    with torch.no_grad():
        model.lm_head.weight[known:] *= 20
    assert max(zoo.reference(model, [40, 41], max_new_tokens=BUDGET)) >= known
    for temperature in (0, 1.0):
        sampling = SamplingConfig(max_new_tokens=BUDGET, temperature=temperature, top_k=0, n=4, seed=2)
        batch = engine(route, model, tokenizer).generate([[40, 41]], sampling)
        assert all(token < known for row in tokens(batch) for token in row)


@pytest.mark.parametrize("capture", ["auto", False])
def test_weights_changed_in_place_between_calls(route, capture):
    """Guards against keys of the call before: the same prompts come again, no address and no version has changed."""
    model = zoo.build("llama")
    rollouts = engine(route, model, capture=capture)
    sampled = SamplingConfig(max_new_tokens=BUDGET, temperature=1.0, top_k=0, n=2, seed=2)
    before = tokens(rollouts.generate(PROMPTS, GREEDY))
    assert before == alone(model)
    rollouts.generate(PROMPTS, sampled)
    places = [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.mul_(0.8)
    assert places == [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]
    after = tokens(rollouts.generate(PROMPTS, GREEDY))
    assert after == alone(model)
    assert after != before
    fresh = engine(route, model, capture=capture)
    assert tokens(rollouts.generate(PROMPTS, sampled)) == tokens(fresh.generate(PROMPTS, sampled))
