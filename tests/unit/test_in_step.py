"""Ranks that vote before each forward whether any of them goes on."""

from __future__ import annotations

import pytest
import torch

from liveroll.distributed import in_step


@pytest.fixture
def votes(monkeypatch):
    """Every vote of this rank; the others have ended, and the first vote is interrupted where it is `interrupted`."""
    cast = []

    def vote(own, group, device):
        cast.append(own)
        if len(cast) == 1:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(in_step, "any_rank", vote)
    return cast


def test_an_interrupt_during_a_vote(votes):
    """Guards against a rank that votes once more where the others, whom its vote sent there, wait for its weights.

    Python looks for interrupts when the collective is over, which is where a rank that waits for another spends them.
    """
    model = torch.nn.Linear(1, 1)
    cpu = torch.device("cpu")
    with pytest.raises(KeyboardInterrupt), in_step.in_step(model, [None], cpu, idle=pytest.fail):
        model(torch.ones(1, 1))
    assert votes == [True]
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_error_between_forwards(votes):
    """Guards against a rank that leaves the others in a vote."""
    votes.append("before")
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="stop"), in_step.in_step(torch.nn.Linear(1, 1), [None], cpu, idle=pytest.fail):
        raise ValueError("stop")
    assert votes == ["before", False]
