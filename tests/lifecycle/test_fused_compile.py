"""Fused projections in compiled steps: one product each, compiled once wherever their weights go."""

from __future__ import annotations

import shutil

import pytest
import torch
import zoo
from fused import fused
from rollouts import check, engine_of, prompts
from test_compile import compilable

from liveroll.decode import feeding


@pytest.fixture
def traced(monkeypatch):
    """Compile to the traced graph itself, and keep the graphs."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(feeding, "inductor", keep)
    return graphs


ARCHITECTURES = ("qwen2", "opt", "gpt_oss")


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name in compilable()])
def test_compiled(name, traced):
    """Guards against a graph break, products that are traced apart, and code compiled again for weights that moved."""
    model = zoo.build(name)
    check(engine_of(model, compile=True), model, prompts(8))
    engine = fused(model, compile=True, capture=True)
    check(engine, model, prompts(8))
    saved = sum(group.count(",") for group in engine.fusion.fused)
    assert saved >= 2 * model.config.num_hidden_layers
    apart, together = (count_products(graph) for graph in traced)
    assert together == apart - saved
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.95)
    check(engine, model, prompts(8))
    assert engine.captures == 1
    engine.unfuse()
    check(engine, model, prompts(8))
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.95
    check(engine, model, prompts(8))
    assert engine.captures == 3
    assert engine.compilations == ["the first run"]


def count_products(graph):
    return sum(node.op == "call_function" and node.target is torch._C._nn.linear for node in graph.graph.nodes)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_by_inductor():
    """Guards against code that reads the parts of a product as if each were contiguous."""
    model = zoo.build("qwen2", num_hidden_layers=1)
    engine = fused(model, compile=True, capture=True)
    check(engine, model, prompts(8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    check(engine, model, prompts(8, rows=3))
    assert engine.compilations == ["the first run"]
