"""Responses in several calls: interrupted and joined they are as if made in one, and forced tokens are as a prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import zoo
from texts import character_tokenizer

from liveroll import RolloutConfig, RolloutEngine, RolloutRequest, SamplingConfig

ROUTES = ("packed", "equal_width", "per_prompt", "ordinary")
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=21)
BUDGET = 16
STOPS = tuple(range(10, 16))
# One setting for each of the five prompts; the temperatures leave several tokens likely.
MIXED = [
    SamplingConfig(temperature=1.5, n=3, seed=7, max_new_tokens=BUDGET, raw_logprobs=True, top_logprobs=3),
    SamplingConfig(temperature=2.0, n=2, max_new_tokens=11, top_k=20, top_p=0.9, min_p=0.02, kept_tokens=20),
    SamplingConfig(temperature=0, max_new_tokens=14, repetition_penalty=1.4),
    SamplingConfig(temperature=1.8, n=3, max_new_tokens=BUDGET, min_new_tokens=9, stop_token_ids=STOPS),
    SamplingConfig(temperature=1.0, n=2, seed=9, max_new_tokens=BUDGET, repetition_penalty=1.2, stop_token_ids=STOPS),
]
MIXED[3] = replace(MIXED[3], presence_penalty=0.8, frequency_penalty=0.4)
TOKENIZER = character_tokenizer()

each_route = pytest.mark.parametrize("route", ROUTES)


def engine(model="llama", route="packed", tokenizer=None, **settings):
    model = zoo.shared(model) if isinstance(model, str) else model
    settings = {"page_size": 4, "max_slots": 4, **settings}
    return RolloutEngine(model, tokenizer, RolloutConfig(prefill_route=route, **settings))


def tokens(batch):
    return [completion.token_ids for completion in batch.completions]


def assert_same(batch, expected):
    """The same completions, but for when they were continued, and log-probabilities that differ by rounding only."""
    for ours, theirs in zip(batch.completions, expected.completions, strict=True):
        plain = {"logprobs": None, "raw_logprobs": None, "top_logprobs": None, "continued_at": ()}
        assert replace(ours, **plain) == replace(theirs, **plain)
        assert ours.stream == theirs.stream
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
        assert ours.raw_logprobs == pytest.approx(theirs.raw_logprobs, abs=2e-4)
        for some, others in zip(ours.top_logprobs or (), theirs.top_logprobs or (), strict=True):
            assert [token for token, _ in some] == [token for token, _ in others]
            assert [value for _, value in some] == pytest.approx([value for _, value in others], abs=2e-4)
    for name in ("input_ids", "attention_mask", "loss_mask"):
        assert getattr(batch, name).equal(getattr(expected, name)), name


@cache
def whole(model="llama"):
    batch = engine(model).generate(PROMPTS, MIXED)
    reasons = [completion.finish_reason for completion in batch.completions]
    assert set(reasons) == {"stop", "length"}
    told = [[getattr(c, name) is not None for c in batch.completions] for name in ("raw_logprobs", "kept_tokens")]
    assert [any(row) for row in told] == [True, True]
    return batch


@pytest.mark.thinned(3)
@each_route
@pytest.mark.parametrize("cut", [1, 25, 60, 100])
def test_interrupted_and_joined(route, cut):
    """Guards against a continued row that draws other numbers, or forgets its history, budget or held stops."""
    partial = engine(route=route).generate(PROMPTS, MIXED, max_total_tokens=cut)
    assert "aborted" in {completion.finish_reason for completion in partial.completions}
    # Another engine, whose seed and calls are others too: all that is needed is in the completions.
    other = engine(route=route, seed=5, max_slots=3)
    joined = other.generate(continue_from=partial, sampling=MIXED)
    assert_same(joined, whole())
    new = sum(map(len, tokens(whole()))) - sum(map(len, tokens(partial)))
    assert joined.stats.new_tokens == new
    for before, after in zip(partial.completions, joined.completions, strict=True):
        went_on = 0 < len(before.token_ids) < len(after.token_ids)
        assert after.continued_at == ((len(before.token_ids),) if went_on else ())


@each_route
def test_interrupted_many_times(route):
    """Guards against what only the second continuation loses, and against finished rows that are touched again."""
    rollouts, calls = engine(route=route), 1
    batch = rollouts.generate(PROMPTS, MIXED, max_total_tokens=12)
    while any(completion.finish_reason == "aborted" for completion in batch.completions):
        before = {index: c for index, c in enumerate(batch.completions) if c.finish_reason != "aborted"}
        batch = rollouts.generate(continue_from=batch, sampling=MIXED, max_total_tokens=12)
        calls += 1
        assert all(batch.completions[index] == completion for index, completion in before.items())
    assert_same(batch, whole())
    assert calls > 8
    for completion in batch.completions:
        assert list(completion.continued_at) == sorted(set(completion.continued_at))
        assert not completion.continued_at or completion.continued_at[-1] < len(completion.token_ids)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "mistral", "gpt_oss"])
def test_other_architectures(name):
    """Guards against windows, sinks or absolute positions that begin anew where a response is continued."""
    partial = engine(name).generate(PROMPTS, MIXED, max_total_tokens=50)
    assert_same(engine(name).generate(continue_from=partial, sampling=MIXED), whole(name))


HOWEVER = ({"run_ahead": 3}, {"capture": False}, {"kv_tokens": 48, "max_slots": 8}, {"route": "auto"})


@pytest.mark.parametrize("settings", HOWEVER, ids=str)
def test_however_the_rows_are_run(settings):
    """Guards against continued rows that are lost in flight or in preemption."""
    partial = engine(**settings).generate(PROMPTS, MIXED, max_total_tokens=50)
    assert_same(engine(**settings).generate(continue_from=partial, sampling=MIXED), whole())


@each_route
def test_a_larger_budget(route):
    """Guards against a response that ended by its length being taken for whole, or getting the larger budget anew."""
    rollouts = engine(route=route)
    small = [replace(setting, max_new_tokens=4, min_new_tokens=None) for setting in MIXED]
    short = rollouts.generate(PROMPTS, small)
    large = [replace(setting, max_new_tokens=BUDGET, min_new_tokens=None) for setting in MIXED]
    expected = engine(route=route).generate(PROMPTS, large)
    assert_same(rollouts.generate(continue_from=short, sampling=large), expected)
    same = rollouts.generate(continue_from=expected, sampling=large)
    assert same.completions == expected.completions
    assert (same.stats.new_tokens, same.stats.prefill_forwards) == (0, 0)
    assert same.stats.route == "none"


@each_route
def test_completions_in_a_list(route):
    """Guards against completions that are taken for samples of another prompt, or come back in another order."""
    rollouts = engine(route=route)
    partial = rollouts.generate(PROMPTS, MIXED, max_total_tokens=70)
    unfinished = [completion for completion in partial.completions if completion.finish_reason == "aborted"]
    assert 1 < len(unfinished) < len(partial.completions)
    prompts = list(dict.fromkeys(completion.prompt_index for completion in unfinished))
    assert len(prompts) > 1
    joined = rollouts.generate(continue_from=unfinished, sampling=[MIXED[index] for index in prompts])
    expected = {(c.prompt_index, c.sample_index): c.token_ids for c in whole().completions}
    assert [(prompts[c.prompt_index], c.sample_index) for c in joined.completions] == [
        (c.prompt_index, c.sample_index) for c in unfinished
    ]
    for completion in joined.completions:
        assert completion.token_ids == expected[prompts[completion.prompt_index], completion.sample_index]
        assert completion.prompt_ids == tuple(PROMPTS[prompts[completion.prompt_index]])


@each_route
def test_beside_new_prompts(route):
    """Guards against continued rows and new ones taking one another's settings, places or random streams."""
    rollouts = engine(route=route)
    first = rollouts.generate(PROMPTS[:3], MIXED[:3], max_total_tokens=30)
    seeded = replace(MIXED[3], seed=4)
    both = rollouts.generate(PROMPTS[3:], [*MIXED[:3], seeded, MIXED[4]], continue_from=first)
    alone = engine(route=route)
    expected = tokens(alone.generate(PROMPTS[:3], MIXED[:3])) + tokens(alone.generate(PROMPTS[3:], [seeded, MIXED[4]]))
    assert tokens(both) == expected
    assert [c.prompt_index for c in both.completions] == [0, 0, 0, 1, 1, 2, 3, 3, 3, 4, 4]
    assert both.response_start_idx == max(map(len, PROMPTS))
    for row, completion in enumerate(both.completions):
        count = int(both.attention_mask[row].sum())
        assert count == len(PROMPTS[completion.prompt_index]) + len(completion.token_ids)
    assert tokens(engine().generate(PROMPTS[:1], MIXED[:1], continue_from=[])) == tokens(whole())[:3]


@each_route
def test_a_padded_batch_and_its_history(route):
    """Guards against a history without the padding that `generate` before 5.23 counts, and a batch padded anew."""
    model = zoo.shared("llama")
    ids, mask = zoo.left_pad(PROMPTS, pad_id=7)
    request = RolloutRequest(torch.cat([ids[:, :1] * 0 + 7, ids], 1), torch.cat([mask[:, :1] * 0, mask], 1))
    sampling = SamplingConfig(max_new_tokens=BUDGET, repetition_penalty=1.3)
    with zoo.with_eos(model, None, pad=7):
        expected = engine(route=route).generate(request, sampling)
        partial = engine(route=route).generate(request, sampling, max_total_tokens=40)
        assert_same(engine(route=route).generate(continue_from=partial, sampling=sampling), expected)


@each_route
def test_a_stop_string_over_the_interruption(route):
    """Guards against a string whose beginning was sampled by the call before."""
    rollouts = engine(route=route, tokenizer=TOKENIZER)
    prompt = ["hello"]
    text = rollouts.generate(prompt, SamplingConfig(max_new_tokens=BUDGET)).completions[0].text
    sampling = SamplingConfig(max_new_tokens=BUDGET, stop=text[5:9], include_stop=False, seed=0)
    expected = rollouts.generate(prompt, sampling)
    assert (len(expected.completions[0].token_ids), expected.completions[0].text) == (9, text[:5])
    for cut in (4, 6, 8):
        partial = rollouts.generate(prompt, sampling, max_total_tokens=cut)
        assert len(partial.completions[0].token_ids) == cut
        assert_same(rollouts.generate(continue_from=partial, sampling=sampling), expected)


@each_route
def test_other_weights_from_the_interruption_on(route):
    """Guards against tokens or log-probabilities of before that are made anew, or a mark in the wrong place."""
    model = zoo.build("llama")
    rollouts = engine(model, route)
    sampling = SamplingConfig(max_new_tokens=BUDGET)
    partial = rollouts.generate(PROMPTS, sampling, max_total_tokens=30)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    joined = rollouts.generate(continue_from=partial, sampling=sampling)
    marks = []
    for before, after in zip(partial.completions, joined.completions, strict=True):
        count = len(before.token_ids)
        assert after.token_ids[:count] == before.token_ids
        assert after.logprobs[:count] == before.logprobs
        rest = zoo.reference(model, [*after.prompt_ids, *before.token_ids], max_new_tokens=BUDGET - count)
        assert list(after.token_ids[count:]) == rest
        assert after.continued_at == ((count,) if 0 < count < BUDGET else ())
        marks += after.continued_at
    assert marks


def test_a_prefix_is_run_once_for_a_group():
    """Guards against a forced beginning that keeps the samples of a prompt from sharing its forward and pages."""
    sampling = SamplingConfig(max_new_tokens=4, n=4, temperature=1.5)
    batch = engine(max_slots=8).generate(PROMPTS[3:], sampling, response_prefix=[1, 2, 3, 4, 5])
    run = sum(len(prompt) + 5 for prompt in PROMPTS[3:])
    assert (batch.stats.prefill_tokens, batch.stats.shared_tokens) == (run, 3 * run)
    partial = engine(max_slots=8).generate(PROMPTS[3:], sampling, response_prefix=[1, 2, 3, 4, 5], max_total_tokens=8)
    assert_same(engine(max_slots=8).generate(continue_from=partial, sampling=sampling), batch)


@each_route
def test_what_is_told_of_forced_tokens(route):
    """Guards against what was told of other tokens standing at forced ones, also in tensors, or lost behind them."""
    told = {"raw_logprobs": True, "top_logprobs": 2, "kept_tokens": 50, "top_k": 40}
    sampling = SamplingConfig(max_new_tokens=3, temperature=1.5, seed=1, **told)
    rollouts = engine(route=route)
    batch = rollouts.generate(PROMPTS[:2], sampling, response_prefix=[[7], [8, 9]])
    again = rollouts.generate(
        continue_from=[completion.extend([4, 4]) for completion in batch.completions],
        sampling=replace(sampling, max_new_tokens=6),
    )
    for first, completion in zip(batch.completions, again.completions, strict=True):
        count = len(first.token_ids)
        for name, blank in (("logprobs", 0.0), ("raw_logprobs", 0.0), ("top_logprobs", ()), ("kept_tokens", None)):
            before, after = getattr(first, name), getattr(completion, name)
            assert (len(before), len(after)) == (count, count + 5)
            assert after[:count] == before
            forced = [value for value, mask in zip(after, completion.sampled_mask, strict=True) if not mask]
            assert forced == [blank] * (count - 3 + 2)
            assert blank not in [value for value, mask in zip(after, completion.sampled_mask, strict=True) if mask]
    for either in (batch, again):
        for whole, name in ((either.response_logprobs, "logprobs"), (either.response_raw_logprobs, "raw_logprobs")):
            for row, completion in zip(whole.tolist(), either.completions, strict=True):
                values = getattr(completion, name)
                assert row == pytest.approx([*values, *[0.0] * (len(row) - len(values))], abs=1e-7)
    assert again.response_raw_logprobs.shape == again.loss_mask.shape
    assert not (again.response_raw_logprobs * (1 - again.loss_mask)).any()


PREFIXES = [[5], None, [40, 41, 42, 43], [], [7, 8]]


@each_route
def test_a_prefix_of_the_response(route):
    """Guards against forced tokens that are not attended to, count as sampled, or have another's log-probability."""
    budgets = [SamplingConfig(max_new_tokens=count, n=2) for count in (6, 3, 8, 5, 1)]
    batch = engine(route=route).generate(PROMPTS, budgets, response_prefix=PREFIXES)
    model = zoo.shared("llama")
    for completion in batch.completions:
        prompt, prefix = PROMPTS[completion.prompt_index], PREFIXES[completion.prompt_index] or []
        budget = budgets[completion.prompt_index].max_new_tokens
        assert list(completion.token_ids) == [*prefix, *zoo.reference(model, [*prompt, *prefix], max_new_tokens=budget)]
        assert completion.sampled_mask == (0,) * len(prefix) + (1,) * budget
        assert completion.sampled_tokens == budget
        assert completion.logprobs[: len(prefix)] == (0.0,) * len(prefix)
        assert completion.continued_at == ()
        check_logprobs(model, completion)
    expected = torch.zeros_like(batch.loss_mask)
    for row, completion in enumerate(batch.completions):
        expected[row, : len(completion.token_ids)] = torch.tensor(completion.sampled_mask)
    assert batch.loss_mask.equal(expected)
    assert batch.input_ids.shape[1] == batch.response_start_idx + batch.loss_mask.shape[1]
    sampled = sum(completion.sampled_tokens for completion in batch.completions)
    assert batch.loss_mask.sum() == batch.stats.new_tokens == sampled


@torch.no_grad()
def check_logprobs(model, completion):
    """Sampled tokens have the log-probability that a forward over the whole gives them."""
    ids = torch.tensor([[*completion.prompt_ids, *completion.token_ids]])
    logits = model(ids).logits[0, len(completion.prompt_ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    expected = expected * torch.tensor(completion.sampled_mask)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=2e-5)


@each_route
def test_stops_inside_forced_tokens(route):
    """Guards against a row that ends at a stop which nobody sampled."""
    rollouts = engine(route=route, tokenizer=TOKENIZER)
    (plain,) = rollouts.generate(["hello"], SamplingConfig(max_new_tokens=8), response_prefix="so it is").completions
    sampling = SamplingConfig(max_new_tokens=8, stop="so it", stop_token_ids=tuple(TOKENIZER("i")["input_ids"]))
    (stopped,) = rollouts.generate(["hello"], sampling, response_prefix="so it is").completions
    assert plain.text.startswith("so it is")
    assert plain.sampled_mask == (0,) * 8 + (1,) * 8
    assert "i" not in plain.text[8:]
    assert stopped == plain
    completed = "s" + plain.text[8:10]
    (over,) = rollouts.generate(
        ["hello"], SamplingConfig(max_new_tokens=8, stop=completed), response_prefix="so it is"
    ).completions
    assert (over.text, over.stop) == (plain.text[:10], completed)


@each_route
def test_one_prefix_for_all_and_its_forms(route):
    """Guards against a prefix with the tokenizer's own special tokens, or read as one prompt's."""
    rollouts = engine(route=route, tokenizer=TOKENIZER)
    ids = TOKENIZER("ab", add_special_tokens=False)["input_ids"]
    prompts, sampling = ["hello", "x"], SamplingConfig(max_new_tokens=3)
    expected = [
        [*ids, *zoo.reference(zoo.shared("llama"), [*TOKENIZER(prompt)["input_ids"], *ids], max_new_tokens=3)]
        for prompt in prompts
    ]
    for given in ("ab", ids, tuple(ids), torch.tensor(ids), ["ab", ids], [ids, torch.tensor(ids)]):
        batch = rollouts.generate(prompts, sampling, response_prefix=given)
        assert [list(row) for row in tokens(batch)] == expected


@each_route
def test_several_turns(route):
    """Guards against tool output that is sampled, counted, left out of the context, or ends the row."""
    model, stop, tool = zoo.build("llama"), 3, [50, 3, 51]
    rollouts = engine(model, route)
    first = [zoo.reference(model, prompt, max_new_tokens=30) for prompt in PROMPTS]
    ends = tuple(sorted({row[4] for row in first}))
    sampling = SamplingConfig(max_new_tokens=20, stop_token_ids=(*ends, stop), repetition_penalty=1.2)
    batch = rollouts.generate(PROMPTS, sampling)
    reference = {"eos_token_id": list(sampling.stop_token_ids), "pad_token_id": 0, "repetition_penalty": 1.2}
    expected = [zoo.reference(model, prompt, max_new_tokens=20, **reference) for prompt in PROMPTS]
    masks = [[1] * len(row) for row in expected]
    for _ in range(3):
        assert [list(row) for row in tokens(batch)] == expected
        assert [list(completion.sampled_mask) for completion in batch.completions] == masks
        extended = [completion.extend(tool) for completion in batch.completions]
        assert {completion.finish_reason for completion in extended} == {"aborted"}
        batch = rollouts.generate(continue_from=replace(batch, completions=tuple(extended)), sampling=sampling)
        for row, prompt in enumerate(PROMPTS):
            left = 20 - sum(masks[row])
            expected[row], masks[row] = [*expected[row], *tool], [*masks[row], 0, 0, 0]
            if left:
                more = zoo.reference(model, [*prompt, *expected[row]], max_new_tokens=left, **reference)
                expected[row], masks[row] = expected[row] + more, masks[row] + [1] * len(more)
    assert [list(row) for row in tokens(batch)] == expected
    assert {completion.finish_reason for completion in batch.completions} >= {"stop"}
    assert batch.loss_mask.sum(1).tolist() == [sum(mask) for mask in masks]


@each_route
def test_turns_of_a_group(route):
    """Guards against samples of a group that become equal, or change with the slots, once they are continued."""
    sampling = SamplingConfig(temperature=1.5, n=4, seed=3, max_new_tokens=5)

    def run(**settings):
        rollouts = engine(route=route, **settings)
        batch = rollouts.generate(PROMPTS[:2], sampling)
        more = [completion.extend([9, 8]) for completion in batch.completions]
        return rollouts.generate(continue_from=more, sampling=replace(sampling, max_new_tokens=12))

    batch = run()
    assert len(set(tokens(batch))) == 8
    assert len({row[7:] for row in tokens(batch)}) == 8
    assert [(c.prompt_index, c.sample_index) for c in batch.completions] == [divmod(row, 4) for row in range(8)]
    assert tokens(run(max_slots=1)) == tokens(batch)


@each_route
def test_a_prefix_and_an_interruption(route):
    """Guards against forced tokens that count as sampled only once the response is continued."""
    rollouts = engine(route=route)
    expected = rollouts.generate(PROMPTS, [replace(one, seed=1) for one in MIXED], response_prefix=PREFIXES)
    partial = rollouts.generate(
        PROMPTS, [replace(one, seed=1) for one in MIXED], response_prefix=PREFIXES, max_total_tokens=60
    )
    assert_same(rollouts.generate(continue_from=partial, sampling=MIXED), expected)
