"""Captured steps and their memory over a training run, on a GPU."""

import gc
import importlib.util

import pytest
import torch
from zoo import build

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.kv.arena import PlainArena

needs_virtual_memory = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None if importlib.util.find_spec("cuda") else True,
    reason="needs cuda-python",
)
GREEDY = SamplingConfig(max_new_tokens=16)
MIB = 2**20


def prompts(width, rows=8):
    return [[1 + (row * 7 + column) % 90 for column in range(width)] for row in range(rows)]


def tokens(batch):
    return [completion.token_ids for completion in batch.completions]


def test_one_capture_over_rounds_of_training():
    """Guards against a capture for each optimizer step or prompt width, and against replays of old weights."""
    model = build("qwen3").cuda()
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    seen = []
    for width in (8, 12, 8, 20):
        batch = engine.generate(prompts(width), GREEDY)
        eager = RolloutEngine(model, config=RolloutConfig(max_slots=8, capture=False))
        assert tokens(batch) == tokens(eager.generate(prompts(width), GREEDY))
        seen.append(tokens(engine.generate(prompts(8), GREEDY)))
        model(input_ids=batch.input_ids, labels=batch.input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.captures == 1
    assert engine.recapture_reasons == []
    assert len(set(map(tuple, seen))) == len(seen)


@needs_virtual_memory
def test_sleep_gives_the_memory_back_and_keeps_the_captures():
    """Guards against pages whose memory stays taken, or whose addresses move, over sleep and wake."""
    model = build("llama").cuda()
    # Many slots make the pages large enough to be seen.
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=4096, max_length=512, kv_bytes=512 * MIB))
    before = tokens(engine.generate(prompts(8), GREEDY))
    kv, captures = engine.memory().kv, engine.captures
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    assert engine.sleep()
    assert torch.cuda.mem_get_info()[0] - free >= kv > 100 * MIB
    assert engine.memory().kv == 0
    engine.wake()
    assert engine.memory().kv == kv
    assert tokens(engine.generate(prompts(8), GREEDY)) == before
    assert engine.sleep()
    assert tokens(engine.generate(prompts(8), GREEDY)) == before
    assert engine.captures == captures


def test_shutdown_frees_the_kv_bytes():
    """Guards against pages or graphs that something still holds after shutdown."""
    model = build("llama").cuda()
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=4096, max_length=512, kv_bytes=512 * MIB))
    expected = tokens(engine.generate(prompts(8), GREEDY))
    kv = engine.memory().kv
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    engine.shutdown()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= kv > 100 * MIB
    assert engine.memory().total == 0
    assert tokens(engine.generate(prompts(8), GREEDY)) == expected
    assert engine.captures == 2


def test_a_new_shape_never_holds_both_states(monkeypatch):
    """Guards against a replacement that is allocated before the old state is dropped."""
    # Memory of torch's own allocator, which keeps the peak.
    monkeypatch.setattr("liveroll.kv.storage.make_arena", PlainArena)
    model = build("llama").cuda()
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=4096, kv_fraction=0.9))
    engine.generate(prompts(8), GREEDY)
    first = engine.memory().kv
    besides = torch.cuda.memory_allocated() - first
    torch.cuda.reset_peak_memory_stats()
    engine.generate(prompts(400, rows=2), GREEDY)
    second = engine.memory().kv
    assert second > first > 100 * MIB
    assert torch.cuda.max_memory_allocated() - besides < second + first / 2


def test_one_captured_step_at_a_time():
    """Guards against a memory pool that takes no graph once its only one has left, and memory of those that left."""
    model = build("llama").cuda()
    expected = tokens(
        RolloutEngine(model, config=RolloutConfig(max_slots=8, capture=False)).generate(prompts(8), GREEDY)
    )
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=8, max_captures=1))
    held = []
    for _ in range(4):
        assert tokens(engine.generate(prompts(8), GREEDY)) == expected
        held.append(engine.memory().graphs)
    assert (engine.captures, engine.prefill_captures) == (4, 4)
    assert 0 < held[3] <= held[1]


def test_a_step_that_cannot_be_captured():
    """Guards against a capture failure that hangs, is silent, or does not name its module.

    And against one that leaves the caller on another stream, or torch with memory that it never gives back.
    """
    from liveroll import CaptureError

    model, stream = build("llama").cuda(), torch.cuda.current_stream()
    inner = model.model.layers[1].mlp
    forward = inner.forward

    def reads_the_device(hidden):
        return forward(hidden) * (1.0 if hidden.sum().item() == hidden.sum().item() else 0.0)

    inner.forward = reads_the_device
    with pytest.raises(CaptureError, match=r"layers\.1\.mlp"):
        RolloutEngine(model, config=RolloutConfig(capture=True)).generate(prompts(4), GREEDY)
    engine = RolloutEngine(model)
    batch = engine.generate(prompts(4), GREEDY)
    assert "layers.1.mlp" in batch.stats.eager_reason
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == reserved
    del inner.forward
    assert tokens(batch) == tokens(RolloutEngine(model).generate(prompts(4), GREEDY))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("capture", [False, True])
def test_fused_projections(capture, compile):
    """Guards against products over memory that weights have left, a second copy of them, and parts read as whole."""
    model = build("qwen2", hidden_size=256, intermediate_size=1024, num_hidden_layers=6).cuda()
    settings = {"max_slots": 8, "capture": capture, "compile": compile}
    engine = RolloutEngine(model, config=RolloutConfig(fuse=True, **settings))
    expected = tokens(RolloutEngine(model, config=RolloutConfig(**settings)).generate(prompts(8), GREEDY))
    assert tokens(engine.generate(prompts(8), GREEDY)) == expected
    assert len(engine.fusion.fused) == 12
    ids = torch.tensor(prompts(8), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    engine.generate(prompts(8), GREEDY)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    apart = tokens(RolloutEngine(model, config=RolloutConfig(capture=False, max_slots=8)).generate(prompts(8), GREEDY))
    assert tokens(engine.generate(prompts(8), GREEDY)) == apart
    assert engine.captures == (2 if capture else 0)
    engine.shutdown()
    del optimizer
    model.zero_grad()
    gc.collect()
    # Fusing again takes room for one group at a time, and leaves none taken.
    engine.unfuse()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine._decoder.fusion.renew(moved=True)
    group = sum(parameter.nbytes for parameter in model.model.layers[0].mlp.parameters())
    assert torch.cuda.max_memory_allocated() - before <= group + 2**16
    assert torch.cuda.memory_allocated() - before <= 2**16
