"""A device without a model: it samples known tokens and checks where every key and value is put."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

import numpy as np

from liveroll.completion import FinishReason
from liveroll.scheduling.pages import SCRATCH_PAGE
from liveroll.scheduling.plan import DecodeStep, Outcome, PrefillStep, StepPlan, StepResult
from liveroll.scheduling.request import Request
from liveroll.scheduling.scheduler import Scheduler
from liveroll.types import ResolvedSampling

LETTERS = "abcdefgh"
VOCAB = len(LETTERS)


def make_request(
    row: int,
    prompt: int,
    budget: int,
    *,
    kind: int | None = None,
    stop_token_ids: tuple[int, ...] = (),
    stop: tuple[str, ...] = (),
    given: tuple[int, ...] = (),
) -> Request:
    """Make a greedy request with a prompt of `prompt` tokens and a response of at most `budget` sampled ones.

    Prompts of one kind and length are equal. `given` are the first response tokens: 1 for each that was sampled
    before, 0 for each that was forced.
    """
    sampling = ResolvedSampling(
        max_new_tokens=budget,
        min_new_tokens=0,
        n=1,
        do_sample=False,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        stop_token_ids=stop_token_ids,
        stop=stop,
        seed=None,
        logprobs=True,
        pad_token_id=0,
    )
    group = 1000 * (row if kind is None else kind) + prompt
    mask, tokens = np.array(given, np.uint8), group + np.arange(prompt, dtype=np.int64)
    request = Request(row, row, 0, group, tokens, (), sampling, (row, 0), given_mask=mask)
    places = range(prompt, prompt + len(given))
    request.tokens = np.array([token_at(row, position) for position in places], np.int64)
    request.logprobs = np.array([logprob_at(row, position) for position in places], np.float32)
    return request


def token_at(row: int, position: int) -> int:
    """The token that stands at a position of a request's response, known from the beginning."""
    return crc32(f"token {row} {position}".encode()) % VOCAB


def logprob_at(row: int, position: int) -> np.float32:
    return np.float32(-(crc32(f"logprob {row} {position}".encode()) % 999) / 100)


def search_stop(request: Request, tokens: np.ndarray) -> str | None:
    """The stop string of a request that its last token completes and that begins first, one letter a token."""
    assert request.sampling.stop, "a request without stop strings was searched"
    text = "".join(LETTERS[token] for token in tokens)
    return max((string for string in request.sampling.stop if text.endswith(string)), key=len, default=None)


@dataclass(frozen=True)
class Ending:
    """What a request must come to, however it is scheduled."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    stop: int | str | None

    @classmethod
    def reached(cls, request: Request) -> Ending:
        """What a finished request has come to."""
        assert request.finish_reason is not None
        return cls(request.tokens.tolist(), request.logprobs.tolist(), request.finish_reason, request.stop)


def ending_of(request: Request) -> Ending:
    """What a request must come to, found by reading its known tokens one by one."""
    sampling, start = request.sampling, len(request.prompt)
    tokens = [token_at(request.row, start + index) for index in range(len(request.given_mask))]
    forced = request.given_mask.tolist().count(0)
    reason: FinishReason | None = None
    stop: int | str | None = None
    while reason is None:
        tokens.append(token_at(request.row, start + len(tokens)))
        if sampling.stop and (found := search_stop(request, np.array(tokens))):
            reason, stop = "stop", found
        elif tokens[-1] in sampling.stop_token_ids:
            reason, stop = "stop", tokens[-1]
        elif len(tokens) - forced == sampling.max_new_tokens:
            reason = "length"
    logprobs = [float(logprob_at(request.row, start + index)) for index in range(len(tokens))]
    return Ending(tokens, logprobs, reason, stop)


@dataclass
class _Row:
    request: Request
    position: int
    remaining: int


class FakeDevice:
    """Carries out step plans in the order they are launched, with a dictionary in place of KV storage.

    Args:
        page_size: tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._written: dict[tuple[int, int], tuple[object, int]] = {}
        self._rows: dict[int, _Row] = {}
        self._logits: set[int] = set()
        self._table = np.empty((0, 0), np.int32)
        self._version: int | None = None

    def run(self, plan: StepPlan, scheduler: Scheduler) -> StepResult:
        """Carry out a plan; raises AssertionError where a row would read or write what is not its own."""
        if self._version != scheduler.slots.table_version:
            self._table, self._version = scheduler.slots.block_table.copy(), scheduler.slots.table_version
        if isinstance(plan, PrefillStep):
            return self._prefill(plan)
        return self._report([self._decode(int(slot), plan) for slot in plan.slots])

    def _prefill(self, plan: PrefillStep) -> StepResult:
        for index, (request, source) in enumerate(zip(plan.admitted, plan.sources, strict=True)):
            if source == index:
                self._run_context(request)
                continue
            assert not len(request.tokens), "a request that comes back is not run"
            assert plan.group_of(source) == request.group, "a request samples from the logits of another prompt"
            if source < 0:
                assert request.group in self._logits, "a request samples from logits that were not kept"
            else:
                assert plan.sources[source] == source, "a request samples from logits that are not there"
                assert not len(plan.admitted[source].tokens), "a request samples from logits behind a response"
        for source in plan.kept:
            assert source >= 0 or ~source in self._logits, "logits are kept that are not there"
            assert source < 0 or plan.sources[source] == source, "logits are kept that are not there"
            assert source < 0 or not len(plan.admitted[source].tokens), "logits behind a response are kept"
        self._logits = {plan.group_of(source) for source in plan.kept}
        for old, new in plan.copies:
            for offset in range(self._page_size):
                self._written[new, offset] = self._written.get((old, offset), (None, 0))
        return self._report([self._admit(request) for request in plan.admitted])

    def _run_context(self, request: Request) -> None:
        start, context = len(request.prompt), request.context.tolist()
        assert context[start:] == [token_at(request.row, position) for position in range(start, len(context))]
        assert request.logprobs.tolist() == [logprob_at(request.row, p) for p in range(start, len(context))]
        for position in range(len(context)):
            if position // self._page_size >= request.borrowed:
                self._write(request.pages[position // self._page_size], request, position)

    def _admit(self, request: Request) -> tuple[int, Outcome, np.float32]:
        assert request.slot is not None
        row = self._rows[request.slot] = _Row(request, len(request.context) - 1, request.left)
        return self._advance(row)

    def _decode(self, slot: int, plan: DecodeStep) -> tuple[int, Outcome, np.float32]:
        row = self._rows[slot]
        if row.remaining == 0:
            return -1, Outcome.IDLE, np.float32("nan")
        pages = self._table[slot]
        self._write(pages[row.position // self._page_size], row.request, row.position)
        for position in range(row.position + 1):
            place = (int(pages[position // self._page_size]), position % self._page_size)
            assert self._written.get(place) == self._key(row.request, position), "a row attends to what is not its own"
        assert row.position < plan.longest
        return self._advance(row)

    def _advance(self, row: _Row) -> tuple[int, Outcome, np.float32]:
        row.position += 1
        row.remaining -= 1
        token = token_at(row.request.row, row.position)
        outcome = Outcome.RUNNING if row.remaining else Outcome.SPENT
        if token in row.request.sampling.stop_token_ids:
            row.remaining, outcome = 0, Outcome.STOPPED
        return token, outcome, logprob_at(row.request.row, row.position)

    def _write(self, page: int, request: Request, position: int) -> None:
        assert page != SCRATCH_PAGE, "a running row writes to the scratch page"
        self._written[int(page), position % self._page_size] = self._key(request, position)

    @staticmethod
    def _key(request: Request, position: int) -> tuple[object, int]:
        """The key and value of a position: those of a prompt are the same for all that have it."""
        return (request.prompt.tobytes() if position < len(request.prompt) else request.row), position

    @staticmethod
    def _report(rows: list[tuple[int, Outcome, np.float32]]) -> StepResult:
        tokens, outcomes, logprobs = zip(*rows, strict=True)
        return StepResult(np.array(tokens, np.int64), np.array(outcomes), np.array(logprobs, np.float32))
