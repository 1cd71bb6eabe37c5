"""Compiled decode steps: same tokens, compiled once, whatever happens to the weights."""

import gc
import shutil
import weakref

import pytest
import torch
import transformers
import zoo
from torch._inductor.exc import InductorError

from liveroll import CompileError, RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.decode import feeding
from liveroll.model.rewriting import rewrite

BUDGET = 8
GREEDY = SamplingConfig(max_new_tokens=BUDGET, temperature=0)


def engine_of(model, **settings):
    return RolloutEngine(model, config=RolloutConfig(max_slots=4, compile=True, capture=True, **settings))


def check(engine, model, rows):
    prompts = zoo.ragged_prompts(zoo.VOCAB_SIZE, 3, [5, 2, 9, 1][:rows])
    batch = engine.generate(prompts, GREEDY)
    for completion, prompt in zip(batch.completions, prompts, strict=True):
        assert list(completion.token_ids) == zoo.reference(model, prompt, max_new_tokens=BUDGET, do_sample=False)
    return batch


@pytest.fixture
def traced(monkeypatch):
    """Compile to the traced graph itself: what is traced, how often and why is the same, and takes no compiler."""
    monkeypatch.setattr(feeding, "inductor", lambda graph, inputs: graph)


def compilable():
    # Before 5.0 experts are gone through one by one, and which ones is read from the device.
    experts = {"mixtral", "qwen3_moe", "gpt_oss"} if int(transformers.__version__.split(".")[0]) < 5 else set()
    return [name for name in zoo.ARCHITECTURES if name not in experts]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("architecture", compilable())
@pytest.mark.usefixtures("traced")
def test_steps_and_prefills_are_one_graph_each(architecture):
    """Guards against a graph break, and against code that is compiled again for another batch size or new weights.

    Of prefills too: for each of their sizes, and beyond the largest that is captured.
    """
    model = zoo.build(architecture)
    engine = engine_of(model, prefill_capture=True, prefill_capture_tokens=256)
    check(engine, model, 4)
    assert engine.compilations == ["the first run"] * 2
    check(engine, model, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    check(engine, model, 3)
    assert engine.captures == 2
    assert engine.prefill_captures == 1
    for length, sizes in ((70, 2), (140, 3), (70, 3), (300, 3)):
        prompts = zoo.ragged_prompts(zoo.VOCAB_SIZE, 3, [length, 5])
        rows = [list(row.token_ids) for row in engine.generate(prompts, GREEDY).completions]
        assert rows == [zoo.reference(model, row, max_new_tokens=BUDGET, do_sample=False) for row in prompts]
        assert engine.prefill_captures == sizes
    assert engine.compilations == ["the first run"] * 2


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt2"])
@pytest.mark.usefixtures("traced")
def test_a_rewritten_step(architecture, monkeypatch):
    """Guards against a rewrite that changes what a model computes, and one that misses the models it is made for."""
    counts = []

    def count(graph):
        counts.append(rewrite(graph, serves=lambda tensor: True))

    monkeypatch.setattr(feeding, "rewrite", count)
    # What other models' norms add to mean squares would have it take that for a variable.
    torch._dynamo.reset()
    model = zoo.build(architecture)
    engine = engine_of(model, fuse="auto")
    check(engine, model, 4)
    check(engine, model, 2)
    layers = model.config.get_text_config().num_hidden_layers
    # A gate, and two norms behind sums, of each layer; the last norm is behind the last layer.
    if architecture in ("llama", "qwen2", "qwen3", "mistral"):
        assert counts == [3 * layers]


@pytest.mark.usefixtures("traced")
def test_a_recompilation_is_named():
    """Guards against code that is compiled again without a word, and against code of another engine that is counted."""
    model = zoo.build("qwen2")
    engine, other = engine_of(model), engine_of(model)
    check(engine, model, 2)
    check(other, model, 2)
    model.double()
    check(engine, model, 2)
    assert len(engine.compilations) == 2
    assert "dtype" in engine.compilations[1]
    assert other.compilations == ["the first run"]


@pytest.mark.usefixtures("traced")
def test_a_recompilation_is_named_in_one_line():
    """Guards against a reason that is told with the whole stack of the model's forward."""
    model = zoo.build("qwen2")
    engine = engine_of(model)
    check(engine, model, 2)
    # As after a trainer has turned checkpointing on and off: layers have of their own what their class has.
    for layer in model.model.layers:
        layer.gradient_checkpointing = False
    check(engine, model, 2)
    assert len(engine.compilations) == 2
    assert "gradient_checkpointing" in engine.compilations[1]
    assert "\n" not in engine.compilations[1]


@pytest.mark.usefixtures("traced")
def test_a_single_row_has_code_of_its_own():
    """Guards against code that knows the pages it ran over, and is compiled again once there are others."""
    model = zoo.build("qwen2")
    engine = engine_of(model)
    check(engine, model, 4)
    check(engine, model, 1)
    assert len(engine.compilations) == 2
    engine.release()
    check(engine, model, 1)
    assert len(engine.compilations) == 2


@pytest.mark.usefixtures("traced")
def test_a_model_goes_with_its_last_reference():
    """Guards against a model that torch keeps for good, in the compiler that it was compiled by."""
    model = zoo.build("qwen2")
    engine = engine_of(model, prefill_capture=True)
    engine.generate([[1, 2, 3], [4]], GREEDY)
    assert len(engine.compilations) == 2
    gone = weakref.ref(model)
    del engine, model
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("traced")
def test_many_engines_compile():
    """Guards against the limit of compiled variants that torch keeps of one function, shared by all engines."""
    model = zoo.build("llama")
    with torch._dynamo.config.patch(recompile_limit=1):
        for _ in range(2):
            engine = engine_of(model)
            check(engine, model, 2)
            assert engine.compilations == ["the first run"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_by_inductor():
    """Guards against a compiler that reorders or drops what the operator does beside returning."""
    model = zoo.build("qwen2")
    engine = engine_of(model)
    check(engine, model, 4)
    check(engine, model, 3)
    assert engine.compilations == ["the first run"]
    assert engine.memory().kv > 0


def test_what_cannot_be_compiled(monkeypatch):
    """Guards against a failure that is silent, and one that is final where the step could run as it is."""
    model = zoo.build("qwen2")

    def fail(graph, inputs):
        raise InductorError(RuntimeError("no compiler here"), None)

    monkeypatch.setattr(feeding, "inductor", fail)
    with pytest.raises(CompileError, match=r"cannot be compiled: .*no compiler here.*set compile='auto'"):
        check(engine_of(model), model, 2)
    assert RolloutEngine(model, config=RolloutConfig(compile="auto")).compilations == []
