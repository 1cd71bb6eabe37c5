"""What an engine keeps between calls, when it lets go of it, and that it never holds two of it."""

from __future__ import annotations

import gc

import pytest
import torch
import zoo
from rollouts import check, engine_of, prompts
from torch.multiprocessing.reductions import StorageWeakRef

from liveroll import RolloutConfig, RolloutMemory
from liveroll.kv import storage
from liveroll.kv.arena import PlainArena
from liveroll.kv.pool import StoragePool
from liveroll.model.geometry import AttentionTraits, LayerSpec, ModelShape

KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 8 * 4
"""Two layers, key and value, two heads of eight numbers, fp32."""


@pytest.fixture
def model():
    return zoo.build("llama")


@pytest.fixture
def arenas(monkeypatch):
    """Weak references to the storages of the arenas made so far; each is dead before the next is made."""
    made = []

    def make_arena(size, device):
        assert all(earlier.expired() for earlier in made), "an arena is made while an earlier one is held"
        arena = PlainArena(size, device)
        made.append(StorageWeakRef(arena.memory.untyped_storage()))
        return arena

    monkeypatch.setattr(storage, "make_arena", make_arena)
    gc.disable()  # what is freed must be freed by its last reference
    yield made
    gc.enable()


def test_memory_says_what_is_kept(model):
    """Guards against numbers that are off, or that leave out a part."""
    engine = engine_of(model)
    assert engine.memory() == RolloutMemory(kv=0, graphs=0, static=0)
    batch = check(engine, model, prompts(8))
    kept = engine.memory()
    # Four rows of 256 tokens in pages of 16, and the scratch page.
    assert kept.kv == batch.stats.kv_bytes == (4 * 256 + 16) * KV_BYTES_PER_TOKEN
    assert kept.graphs == 0  # without device graphs, none have a pool
    # Eight int64 and six fp32 a slot, eight stop tokens, sixteen pages in int32; sixteen adjusted tokens, each with a
    # bias and a count, in four bytes; five slots with the inert one.
    assert kept.static == 5 * (8 * 8 + 6 * 4 + 8 * 8 + 16 * 4 + 16 * 12) + 4 * 8 + 3 * 4 * 4
    assert kept.total == kept.kv + kept.static
    check(engine, model, prompts(8), repetition_penalty=1.3)
    assert engine.memory().static == kept.static + 5 * 4 * zoo.VOCAB_SIZE
    assert engine.memory().kv == kept.kv


def test_memory_follows_its_settings(model):
    """Guards against settings of the KV memory that are read in another unit."""
    for settings, tokens in (({"kv_tokens": 96}, 96), ({"kv_bytes": 128 * KV_BYTES_PER_TOKEN}, 128)):
        engine = engine_of(model, **settings)
        check(engine, model, prompts(8))
        assert engine.memory().kv == (tokens + 16) * KV_BYTES_PER_TOKEN
    engine = engine_of(model, max_length=32)
    check(engine, model, prompts(8))
    assert engine.memory().kv == (4 * 32 + 16) * KV_BYTES_PER_TOKEN


@pytest.mark.parametrize("end", ["release", "shutdown", "sleep", "exit"])
def test_letting_go_frees_the_pages_and_the_engine_stays_usable(model, arenas, end):
    """Guards against pages that something still holds, and against an engine that is used up."""
    engine = engine_of(model)
    for count in (1, 2, 3):
        check(engine, model, prompts(8), repetition_penalty=1.3)
        assert engine.captures == count
        assert not arenas[-1].expired()
        if end == "exit":
            with engine:
                pass
        else:
            result = getattr(engine, end)()
            assert result is (False if end == "sleep" else None)
        assert arenas[-1].expired()
        assert engine.memory() == RolloutMemory(kv=0, graphs=0, static=0)
    assert len(arenas) == 3
    assert engine.recapture_reasons == []
    engine.wake()
    check(engine, model, prompts(8))
    engine.shutdown()
    engine.shutdown()
    assert all(arena.expired() for arena in arenas)


def test_the_model_is_not_held_by_what_is_freed(model):
    """Guards against letting go of the model's own tensors."""
    weights = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    engine = engine_of(model)
    check(engine, model, prompts(8))
    engine.shutdown()
    assert not any(weight.expired() for weight in weights)


def test_an_engine_that_goes_frees_its_pages(model, arenas):
    """Guards against a registry that keeps an engine which nobody has any more."""
    engine = engine_of(model)
    check(engine, model, prompts(8))
    del engine
    gc.collect()
    assert arenas[0].expired()


@pytest.mark.parametrize("stream", [False, True])
def test_the_old_pages_are_dead_before_new_ones_are_made(model, arenas, stream):
    """Guards against a peak of both states, which may not fit where each does."""
    engine = engine_of(model)
    check(engine, model, prompts(8))
    if stream:
        rows = engine.stream(prompts(8))
        next(rows)
        rows.close()
    check(engine, model, prompts(300), 2)
    model.to(torch.bfloat16).to(torch.float32)
    check(engine, model, prompts(8), repetition_penalty=1.3)
    weight = model.lm_head.weight
    weight.data = weight.data.clone()
    check(engine, model, prompts(8))
    assert len(arenas) == 4
    assert [arena.expired() for arena in arenas] == [True, True, True, False]
    assert engine.captures == 4


def test_a_pool_drops_its_storage_before_it_provides_another(arenas):
    """Guards against a pool that leaves this to those who ask it for storage."""
    traits = AttentionTraits(scale=1.0, window=None, softcap=None)
    shape = ModelShape((LayerSpec(4, 2, 8, 8, traits, False),), zoo.VOCAB_SIZE, None)
    pool = StoragePool(RolloutConfig())
    for pages in (2, 3):
        pool.provide(shape, torch.float32, torch.device("cpu"), pages)
        assert pool.bytes == (pages + 1) * 16 * KV_BYTES_PER_TOKEN // 2
    assert [arena.expired() for arena in arenas] == [True, False]


def test_the_old_rows_are_dead_before_new_ones_are_made(model, monkeypatch):
    """Guards against histories of `[slots, vocabulary]` that are held twice."""
    from liveroll.decode import decoder

    made = []

    class Watched(decoder.RowState):
        def __init__(self, *args, **kwargs):
            assert all(earlier.expired() for earlier in made)
            super().__init__(*args, **kwargs)
            made.append(StorageWeakRef(self.numbers.untyped_storage()))

        def keep_histories(self):
            super().keep_histories()
            made.append(StorageWeakRef(self.history.untyped_storage()))

    monkeypatch.setattr(decoder, "RowState", Watched)
    engine = engine_of(model)
    check(engine, model, prompts(8), repetition_penalty=1.3)
    check(engine, model, prompts(300), 2, repetition_penalty=1.3)
    assert [state.expired() for state in made] == [True, True, False, False]


def test_pages_that_cannot_be_made(model, monkeypatch):
    """Guards against captured steps that are replayed over pages which are gone."""
    engine = engine_of(model)
    check(engine, model, prompts(8))
    with monkeypatch.context() as patch:

        def refuse(size, device):
            raise MemoryError("none is left")

        patch.setattr(storage, "make_arena", refuse)
        with pytest.raises(MemoryError):
            check(engine, model, prompts(300), 2)
    assert engine.memory().total == 0
    check(engine, model, prompts(8))
    assert engine.captures == 2
