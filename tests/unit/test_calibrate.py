"""Calibration of a tiny model, and costs that an engine measures by itself."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
import zoo
from snapshots import left_as_found
from torch import nn

from liveroll import ConfigError, RolloutConfig, RolloutEngine, SamplingConfig, UnsupportedModelError
from liveroll.model.identity import describe_origin
from liveroll.planning.costs_file import read_costs, write_costs
from liveroll.planning.fit import COEFFICIENTS
from liveroll.routing import Router
from liveroll.tools import calibrate as calibrate_module
from liveroll.tools import costs_cache
from liveroll.tools.calibrate import calibrate, longest_prompt, range_of
from liveroll.tools.grid import DECODE_STEPS, WorkloadRange
from liveroll.tools.quiet import QuietHost

MODEL = zoo.build("llama")
WORK = WorkloadRange(min_length=2, max_length=6, max_batch=2)
PROMPTS = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed=5)
SAMPLED = SamplingConfig(max_new_tokens=6, temperature=1.0, n=2)


@pytest.fixture(scope="module")
def calibration():
    return calibrate(MODEL, WORK, repeats=1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "liveroll" / "costs"


@pytest.fixture
def small(monkeypatch):
    """Let engines measure little."""
    monkeypatch.setattr(costs_cache, "range_of", lambda model, config: WORK)
    monkeypatch.setattr(costs_cache, "_SECONDS", 0.0)


def tokens(batch):
    return [completion.token_ids for completion in batch.completions]


def test_what_is_written_can_be_used(calibration, tmp_path):
    """Guards against a file that engines of the same model refuse, or that lacks a coefficient or a point."""
    path = tmp_path / "costs.json"
    write_costs(path, calibration.file)
    file = read_costs(path)
    assert file.coefficients == calibration.costs
    assert file.origin == describe_origin(MODEL, RolloutConfig(), ranks=1)
    assert {(point["kind"], point["route"]) for point in file.points} == {
        ("prefill", "equal_width"),
        ("prefill", "packed"),
        ("prefill", "ordinary"),
        ("decode", "packed"),
        ("decode", "ordinary"),
    }
    assert all(point["ms"] > 0 and point["predicted_ms"] > 0 for point in file.points)
    assert any(getattr(file.coefficients, name) > 0 for name in COEFFICIENTS)
    engine = RolloutEngine(MODEL, config=RolloutConfig(prefill_route="auto", costs=path))
    assert engine.costs == calibration.costs


def test_the_model_is_left_as_found():
    """Guards against a flag, the random state or memory that calibration leaves changed."""
    MODEL.train()
    try:
        with left_as_found(MODEL):
            calibrate(MODEL, WORK, RolloutConfig(capture=False), repeats=1)
    finally:
        MODEL.eval()


@pytest.mark.parametrize(
    ("work", "config", "message"),
    [
        ({"max_length": 510}, {}, f"510 tokens and the {DECODE_STEPS + 1} .* max_position_embeddings, 512; lower"),
        ({"max_length": 30}, {"max_length": 32}, r"do not fit RolloutConfig\.max_length, 32; lower max_length"),
        ({"min_length": 1, "max_length": 1}, {"max_length": 4}, "max_length, 4; raise it, or give costs as a CostMod"),
        ({"max_length": 30}, {"prefill_max_tokens": 20}, "30 tokens are over prefill_max_tokens, 20"),
        ({"max_batch": 10**9}, {}, r"rows of 11 tokens take .* GiB, and .* are free; lower max_batch or max_length"),
    ],
)
def test_a_range_that_cannot_be_measured_is_refused(work, config, message):
    """Guards against a run that fails when it comes to the largest call."""
    with pytest.raises(ConfigError, match=message):
        calibrate(MODEL, replace(WORK, **work), RolloutConfig(**config))


def test_memory_that_runs_out_is_said_to(monkeypatch):
    """Guards against a traceback from inside a forward for a range that is too large."""

    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(MODEL.model.norm, "forward", out_of_memory)
    with pytest.raises(ConfigError, match=r"memory of the device does not hold forwards over .*max_batch=2"):
        calibrate(MODEL, WORK)


def test_the_range_of_an_engine(monkeypatch):
    """Guards against measuring what no call of the engine can be, or what memory does not hold."""
    most = 512 - DECODE_STEPS - 1
    assert longest_prompt(MODEL, RolloutConfig()) == most
    assert longest_prompt(MODEL, RolloutConfig(max_length=60)) == 60 - DECODE_STEPS - 1
    assert longest_prompt(MODEL, RolloutConfig(prefill_max_tokens=40)) == 40
    assert longest_prompt(MODEL, RolloutConfig(max_length=2)) == 1
    assert range_of(MODEL, RolloutConfig()) == WorkloadRange(min_length=16, max_length=most, max_batch=32)
    monkeypatch.setattr("liveroll.tools.calibrate.free_bytes", lambda device: 1 << 30)
    huge = range_of(MODEL, RolloutConfig(max_slots=1 << 20))
    assert 1 < huge.max_batch < 1 << 20
    assert huge.max_length == most


def test_what_is_not_captured_does_not_run_ahead(monkeypatch):
    """Guards against a long prefill that counts as decode too.

    Launches of eager steps that ran ahead waited for it on a GPU, so that steps behind 32 prompts of 512 tokens seemed
    to take 56 ms, which take 28, and `auto` took `model.generate` where that was 1.3 times as slow.
    """
    configs = []
    engine = calibrate_module.RolloutEngine

    def making(model, config):
        configs.append(config)
        return engine(model, config=config)

    monkeypatch.setattr(calibrate_module, "RolloutEngine", making)
    for capture, run_ahead, expected in ((False, None, 0), (False, 3, 0), ("auto", 3, 3), ("auto", None, None)):
        calibrate(MODEL, WORK, RolloutConfig(capture=capture, run_ahead=run_ahead), repeats=1)
        assert configs.pop().run_ahead == expected


@pytest.mark.parametrize(("seconds", "share"), [(None, 1.0), (0.0, 0.25)])
def test_waiting_is_short_where_time_is_limited(seconds, share, monkeypatch):
    """Guards against a first call of an engine that waits twice as long as it should, for a quiet host."""
    shares = []
    monkeypatch.setattr(calibrate_module, "QuietHost", lambda given: shares.append(given) or QuietHost(0.0))
    calibrate(MODEL, WORK, repeats=1, seconds=seconds)
    assert shares == [share]


def test_a_range_is_cut_to_the_time_there_is():
    """Guards against a first call that waits for minutes where forwards are slow, and against a cut without need."""
    work = WorkloadRange(min_length=2, max_length=40, max_batch=8)
    in_no_time = calibrate(MODEL, work, repeats=1, seconds=1e-9)
    assert {(point.rows, point.width) for point in in_no_time.points} == {(1, 1)}
    in_good_time = calibrate(MODEL, work, repeats=1, seconds=600.0)
    assert {(point.rows, point.width) for point in in_good_time.points} > {(1, 2), (1, 40), (8, 2), (8, 40)}
    assert in_good_time.calls == 24
    assert 0 < in_good_time.setup_seconds < in_good_time.seconds


@pytest.mark.parametrize("route", ["auto", "bucketed"])
def test_an_engine_measures_once_and_keeps_it(route, folder, small, monkeypatch):
    """Guards against measuring again for every engine, or for none, and against costs of another model."""
    first = RolloutEngine(MODEL, config=RolloutConfig(prefill_route=route, costs="auto"))
    assert first.costs == RolloutEngine(MODEL).costs
    first.generate(PROMPTS, SAMPLED)
    (path,) = folder.iterdir()
    assert read_costs(path).coefficients == first.costs != RolloutEngine(MODEL).costs

    def never(*_, **__):
        raise AssertionError("measured again")

    monkeypatch.setattr(costs_cache, "calibrate", never)
    moved = path.rename(folder / "elsewhere")
    first.generate(PROMPTS, SAMPLED)
    moved.rename(path)
    second = RolloutEngine(MODEL, config=RolloutConfig(prefill_route=route, costs="auto"))
    list(second.stream(PROMPTS, SAMPLED))
    assert second.costs == first.costs
    for other in (zoo.build("qwen2"), MODEL):
        config = RolloutConfig(prefill_route=route, costs="auto", capture=other is not MODEL)
        with pytest.raises(AssertionError, match="measured again"):
            RolloutEngine(other, config=config).generate(PROMPTS, SAMPLED)


def test_measuring_leaves_the_engine_alone(folder, small):
    """Guards against other samples, captures or statistics in a call that measured costs first."""
    measuring = RolloutEngine(MODEL, config=RolloutConfig(prefill_route="auto", auto_routes=("packed",), costs="auto"))
    plain = RolloutEngine(MODEL, config=RolloutConfig(prefill_route="auto", auto_routes=("packed",)))
    with left_as_found(MODEL):
        ours = measuring.generate(PROMPTS, SAMPLED)
    theirs = plain.generate(PROMPTS, SAMPLED)
    assert tokens(ours) == tokens(theirs)
    same = ("prompts", "new_tokens", "prefill_forwards", "decode_steps", "captures", "replays", "kv_bytes")
    assert [getattr(ours.stats, name) for name in same] == [getattr(theirs.stats, name) for name in same]
    assert measuring.captures == plain.captures
    assert tokens(measuring.generate(PROMPTS, SAMPLED)) == tokens(plain.generate(PROMPTS, SAMPLED))


def test_routes_that_need_no_costs_measure_none(folder):
    """Guards against a wait for what is not used."""
    RolloutEngine(MODEL, config=RolloutConfig(prefill_route="packed", costs="auto")).generate(PROMPTS, SAMPLED)
    assert not folder.exists()


def test_a_damaged_file_is_measured_again(folder, small):
    """Guards against a cache that a full disk once broke, and that no call can do without any more.

    And against costs of something else under its name.
    """
    config = RolloutConfig(prefill_route="auto", costs="auto")
    RolloutEngine(MODEL, config=config).generate(PROMPTS, SAMPLED)
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    other = {**content, "coefficients": {**content["coefficients"], "fixed_ms": 1e6}}
    other["metadata"] = {**content["metadata"], "device": "an abacus"}
    for damage in ("{", json.dumps({"coefficients": {}}), json.dumps(other)):
        path.write_text(damage)
        engine = RolloutEngine(MODEL, config=config)
        engine.generate(PROMPTS, SAMPLED)
        assert read_costs(path).coefficients == engine.costs
        assert engine.costs.fixed_ms < 1e6
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch, small, caplog):
    """Guards against a rollout that fails because its costs cannot be kept."""
    (tmp_path / "liveroll").write_text("a file where the folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    engine = RolloutEngine(MODEL, config=RolloutConfig(prefill_route="auto", costs="auto"))
    with caplog.at_level(logging.WARNING, "liveroll"):
        engine.generate(PROMPTS, SAMPLED)
    assert "cannot keep the costs" in caplog.text
    assert engine.costs != RolloutEngine(MODEL).costs


def test_forwards_that_memory_does_not_hold(folder, small, monkeypatch):
    """Guards against a rollout that fails for lack of the memory that measuring would take."""
    most = []
    measure = costs_cache.calibrate

    def tight(model, work, *arguments, **settings):
        most.append(work.max_batch)
        if work.max_batch > 1:
            raise ConfigError("too much") from torch.OutOfMemoryError()
        return measure(model, work, *arguments, **settings)

    monkeypatch.setattr(costs_cache, "calibrate", tight)
    engine = RolloutEngine(MODEL, config=RolloutConfig(prefill_route="auto", costs="auto"))
    engine.generate(PROMPTS, SAMPLED)
    assert most == [2, 1]
    assert engine.costs != RolloutEngine(MODEL).costs


class OtherAttention(nn.Module):
    """Attention that ignores transformers' interface."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, **kwargs):
        return self.inner.o_proj(self.inner.q_proj(hidden_states)), None


def test_a_model_that_falls_back(folder):
    """Guards against a fallback that is refused, because what will not run could not be measured."""
    model = zoo.build("llama")
    model.model.layers[1].self_attn = OtherAttention(model.model.layers[1].self_attn)
    settings = {"prefill_route": "auto", "costs": "auto"}
    batch = RolloutEngine(model, config=RolloutConfig(fallback="generate", **settings)).generate(PROMPTS, SAMPLED)
    assert "do not attend" in batch.stats.fallback_reason
    with pytest.raises(UnsupportedModelError, match="do not attend"):
        RolloutEngine(model, config=RolloutConfig(**settings)).generate(PROMPTS, SAMPLED)
    assert not folder.exists()


def test_ranks_that_share_a_model_measure_nothing():
    """Guards against ranks that plan by different costs, and wait for one another forever."""
    with pytest.raises(ConfigError, match="measured by each rank for itself"):
        Router(MODEL, RolloutConfig(prefill_route="auto", costs="auto"), ranks=2)
    Router(MODEL, RolloutConfig(prefill_route="auto"), ranks=2)


def test_where_costs_are_kept(monkeypatch, tmp_path):
    """Guards against files in the working folder for a relative XDG_CACHE_HOME, which the specification ignores."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert costs_cache.cache_folder() == tmp_path / ".cache" / "liveroll" / "costs"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert str(costs_cache.cache_folder()) == "/elsewhere/liveroll/costs"
