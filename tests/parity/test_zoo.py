"""The zoo itself: its models vary, their special parts show, and transformers agrees with itself on them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import zoo
from transformers import PreTrainedModel

SEEDS = (0, 1)
NEW = 24


def prompts(seed: int = 0) -> list[list[int]]:
    return zoo.ragged_prompts(zoo.VOCAB_SIZE, seed)


@cache
def responses(name: str) -> list[list[int]]:
    return zoo.reference_batch(zoo.shared(name), prompts(), max_new_tokens=NEW)


@torch.no_grad()
def last_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0, -1]


def assert_apart(one: torch.Tensor, other: torch.Tensor) -> None:
    assert (one - other).abs().max() > 0.1


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_single_and_left_padded_prompts_agree(name: str) -> None:
    """A reference that depends on padding would fail an engine that is right."""
    model = zoo.shared(name)
    assert [zoo.reference(model, prompt, max_new_tokens=NEW) for prompt in prompts()] == responses(name)


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_responses_vary_and_ties_are_rare(name: str) -> None:
    """One token repeated would hide wrong positions, masks and caches; near ties would flip with rounding."""
    model = zoo.shared(name)
    rows: list[list[int]] = []
    gaps = []
    for seed in SEEDS:
        ids, mask = zoo.left_pad(prompts(seed), pad_id=0)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, output_logits=True, return_dict_in_generate=True
        )
        rows += out.sequences[:, ids.shape[1] :].tolist()
        top = torch.stack(out.logits).topk(2).values
        gaps.append((top[..., 0] - top[..., 1]).flatten())
    distinct = sorted(len(set(row)) for row in rows)
    # One prompt may still run into a token that its own repetition keeps most likely.
    assert distinct[1] >= 6
    assert sum(distinct) / len(distinct) >= 9
    assert len(set(map(tuple, rows))) == len(rows)
    assert (torch.cat(gaps) < 1e-3).float().mean() <= 0.01


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_architecture_stops_some_rows_early(name: str) -> None:
    """An eos that ends all rows or none never empties a slot beside a running one."""
    model = zoo.shared(name)
    eos = zoo.early_eos(model, prompts(), NEW)
    with zoo.with_eos(model, eos, pad=eos):
        rows = zoo.reference_batch(model, prompts(), max_new_tokens=NEW)
    assert model.generation_config.eos_token_id is None
    assert rows == [row[: row.index(eos) + 1] if eos in row else row for row in responses(name)]
    assert min(map(len, rows)) <= NEW // 2
    assert any(eos not in row for row in rows)


@pytest.mark.parametrize("pad", [0, 5])
def test_several_eos(pad: int) -> None:
    """A response cut at one of its eos ids only would compare padding with tokens."""
    model, whole = zoo.shared("qwen2"), responses("qwen2")
    stops = [whole[1][4], whole[3][9]]
    ends = [min(row.index(stop) if stop in row else NEW for stop in stops) + 1 for row in whole]
    with zoo.with_eos(model, stops, pad):
        rows = zoo.reference_batch(model, prompts(), max_new_tokens=NEW)
    assert rows == [row[:end] for row, end in zip(whole, ends, strict=True)]


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_models_are_reproducible(name: str) -> None:
    """Weights that depend on the global generator, or change it, make failures come and go with test order."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = zoo.build(name)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = zoo.build(name).state_dict(), zoo.build(name, seed=1)
    for key, tensor in first.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, again[key])
    for (key, parameter), changed in zip(first.named_parameters(), other.parameters(), strict=True):
        assert not torch.equal(parameter, changed), key


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_models_have_no_dropout(name: str) -> None:
    """Dropout would make training-mode generation differ from run to run."""
    model = zoo.build(name)
    ids = torch.tensor([prompts()[-1]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model.train()(ids).logits)


@pytest.mark.parametrize("window", [zoo.WINDOW - 1, zoo.WINDOW + 1])
@pytest.mark.parametrize("name", zoo.WINDOWED)
def test_window_shows(name: str, window: int) -> None:
    """A window off by one would pass unseen."""
    other = zoo.build(name, sliding_window=window)
    rows = zoo.reference_batch(other, prompts(), max_new_tokens=NEW)
    assert all(row != expected for row, expected in zip(rows, responses(name), strict=True))
    short, long = prompts()[2], prompts()[-1]
    assert torch.equal(last_logits(other, short), last_logits(zoo.shared(name), short))
    assert_apart(last_logits(other, long), last_logits(zoo.shared(name), long))


@pytest.mark.parametrize("part", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_soft_capping_shows(part: str) -> None:
    """An attention kernel that drops the capping, or a head that does, would pass unseen."""
    other, prompt = zoo.build("gemma2", **{part: None}), prompts()[-1]
    assert_apart(last_logits(other, prompt), last_logits(zoo.shared("gemma2"), prompt))


def test_sinks_show() -> None:
    """An attention kernel without the sinks would pass unseen."""
    other, prompt = zoo.build("gpt_oss"), prompts()[-1]
    for path, parameter in other.named_parameters():
        if path.endswith("sinks"):
            parameter.data.fill_(-1e9)
    assert_apart(last_logits(other, prompt), last_logits(zoo.shared("gpt_oss"), prompt))
    rows = zoo.reference_batch(other, prompts(), max_new_tokens=NEW)
    assert all(row != expected for row, expected in zip(rows, responses("gpt_oss"), strict=True))


def test_windows_and_full_layers_mix() -> None:
    """Mask and cache of one layer type used for all would pass unseen."""
    for name in ("gemma2", "gemma3", "gpt_oss", "cohere2"):
        assert set(zoo.shared(name).config.layer_types) == {"sliding_attention", "full_attention"}


def test_tying() -> None:
    """A copy made of a tied head would pass unseen."""
    tied = zoo.shared("llama_tied")
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    untied = zoo.shared("llama")
    assert untied.get_output_embeddings().weight is not untied.get_input_embeddings().weight
