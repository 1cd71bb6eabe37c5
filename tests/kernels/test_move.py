"""The moving kernel does what the torch one does."""

import pytest
import torch

from liveroll.decode.advance import move as move_plainly
from liveroll.decode.state import Column
from liveroll.scheduling.plan import Outcome


@pytest.mark.parametrize("keeping", [False, True])
def test_same_rows_and_reports(device, keeping):
    """Guards against a frozen row that moves or is counted, a stop that is overlooked, budgets that are off by one."""
    from liveroll.kernels.move import move

    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(1, 1000, (9, len(Column)), generator=generator)
    numbers[:, Column.REMAINING] = torch.tensor([3, 1, 0, 2, 1, 0, 5, 2, 0])
    stops = torch.full((9, 3), -1)
    stops[:, 1] = 7
    stops[3, 2] = 8
    # Rows that go on, end by a token or by their budget, were frozen before, and the inert one, twice.
    slots = torch.tensor([6, 0, 3, 1, 4, 2, 5, 8, 8])
    tokens = torch.tensor([1, 7, 8, 7, 5, 7, 9, 0, 0])
    logprobs = -torch.rand(9, generator=generator)
    history = torch.randint(0, 5, (9, 12), generator=generator, dtype=torch.int32) if keeping else None
    kept = None if history is None else history.to(device, copy=True)
    expected_numbers = numbers.clone()
    there = numbers.to(device, copy=True)
    expected = move_plainly(expected_numbers, stops, slots, tokens, logprobs, history)
    report = move(there, *(x.to(device) for x in (stops, slots, tokens, logprobs)), kept)
    assert there.cpu().equal(expected_numbers)
    assert report.cpu().equal(expected)
    assert set(report[1].tolist()) == set(Outcome)
    assert kept is None or kept.cpu().equal(history)


def test_no_stop_tokens(device):
    """Guards against a step that cannot be compiled where no row has a token to stop at."""
    from liveroll.kernels.move import move

    numbers = torch.ones(2, len(Column), dtype=torch.int64, device=device)
    stops = torch.empty(2, 0, dtype=torch.int64, device=device)
    slots, tokens, logprobs = torch.tensor([0]), torch.tensor([5]), torch.zeros(1)
    report = move(numbers, stops, slots.to(device), tokens.to(device), logprobs.to(device), None)
    assert report[:2].tolist() == [[5], [Outcome.SPENT]]
