"""A trainer's hooks: not in captured steps, everywhere else, and always still there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import zoo
from rollouts import BUDGET, check, engine_of, prompts
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from liveroll import CaptureError, SamplingConfig
from liveroll.model.hooks import gathers_weights, needed_hooks, without_hooks
from liveroll.model.signature import tensors_of

GREEDY = SamplingConfig(max_new_tokens=BUDGET)


@pytest.fixture
def model():
    return zoo.build("llama")


class Counter:
    """Counts the calls of a module by the tokens that went in."""

    def __init__(self, module):
        self.widths = []
        self.handles = [
            module.register_forward_pre_hook(lambda module, args: self.widths.append(args[0].shape[1])),
            module.register_forward_hook(lambda module, args, output: self.widths.append(args[0].shape[1])),
        ]


def kept_hooks(model):
    """Every hook of every module, by identity."""
    return [
        (name, key, hook)
        for name, module in model.named_modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for key, hook in hooks.items()
    ]


def test_hooks_run_in_prefill_and_not_in_captured_steps(model):
    """Guards against hooks whose Python runs at capture and never at replay, and against hooks lost on the way."""
    engine = engine_of(model)
    engine.generate(prompts(8), GREEDY)  # the first call of an engine looks at the model's layers as well
    counter = Counter(model.model.layers[0].mlp)
    before = kept_hooks(model)
    for calls in (1, 2):
        stats = engine.generate(prompts(8), GREEDY).stats
        assert stats.replays == BUDGET - 1
        assert counter.widths == [4 * 8] * 2 * calls  # one packed prefill, before and after
        assert kept_hooks(model) == before
    model(torch.tensor(prompts(8)))
    assert counter.widths == [32] * 4 + [8] * 2
    for handle in counter.handles:
        handle.remove()
    assert kept_hooks(model) == []
    check(engine, model, prompts(8))
    assert engine.captures == 1


def test_hooks_run_in_steps_that_are_not_captured(model):
    """Guards against hooks that are left out where nothing asks for it."""
    engine = engine_of(model, capture=False)
    engine.generate(prompts(8), GREEDY)
    counter = Counter(model.model.layers[0].mlp)
    engine.generate(prompts(8), GREEDY)
    assert counter.widths == [32] * 2 + [1] * 2 * (BUDGET - 1)


def test_hooks_that_change_outputs_change_what_their_forwards_do(model):
    """Guards against a hook that reaches some forwards of a route and not others."""
    engine = engine_of(model, capture=False)
    plain = check(engine, model, prompts(8))
    model.lm_head.register_forward_hook(lambda module, args, output: -output)
    assert plain.completions != check(engine, model, prompts(8)).completions


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_hooks_are_back_after_an_exception_in_a_step(model, error):
    """Guards against a step that fails half-way and leaves the trainer's hooks behind."""
    counter = Counter(model.model.layers[0].mlp)
    before = kept_hooks(model)
    head = model.lm_head.forward
    steps = 0

    def fail(hidden):
        nonlocal steps
        steps += 1
        if steps == 4:
            raise error("the step failed")
        return head(hidden)

    engine = engine_of(model)
    model.lm_head.forward = fail
    with pytest.raises(error, match="the step failed"):
        engine.generate(prompts(8), GREEDY)
    assert kept_hooks(model) == before
    counter.widths.clear()
    model(torch.tensor(prompts(8)))
    assert counter.widths == [8, 8]
    check(engine, model, prompts(8))


def test_a_hook_that_fails_in_prefill(model):
    """Guards against an engine that is unusable after a trainer's hook raised."""

    def fail(module, args):
        raise RuntimeError("no")

    engine = engine_of(model)
    check(engine, model, prompts(8))
    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        engine.generate(prompts(8), GREEDY)
    assert len(kept_hooks(model)) == 1
    handle.remove()
    check(engine, model, prompts(8))
    assert engine.captures == 1


class Mover:
    """Stands for accelerate's hooks, which wrap a module's forward."""


def give_accelerate_hook(model):
    model.model.layers[1]._hf_hook = Mover()
    return "accelerate moves the weights of model.layers.1 in every forward"


def test_models_whose_hooks_must_run_are_not_captured(model):
    """Guards against captured steps that read weights which are not there, and against silence about it."""
    reason = give_accelerate_hook(model)
    counter = Counter(model.model.layers[0].mlp)
    engine = engine_of(model)
    stats = check(engine, model, prompts(8)).stats
    assert (stats.captures, stats.replays, stats.eager_reason) == (0, 0, reason)
    assert counter.widths.count(1) >= 2 * (BUDGET - 1)
    assert check(engine, model, prompts(8)).stats.eager_reason == reason
    with pytest.raises(CaptureError, match=reason):
        engine_of(model, capture=True).generate(prompts(8), GREEDY)
    check(engine_of(model, capture=False), model, prompts(8))


def test_a_need_that_comes_and_goes(model):
    """Guards against a captured step replayed over weights that hooks have begun to move, and one never made again."""
    engine = engine_of(model)
    assert check(engine, model, prompts(8)).stats.eager_reason is None
    reason = give_accelerate_hook(model)
    stats = check(engine, model, prompts(8)).stats
    assert (stats.replays, stats.eager_reason) == (0, reason)
    del model.model.layers[1]._hf_hook
    stats = check(engine, model, prompts(8)).stats
    assert (stats.captures, stats.replays, stats.eager_reason) == (1, BUDGET - 1, None)
    assert engine.captures == 2


class Halved(prune.BasePruningMethod):
    """A method of pruning as a trainer writes one."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask * (torch.arange(t.numel()).view_as(t) % 2)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize(
    "give_hook",
    [
        weight_norm,
        spectral_norm,
        partial(prune.l1_unstructured, name="weight", amount=0.3),
        partial(Halved.apply, name="weight"),
    ],
)
def test_hooks_that_compute_weights(model, give_hook):
    """Guards against captured forwards over a weight that a hook computed before the trainer's last step."""
    give_hook(model.model.layers[1].mlp.up_proj)
    model.eval()  # a spectral norm goes on with its iteration while it trains
    reason = "hooks compute the weights of model.layers.1.mlp.up_proj in every forward"
    engine = engine_of(model)
    for _ in range(2):
        assert check(engine, model, prompts(8)).stats.eager_reason == reason
        with torch.no_grad():
            for parameter in model.model.layers[1].mlp.up_proj.parameters():
                parameter.mul_(-2)
    with pytest.raises(CaptureError, match=reason):
        engine_of(model, prefill_capture=True).generate(prompts(8), GREEDY)


def _needed(model):
    modules = list(model.modules())
    return needed_hooks(model, modules, tensors_of(modules))


def test_a_partitioned_parameter_needs_hooks(model):
    """Guards against captured steps over what ZeRO-3 leaves in a parameter that is not gathered."""
    weight = model.model.norm.weight
    whole, weight.ds_id, weight.ds_shape = weight.data, 7, weight.shape
    assert _needed(model) is None
    weight.data = whole[:0]
    needed = _needed(model)
    assert needed == "model.norm.weight is partitioned by ZeRO-3, whose hooks gather it in every forward"


def test_hooks_that_gather_weights(model):
    """Guards against captured steps of a model whose hooks gather its weights, and eager ones of other shards."""
    if not torch.distributed.is_available():
        pytest.skip("needs torch.distributed")
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model.lm_head.weight = nn.Parameter(distribute_tensor(model.lm_head.weight.detach(), mesh))
        assert _needed(model) is None
        fully_shard(model.model.layers[1], mesh=mesh)
        gathering = "hooks gather the weights of model.layers.1 in every forward"
        assert _needed(model) == gathering
        with without_hooks(model, spare=lambda hook: not gathers_weights(hook)):
            assert _needed(model) is None
        assert _needed(model) == gathering
    finally:
        torch.distributed.destroy_process_group()
