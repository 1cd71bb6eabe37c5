"""Ranks that hold the same model share a call's work, and return what one rank would return for all prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from ranks import Crew
from torch import distributed as dist

from liveroll import LiverollError, RolloutConfig, RolloutEngine, SamplingConfig

WORLD = 4
SLOTS = 4
STOP = 7
SILENCE = 4.0
"""Seconds after which a rank counts as lost, where that is tested: more than ranks come apart on a busy machine."""

KEPT: dict[str, Any] = {}
"""What a rank keeps from task to task: engines, and groups of some of the ranks."""


@pytest.fixture(scope="module")
def crew():
    with Crew(WORLD) as crew:
        crew.run(make_groups)
        yield crew


def prompts_of(counts: tuple[int, ...], seed: int = 0) -> list[list[list[int]]]:
    """Draw so many prompts for each rank, of mixed lengths."""
    drawn = zoo.ragged_prompts(zoo.VOCAB_SIZE, seed, [3 + 5 * (index % 4) for index in range(sum(counts))])
    return [[drawn.pop() for _ in range(count)] for count in counts]


def engine_with(**settings: Any) -> RolloutEngine:
    return RolloutEngine(zoo.build("llama"), config=RolloutConfig(**{"max_slots": SLOTS, **settings}))


def flat(per_rank: list[list[Any]]) -> list[Any]:
    return [entry for own in per_rank for entry in own]


def told(batch) -> list[tuple[Any, ...]]:
    """All that is the same wherever a completion was run."""
    return [
        (c.prompt_index, c.sample_index, c.token_ids, c.finish_reason, c.stop, c.stream, c.prompt_ids, c.sampled_mask)
        for c in batch.completions
    ]


def split(batch, counts: tuple[int, ...]) -> list[list[tuple[Any, ...]]]:
    """What one rank returned for all prompts, as each of several ranks should have returned it for its own."""
    parts, first = [], 0
    for count in counts:
        own = [entry for entry in told(batch) if first <= entry[0] < first + count]
        parts.append([(entry[0] - first, *entry[1:]) for entry in own])
        first += count
    return parts


# What ranks do.


def make_groups(rank: int) -> None:
    KEPT["world"] = dist.group.WORLD
    KEPT["pairs"] = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    KEPT["first two"] = dist.new_group([0, 1])
    KEPT["alone"] = [dist.new_group([one]) for one in range(WORLD)][rank]


def kept_engine(**settings: Any) -> RolloutEngine:
    key = f"engine {sorted(settings.items())}"
    if key not in KEPT:
        KEPT[key] = engine_with(**settings)
    return KEPT[key]


def share(rank: int, prompts: list[Any], sampling: Any, settings: dict[str, Any], call: dict[str, Any]) -> Any:
    """Generate for the rank's own prompts: what is told, the tensors, and tokens sampled here."""
    engine = kept_engine(**settings)
    own = sampling[rank] if isinstance(sampling, list) else sampling
    group = KEPT[call.get("group", "world")]
    batch = engine.generate(prompts[rank], own, group=group, gather=call.get("gather", "own"))
    tensors = (batch.input_ids.tolist(), batch.loss_mask.tolist(), batch.response_logprobs)
    return told(batch), tensors, batch.stats.new_tokens, batch.stats.prompts, len(batch.sampling)


def attempt(rank: int, work: Callable[..., Any], *arguments: Any) -> tuple[str, str, Any]:
    """The kind, message and ranks of the error that a task ends with."""
    try:
        work(rank, *arguments)
    except LiverollError as error:
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    return "none", "", None


# What they should do.

GREEDY = SamplingConfig(max_new_tokens=12, seed=0, stop_token_ids=(STOP,))
SAMPLED = SamplingConfig(max_new_tokens=12, temperature=1.0, n=3, seed=5, stop_token_ids=(STOP,))
COUNTS = (5, 0, 9, 2)


@pytest.mark.parametrize("balance", ["queue", "static"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("gather", ["own", "all"])
def test_as_one_rank_with_all_prompts(crew, sampling, balance, gather):
    """Guards against tokens that depend on who ran a row, and completions in another order or of another's prompts."""
    prompts = prompts_of(COUNTS)
    prompts[3][1] = prompts[0][0]  # equal prompts on two ranks draw from different streams
    alone = engine_with().generate(flat(prompts), sampling)
    reports = crew.run(share, prompts, sampling, {"balance": balance}, {"gather": gather})
    expected = split(alone, COUNTS) if gather == "own" else [told(alone)] * WORLD
    assert [seen for seen, *_ in reports] == expected
    assert {entry[3] for entry in told(alone)} == {"stop", "length"}
    for rank, (_, (ids, loss, logprobs), _, count, settings) in enumerate(reports):
        assert count == COUNTS[rank]
        assert settings == (COUNTS[rank] if gather == "own" else sum(COUNTS))
        assert len(ids) == len(loss) == len(logprobs) == len(expected[rank])
        if gather == "all":
            assert ids == alone.input_ids.tolist()
            assert loss == alone.loss_mask.tolist()
            torch.testing.assert_close(logprobs, alone.response_logprobs, rtol=0, atol=1e-4)
    new = [tokens for _, _, tokens, *_ in reports]
    assert sum(new) == alone.stats.new_tokens
    if balance == "queue":
        assert min(new) > 0, "the rank without prompts did nothing for the others"
    else:
        assert new == [sum(sum(entry[7]) for entry in own) for own in split(alone, COUNTS)]


def test_as_generate(crew):
    """Guards against the engine being compared with nothing but itself."""
    prompts = prompts_of((3, 4, 0, 6), seed=3)
    reports = crew.run(share, prompts, SamplingConfig(max_new_tokens=10, seed=0), {}, {})
    model = zoo.shared("llama")
    for own, (seen, *_) in zip(prompts, reports, strict=True):
        assert [list(entry[2]) for entry in seen] == [zoo.reference(model, row, max_new_tokens=10) for row in own]


def test_all_work_given_to_one_rank(crew):
    """Guards against ranks that have nothing of their own and leave the others alone, or never end."""
    prompts = [[], prompts_of((20,))[0], [], []]
    alone = engine_with().generate(prompts[1], SAMPLED)
    reports = crew.run(share, prompts, SAMPLED, {}, {})
    assert [len(seen) for seen, *_ in reports] == [0, 60, 0, 0]
    assert reports[1][0] == told(alone)
    assert min(new for _, _, new, *_ in reports) > 0
    assert [tensors[0] for _, tensors, *_ in reports[2:]] == [[], []]


def test_fewer_rows_than_ranks(crew):
    """Guards against a rank that has nothing to run, and waits for a step that never comes."""
    prompts = [[], [], [[1, 2, 3]], []]
    alone = engine_with().generate(prompts[2], GREEDY)
    reports = crew.run(share, prompts, GREEDY, {}, {})
    assert reports[2][0] == told(alone)
    assert sum(new for _, _, new, *_ in reports) == alone.stats.new_tokens


def test_settings_by_prompt(crew):
    """Guards against settings that come to another's prompts, and ranks refused for settings that differ by prompt."""
    prompts = prompts_of((2, 3, 1, 0))
    settings = [
        [SamplingConfig(max_new_tokens=3 + 2 * rank + index, seed=rank, n=1 + index) for index in range(len(own))]
        for rank, own in enumerate(prompts)
    ]
    alone = engine_with().generate(flat(prompts), flat(settings))
    reports = crew.run(share, prompts, settings, {}, {})
    assert [seen for seen, *_ in reports] == split(alone, (2, 3, 1, 0))


def details(rank: int, prompts: list[Any], sampling: SamplingConfig, route: str) -> Any:
    batch = kept_engine(prefill_route=route).generate(prompts[rank], sampling, group=KEPT["world"])
    return [(c.token_ids, c.kept_tokens, [[i for i, _ in t] for t in c.top_logprobs]) for c in batch.completions]


@pytest.mark.parametrize("route", ["packed", "ordinary"])
def test_all_that_is_told_on_every_way(crew, route):
    """Guards against what is told of a token being lost between ranks, and routes that know of no queue."""
    sampling = SamplingConfig(max_new_tokens=8, temperature=1.0, top_k=5, seed=1, top_logprobs=3, kept_tokens=8, n=2)
    prompts = prompts_of(COUNTS)
    alone = engine_with().generate(flat(prompts), sampling)
    expected = [(c.token_ids, c.kept_tokens, [[i for i, _ in t] for t in c.top_logprobs]) for c in alone.completions]
    assert flat(crew.run(details, prompts, sampling, route)) == expected


def begun(rank: int, prompts: list[Any], sampling: SamplingConfig, prefix: Any, nothing: Any) -> Any:
    batch = kept_engine().generate(
        prompts[rank] or nothing, sampling, response_prefix=prefix[rank], group=KEPT["world"], gather="all"
    )
    return told(batch)


@pytest.mark.parametrize("nothing", [[], None])
def test_responses_that_are_begun(crew, nothing):
    """Guards against a rank without prompts that is refused for the prefix that all ranks give."""
    prompts = prompts_of(COUNTS, seed=8)
    one = [5, 6]
    alone = told(engine_with().generate(flat(prompts), GREEDY, response_prefix=one))
    assert crew.run(begun, prompts, GREEDY, [one] * WORLD, nothing) == [alone] * WORLD
    each = [[[rank] for _ in own] for rank, own in enumerate(prompts)]
    alone = told(engine_with().generate(flat(prompts), GREEDY, response_prefix=flat(each)))
    assert crew.run(begun, prompts, GREEDY, each, nothing) == [alone] * WORLD


def interrupt_and_join(rank: int, prompts: list[Any], sampling: SamplingConfig) -> Any:
    engine = kept_engine()
    short = engine.generate(prompts[rank], sampling, max_total_tokens=6) if prompts[rank] else []
    joined = engine.generate(sampling=sampling, continue_from=short, group=KEPT["world"])
    return [(c.prompt_index, c.sample_index, c.token_ids, c.finish_reason) for c in joined.completions]


def test_completions_continued(crew):
    """Guards against rows that another rank runs from their prompt again, or with another random stream."""
    prompts = prompts_of(COUNTS, seed=4)
    whole = [engine_with().generate(own, SAMPLED).completions if own else () for own in prompts]
    assert crew.run(interrupt_and_join, prompts, SAMPLED) == [
        [(c.prompt_index, c.sample_index, c.token_ids, c.finish_reason) for c in own] for own in whole
    ]


def train(model, prompts: list[Any]) -> None:
    """Take one step of gradient descent, the same on every rank."""
    ids, mask = zoo.left_pad(prompts, pad_id=0)
    model.train()
    model(ids, attention_mask=mask, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.zero_grad()


def two_rounds(rank: int | None, prompts: list[Any], sampling: SamplingConfig) -> Any:
    model = zoo.build("llama")
    engine = RolloutEngine(model, config=RolloutConfig(max_slots=SLOTS, max_length=64))
    seen = []
    for _ in range(2):
        if rank is None:
            seen.append(told(engine.generate(flat(prompts), sampling)))
        else:
            seen.append(told(engine.generate(prompts[rank], sampling, group=dist.group.WORLD, gather="all")))
        train(model, flat(prompts))
    return seen


def test_weights_that_move_between_rounds(crew):
    """Guards against what is kept of a call and comes into the next one; seeds are those of the engine's calls."""
    prompts = prompts_of((4, 3, 0, 2))
    sampling = SamplingConfig(max_new_tokens=8, temperature=1.0, n=2)
    first, second = two_rounds(None, prompts, sampling)
    assert first != second
    assert crew.run(two_rounds, prompts, sampling) == [[first, second]] * WORLD


def after_own_calls(rank: int, prompts: list[Any], sampling: SamplingConfig) -> Any:
    engine = engine_with()
    for _ in range(2 * rank):
        engine.generate([[1, 2]], SamplingConfig(max_new_tokens=1))
    return [told(engine.generate(prompts[rank], sampling, group=dist.group.WORLD, gather="all")) for _ in range(2)]


def test_ranks_that_made_calls_of_their_own(crew):
    """Guards against streams of an engine's own calls, which differ where one rank alone has evaluated the model."""
    prompts = prompts_of((2, 1, 1, 3))
    sampling = SamplingConfig(max_new_tokens=6, temperature=1.0)
    engine = engine_with()
    for _ in range(2 * (WORLD - 1)):
        engine.generate([[1, 2]], SamplingConfig(max_new_tokens=1))
    expected = [told(engine.generate(flat(prompts), sampling)) for _ in range(2)]
    assert crew.run(after_own_calls, prompts, sampling) == [expected] * WORLD


@pytest.mark.parametrize("group", ["pairs", "alone"])
def test_groups_of_some_ranks(crew, group):
    """Guards against queues that get mixed up, and ranks taken by their number in the world."""
    prompts = prompts_of((3, 5, 2, 4), seed=6)
    reports = crew.run(share, prompts, SAMPLED, {}, {"group": group})
    members = {"pairs": [(0, 2), (1, 3)], "alone": [(0,), (1,), (2,), (3,)]}[group]
    for ranks in members:
        counts = tuple(len(prompts[rank]) for rank in ranks)
        alone = engine_with().generate(flat([prompts[rank] for rank in ranks]), SAMPLED)
        assert [reports[rank][0] for rank in ranks] == split(alone, counts)


# Failures.

ROWS = prompts_of((6, 6, 6, 6), seed=9)


class _CableError(Exception):
    pass


def fail(forwards: int) -> None:
    if forwards > 5:
        raise _CableError("the cable is out")


def fail_at_once(forwards: int) -> None:
    raise _CableError("the cable is out")


def linger(forwards: int) -> None:
    time.sleep(SILENCE / 20)


def hang(forwards: int) -> None:
    if forwards == 5:
        time.sleep(2.5 * SILENCE)


def with_trouble(rank: int, trouble: Callable[[int], None], route: str = "packed") -> Any:
    """Run a call in which trouble comes with each forward of rank 2, and then one without."""
    settings = {"capture": False, "rank_timeout": SILENCE, "prefill_route": route}  # captured steps run no hooks
    engine = kept_engine(**settings)
    forwards = iter(range(10000))
    layer = engine._model.model.layers[0]
    handle = layer.register_forward_pre_hook(lambda *_: trouble(next(forwards)) if rank == 2 else None)
    sampling = SamplingConfig(max_new_tokens=40, seed=0)
    try:
        error = attempt(rank, share, ROWS, sampling, settings, {})
    except _CableError as own:
        error = ("own", str(own), None)
    handle.remove()
    return error, share(rank, ROWS, GREEDY, {}, {})[0]


@pytest.mark.parametrize("trouble", [fail_at_once, fail])
def test_a_rank_that_fails(crew, trouble):
    """Guards against ranks that wait for good for one that has left, and groups that are of no use afterwards."""
    reports = crew.run(with_trouble, trouble)
    alone = engine_with().generate(flat(ROWS), GREEDY)
    for rank, (error, _) in enumerate(reports):
        kind, message, ranks = error
        if rank == 2:
            assert (kind, message) == ("own", "the cable is out")
        else:
            assert (kind, ranks) == ("RankError", (2,))
            assert message == "rank 2 of the group failed, and so does the call: _CableError: the cable is out"
    assert [seen for _, seen in reports] == split(alone, (6, 6, 6, 6))


def test_a_rank_that_hangs(crew):
    """Guards against waiting for good at the end, and a rank that goes on alone once the others have given up."""
    reports = crew.run(with_trouble, hang)
    for error, _ in reports:
        kind, message, ranks = error
        assert (kind, ranks) == ("RankError", (2,))
        assert "rank 2 did not come to the end of the call within 4 s" in message
    assert [seen for _, seen in reports] == split(engine_with().generate(flat(ROWS), GREEDY), (6, 6, 6, 6))


@pytest.mark.parametrize("route", ["packed", "ordinary"])
def test_a_rank_that_is_slow(crew, route):
    """Guards against a rank that is taken for lost because its rows take longer than a rank may be silent."""
    reports = crew.run(with_trouble, linger, route)
    assert [error[0] for error, _ in reports] == ["none"] * WORLD


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [([2, 500], "prompt 1 holds token id 500, outside the vocabulary of 97"), ([3] * 600, "prompt 1 has 600 tokens")],
)
def test_a_prompt_that_one_rank_refuses(crew, prompt, complaint):
    """Guards against ranks that wait for the prompts of one that has raised, and errors told of another's prompt."""
    reports = crew.run(attempt, share, [[[1]], [[1], prompt], [[3]], []], GREEDY, {}, {})
    kind, message, ranks = reports[1]
    assert (kind, ranks) == ("PromptError", None)
    assert message.startswith(complaint)
    for rank in (0, 2, 3):
        kind, told, ranks = reports[rank]
        assert (kind, ranks) == ("RankError", (1,))
        assert told == f"rank 1 of the group failed, and so does the call: PromptError: {message}"


def odd_argument(rank: int, argument: dict[str, Any]) -> Any:
    """Give an argument on rank 1 alone; then all make a call."""
    odd = argument if rank == 1 else {}
    engine = kept_engine()
    error = attempt(rank, lambda _: engine.generate([[1, rank + 1]], GREEDY, group=KEPT["world"], **odd))
    return error, share(rank, ROWS, GREEDY, {}, {})[0]


@pytest.mark.parametrize(
    ("argument", "complaint"),
    [
        ({"gather": "some"}, "gather must be 'own' or 'all', not 'some'"),
        ({"max_seconds": -1.0}, "max_seconds and max_total_tokens limit what one rank runs"),
        ({"max_total_tokens": 5}, "max_seconds and max_total_tokens limit what one rank runs"),
    ],
)
def test_an_argument_that_one_rank_refuses(crew, argument, complaint):
    """Guards against a rank that raises before the others can hear of it.

    They would wait as long as a rank may be silent, and count one call more than it from then on.
    """
    reports = crew.run(odd_argument, argument)
    kind, message, _ = reports[1][0]
    assert kind == "ConfigError"
    assert message.startswith(complaint)
    told = f"rank 1 of the group failed, and so does the call: ConfigError: {message}"
    assert [reports[rank][0] for rank in (0, 2, 3)] == [("RankError", told, (1,))] * 3
    assert [seen for _, seen in reports] == split(engine_with().generate(flat(ROWS), GREEDY), (6, 6, 6, 6))


def come_late(rank: int, late: int) -> Any:
    """Leave a rank out of a call until the others have given up; then all make a call."""
    store = dist.group.WORLD.get_group_store()
    settings = {"rank_timeout": SILENCE}
    if rank == late:
        store.wait(["given up"])
    error = attempt(rank, share, ROWS, GREEDY, settings, {})
    if rank != late and store.add("left", 1) == WORLD - 1:
        store.set("given up", "")
    return error, share(rank, ROWS, GREEDY, {}, {})[0]


def test_a_rank_that_does_not_come(crew):
    """Guards against waiting for good, a late rank that is left alone in a collective, and counts that come apart."""
    reports = crew.run(come_late, 3)
    for error, _ in reports:
        kind, message, ranks = error
        assert (kind, ranks) == ("RankError", (3,))
        assert "rank 3 did not call generate with the group within 4 s" in message
    assert [seen for _, seen in reports] == split(engine_with().generate(flat(ROWS), GREEDY), (6, 6, 6, 6))


def leave_out(rank: int, late: int) -> Any:
    """Leave a rank out of a call; it waits for the others after each, as ranks do that add up gradients."""
    errors = []
    for call in range(3):
        if call or rank != late:
            errors.append(attempt(rank, share, ROWS, GREEDY, {"rank_timeout": SILENCE}, {}))
        dist.barrier()
    return errors, share(rank, ROWS, GREEDY, {}, {})[0]


def test_a_rank_that_leaves_a_call_out(crew):
    """Guards against a rank that is one call behind for good, and each time found to be missing."""
    reports = crew.run(leave_out, 3)
    for rank, (errors, _) in enumerate(reports):
        kinds = [kind for kind, _, _ in errors]
        assert kinds == ["RankError"] * (1 if rank == 3 else 2) + ["none"]
        assert {ranks for _, _, ranks in errors[:-1]} == {(3,)}
    assert [seen for _, seen in reports] == split(engine_with().generate(flat(ROWS), GREEDY), (6, 6, 6, 6))


def keys_after(rank: int, calls: int) -> int:
    """How much the store holds after so many calls, counted by one rank while the others wait."""
    for call in range(calls):
        if call % 2:
            attempt(rank, share, [[[500]], [], [], []], GREEDY, {}, {})
        else:
            share(rank, ROWS, GREEDY, {}, {})
    dist.barrier()
    count = dist.group.WORLD.get_group_store().num_keys() if rank == 0 else 0
    dist.barrier()
    return count


def test_the_store_does_not_fill_up(crew):
    """Guards against what is left of each call, of those that failed too, for as long as a job runs."""
    few, many = crew.run(keys_after, 3)[0], crew.run(keys_after, 6)[0]
    assert many <= few + 7, "more is kept than of one call"


def disagree(rank: int, odd: int, what: str) -> None:
    config: dict[str, Any] = {"max_slots": SLOTS}
    sampling, call, changes = GREEDY, {}, {}
    if rank == odd:
        if what == "model":
            changes = {"intermediate_size": 40}
        elif what == "configuration":
            changes = {"rms_norm_eps": 0.25}
        elif what == "temperature":
            sampling = SamplingConfig(max_new_tokens=12, seed=0, stop_token_ids=(STOP,), temperature=0.5)
        elif what == "sampling seed":
            sampling = SamplingConfig(max_new_tokens=12, seed=1, stop_token_ids=(STOP,))
        elif what == "engine seed":
            config["seed"] = 3
        elif what == "balance":
            config["balance"] = "static"
        elif what == "gather":
            call["gather"] = "all"
    model = zoo.build("llama", **changes)
    if rank == odd and what == "generation configuration":
        model.generation_config.top_k = 3
    engine = RolloutEngine(model, config=RolloutConfig(**config))
    engine.generate([[1, 2, rank]], sampling, group=dist.group.WORLD, **call)


@pytest.mark.parametrize(
    ("what", "subject"),
    [
        ("model", "the model: ranks 0, 2 and 3 have a LlamaForCausalLM of "),
        ("configuration", "the model's configuration: ranks 0, 2 and 3 have "),
        ("generation configuration", "the model's generation configuration: ranks 0, 2 and 3 have "),
        ("temperature", "SamplingConfig.temperature: ranks 0, 2 and 3 have None, rank 1 has 0.5"),
        ("sampling seed", "SamplingConfig.seed: ranks 0, 2 and 3 have 0, rank 1 has 1"),
        ("engine seed", "RolloutConfig.seed: ranks 0, 2 and 3 have 0, rank 1 has 3"),
        ("balance", "RolloutConfig.balance: ranks 0, 2 and 3 have 'queue', rank 1 has 'static'"),
        ("gather", "gather: ranks 0, 2 and 3 have 'own', rank 1 has 'all'"),
    ],
)
def test_ranks_that_disagree(crew, what, subject):
    """Guards against rows of one call that come from different models or settings."""
    (report,) = set(crew.run(attempt, disagree, 1, what))
    kind, message, ranks = report
    assert (kind, ranks) == ("RankError", (1,))
    assert message.startswith(f"the ranks of the group disagree about {subject}")


def refused(rank: int) -> list[tuple[str, str, Any]]:
    engine = kept_engine()

    def call(**arguments: Any) -> Callable[[int], Any]:
        return lambda _: engine.generate([[1, 2]], GREEDY, **arguments)

    world = KEPT["world"]
    return [
        attempt(rank, call(group="world")),
        attempt(rank, call(group=world, gather="some")),
        attempt(rank, call(group=world, max_seconds=3.0)),
        attempt(rank, lambda _: engine.generate([], GREEDY, group=world)),
        attempt(rank, call(group=KEPT["first two"])) if rank > 1 else ("ConfigError", "not in the group", None),
        attempt(rank, call(group=world)),
    ]


def test_what_is_refused(crew):
    """Guards against groups that are none, or not this rank's, and limits that one rank alone would keep."""
    for seen in crew.run(refused):
        kinds = [kind for kind, _, _ in seen]
        assert kinds[:2] == ["ConfigError"] * 2
        assert set(kinds[2:4]) <= {"ConfigError", "PromptError", "RankError"}
        assert kinds[4:] == ["ConfigError", "none"]
        assert "must be a process group" in seen[0][1]
        assert "gather must be 'own' or 'all'" in seen[1][1]
        assert "leave them out with a group" in seen[2][1]
        assert "no rank of the group has a prompt" in seen[3][1]
        assert "not in the group" in seen[4][1]
