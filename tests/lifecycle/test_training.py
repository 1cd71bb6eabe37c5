"""Rollouts between the steps of real training loops: one capture, and always the weights of now."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from rollouts import check, engine_of, prompts, tokens

from liveroll import SamplingConfig

ROUNDS = 3


def lose(forward, batch):
    """Train a little on what was just rolled out."""
    # Rows are of one length: no mask is needed, and not every pair of versions compiles one.
    return forward(input_ids=batch.input_ids, labels=batch.input_ids).loss


def assert_all_differ(seen):
    assert len({str(rows) for rows in seen}) == len(seen)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gpt2", "qwen3_moe"])
def test_optimizer_steps(name):
    """Guards against rollouts of the weights before the step, and against a capture for each step."""
    model = zoo.build(name)
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for _ in range(ROUNDS):
        batch = check(engine, model, prompts(8))
        seen.append(tokens(batch))
        lose(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.captures == 1
    assert_all_differ(seen)


def test_tied_weights_are_one_tensor():
    """Guards against a head that keeps a copy of the embedding as it was captured."""
    model = zoo.build("llama_tied")
    engine = engine_of(model)
    before = tokens(check(engine, model, prompts(8)))
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(torch.linspace(-1, 1, 32))
    assert tokens(check(engine, model, prompts(8))) != before
    assert engine.captures == 1
    model.get_output_embeddings().weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    check(engine, model, prompts(8))
    assert engine.captures == 2
    assert "lm_head.weight changed its address" in engine.recapture_reasons[0]


def test_half_precision_weights_copied_from_masters():
    """Guards against a capture for each copy, and against steps over the copies of before."""
    model = zoo.build("llama").to(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=0.05)
    engine = engine_of(model)
    sampling = SamplingConfig(max_new_tokens=6)
    seen = []
    for _ in range(ROUNDS):
        batch = engine.generate(prompts(8), sampling)
        # The reference is an engine that has never captured: in bf16 `model.generate` rounds in another order.
        assert tokens(batch) == tokens(engine_of(model, capture=False).generate(prompts(8), sampling))
        seen.append(tokens(batch))
        lose(model, batch).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
    assert engine.captures == 1
    assert_all_differ(seen)


def test_gradients_accumulated_over_rollouts():
    """Guards against rollouts that drop or add to the gradients that are being accumulated."""
    model = zoo.build("llama")
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    seen = []
    for _ in range(2):
        for micro in range(2):
            batch = check(engine, model, prompts(8, seed=micro))
            (lose(model, batch) / 2).backward()
            gradients = copy.deepcopy([p.grad for p in model.parameters()])
            check(engine, model, prompts(8, seed=micro))
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        seen.append(tokens(batch))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.captures == 1
    assert_all_differ(seen)


def test_a_compiled_trainer():
    """Guards against a compiled wrapper that is not seen through, or rolled out with what it was compiled from."""
    model = zoo.build("llama")
    compiled = torch.compile(model, backend="eager")
    engine = engine_of(compiled)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.05)
    seen = []
    for _ in range(ROUNDS):
        batch = check(engine, model, prompts(8))
        seen.append(tokens(batch))
        lose(compiled, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.captures == 1
    assert_all_differ(seen)


def test_checkpoints_loaded_in_place_and_mode_flips():
    """Guards against a capture for each checkpoint or flip, and against the weights of the one before."""
    model = zoo.build("llama")
    engine = engine_of(model)
    seen = []
    for seed in (1, 2, 3):
        model.train(seed % 2 == 0)
        model.load_state_dict(zoo.build("llama", seed=seed).state_dict())
        model.requires_grad_(seed % 2 == 1)
        seen.append(tokens(check(engine, model, prompts(8))))
        assert model.training == (seed % 2 == 0)
    assert engine.captures == 1
    assert_all_differ(seen)


# Version 5 of transformers has another name for it, and warns of this one.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_gradient_checkpointing_between_rollouts():
    """Guards against rollouts that switch checkpointing off for the trainer, or are changed by it."""
    model = zoo.build("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        batch = engine.generate(prompts(8), SamplingConfig(max_new_tokens=6))
        assert model.is_gradient_checkpointing
        twin = zoo.build("llama")
        twin.load_state_dict(model.state_dict())
        assert tokens(batch) == [zoo.reference(twin, row, max_new_tokens=6) for row in prompts(8)]
        lose(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.captures == 1


# PEFT asks transformers for names that it is about to give up.
peft_warns = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


@pytest.fixture
def lora():
    peft = pytest.importorskip("peft")
    model = zoo.build("llama")

    def attach():
        settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model, settings)

    return model, attach


@peft_warns
def test_lora_attached_trained_and_merged(lora):
    """Guards against adapters that come, change or go unseen."""
    model, attach = lora
    engine = engine_of(model)
    seen = [tokens(check(engine, model, prompts(8)))]
    adapted = attach()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.05)
    for _ in range(ROUNDS):
        batch = check(engine, model, prompts(8))
        seen.append(tokens(batch))
        lose(adapted, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.captures == 2
    last = tokens(check(engine, model, prompts(8)))
    merged = adapted.merge_and_unload()
    assert merged is model
    assert tokens(check(engine, model, prompts(8))) == last
    assert engine.captures == 3
    assert_all_differ(seen)


@peft_warns
def test_lora_given_as_its_wrapper(lora):
    """Guards against a wrapper that is rolled out without its adapters."""
    model, attach = lora
    plain = [zoo.reference(model, row, max_new_tokens=6) for row in prompts(8)]
    adapted = attach()
    engine = engine_of(adapted)
    assert tokens(check(engine, model, prompts(8))) != plain
    with adapted.disable_adapter():
        assert tokens(check(engine, model, prompts(8))) == plain


@peft_warns
def test_lora_switched_without_moving_a_tensor(lora):
    """Guards against a captured step that goes on adding an adapter that was disabled, merged or rescaled."""
    model, attach = lora
    adapted = attach()
    engine = engine_of(adapted)
    check(engine, model, prompts(8))
    with adapted.disable_adapter():
        check(engine, model, prompts(8))
    assert engine.captures == 2
    check(engine, model, prompts(8))
    assert engine.captures == 3
    adapted.merge_adapter()
    check(engine, model, prompts(8))
    check(engine, model, prompts(8))
    assert engine.captures == 4
    adapted.unmerge_adapter()
    check(engine, model, prompts(8))
    assert engine.captures == 5
    for module in model.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)
    check(engine, model, prompts(8))
    assert engine.captures == 6
    assert all(reason.startswith("adapters changed from ") for reason in engine.recapture_reasons)
