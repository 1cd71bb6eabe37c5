"""What a step does to the rows of the running batch, and what an admission leaves of the row before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_device import make_request

from liveroll.decode.advance import advance
from liveroll.decode.sampler import Variant
from liveroll.decode.state import IN_RESPONSE, Column, RowState
from liveroll.scheduling.plan import Outcome
from liveroll.scheduling.request import Request

VOCAB = 8
RUNNING, STOPPED, SPENT, IDLE = (int(outcome) for outcome in Outcome)


def request_at(slot: int, prompt: list[int], done: tuple[int, ...] = (), **setting) -> Request:
    request = make_request(slot, len(prompt), 3)
    request.prompt, request.tokens = np.array(prompt), np.array(done, np.int64)
    request.sampling = replace(request.sampling, **setting)
    request.slot = slot
    return request


def state_of(*requests: Request, slots: int = 3) -> RowState:
    widths = {"table_width": 2, "stop_width": 2, "adjusted_width": 4}
    state = RowState(slots, **widths, vocab_size=VOCAB, device=torch.device("cpu"))
    state.keep_histories()
    if requests:
        state.admit(requests)
    return state


def step(state: RowState, slots: list[int], tokens: list[int]) -> list[list[int]]:
    """Advance with logits that make the tokens certain; the tokens and outcomes reported."""
    logits = torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 50
    report = advance(state, torch.tensor(slots), logits, Variant.FULL)
    assert report.dtype == torch.int32
    return report[:2].tolist()


def tensors(state: RowState, slot: int) -> list[torch.Tensor]:
    held = (state.numbers, state.settings, state.stops, state.adjusted, state.bias, state.until, state.history)
    return [tensor[slot] for tensor in held]


def test_rows_end_at_their_budget_or_stop_and_stay_there():
    """Guards against a row that goes on behind its end: it would write over keys that are not its own."""
    state = state_of(request_at(0, [1, 2]), request_at(1, [1, 2, 3], stop_token_ids=(5, 6)), request_at(2, [4]))
    slots = [2, 0, 1]
    assert step(state, slots, [7, 7, 7]) == [[7, 7, 7], [RUNNING, RUNNING, RUNNING]]
    assert step(state, slots, [7, 7, 6]) == [[7, 7, 6], [RUNNING, RUNNING, STOPPED]]
    stopped = [tensor.clone() for tensor in tensors(state, 1)]
    assert step(state, slots, [4, 3, 7])[1] == [SPENT, SPENT, IDLE]
    assert step(state, slots, [2, 2, 2])[1] == [IDLE, IDLE, IDLE]
    assert all(map(torch.equal, tensors(state, 1), stopped))
    assert state.numbers[:3, Column.TOKEN].tolist() == [3, 6, 4]
    assert state.numbers[:3, Column.POSITION].tolist() == [4, 4, 3]


def test_a_stop_at_the_last_token_is_a_stop():
    """Guards against a response that ends with its stop token and is reported as cut off."""
    state = state_of(request_at(0, [1], max_new_tokens=1, stop_token_ids=(5,)))
    assert step(state, [0], [5]) == [[5], [STOPPED]]


def test_steps_leave_other_slots_alone():
    """Guards against a step that reaches rows which are not in it."""
    state = state_of(request_at(0, [1, 2]), request_at(2, [4], stop_token_ids=(1,)))
    before = [[tensor.clone() for tensor in tensors(state, slot)] for slot in (1, 2, 3)]
    step(state, [0], [7])
    for slot, kept in zip((1, 2, 3), before, strict=True):
        assert all(map(torch.equal, tensors(state, slot), kept))


def test_stops_are_held_for_as_many_tokens_as_asked():
    """Guards against min_new_tokens off by one, and a count that starts again when a row is admitted again."""
    setting = {"stop_token_ids": (5,), "min_new_tokens": 2, "max_new_tokens": 9}
    state = state_of(request_at(0, [1, 2], **setting), request_at(1, [1, 2], done=(3,), **setting))
    tokens, outcomes = step(state, [0, 1], [5, 5])
    assert tokens[0] != 5
    assert tokens[1] != 5
    assert outcomes == [RUNNING, RUNNING]
    tokens, outcomes = step(state, [0, 1], [5, 5])
    assert tokens[0] != 5
    assert outcomes == [RUNNING, STOPPED]
    assert step(state, [0], [5]) == [[5], [STOPPED]]


def test_the_history_is_prompt_padding_and_response():
    """Guards against a penalty that forgets a part of the history, or that counts another row's."""
    request = request_at(1, [1, 2], done=(4,), repetition_penalty=2.0)
    request.padding_ids = (0,)
    state = state_of(request)
    step(state, [1], [6])
    assert state.history[1].nonzero()[:, 0].tolist() == [0, 1, 2, 4, 6]
    assert not state.history[[0, 2]].any()


def test_the_response_is_counted_and_the_prompt_is_not():
    """Guards against counts that start again when a row is admitted again, or that count the prompt or twice."""
    prompt, done, later = [1, 1, 5], (1, 4, 4), [1, 4, 6]
    state = state_of(request_at(1, prompt, done=done, max_new_tokens=9))
    for token in later:
        step(state, [1], [token])
    whole = state_of(request_at(1, prompt, done=(*done, *later), max_new_tokens=9))
    assert state.history[1].equal(whole.history[1])
    counted = (state.history[1] // IN_RESPONSE).tolist()
    assert counted == [([*done, *later]).count(token) for token in range(VOCAB)]
    assert (state.history[1] % IN_RESPONSE).nonzero()[:, 0].tolist() == [1, 5]


def test_position_of_the_noise_counts_prompt_and_response():
    """Guards against draws that change with the budget, or when a row is prefilled again over its own response."""
    flat, slot = torch.zeros(1, VOCAB), torch.tensor([0])
    first = state_of(request_at(0, [1, 2], do_sample=True, max_new_tokens=9))
    drawn = [int(advance(first, slot, flat, Variant.PLAIN)[0, 0]) for _ in range(6)]
    for done in range(1, 5):
        again = state_of(request_at(0, [1, 2], done=tuple(drawn[:done]), do_sample=True, max_new_tokens=20))
        assert int(advance(again, slot, flat, Variant.PLAIN)[0, 0]) == drawn[done]
    assert len(set(drawn)) > 2


@pytest.mark.parametrize("done", [(), (4, 5)])
def test_a_reused_slot_is_as_a_fresh_one(done):
    """Guards against a penalty, stop, setting or count of the row before that stays in the slot."""
    used = request_at(
        1, [0, 3, 6], done=(7, 7), stop_token_ids=(2, 3), min_new_tokens=3, max_new_tokens=9, repetition_penalty=1.7
    )
    used.sampling = replace(used.sampling, do_sample=True, temperature=0.5, top_k=3, top_p=0.5, min_p=0.2)
    used.sampling = replace(used.sampling, presence_penalty=0.5, frequency_penalty=0.3, logit_bias=((1, 2.0),))
    used.sampling = replace(used.sampling, forbidden_tokens=(4,))
    new = request_at(1, [1, 2], done=done, max_new_tokens=4)
    state = state_of(used)
    step(state, [1], [5])
    state.admit([new])
    assert all(map(torch.equal, tensors(state, 1), tensors(state_of(new), 1)))


def test_the_inert_slot_stays_idle():
    """Guards against the filler of a captured step that comes to life."""
    state = state_of(request_at(0, [1, 2]))
    assert step(state, [0, state.inert, state.inert], [7, 7, 7])[1] == [RUNNING, IDLE, IDLE]
    assert not state.numbers[state.inert].any()
