"""Bad prompts and calls are refused before any forward, by an error that says where and what; nothing changes."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import zoo
from snapshots import ForwardCounter, left_as_found
from texts import CHAT_TEMPLATE, character_tokenizer

from liveroll import (
    ConfigError,
    KVMemoryError,
    LogitsError,
    PrefillLimitError,
    PromptError,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    UnsupportedModelError,
)

MODEL = zoo.build("llama")
SAMPLED = SamplingConfig(max_new_tokens=4, temperature=1.0)
META = torch.device("meta")


def ids(*rows, dtype=torch.int64, device=None):
    return torch.tensor(rows, dtype=dtype, device=device)


def request(prompt_ids, mask):
    return RolloutRequest(prompt_ids, mask)


BAD_PROMPTS = {
    "no prompts": ([], "list of prompts is empty"),
    "an empty prompt": ([[1], []], "prompt 1 is empty"),
    "an empty tensor": ([torch.tensor([], dtype=torch.int64)], "prompt 0 is empty"),
    "an id too high": ([[1], [2, zoo.VOCAB_SIZE]], "prompt 1 holds token id 97, outside the vocabulary of 97"),
    "an id below 0": ([[1, -1]], "prompt 0 holds token id -1"),
    "an id of many bits": ([[1, 2**70]], "prompt 0 .*64 bits"),
    "ids that are floats": ([[1.0]], "prompt 0 must be"),
    "ids that are flags": ([[True]], "prompt 0 must be"),
    "a float tensor": ([torch.ones(3)], "prompt 0 must be"),
    "a tensor of two dimensions": ([ids([1, 2])], "prompt 0 must be"),
    "a tensor of none": ([torch.tensor(3)], "prompt 0 must be"),
    "one flat prompt": ([1, 2, 3], "prompt 0 must be"),
    "a prompt of None": ([[1], None], "prompt 1 must be"),
    "a bare string": ("hello", "list of prompts .* not a str; give a single prompt as a list of one"),
    "bytes": (b"hello", "list of prompts .* not a bytes"),
    "one conversation": ([{"role": "user", "content": "x"}], "prompt 0 must be"),
    "a bare mapping": ({"input_ids": [[1]]}, "list of prompts .* not a dict"),
    "None": (None, "nothing to generate; give prompts, or"),
    "a generator": ((prompt for prompt in [[1]]), "list of prompts .* not a generator"),
    "what a tokenizer gives": (character_tokenizer()(["a"]), "BatchEncoding; .*RolloutRequest.prompt_ids=input_ids"),
    "a bare array": (np.array([[1, 2]]), "list of prompts .* not a ndarray"),
    "a bare tensor": (ids([1, 2]), "list of prompts or a RolloutRequest, not a Tensor"),
    "text without a tokenizer": (["hello"], "prompt 0 is text .* no tokenizer"),
    "messages without a tokenizer": ([[{"role": "user", "content": "x"}]], "prompt 0 is text .* no tokenizer"),
    "a mask with a hole": (request(ids([1, 2, 3]), ids([1, 0, 1])), "mask of row 0 .* without holes"),
    "right padding": (request(ids([1, 2], [1, 2]), ids([1, 1], [1, 0])), "mask of row 1 .* left-padded"),
    "a row of padding": (request(ids([1, 2], [1, 2]), ids([1, 1], [0, 0])), "prompt 1 is empty"),
    "other shapes": (request(ids([1, 2]), ids([1, 1, 1])), r"prompt_ids \(1, 2\) and prompt_attention_mask \(1, 3\)"),
    "one dimension": (request(torch.tensor([1, 2]), torch.tensor([1, 1])), r"must both be \[B, T\]"),
    "no rows": (request(ids().view(0, 3), ids().view(0, 3)), "hold no prompt"),
    "no columns": (request(ids([]), ids([])), "hold no prompt"),
    "float ids": (request(torch.ones(1, 2), ids([1, 1])), "prompt_ids must be integers, not torch.float32"),
    "flags as ids": (request(ids([1, 1]).bool(), ids([1, 1])), "prompt_ids must be integers, not torch.bool"),
    "another device": (request(ids([1, 2]), ids([1, 1], device=META)), "prompt_ids are on cpu and .*mask on meta"),
    "no values": (request(ids([1, 2], device=META), ids([1, 1], device=META)), "prompt_ids are on the meta device"),
    "lists": (request([[1, 2]], [[1, 1]]), "must be tensors"),
    "an odd id": (request(ids([1, 99]), ids([1, 1])), "prompt 0 holds token id 99"),
    "an odd id as padding": (request(ids([-100, 2]), ids([0, 1])), "prompt 0 is padded with token id -100"),
    "no room": ([[1] * 509], "prompt 0 has 509 tokens and max_new_tokens is 4.*513.*max_position_embeddings is 512"),
}
BAD_SAMPLING = {
    "none of them": ([], "0 SamplingConfigs were given for 2 prompts"),
    "too few": ([SAMPLED], "1 SamplingConfigs were given for 2 prompts"),
    "too many": ([SAMPLED] * 3, "3 SamplingConfigs were given for 2 prompts"),
    "of another type": ([SAMPLED, {"n": 1}], "sampling holds a dict"),
    "a mapping": ({"max_new_tokens": 3}, "sampling must be a SamplingConfig .* not a dict"),
    "a number": (3, "sampling must be a SamplingConfig .* not a int"),
    "a RolloutConfig": (RolloutConfig(), "sampling must be a SamplingConfig .* not a RolloutConfig"),
    "a stop token outside": (SamplingConfig(stop_token_ids=(97,)), r"stop_token_ids holds \[97\].* 0 to 96"),
    "stop strings without a tokenizer": (SamplingConfig(max_new_tokens=4, stop="a"), "stop .* no tokenizer"),
}


def assert_refused(error, message, prompts, sampling, **engine):
    """Nothing ran, nothing changed, and the next call draws what the first call of a new engine draws."""
    rollouts = RolloutEngine(MODEL, **engine)
    for call in (rollouts.generate, lambda *given: list(rollouts.stream(*given))):
        with left_as_found(MODEL), ForwardCounter(MODEL) as forwards, pytest.raises(error, match=message):
            call(prompts, sampling)
        assert (forwards.count, rollouts.memory().total, rollouts.captures) == (0, 0, 0)
    drawn, expected = (e.generate([[1, 2]], SAMPLED) for e in (rollouts, RolloutEngine(MODEL, **engine)))
    assert drawn.completions == expected.completions


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_prompts(case):
    """Guards against an index error on the device, or a prompt that is not the one meant."""
    prompts, message = BAD_PROMPTS[case]
    assert_refused(PromptError, message, prompts, SAMPLED)


@pytest.mark.parametrize("case", BAD_SAMPLING)
def test_sampling(case):
    """Guards against settings given to other prompts than meant, or dropped."""
    sampling, message = BAD_SAMPLING[case]
    assert_refused(ConfigError, message, [[1, 2], [3]], sampling)


def test_a_prompt_over_the_prefill_limit():
    """Guards against one prompt that no forward may hold being split, cut or run."""
    message = "prompt 1 has 5 tokens and prefill_max_tokens is 4"
    for route in ("packed", "bucketed", "equal_width", "per_prompt", "ordinary", "auto"):
        config = RolloutConfig(prefill_max_tokens=4, prefill_route=route)
        assert_refused(PrefillLimitError, message, [[1], [1, 2, 3, 4, 5]], SAMPLED, config=config)


def test_a_row_over_the_length():
    """Guards against a row that outgrows the storage that max_length fixes."""
    config = RolloutConfig(max_length=8)
    assert_refused(
        PromptError, "prompt 0 .* together 9, and RolloutConfig.max_length is 8", [[1] * 5], SAMPLED, config=config
    )


def test_max_length_of_the_checkpoint_leaves_no_room():
    """Guards against a budget of no tokens at all."""
    model = zoo.build("llama")
    model.generation_config.max_length = 5
    with ForwardCounter(model) as forwards, pytest.raises(PromptError, match="max_length=5 leaves no room"):
        RolloutEngine(model).generate([[1] * 6])
    assert forwards.count == 0


@pytest.mark.parametrize(
    ("settings", "held"),
    [({"kv_tokens": 8, "page_size": 4}, 8), ({"kv_bytes": 100}, 0), ({"kv_fraction": 1e-12}, 0)],
)
def test_kv_memory_for_less_than_one_row(settings, held):
    """Guards against a row that is preempted for ever, and a message that does not say what is needed."""
    rollouts = RolloutEngine(MODEL, config=RolloutConfig(**settings))
    need = r"needs (12|16) \((3072|4096) bytes\); raise kv_tokens, kv_bytes or kv_fraction"
    with left_as_found(MODEL), pytest.raises(KVMemoryError, match=f"holds {held} tokens and one row .* {need}"):
        rollouts.generate([[1], [1] * 8], SAMPLED)
    assert rollouts.memory().kv == 0
    if held:
        assert len(rollouts.generate([[1] * 4], SAMPLED)) == 1


def test_tokenizers():
    """Guards against a tokenizer that cannot pad, or an argument in its place, found out after the rollout."""
    with pytest.raises(
        PromptError, match=r"neither the tokenizer nor the model has a pad or eos .*tokenizer.pad_token"
    ):
        RolloutEngine(MODEL, character_tokenizer(None, None)).generate([[1]], SAMPLED)
    for wrong in (RolloutConfig(), "gpt2", 3):
        with pytest.raises(ConfigError, match="tokenizer must be a transformers tokenizer"):
            RolloutEngine(MODEL, wrong)
    for wrong in ({"max_slots": 2}, SamplingConfig(), 3):
        with pytest.raises(ConfigError, match="config must be a RolloutConfig"):
            RolloutEngine(MODEL, None, wrong)


def test_chat_without_a_template():
    """Guards against messages laid out by a template that nobody chose."""
    messages = [[1], [{"role": "user", "content": "x"}]]
    assert_refused(
        PromptError,
        "the tokenizer refuses prompt 1: .*chat_template",
        messages,
        SAMPLED,
        tokenizer=character_tokenizer(),
    )


def test_text_that_the_tokenizer_refuses():
    """Guards against an error of a template or tokenizer that does not say which prompt it is about."""
    tokenizer = copy.deepcopy(character_tokenizer())
    tokenizer.chat_template = CHAT_TEMPLATE
    for prompt in ("\ud800", [{"content": "no role"}], [{"role": "user"}]):
        assert_refused(PromptError, "the tokenizer refuses prompt 1: ", ["a", prompt], SAMPLED, tokenizer=tokenizer)


@pytest.mark.parametrize("model", [None, "gpt2", torch.nn.Linear(2, 2), 3], ids=repr)
def test_what_is_no_model(model):
    """Guards against an attribute error deep inside for a name or a plain module."""
    with pytest.raises(UnsupportedModelError, match="is not a transformers model"):
        RolloutEngine(model)


@pytest.mark.parametrize("route", ["packed", "ordinary"])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_logits_that_are_not_numbers(route, temperature):
    """Guards against responses made up of a broken model's NaN, which a trainer would learn from."""
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    engine = RolloutEngine(model, config=RolloutConfig(prefill_route=route))
    with pytest.raises(LogitsError, match="prompt 0 are NaN"):
        engine.generate([[1, 2, 3]], SamplingConfig(max_new_tokens=3, temperature=temperature))
    with torch.no_grad():
        model.model.norm.weight[3] = 1.0
    assert len(engine.generate([[1, 2, 3]], SamplingConfig(max_new_tokens=3)).completions[0].token_ids) == 3


def test_more_that_is_no_prompt():
    """Guards against bytes taken for token ids, messages without a role, and masks that hold NaN."""
    engine = RolloutEngine(zoo.shared("llama"))
    with pytest.raises(PromptError, match="prompt 0 must be"):
        engine.generate([b"12"], SamplingConfig(max_new_tokens=1))
    mask = torch.tensor([[0.0, float("nan")]])
    with pytest.raises(PromptError, match="row 0 holds NaN"):
        engine.generate(RolloutRequest(torch.tensor([[1, 2]]), mask), SamplingConfig(max_new_tokens=1))
    with pytest.raises(ConfigError, match="tp_group"):
        RolloutEngine(zoo.shared("llama"), tp_group=5)


def test_a_top_k_beyond_any_vocabulary():
    """Guards against an overflow where all tokens are kept anyway."""
    engine = RolloutEngine(zoo.shared("llama"))
    kept = [
        engine.generate([[1, 2]], SamplingConfig(max_new_tokens=4, temperature=1.0, top_k=top_k, seed=3))
        for top_k in (0, 2**70)
    ]
    assert kept[0].completions[0].token_ids == kept[1].completions[0].token_ids
