"""Ranks that disagree are told apart by their values, and named."""

from __future__ import annotations

import pickle
import re

import pytest
import zoo

from liveroll import ConfigError, RankError, RolloutConfig
from liveroll.distributed.agreement import check_agreement, name_ranks
from liveroll.distributed.control import check_group
from liveroll.distributed.subjects import engine_subjects
from liveroll.vocabulary import Vocabulary


def test_subjects_are_compared_among_those_that_have_them() -> None:
    """Guards against ranks without prompts that must have settings, and disagreements that go unnoticed."""
    check_agreement([{"a": "1"}, {}, {"a": "1", "b": "2"}])
    with pytest.raises(RankError, match=r"disagree about a: ranks 0 and 2 have 1, rank 1 has 2$"):
        check_agreement([{"a": "1"}, {"a": "2"}, {"a": "1"}])
    with pytest.raises(RankError) as caught:
        check_agreement([{}, {"a": "1", "b": "2"}, {"a": "1"}, {"b": "3"}, {"b": "4"}, {"b": "3"}])
    expected = "the ranks of the group disagree about b: rank 1 has 2, ranks 3 and 5 have 3, rank 4 has 4"
    assert str(caught.value) == expected
    assert caught.value.ranks == (3, 4, 5)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.ranks) == (expected, (3, 4, 5))


def test_many_ranks_are_not_all_named() -> None:
    """Guards against an error as long as the job is large."""
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([3, 4]) == "ranks 3 and 4"
    assert name_ranks(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6 and 7"
    assert name_ranks(range(10, 4000)) == "ranks 10, 11, 12, 13, 14, 15, 16, 17 and 3982 others"


def test_what_is_no_group() -> None:
    """Guards against a collective of ranks that are none."""
    assert check_group(None) is None
    with pytest.raises(ConfigError, match="must be a process group"):
        check_group([0, 1])


def test_what_of_a_model_differs_is_told() -> None:
    """Guards against ranks with other dtypes or generation settings that are told two digests, and not what differs."""

    def told(change=lambda model: None):
        model = zoo.build("llama")
        change(model)
        subjects = engine_subjects(model, RolloutConfig(), Vocabulary(model, None, padded=True), None)
        return [subjects[name].rpartition(" (") for name in ("the model", "the model's generation configuration")]

    def set_some(model):
        model.generation_config.update(top_k=3, eos_token_id=[1, 2], suppress_tokens=list(range(1000)))

    def set_others(model):
        model.generation_config.update(top_k=3, eos_token_id=[1, 2], suppress_tokens=list(range(1001)))

    (model, _, _), (settings, _, _) = told()
    assert re.fullmatch(r"a LlamaForCausalLM of \d+ numbers in 2\d tensors of float32", model)
    assert settings == "nothing set"
    assert told(lambda model: model.lm_head.bfloat16())[0][0].endswith("tensors of bfloat16 and float32")
    some, others = told(set_some)[1], told(set_others)[1]
    assert some[0] == "eos_token_id=[1, 2], suppress_tokens=[0, 1, 2, 3, 4, 5, ...], top_k=3"
    assert (some[0], some[2] == others[2]) == (others[0], False)
