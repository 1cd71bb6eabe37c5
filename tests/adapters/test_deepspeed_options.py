"""The drop-in for DeepSpeed's rollouts, with any object for an engine: options, reports and refusals."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import zoo
from snapshots import left_as_found

import liveroll
from liveroll import ConfigError, PromptError
from liveroll.adapters import deepspeed as adapter
from liveroll.adapters.deepspeed import (
    HybridEngineRollout,
    HybridEngineRolloutConfig,
    RolloutConfig,
    RolloutRequest,
    SamplingConfig,
    build_rollout,
)

BUDGET = 8
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=11, lengths=(3, 9, 5, 9, 2))
EOS = zoo.early_eos(zoo.shared("llama"), PROMPTS, BUDGET)
WIDTH = max(map(len, PROMPTS))
IDS, MASK = zoo.left_pad(PROMPTS, pad_id=0)
CONFIGURATIONS = {
    "plain": {},
    "graph": {"use_graph_capture": True},
    "graph and shared prefill": {"use_graph_capture": True, "use_shared_prefill": True},
    "graph and aligned fronts": {"use_graph_capture": True, "align_decode_fronts": True},
    "graph and trimming": {"use_graph_capture": True, "enable_cache_trimming": True},
    "capacity": {"use_graph_capture": True, "continuous_cache_capacity": 40},
    "auto": {"adaptive_prefill": True, "use_graph_capture": True},
    "auto and trimming": {"adaptive_prefill": True, "enable_cache_trimming": True},
}


def tokenizer(pad=0, eos=EOS):
    return SimpleNamespace(pad_token_id=pad, eos_token_id=eos)


def rollout_of(model=None, cfg=None, *, eos=EOS, pad=0, **options):
    engine = SimpleNamespace(module=model or zoo.build("llama"))
    return HybridEngineRollout(engine, tokenizer(pad, eos), cfg or HybridEngineRolloutConfig(**options))


def generated(model, ids=IDS, mask=MASK, *, eos=EOS, pad=0, budget=BUDGET):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=budget, do_sample=False, eos_token_id=eos, pad_token_id=pad
    )


def test_names_and_their_order():
    """Guards against an option that a script gives by position landing in another."""
    order = {kind: [field.name for field in dataclasses.fields(kind)] for kind in (SamplingConfig, RolloutConfig)}
    assert order[SamplingConfig] == [
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n_samples_per_prompt",
        "continuous_batch_size",
    ]
    assert order[RolloutConfig] == ["engine", "use_graph_capture"]
    cfg = HybridEngineRolloutConfig(False, True, False, True, True, 16)
    assert (cfg.use_graph_capture, cfg.enable_profiling, cfg.use_shared_prefill) == (False, True, False)
    assert (cfg.align_decode_fronts, cfg.enable_cache_trimming, cfg.continuous_cache_capacity) == (True, True, 16)
    assert (cfg.adaptive_prefill, cfg.prefill_fixed_cost_ms, cfg.prefill_token_cost_ms) == (False, 25.0, 0.1)
    assert (cfg.prefill_attention_cost_ms, cfg.prefill_kv_cost_ms) == (0.01, 0.04)
    assert (cfg.continuous_decode_cost_ms, cfg.prefill_max_tokens) == (10.0, 65536)


def test_the_base_class_of_rollout_engines():
    """Guards against liveroll's engine being imported where a script asks for DeepSpeed's base class of that name."""

    class Own(adapter.RolloutEngine):
        def generate(self, request, sampling):
            return request

        def sync_weights(self, step):
            pass

    assert isinstance(rollout_of(), adapter.RolloutEngine)
    assert (Own().name, Own().generate(3, None), Own().shutdown()) == ("base", 3, None)
    with pytest.raises(TypeError, match="abstract"):
        adapter.RolloutEngine()


@pytest.mark.parametrize("slots", [None, 2, 32])
@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_greedy_tokens_are_those_of_generate(options, slots):
    """Guards against any option or batch size changing a token, an order, a mask or the model."""
    model = zoo.build("llama").train()
    rollout = rollout_of(model, **options)
    with left_as_found(model):
        batch = rollout.generate(RolloutRequest(IDS, MASK), SamplingConfig(BUDGET, 0.0, continuous_batch_size=slots))
    expected = generated(zoo.shared("llama"))
    assert torch.equal(batch.input_ids, expected)
    lengths = [len(row) for row in zoo.reference_batch(zoo.shared("llama"), PROMPTS, **greedy())]
    assert batch.attention_mask[:, WIDTH:].sum(dim=1).tolist() == lengths
    assert torch.equal(batch.attention_mask[:, :WIDTH], MASK)
    assert batch.response_start_idx.tolist() == [WIDTH] * len(PROMPTS)
    assert (batch.batch_size, batch.seq_len) == (len(PROMPTS), expected.shape[1])


def greedy():
    return {"max_new_tokens": BUDGET, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}


def test_a_pad_token_inside_a_response_counts():
    """Guards against PAD that was sampled before the end being masked, and against EOS as PAD being lost."""
    expected = generated(zoo.shared("llama"), eos=None, pad=0)
    inside = int(expected[0, WIDTH])
    batch = rollout_of(eos=None, pad=inside).generate(RolloutRequest(IDS, MASK), SamplingConfig(BUDGET, 0.0))
    assert torch.equal(batch.input_ids, expected)
    assert batch.attention_mask[:, WIDTH:].all()
    as_pad = rollout_of(eos=EOS, pad=EOS).generate(RolloutRequest(IDS, MASK), SamplingConfig(BUDGET, 0.0))
    assert torch.equal(as_pad.input_ids, generated(zoo.shared("llama"), pad=EOS))
    lengths = [len(row) for row in zoo.reference_batch(zoo.shared("llama"), PROMPTS, **greedy())]
    assert as_pad.attention_mask[:, WIDTH:].sum(dim=1).tolist() == lengths


def test_responses_end_where_generate_ends_them_and_at_the_tokenizers_eos():
    """Guards against stop tokens of the generation configuration, or several of the tokenizer, being overlooked."""
    other = int(generated(zoo.shared("llama"), eos=None)[1, WIDTH + 3])
    assert other != EOS
    expected = generated(zoo.shared("llama"), eos=[other, EOS])
    sampling = SamplingConfig(BUDGET, 0.0)
    model = zoo.build("llama")
    model.generation_config.eos_token_id = [other]
    assert torch.equal(rollout_of(model).generate(RolloutRequest(IDS, MASK), sampling).input_ids, expected)
    several = rollout_of(eos=[EOS, other])
    assert torch.equal(several.generate(RolloutRequest(IDS, MASK), sampling).input_ids, expected)


@pytest.mark.parametrize("options", [{}, {"use_graph_capture": True, "use_shared_prefill": True}])
def test_samples_with_continuous_batching(options):
    """Guards against samples that differ with the slots, are alike, repeat from call to call or ignore the seed."""
    rollout = rollout_of(**options)
    request = RolloutRequest(IDS, MASK)
    rows = []
    for slots in (None, 2, 5):
        torch.manual_seed(3)
        sampling = SamplingConfig(BUDGET, 0.9, 0.95, 20, 4, slots)
        rows.append(rollout.generate(request, sampling).input_ids)
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[0][:, :WIDTH], IDS.repeat_interleave(4, dim=0))
    assert len({tuple(row) for row in rows[0][:4].tolist()}) > 1
    again = rollout.generate(request, SamplingConfig(BUDGET, 0.9, 0.95, 20, 4))
    assert again.input_ids.shape != rows[0].shape or not torch.equal(again.input_ids, rows[0])
    assert rollout.rollouts.generate([PROMPTS[0]]).sampling[0].seed is None
    resolved = again.rollout.sampling[0]
    assert (resolved.temperature, resolved.top_p, resolved.top_k) == (0.9, 0.95, 20)


def test_a_request_that_changes():
    """Guards against requests that scripts cannot write to, as they can to DeepSpeed's, and shapes told of too late."""
    request = RolloutRequest(IDS[:2], MASK[:2])
    request.prompt_ids, request.prompt_attention_mask = IDS, MASK
    assert rollout_of().generate(request, SamplingConfig(BUDGET, 0.0)).batch_size == len(PROMPTS)
    for ids, mask in ((IDS[0], MASK[0]), (IDS, MASK[:2]), (IDS, MASK[:, 1:])):
        with pytest.raises(PromptError, match=r"must both be \[B, T_p\]"):
            RolloutRequest(ids, mask)


def test_a_mask_of_the_requests_kind():
    """Guards against a mask of another dtype than DeepSpeed returns."""
    rollout = rollout_of()
    request = RolloutRequest(IDS, MASK.float())
    continuous = rollout.generate(request, SamplingConfig(2, 0.0, continuous_batch_size=2))
    assert continuous.attention_mask.dtype == torch.float32
    assert rollout.generate(request, SamplingConfig(2, 0.0)).attention_mask.dtype == torch.int64


def test_captured_steps_stay_between_calls_and_go_with_shutdown():
    """Guards against steps captured anew for each prompt width, and against a shutdown that frees nothing."""
    model = zoo.build("llama")
    rollout = rollout_of(model, use_graph_capture=True, continuous_cache_capacity=64, eos=None)
    for width, budget in ((8, 16), (12, 12), (8, 8)):
        rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=width, lengths=[width] * 4)
        ids, mask = zoo.left_pad(rows, pad_id=0)
        batch = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(budget, 0.0, continuous_batch_size=4))
        assert torch.equal(batch.input_ids, generated(model, ids, mask, eos=None, budget=budget))
    assert rollout.rollouts.captures == 1
    held = rollout.rollouts.memory()
    assert held.kv > 0
    rollout.shutdown()
    assert rollout.rollouts.memory().total == 0
    batch = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(8, 0.0, continuous_batch_size=4))
    assert torch.equal(batch.input_ids, generated(model, ids, mask, eos=None, budget=8))
    assert rollout.rollouts.captures == 2


def test_an_engine_with_more_slots_replaces_the_one_before():
    """Guards against the pages of both being held, and against slots that shrink with every small batch."""
    rollout = rollout_of()
    request, first = RolloutRequest(IDS, MASK), rollout.rollouts
    rollout.generate(request, SamplingConfig(BUDGET, 0.0))
    assert rollout.rollouts is first
    many = rollout.generate(request, SamplingConfig(BUDGET, 1.0, n_samples_per_prompt=8))
    wider = rollout.rollouts
    assert (many.batch_size, wider.config.max_slots) == (40, 40)
    assert first.memory().total == 0
    rollout.generate(request, SamplingConfig(BUDGET, 0.0))
    assert rollout.rollouts is wider
    rollout.generate(request, SamplingConfig(BUDGET, 0.0, continuous_batch_size=2))
    assert (rollout.rollouts.config.max_slots, wider.memory().total) == (2, 0)
    own = liveroll.RolloutConfig(max_slots=3, prefill_route="equal_width")
    bounded = HybridEngineRollout(SimpleNamespace(module=zoo.build("llama")), tokenizer(), engine_config=own)
    batch = bounded.generate(request, SamplingConfig(BUDGET, 0.0))
    assert (bounded.rollouts.config.max_slots, batch.rollout.stats.route) == (3, "equal_width")


@pytest.mark.parametrize(
    ("lengths", "slots", "strategy", "forwards"),
    [
        ([4, 4, 3, 3], 4, "batched", 1),
        ([16, 1, 1, 1], 4, "batched", 1),
        ([4, 4, 3, 3], 2, "bucketed", 2),
        ([512, *[16] * 7], 8, "bucketed", 2),
    ],
)
def test_adaptive_prefill_chooses_by_its_costs(lengths, slots, strategy, forwards):
    """Guards against costs that do not reach the planner, and against a route outside those that DeepSpeed has."""
    model = zoo.build("llama", max_position_embeddings=1024)
    rows = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=2, lengths=lengths)
    ids, mask = zoo.left_pad(rows, pad_id=0)
    rollout = rollout_of(model, adaptive_prefill=True, enable_profiling=True, eos=None)
    batch = rollout.generate(RolloutRequest(ids, mask), SamplingConfig(3, 0.0, continuous_batch_size=slots))
    assert torch.equal(batch.input_ids, generated(model, ids, mask, eos=None, budget=3))
    profile = rollout.get_last_profile()
    assert (profile["generation_strategy"], profile["num_prefill_forwards"]) == (strategy, forwards)
    assert (rollout.get_last_continuous_stats() is None) == (strategy == "batched")
    dear = rollout_of(model, adaptive_prefill=True, prefill_fixed_cost_ms=1e6, enable_profiling=True, eos=None)
    dear.generate(RolloutRequest(ids, mask), SamplingConfig(3, 0.0, continuous_batch_size=len(lengths)))
    assert dear.get_last_profile()["num_prefill_forwards"] == 1
    assert dear.rollouts.costs.fixed_ms == 1e6


@pytest.mark.parametrize("options", [{"enable_cache_trimming": True}, {"continuous_cache_capacity": 32}, {}])
def test_what_keeps_adaptive_prefill_from_ordinary_generation(options):
    """Guards against the two options that fix a continuous cache being overlooked."""
    rollout = rollout_of(adaptive_prefill=True, enable_profiling=True, **options)
    rollout.generate(RolloutRequest(IDS, MASK), SamplingConfig(BUDGET, 0.0, continuous_batch_size=8))
    assert rollout.get_last_profile()["generation_strategy"] == ("bucketed" if options else "batched")


@pytest.mark.parametrize("capture", [False, True])
def test_capture_is_asked_for(capture):
    """Guards against steps captured although the script does not ask for it."""
    rollout = rollout_of(use_graph_capture=capture)
    rollout.generate(RolloutRequest(IDS, MASK), SamplingConfig(BUDGET, 0.0))
    assert bool(rollout.rollouts.captures) == capture


def test_limits_on_prefill_and_capacity_are_errors():
    """Guards against a limit that is not handed on."""
    request, sampling = RolloutRequest(IDS, MASK), SamplingConfig(BUDGET, 0.0, continuous_batch_size=2)
    with pytest.raises(liveroll.PrefillLimitError):
        rollout_of(adaptive_prefill=True, prefill_max_tokens=4).generate(request, sampling)
    with pytest.raises(PromptError, match="max_length is 16"):
        rollout_of(continuous_cache_capacity=16).generate(request, sampling)


def test_reports():
    """Guards against a profile or statistics without the fields that DeepSpeed documents, or that do not add up."""
    rollout = rollout_of(enable_profiling=True)
    assert rollout.get_last_profile() is None
    assert rollout.get_last_continuous_stats() is None
    batch = rollout.generate(RolloutRequest(IDS, MASK), SamplingConfig(BUDGET, 0.0, continuous_batch_size=3))
    profile, stats = rollout.get_last_profile(), rollout.get_last_continuous_stats()
    tokens = int(batch.attention_mask[:, WIDTH:].sum())
    counts = ("num_generated_tokens", "batch_size", "num_samples_per_prompt", "prompt_length", "continuous_batch_size")
    assert [profile[name] for name in counts] == [tokens, 5, 1, WIDTH, 3]
    assert profile["response_length"] == batch.seq_len - WIDTH
    assert profile["active_batch_size"] == 3
    assert profile["num_decode_forwards"] == stats["decode_steps"] > 0
    parts = ("prefill_forward_ms", "decode_forward_ms", "generation_overhead_ms", "post_processing_ms")
    assert sum(profile[name] for name in parts) == pytest.approx(profile["total_ms"])
    assert profile["tokens_per_second"] == pytest.approx(tokens / profile["total_ms"] * 1e3)
    longest = int(batch.attention_mask.sum(dim=1).max())
    assert (stats["peak_cache_length"], stats["cache_capacity"]) == (longest, batch.seq_len)
    assert stats["cache_memory_bytes"] == rollout.rollouts.memory().kv
    assert [stats[name] for name in stats if name.startswith("trim")] == [0] * 5
    assert stats["end_to_end_ms"] == pytest.approx(profile["total_ms"])
    quiet = rollout_of()
    quiet.generate(RolloutRequest(IDS, MASK), SamplingConfig(2, 0.0, continuous_batch_size=3))
    assert quiet.get_last_profile() is None
    assert quiet.get_last_continuous_stats()["tokens_per_second"] is None


def test_options_of_other_objects():
    """Guards against options given as a mapping, a namespace or to the factory being lost."""
    engine = SimpleNamespace(module=zoo.build("llama"))

    class ByClass:
        engine, enable_profiling = "hybrid_engine", True

    named = {"engine": "hybrid_engine", "enable_profiling": True}
    for cfg in (named, SimpleNamespace(**named), ByClass()):
        assert HybridEngineRollout(engine, tokenizer(), cfg).cfg == HybridEngineRolloutConfig(enable_profiling=True)
        assert build_rollout(cfg, engine, tokenizer()).cfg == HybridEngineRolloutConfig(enable_profiling=True)
    built = build_rollout(RolloutConfig("hybrid_engine", True), engine, tokenizer())
    assert built.cfg == HybridEngineRolloutConfig(use_graph_capture=True)
    assert (built.engine, built.sync_weights(3)) == (engine, None)
    cfg = HybridEngineRolloutConfig()
    rollout = HybridEngineRollout(engine, tokenizer(), cfg)
    cfg.enable_profiling = "yes"
    assert rollout.cfg.enable_profiling is False
    with pytest.raises(ConfigError, match="enable_profiling"):
        HybridEngineRollout(engine, tokenizer(), cfg)
    changed = SamplingConfig(4)
    changed.max_new_tokens, changed.temperature = 2, 0.0
    assert built.generate(RolloutRequest(IDS, MASK), changed).seq_len == WIDTH + 2

    class ByClassToo:
        max_new_tokens, temperature = 3, 0.0

    assert built.generate(RolloutRequest(IDS, MASK), ByClassToo()).seq_len == WIDTH + 3
    changed.top_p = 7.0
    with pytest.raises(ConfigError, match="top_p"):
        built.generate(RolloutRequest(IDS, MASK), changed)


def test_what_is_refused():
    """Guards against a misspelt option or a missing piece being passed over without a word."""
    engine = SimpleNamespace(module=zoo.build("llama"))
    with pytest.raises(ConfigError, match="no option use_graph_captures; did you mean use_graph_capture"):
        HybridEngineRolloutConfig(use_graph_captures=True)
    for cfg in ({"profiling": True}, SimpleNamespace(profiling=True)):
        with pytest.raises(ConfigError, match="no option profiling"):
            HybridEngineRollout(engine, tokenizer(), cfg)
    for name, value in (
        ("prefill_fixed_cost_ms", -1.0),
        ("prefill_token_cost_ms", float("nan")),
        ("prefill_attention_cost_ms", float("inf")),
        ("prefill_max_tokens", 0),
        ("continuous_cache_capacity", 0),
        ("use_graph_capture", 1),
    ):
        with pytest.raises(ConfigError, match=name):
            HybridEngineRolloutConfig(**{name: value})
    for name, value in (
        ("max_new_tokens", 0),
        ("temperature", "cold"),
        ("top_p", 0.0),
        ("top_k", None),
        ("n_samples_per_prompt", 0),
        ("continuous_batch_size", 0),
    ):
        with pytest.raises(ConfigError, match=name):
            SamplingConfig(**{"max_new_tokens": 4, name: value})
    with pytest.raises(ConfigError, match="neither a pad nor an eos"):
        HybridEngineRollout(engine, tokenizer(None, None))
    with pytest.raises(ConfigError, match="unknown rollout engine 'vllm'"):
        build_rollout(SimpleNamespace(engine="vllm"), engine, tokenizer())
    with pytest.raises(ConfigError, match="both student_engine and tokenizer"):
        build_rollout(RolloutConfig(), engine)
    with pytest.raises(ConfigError, match="no option device"):
        build_rollout(RolloutConfig(), engine, tokenizer(), device="cpu")
    rollout = HybridEngineRollout(engine, tokenizer())
    with pytest.raises(PromptError, match=r"request\.prompt_ids"):
        rollout.generate(SimpleNamespace(prompt_ids=[[1]]), SamplingConfig(2))
    with pytest.raises(ConfigError, match="sampling must be a SamplingConfig"):
        rollout.generate(RolloutRequest(IDS, MASK), 4)


def test_deepspeeds_own_names_without_deepspeed(monkeypatch):
    """Guards against an import error that does not say what to install."""
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match=r'pip install "liveroll\[deepspeed\]"'):
        _ = adapter.ResponseTokenBatch
    with pytest.raises(AttributeError, match="no attribute 'VLLMRollout'"):
        _ = adapter.VLLMRollout


@pytest.mark.parametrize("name", ["deepspeed", "trl"])
def test_importing_an_adapter_does_not_import_the_trainer(name):
    """Guards against an import that takes seconds, or fails where the trainer is not installed."""
    program = f"import liveroll.adapters.{name}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"deepspeed", "trl", "datasets"}
