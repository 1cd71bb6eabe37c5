"""The sampling kernels do what the torch sampler does: the same tokens, the very same kept sets."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampled_rows import admitted, moved, request_with

from liveroll.decode.sampler import Variant, sample
from liveroll.decode.state import Column, RowState, Setting
from liveroll.decode.truncation import find_bounds, keeps, masses
from liveroll.kernels import draw, report, truncate
from liveroll.kernels import scores as prepared
from liveroll.kernels.mass import mass
from liveroll.kernels.sample import sample_fused
from liveroll.scheduling.details import Wanted

ALL = Wanted(raw=True, top=4, kept=64)
# Every filter alone and with others, each kind of adjustment, and a greedy row; response tokens count.
SETTINGS: list[dict[str, Any]] = [
    {},
    {"sampled": False},
    {"top_k": 1},
    {"top_k": 7, "temperature": 0.3},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"min_p": 0.1, "temperature": 1.7},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"sampled": False, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "response": (1, 5, 5, 3)},
    {"logit_bias": ((1, 2.0), (5, -3.0), (511, 9.0)), "forbidden_tokens": (6, 510, 512), "top_p": 0.95},
    {"min_new_tokens": 3, "stop_token_ids": (2, 3), "first_forbidden_tokens": (4,)},
]


@pytest.fixture(autouse=True, scope="module")
def small_kernels():
    """Few programs, short lists and small blocks: the interpreter is slow, and all paths are taken."""
    if torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncate, "_SPLITS", 2)
        patch.setattr(truncate, "_CHUNK", 256)
        patch.setattr(truncate, "_CAPACITY", 64)
        for module in (draw, report, prepared, truncate):
            patch.setattr(module, "BLOCK", 512)
        yield


def on_both(
    logits: torch.Tensor,
    state: RowState,
    slots: torch.Tensor,
    variant: Variant,
    device: torch.device,
    wanted: Wanted = ALL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample in torch and in kernels, compare everything that is reported, and return the tokens and logprobs."""
    expected = sample(logits, state, slots, variant, wanted)
    there = moved(state, device)
    found = sample_fused(logits.to(device), there, slots.to(device), variant, wanted)
    moved(state, torch.device("cpu"))
    tokens, logprobs = found.tokens.cpu(), found.logprobs.cpu()
    assert tokens.equal(expected.tokens)
    torch.testing.assert_close(logprobs, expected.logprobs, atol=2e-5, rtol=1e-5, equal_nan=True)
    assert (found.details is None) == (expected.details is None) == (wanted.rows == 0)
    if found.details is not None:
        ours, theirs = wanted.read(found.details.cpu().numpy()), wanted.read(expected.details.numpy())
        torch.testing.assert_close(ours.raw_logprobs, theirs.raw_logprobs, atol=2e-5, rtol=1e-5, equal_nan=True)
        possible = theirs.top_logprobs > -math.inf
        assert (ours.top_ids == theirs.top_ids)[possible].all()
        torch.testing.assert_close(ours.top_logprobs, theirs.top_logprobs, atol=2e-5, rtol=1e-5)
        assert wanted.kept == 0 or ours.kept_counts.tolist() == theirs.kept_counts.tolist()
        assert all(one.tolist() == other.tolist() for one, other in zip(ours.kept, theirs.kept, strict=True))
    return tokens, logprobs


def logits_of(rows: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocab", "size"), [(7, 7), (512, 500), (1301, 1024), (9001, 8500)])
def test_by_temperature_alone(device, dtype, vocab, size):
    """Guards against other noise, other ties, a lost block, or ids beyond the tokenizer: greedy and sampled mixed."""
    mixed = [{"sampled": False}, {}, {"temperature": 0.4}, {"temperature": 1.6}]
    state, slots = admitted(
        [request_with((0,) * (row + 1), **setting) for row, setting in enumerate(mixed)], vocab, size
    )
    logits = logits_of(len(mixed), vocab, dtype)
    logits[:, vocab // 2] = -math.inf
    on_both(logits, state, slots, Variant.PLAIN, device)
    on_both(logits, state, slots, Variant.PLAIN, device, Wanted())
    on_both(logits, state, slots.flip(0), Variant.PLAIN, device, Wanted(raw=True))


def test_all_settings_mixed(device):
    """Guards against a setting that kernels read from another row, skip, or apply in another order."""
    requests = [request_with(**setting) for setting in SETTINGS]
    state, slots = admitted(requests, 1301, 1290)
    logits = logits_of(len(requests), 1301, torch.bfloat16)
    logits[::2, 100:140] = -math.inf
    on_both(logits, state, slots, Variant.FULL, device)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(0))[:3]
    on_both(logits[order], state, slots[order], Variant.FULL, device, Wanted())


ROWS = {
    "two scores": torch.zeros(1, 300).index_fill(1, torch.arange(0, 300, 7), 2.0),
    "adjacent": torch.ones(1, 300).index_fill(1, torch.arange(0, 300, 7), 1.0000001),
    "both zeros": torch.tensor([[0.0, -0.0] * 150]),
    "one possible": torch.full((1, 300), -math.inf).index_fill(1, torch.tensor([123]), -4.0),
    "tiny": 1e-30 * logits_of(1, 300, seed=4),
    "rounded": logits_of(1, 300, seed=5).round(),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("logits", ROWS.values(), ids=ROWS)
def test_strange_rows(device, logits):
    """Guards against ties cut elsewhere, sums of -inf, pivots that miss, and lists that are too short for a row."""
    each = [{"top_p": 0.5}, {"top_k": 40, "top_p": 0.7}, {"top_k": 9999}, {"top_p": 0.7, "min_p": 1.0}]
    requests = [request_with(**setting) for setting in each]
    state, slots = admitted(requests, 300)
    on_both(logits.expand(len(each), -1), state, slots, Variant.FULL, device)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("capacity", "held"), [(32, 32), (4096, 32), (4096, 4096)])
def test_flat_rows(device, capacity, held, monkeypatch):
    """Guards against a long list of many equal scores that is cut elsewhere than the row itself would be."""
    monkeypatch.setattr(truncate, "_CAPACITY", capacity)
    monkeypatch.setattr(truncate, "_HELD", held)
    each = [{"top_p": 0.9}, {"top_p": 0.5, "temperature": 0.7}, {"top_k": 700}, {"top_k": 900, "top_p": 0.8}]
    requests = [request_with(**setting) for setting in each]
    state, slots = admitted(requests, 3000)
    logits = torch.randn(len(each), 3000, generator=torch.Generator().manual_seed(3)).bfloat16()
    scores = prepared.score(logits.to(device), moved(state, device), slots.to(device))
    ours = [found.cpu() for found in truncate.find_bounds(scores, state, slots.to(device))]
    listed = scores.found.cpu()
    moved(state, torch.device("cpu"))
    numbers, limits = state.numbers[slots], state.settings[slots]
    expected = find_bounds(
        scores.values.cpu(), numbers[:, Column.TOP_K], limits[:, Setting.TAIL], limits[:, Setting.LEAST]
    )
    assert (listed > 32).all()
    assert (listed < 4096).all()
    # Where all tokens of the bound's score are kept, any id up to the first of them says so.
    kept = [keeps(scores.values.cpu(), *bound) for bound in (ours, expected)]
    assert kept[0].equal(kept[1])
    at_the_edge = scores.values.cpu() == expected[0][:, None]
    assert ((kept[0] & at_the_edge).sum(1) < at_the_edge.sum(1)).any()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.3, 3.0])
def test_other_rows_filters_change_no_bit(device, temperature):
    """Guards against scores that are rounded otherwise where some row of the batch has filters."""
    state, slots = admitted([request_with(temperature=temperature) for _ in range(8)], 1000)
    logits = logits_of(8, 1000).to(device)
    plain, full = (
        sample_fused(logits, moved(state, device), slots.to(device), variant, ALL)
        for variant in (Variant.PLAIN, Variant.FULL)
    )
    assert plain.tokens.equal(full.tokens)
    assert plain.logprobs.equal(full.logprobs)


@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # sums of the masked may be infinite
@pytest.mark.parametrize("mask", [torch.finfo(torch.bfloat16).min, -1e4])
def test_masked_tokens_do_not_make_the_list_longer(device, mask):
    """Guards against pivots drawn so far apart by tokens that a model masks that whole rows are searched, slowly."""
    each = [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 5, "temperature": 0.5}]
    state, slots = admitted([request_with(**setting) for setting in each], 1000)
    logits, listed = logits_of(1, 1000).expand(len(each), -1).clone(), []
    for masked in (-math.inf, mask):
        logits[:, :600] = masked
        there = moved(state, device)
        scores = prepared.score(logits.to(device), there, slots.to(device))
        truncate.find_bounds(scores, there, slots.to(device))
        listed.append(scores.found.cpu())
        moved(state, torch.device("cpu"))
        on_both(logits, state, slots, Variant.FULL, device)
    assert listed[0].equal(listed[1])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's NumPy notices what a GPU does not
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_logits_that_are_not_numbers_show(device, value):
    """Guards against a filter that hides the token which is no number, so that nonsense is sampled."""
    each = [{}, {"top_k": 3}, {"top_p": 0.5}, {"sampled": False, "presence_penalty": 1.0}]
    requests = [request_with(**setting) for setting in each]
    state, slots = admitted(requests, 30)
    logits = logits_of(len(each), 30)
    logits[:, 6] = value
    for variant in (Variant.PLAIN, Variant.FULL):
        drawn = sample_fused(logits.to(device), moved(state, device), slots.to(device), variant, ALL)
        assert drawn.logprobs.isnan().all()
        assert (drawn.tokens >= 0).all()
        assert (drawn.tokens < 30).all()


@settings(
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    scores=st.lists(st.integers(-8, 8).map(float) | st.floats(-40, 40, width=32), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.integers(1, 20).map(lambda n: n / 20) | st.floats(0.001, 1),
    min_p=st.just(0.0) | st.floats(0.001, 1),
)
def test_bounds(device, scores, top_k, top_p, min_p):
    """Guards against a bound that is off by one score or one token, whatever ties there are."""
    state, slots = admitted([request_with((0,), top_k=top_k, top_p=top_p, min_p=min_p)], len(scores))
    row = torch.tensor([scores])
    ours = prepared.score(row.to(device), moved(state, device), slots.to(device))
    bound, edge = truncate.find_bounds(ours, state, slots.to(device))
    moved(state, torch.device("cpu"))
    least = -math.inf if min_p == 0 else math.log(min_p)
    expected = find_bounds(row, torch.tensor([top_k]), torch.tensor([1 - top_p]), torch.tensor([least]))
    token = torch.arange(len(scores))
    keeps = [~((row < b) | ((row == b) & (token < e))) for b, e in ((bound.cpu(), edge.cpu()), expected)]
    assert keeps[0].equal(keeps[1])


@triton.jit
def _masses(scores, found, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.arange(0, BLOCK)
    tl.store(found + at, mass(tl.load(scores + at), 0.0))


def test_masses(device):
    """Guards against masses that differ in a single unit from those of the rule."""
    scores = -torch.rand(4096, generator=torch.Generator().manual_seed(0)).mul(30)
    scores[:4] = torch.tensor([0.0, -63.9, -64.0, -math.inf])
    found = torch.empty(4096, dtype=torch.int64, device=device)
    _masses[(1,)](scores.to(device), found, BLOCK=4096)
    assert found.cpu().equal(masses(scores[None], torch.zeros(1, 1))[0])
