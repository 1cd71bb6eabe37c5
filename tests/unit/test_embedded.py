"""The shipped model, its tokenizer, and the sums."""

import importlib.resources

import pytest
import torch
from transformers import LlamaForCausalLM

from liveroll.tools.embedded import Problem, load_embedded, problems, reward


@pytest.fixture(scope="module")
def embedded():
    return load_embedded()


def test_the_shipped_model_loads_as_a_small_float32_llama(embedded):
    """Guards against a checkpoint that only one transformers version reads, or that grows past a small download."""
    model, tokenizer = embedded
    folder = importlib.resources.files("liveroll") / "assets" / "sums"
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert 500_000 < model.num_parameters() < 1_250_000
    assert sum(len(file.read_bytes()) for file in folder.iterdir()) < 5_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.max_position_embeddings >= 512


def test_special_tokens_are_distinct_and_shipped_in_the_generation_config(embedded):
    """Guards against responses that never end, and against padding that is taken for their end."""
    model, tokenizer = embedded
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert len(set(special)) == 4
    shipped = model.generation_config
    assert [shipped.pad_token_id, shipped.bos_token_id, shipped.eos_token_id] == special[:3]


@pytest.mark.parametrize("problem", [*problems(seed=5, count=4), Problem((9,) * 8)])
def test_text_survives_the_tokenizer_character_by_character(embedded, problem):
    """Guards against spaces or a clean-up in decoded text, which no answer would be marked right with."""
    _, tokenizer = embedded
    text = problem.prompt + problem.solution
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == 1 + len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_prompts_are_padded_on_the_left(embedded):
    """Guards against a batch for `model.generate` that goes on from padding."""
    _, tokenizer = embedded
    batch = tokenizer(["1+2=", "1+2+3="], padding=True)
    assert batch["attention_mask"] == [[0, 0, 1, 1, 1, 1, 1], [1] * 7]


def test_an_unknown_character_is_kept_as_unknown(embedded):
    """Guards against a prompt silently losing what the model has no token for."""
    _, tokenizer = embedded
    assert tokenizer("1 x")["input_ids"][2:] == [tokenizer.unk_token_id] * 2


def test_the_split_is_disjoint_and_each_side_is_drawn_from():
    """Guards against an exam that was trained on."""
    train = {problem.terms for problem in problems(seed=1, count=2000)}
    exam = {problem.terms for problem in problems(seed=1, count=2000, held_out=True)}
    assert not train & exam
    assert {len(terms) for terms in exam} == {len(terms) for terms in train} == set(range(2, 9))


def test_the_same_seed_draws_the_same_problems():
    """Guards against a draw that hangs on the process, such as one from Python's salted hash."""
    assert [problem.prompt for problem in problems(seed=0, count=3)] == ["7+7+1+5+9+8+7+5=", "2+5+9=", "6+7="]
    assert problems(seed=0, count=5) != problems(seed=1, count=5)


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("11,20,22", 1.0),
        ("11,20,12", 2 / 3),
        ("11,10,22", 1 / 3),
        ("11,20", 2 / 3),
        ("11,20,22,22", 3 / 4),
        ("11,20,22=", 2 / 3),
        ("1,20,22", 0.0),
        ("", 0.0),
    ],
)
def test_reward_counts_right_totals_up_to_the_first_mistake(text, mark):
    """Guards against full marks for anything but the solution, such as text going on after it."""
    assert reward(Problem((7, 4, 9, 2)), text) == pytest.approx(mark)


def test_the_shipped_model_solves_some_sums_but_not_most(embedded):
    """Guards against a checkpoint with nothing to learn, or one from which no reward is ever seen."""
    model, tokenizer = embedded
    exam = problems(seed=0, count=128, held_out=True)
    inputs = tokenizer([problem.prompt for problem in exam], padding=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    solved = sum(reward(*pair) == 1.0 for pair in zip(exam, texts, strict=True)) / len(exam)
    assert 0.2 < solved < 0.5
