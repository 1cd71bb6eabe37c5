"""When decode steps are captured, and when captured ones are used again."""

from __future__ import annotations

import re

import pytest
import torch
import zoo
from rollouts import BUDGET, check, engine_of, prompts, tokens
from torch import nn

from liveroll import KVMemoryError, SamplingConfig

LAYER = "model.layers.1"


@pytest.fixture
def model():
    return zoo.build("llama")


def projection(model):
    """A square weight, so that its transpose has the same shape."""
    return model.get_submodule(f"{LAYER}.self_attn.q_proj")


@pytest.mark.parametrize("run_ahead", [0, 2])
def test_a_repeat_call_only_replays(model, run_ahead):
    """Guards against a capture for each call, and against steps that are not replays of the captured one."""
    engine = engine_of(model, run_ahead=run_ahead)
    for call in range(1, 4):
        stats = check(engine, model, prompts(8, seed=call)).stats
        # The prefill samples the first token.
        assert (stats.decode_steps, stats.replays) == (BUDGET - 1, BUDGET - 1)
        assert stats.captures == (1 if call == 1 else 0)
        assert (engine.captures, engine.replays) == (1, call * (BUDGET - 1))
    assert engine.recapture_reasons == []


def test_one_capture_serves_every_prompt_width(model):
    """Guards against steps that have the width of the prompts they were captured with baked in."""
    engine = engine_of(model)
    for width in (8, 12, 8, 1, 40):
        check(engine, model, prompts(width))
    check(engine, model, zoo.ragged_prompts(zoo.VOCAB_SIZE, 3, (1, 30, 7, 12)))
    assert engine.captures == 1
    assert engine.recapture_reasons == []


def test_with_capture_off_nothing_is_captured(model):
    """Guards against a switch without effect."""
    engine = engine_of(model, capture=False)
    stats = check(engine, model, prompts(8)).stats
    assert (engine.captures, engine.replays, stats.decode_steps) == (0, 0, BUDGET - 1)
    assert stats.eager_reason == "RolloutConfig.capture is False"


def move(model):
    weight = projection(model).weight
    weight.data = weight.data.clone()


def transpose(model):
    with torch.no_grad():
        projection(model).weight.transpose_(0, 1)


def replace(model):
    layer = projection(model)
    layer.weight = nn.Parameter(-layer.weight.detach())


def set_bias(model):
    projection(model).bias = nn.Parameter(torch.linspace(-2, 2, 32))


def register_frequencies(model):
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq * 0.25, persistent=False)


def assign_state(model):
    model.load_state_dict(zoo.build("llama", seed=1).state_dict(), assign=True)


def add_buffer(model):
    model.register_buffer("extra", torch.zeros(3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (move, rf"{LAYER}.self_attn.q_proj.weight changed its address from \d+ to \d+"),
        (transpose, rf"{LAYER}.self_attn.q_proj.weight changed its strides from \(32, 1\) to \(1, 32\)"),
        (replace, rf"{LAYER}.self_attn.q_proj.weight changed its address from \d+ to \d+"),
        (set_bias, rf"{LAYER}.self_attn.q_proj.bias was set"),
        (register_frequencies, r"model.rotary_emb.inv_freq changed its address from \d+ to \d+"),
        (assign_state, r"model.embed_tokens.weight changed its address from \d+ to \d+"),
        (add_buffer, "extra was set"),
    ],
    ids=["moved", "transposed", "replaced", "set", "registered", "assigned", "added"],
)
def test_a_changed_tensor_is_captured_again_and_tokens_stay_right(model, change, reason):
    """Guards against replays over storage that the model no longer uses, and against reasons that say nothing."""
    engine = engine_of(model)
    before = tokens(check(engine, model, prompts(12)))
    change(model)
    after = tokens(check(engine, model, prompts(12)))
    assert (after == before) == (change in (move, add_buffer))
    check(engine, model, prompts(8))
    assert engine.captures == 2
    assert_reasons(engine, reason)


def test_a_tensor_that_was_removed(model):
    """Guards against a comparison that stumbles over a parameter that is None now."""
    set_bias(model)
    engine = engine_of(model)
    check(engine, model, prompts(8))
    projection(model).bias = None
    check(engine, model, prompts(8))
    assert engine.captures == 2
    assert_reasons(engine, f"{LAYER}.self_attn.q_proj.bias was removed")


@pytest.mark.parametrize(
    ("before", "change", "reason"),
    [
        (torch.zeros(8), lambda t: t.view(2, 4), r"extra changed its shape from torch.Size\(\[8\]\) to .*\[2, 4\]\)"),
        (torch.zeros(4, 4), lambda t: t.t(), r"extra changed its strides from \(4, 1\) to \(1, 4\)"),
        (torch.zeros(8), lambda t: t.view(torch.int32), "extra changed its dtype from torch.float32 to torch.int32"),
        (torch.zeros(8), torch.clone, r"extra changed its address from \d+ to \d+"),
        # Empty tensors have the address 0 on every device.
        (torch.zeros(0), lambda t: t.to("meta"), "extra changed its device from cpu to meta"),
    ],
    ids=["shape", "strides", "dtype", "address", "device"],
)
def test_each_aspect_of_a_tensor_counts_by_itself(model, before, change, reason):
    """Guards against a signature that leaves out what mostly changes together with something else."""
    model.register_buffer("extra", before)
    engine = engine_of(model)
    check(engine, model, prompts(4, rows=2), budget=2)
    model.extra = change(before)
    check(engine, model, prompts(4, rows=2), budget=2)
    assert engine.captures == 2
    assert_reasons(engine, reason)


def test_a_tensor_that_moves_to_another_name(model):
    """Guards against a signature of what tensors there are, whichever of the model's they are."""
    model.register_buffer("first", torch.zeros(8))
    model.register_buffer("second", None)
    engine = engine_of(model)
    check(engine, model, prompts(4, rows=2), budget=2)
    model.first, model.second = None, model.first
    check(engine, model, prompts(4, rows=2), budget=2)
    assert engine.captures == 2
    assert_reasons(engine, "first was removed")


def test_tensors_in_another_order(model):
    """Guards against a capture for the order of names alone, and against later reasons that name a neighbour."""
    engine = engine_of(model)
    check(engine, model, prompts(8))
    layer = projection(model)
    weight = layer.weight
    layer.bias = nn.Parameter(torch.linspace(-2, 2, 32))
    check(engine, model, prompts(8))
    del layer.weight
    layer.weight = weight
    check(engine, model, prompts(8))
    assert engine.captures == 2
    model.model.norm.weight.data = model.model.norm.weight.data.clone()
    check(engine, model, prompts(8))
    moved = r"model.norm.weight changed its address from \d+ to \d+"
    assert_reasons(engine, f"{LAYER}.self_attn.q_proj.bias was set", moved)


def test_a_parametrization_is_named(model):
    """Guards against a reason that names what stands in the place of a parameter that is not there any more."""
    engine = engine_of(model)
    check(engine, model, prompts(8))
    nn.utils.parametrizations.weight_norm(projection(model))
    check(engine, model, prompts(8))
    assert engine.captures == 2
    assert_reasons(engine, f"{LAYER}.self_attn.q_proj.weight was removed")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_layer_has_names_too(model):
    """Guards against containers of torch that only look like dictionaries."""
    model.model.layers[0].mlp.down_proj = torch.jit.script(model.model.layers[0].mlp.down_proj)
    engine = engine_of(model)
    check(engine, model, prompts(8))
    move(model)
    check(engine, model, prompts(8))
    assert_reasons(engine, rf"{LAYER}.self_attn.q_proj.weight changed its address from \d+ to \d+")


def test_longer_rows_are_given_room_once(model):
    """Guards against rows longer than the captured capacity, and against a capacity that shrinks again."""
    engine = engine_of(model)
    check(engine, model, prompts(8))
    check(engine, model, prompts(250))  # needs 255 tokens and has 256
    assert engine.captures == 1
    check(engine, model, prompts(252))
    check(engine, model, prompts(8))
    check(engine, model, prompts(252))
    assert engine.captures == 2
    assert_reasons(engine, "tokens a row changed from 256 to 288")


def test_more_stop_tokens_are_given_room_once(model):
    """Guards against stop tokens that are cut off at the captured width."""
    engine = engine_of(model)
    rows = prompts(8)
    whole = tokens(check(engine, model, rows))
    stops = [*(t for t in range(zoo.VOCAB_SIZE) if all(t not in row for row in whole))][:8]
    check(engine, model, rows, stop_token_ids=tuple(stops))
    assert engine.captures == 1
    batch = check(engine, model, rows, stop_token_ids=(*stops, whole[0][2]))
    assert batch.completions[0].stop == whole[0][2]
    captures = engine.captures
    check(engine, model, rows)
    check(engine, model, rows, stop_token_ids=(*stops, whole[0][2]))
    assert engine.captures == captures
    assert_reasons(engine, "stop tokens a row changed from 8 to 9")


def test_more_adjusted_tokens_are_given_room_once(model):
    """Guards against biased and forbidden tokens that are cut off at the captured width."""
    engine = engine_of(model)
    rows = prompts(8)
    (first, *_), *_ = whole = tokens(check(engine, model, rows))
    unseen = [token for token in range(zoo.VOCAB_SIZE) if all(token not in row for row in whole)]
    for count, captures in ((15, 2), (16, 4), (40, 6), (15, 6), (16, 6), (40, 6)):
        # The last of the list is the token that shows.
        sampling = SamplingConfig(max_new_tokens=BUDGET, forbidden_tokens=[*unseen[:count], first])
        forbidden = [*unseen[:count], first]
        expected = [zoo.reference(model, row, max_new_tokens=BUDGET, suppress_tokens=forbidden) for row in rows]
        assert tokens(engine.generate(rows, sampling)) == expected
        assert tokens(check(engine, model, rows)) == whole
        assert engine.captures == captures
    changes = ("16 to 32", "32 to 64")
    assert_reasons(engine, *(f"adjusted tokens a row changed from {change}" for change in changes))


def test_another_dtype(model):
    """Guards against KV pages and steps of the dtype that the model had before."""
    engine = engine_of(model)
    check(engine, model, prompts(8))
    kv = engine.memory().kv
    model.to(torch.bfloat16)
    sampling = SamplingConfig(max_new_tokens=BUDGET)
    again = engine.generate(prompts(8), sampling)
    assert tokens(again) == tokens(engine_of(model, capture=False).generate(prompts(8), sampling))
    assert engine.captures == 2
    assert engine.memory().kv == kv // 2
    assert_reasons(engine, "KV dtype changed from torch.float32 to torch.bfloat16")
    model.to(torch.float32)
    check(engine, model, prompts(8))
    assert engine.captures == 3


def test_training_flags_count_where_they_are_left_alone():
    """Guards against a step captured in the other mode, which would drop what the mode asks for."""
    model = zoo.build("llama")
    engine = engine_of(model, training_mode=None)
    check(engine, model, prompts(8))
    model.train()
    check(engine, model, prompts(8))
    model.model.layers[0].eval()
    check(engine, model, prompts(8))
    model.model.layers[0].train()
    model.model.layers[1].eval()
    check(engine, model, prompts(8))
    model.eval()
    check(engine, model, prompts(8))
    assert engine.captures == 5
    assert_reasons(
        engine,
        "training mode changed from eval to train",
        r"training mode changed from train to mixed \(.*\)",
        r"training mode changed from mixed \(.*\) to mixed \(.*\)",
        r"training mode changed from mixed \(.*\) to eval",
    )


@pytest.mark.parametrize("mode", [False, True])
def test_training_flags_do_not_count_where_the_mode_is_set(model, mode):
    """Guards against a capture for every flip between training and rollouts."""
    engine = engine_of(model, training_mode=mode)
    for flag in (False, True, False):
        model.train(flag)
        check(engine, model, prompts(8))
        assert all(module.training == flag for module in model.modules())
    assert engine.captures == 1


def step_in_place(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor(prompts(8)), labels=torch.tensor(prompts(8))).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load_in_place(model):
    model.load_state_dict(zoo.build("llama", seed=1).state_dict())


def scale_in_place(model):
    with torch.no_grad():
        projection(model).weight.mul_(-1)


def write_frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.25)


def freeze(model):
    model.requires_grad_(not next(model.parameters()).requires_grad)


def rewrap(model):
    layer = projection(model)
    layer.weight = nn.Parameter(layer.weight.detach())


@pytest.mark.parametrize(
    "change",
    [step_in_place, load_in_place, scale_in_place, write_frequencies, freeze, rewrap],
    ids=lambda f: f.__name__,
)
def test_values_changed_in_place_are_seen_without_a_capture(model, change):
    """Guards against a capture for every optimizer step, and against tokens of the weights that were captured."""
    engine = engine_of(model)
    before = tokens(check(engine, model, prompts(12)))
    change(model)
    after = tokens(check(engine, model, prompts(12)))
    assert (after == before) == (change in (freeze, rewrap))
    change(model)
    check(engine, model, prompts(12))
    assert engine.captures == 1
    assert engine.recapture_reasons == []


def test_settings_and_prompts_are_values_too(model):
    """Guards against sampling settings, seeds or row counts that are baked into a step."""
    engine = engine_of(model)
    # Left at None, top_k is the 50 of a new GenerationConfig, which is another sampler.
    budget = {"max_new_tokens": BUDGET, "top_k": 0}
    calls = [
        (prompts(8), SamplingConfig(**budget)),
        (prompts(8), SamplingConfig(temperature=0.7, seed=1, **budget)),
        (prompts(8), SamplingConfig(temperature=1.5, seed=2, **budget)),
        (prompts(5, rows=3, seed=4), SamplingConfig(temperature=1.0, seed=2, **budget)),
        (prompts(8, rows=2), SamplingConfig(temperature=1.0, n=2, seed=2, **budget)),
        (prompts(8, rows=1), SamplingConfig(temperature=1.0, n=3, seed=2, **budget)),
        (prompts(8), SamplingConfig(max_new_tokens=9)),
        (prompts(8), [SamplingConfig(temperature=t, seed=3, **budget) for t in (0.0, 0.5, 1.0, 2.0)]),
    ]
    for rows, sampling in calls:
        batch = engine.generate(rows, sampling)
        assert tokens(batch) == tokens(engine_of(model, capture=False).generate(rows, sampling))
    assert engine.captures == 1


def test_two_samplers_at_most_are_captured(model):
    """Guards against a capture for every combination of filters, and against a sampler that lacks one."""
    engine = engine_of(model)
    settings = [
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.6},
        {"temperature": 1.2, "min_p": 0.1},
        {"repetition_penalty": 1.4},
        {"min_new_tokens": 3, "stop_token_ids": (1, 2, 3)},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {5: 3.0}, "forbidden_tokens": (7, 8)},
        {"temperature": 0.0, "top_k": 5},
    ]
    for count, setting in enumerate(settings, 1):
        sampling = SamplingConfig(max_new_tokens=BUDGET, seed=5, **setting)
        batch = engine.generate(prompts(8), sampling)
        assert tokens(batch) == tokens(engine_of(model, capture=False).generate(prompts(8), sampling))
        assert engine.captures == (1 if count <= 2 else 2)
    assert engine.recapture_reasons == []


def test_what_is_told_is_captured_apart(model):
    """Guards against a report of another width than what was captured, and steps that are lost for another's sake."""
    engine = engine_of(model)
    told = [
        ({}, 1),
        ({"raw_logprobs": True}, 2),
        ({"top_logprobs": 3}, 3),
        ({"top_logprobs": 4}, 3),
        ({"temperature": 1.0, "top_k": 9, "kept_tokens": 9, "seed": 1}, 4),
        ({"temperature": 1.0, "top_p": 0.7, "kept_tokens": 16, "seed": 1}, 4),
        ({}, 4),
        ({"raw_logprobs": True}, 4),
    ]
    eager = engine_of(model, capture=False)
    for setting, captures in told:
        sampling = SamplingConfig(max_new_tokens=BUDGET, **setting)
        batch, expected = engine.generate(prompts(8), sampling), eager.generate(prompts(8), sampling)
        assert [vars(completion) for completion in batch.completions] == [
            vars(completion) for completion in expected.completions
        ]
        assert engine.captures == captures
    assert engine.recapture_reasons == []


def drain(engine, model):
    """Eight rows that end two steps after one another, in groups of four, two, one and one."""
    rows = prompts(6, rows=8)
    budgets = [2, 2, 2, 2, 4, 4, 6, 8]
    batch = engine.generate(rows, [SamplingConfig(max_new_tokens=b) for b in budgets])
    assert tokens(batch) == [zoo.reference(model, r, max_new_tokens=b) for r, b in zip(rows, budgets, strict=True)]
    assert batch.stats.replays == batch.stats.decode_steps == 7


def test_smaller_steps_are_captured_when_rows_drain(model):
    """Guards against full-width steps for a few last rows, and against rungs captured before they are needed."""
    engine = engine_of(model, max_slots=8)
    check(engine, model, prompts(8, rows=8))
    assert engine.captures == 1
    drain(engine, model)
    assert engine.captures == 4
    drain(engine, model)
    assert engine.captures == 4
    check(engine, model, prompts(8, rows=5))
    assert engine.captures == 4


@pytest.mark.parametrize("limit", [1, 2])
def test_only_so_many_captured_steps_are_kept(model, limit):
    """Guards against a limit without effect, and against an evicted step that is replayed."""
    engine = engine_of(model, max_slots=8, max_captures=limit)
    for calls in (1, 2):
        drain(engine, model)
        assert engine.captures == 4 * calls
    assert engine.recapture_reasons == []


def test_the_step_unused_for_longest_leaves(model):
    """Guards against leaving in the order of capture."""
    engine = engine_of(model, max_captures=2)
    seen = []
    for rows in (1, 2, 1, 4, 1, 2):
        check(engine, model, prompts(8, rows=rows))
        seen.append(engine.captures)
    assert seen == [1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("size", [90, 400])
def test_a_call_refused_for_memory_costs_no_capture(model, size):
    """Guards against a refusal that leaves the engine taking its captured steps for stale, with a false reason."""
    engine = engine_of(model, kv_tokens=64)
    rows = prompts(8, rows=1)
    check(engine, model, rows)
    with pytest.raises(KVMemoryError):
        engine.generate(prompts(size, rows=1), SamplingConfig(max_new_tokens=BUDGET))
    check(engine, model, rows)
    assert engine.captures == 1
    assert engine.recapture_reasons == []


def assert_reasons(engine, *patterns):
    assert len(engine.recapture_reasons) == len(patterns)
    for reason, pattern in zip(engine.recapture_reasons, patterns, strict=True):
        assert re.fullmatch(pattern, reason), reason


def test_autocast_counts_by_its_dtype(model):
    """Guards against a step captured under another autocast, and KV pages of its dtype."""
    engine = engine_of(model)
    sampling = SamplingConfig(max_new_tokens=BUDGET)
    check(engine, model, prompts(8))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            batch = engine.generate(prompts(8), sampling)
            engine.generate(prompts(8), sampling)
            assert tokens(batch) == tokens(engine_of(model, capture=False).generate(prompts(8), sampling))
    check(engine, model, prompts(8))
    assert engine.captures == 4


def test_the_precision_of_products_counts(model):
    """Guards against a step that keeps the TF32 of its capture, where the process has switched it since."""
    engine = engine_of(model)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        for allowed in (False, True, True, False):
            matmul.allow_tf32 = allowed
            check(engine, model, prompts(8))
    finally:
        matmul.allow_tf32 = before
    assert engine.captures == 3
    assert all("precision of float32 products" in reason for reason in engine.recapture_reasons)


def test_weights_change_inside_one_autocast(model):
    """Guards against casts of the weights that autocast keeps, and that a captured step would go on reading."""
    engine = engine_of(model)
    sampling = SamplingConfig(max_new_tokens=BUDGET)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.tensor(prompts(8)))
        before = tokens(engine.generate(prompts(8), sampling))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-0.9)
        after = tokens(engine.generate(prompts(8), sampling))
        assert torch.is_autocast_cache_enabled()
    assert engine.captures == 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert after == tokens(engine_of(model).generate(prompts(8), sampling)) != before
