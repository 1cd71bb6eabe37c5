"""Ranks that die, and what is told by the others, which end with their error as a trainer does."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import zoo
from ranks import Ranks
from torch import distributed as dist

from liveroll import RankError, RolloutConfig, RolloutEngine, SamplingConfig

WORLD = 3
SILENCE = 4.0
"""Seconds after which rank 0 takes a rank for lost: more than ranks come apart on a busy machine."""


def lose(rank: int, report: Callable[[Any], None], lost: int) -> None:
    """A rank dies in a call; rank 0, which keeps the store, does so once it has raised. The others wait longer."""
    model = zoo.build("llama")
    engine = RolloutEngine(model, config=RolloutConfig(capture=False, rank_timeout=SILENCE * (1 if rank == 0 else 10)))
    sampling = SamplingConfig(max_new_tokens=2)
    engine.generate([[1, 2, 3]], sampling, group=dist.group.WORLD)
    if rank == lost:
        model.register_forward_pre_hook(lambda *_: os._exit(3))
    try:
        engine.generate([[1, 2, 3]], sampling, group=dist.group.WORLD)
    except RankError as error:
        if rank == 0:
            os._exit(3)
        report((str(error), error.ranks))


def test_a_rank_that_dies() -> None:
    """Guards against ranks of which only the first to raise tells who is lost, since the store ends with it."""
    told = "rank 1 did not come to the end of the call within 4 s (RolloutConfig.rank_timeout)"
    with Ranks(lose, WORLD, 1) as ranks:
        assert ranks.report(2) == (told, (1,))


def test_the_rank_that_keeps_the_store_dies() -> None:
    """Guards against an error of a socket, which says nothing of ranks."""
    with Ranks(lose, WORLD, 0) as ranks:
        for rank in (1, 2):
            message, blamed = ranks.report(rank)
            assert message.startswith("the store of the group is out of reach (")
            assert blamed == ()
