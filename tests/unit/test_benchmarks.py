"""What benchmarks are asked for, before they measure anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import zoo

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def decode(monkeypatch):
    # What generates beside the engine is there in transformers 5 alone.
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = set(sys.modules)
    import decode

    yield decode
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == BENCHMARKS:
            del sys.modules[name]


def test_the_decode_benchmark_takes_every_contender(decode):
    """Guards against names with a comma in them that are taken for two, so that the bare command does nothing."""
    arguments = decode.read_arguments([])
    assert arguments.contenders == [*decode.VARIANTS, *decode.PEERS]
    assert arguments.cases == ["A", "B", "C", "D", "E", "F", "G"]
    for name in arguments.contenders:
        assert decode.read_arguments(["--contenders", name]).contenders == [name]
    assert decode.read_arguments(["--contenders", "fused, eager"]).contenders == ["fused", "eager"]


def test_slow_peers_are_called_again_after_their_set_up_alone(decode):
    """Guards against minutes of repeats, and against a time with compilation in it where another call is cheap."""
    assert set(decode.PEERS) > decode.SETTING_UP
    for name, first_ms, calls in [
        ("fused", 60_000, 9),
        ("model.generate", 1_000, 9),
        ("model.generate", 4_000, 1),
        ("model.generate", 60_000, 0),
        ("DeepSpeed, graph", 60_000, 1),
        ("generate_batch, kept", 108_000, 0),
    ]:
        again = [decode.is_called_again(name, first_ms, repeats, 2.0) for repeats in range(9)]
        assert again == [True] * calls + [False] * (9 - calls)


def test_what_was_measured_is_kept_when_a_contender_does_not_end(decode, monkeypatch):
    """Guards against an hour's times lost with the last call, which somebody ended."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kept = []

    def endless(case):
        if kept and "all ms" in kept[-1]["contenders"]["fused"]:
            raise KeyboardInterrupt

    case = decode.Case("A", [[1, 2]], [4])
    with pytest.raises(KeyboardInterrupt):
        decode.measure(
            zoo.build("llama"), case, {"fused": lambda case: None, "DeepSpeed": endless}, 3, 2.0, kept.append
        )
    assert [*kept[-1]["contenders"]] == ["fused", "DeepSpeed"]
    assert len(kept[-1]["contenders"]["fused"]["all ms"]) == 1
    assert "first ms" in kept[-1]["contenders"]["DeepSpeed"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--cases", "A,Z"], "no cases of these names: Z; there are A; B"),
        (["--contenders", "quick"], "no contenders of these names: quick; there are eager"),
        (["--model", "4B"], "invalid choice: '4B'"),
        (["--contenders", "DeepSpeed", "--curve"], "--curve needs one of the contenders eager"),
    ],
)
def test_the_decode_benchmark_refuses_what_it_does_not_know(decode, given, message, capsys):
    """Guards against a name that is found to be wrong once a model was built, or all the rest was measured."""
    with pytest.raises(SystemExit):
        decode.read_arguments(given)
    assert message in capsys.readouterr().err


def test_a_benchmark_without_a_gpu_says_so(decode, monkeypatch, capsys):
    """Guards against a traceback out of torch's depths."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        decode.read_arguments([])
    assert "this measures on a GPU, and there is none" in capsys.readouterr().err
