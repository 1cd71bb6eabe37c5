"""Ranks that disagree are told apart by their values, and named."""

from __future__ import annotations

import pickle

import pytest

from liveroll import ConfigError, RankError
from liveroll.distributed.agreement import check_agreement, name_ranks
from liveroll.distributed.control import check_group


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
