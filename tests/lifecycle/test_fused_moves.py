"""Fused projections whose weights move: fused anew, left apart, and never read where they were."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from fused import attention, fused, projections, weights
from rollouts import check, engine_of, prompts, tokens
from snapshots import Trap, left_as_found, raising
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from liveroll import EngineStateError, FusionError, SamplingConfig
from liveroll.model import fusion
from liveroll.model.adjacency import lie_together


@pytest.fixture
def model():
    return zoo.build("qwen2")


def move(model):
    block = attention(model).k_proj
    block.weight.data = block.weight.data * 0.5


def replace(model):
    attention(model).v_proj.weight = nn.Parameter(-attention(model).v_proj.weight.detach())


def assign(model):
    model.load_state_dict(zoo.build("qwen2", seed=1).state_dict(), assign=True)


def move_bias(model):
    bias = attention(model).q_proj.bias
    bias.data = bias.data + 1


def convert(model):
    model.double()


def replace_module(model):
    old, new = attention(model).k_proj, nn.Linear(32, 16)
    new.load_state_dict(old.state_dict())
    with torch.no_grad():
        new.weight.mul_(0.5)
    attention(model).k_proj = new


@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("change", [move, replace, assign, move_bias, convert, replace_module])
def test_weights_that_move_are_fused_anew(model, change, capture):
    """Guards against products of the weights that were left behind."""
    engine = fused(model, capture=capture)
    before = tokens(check(engine, model, prompts(8)))
    change(model)
    assert not (lie_together(weights(model)) and lie_together([p.bias for p in projections(model)]))
    after = tokens(check(engine, model, prompts(8)))
    assert (before == after) == (change is convert)
    assert lie_together(weights(model))
    assert len(engine.fusion.fused) == 4
    assert engine.captures == (0 if capture is False else 2)
    check(engine, model, prompts(8))
    assert len(engine.recapture_reasons) == (0 if capture is False else 1)


def test_weights_that_move_while_a_stream_is_open(model):
    """Guards against reading memory that the weights have left, which nobody keeps."""
    engine = fused(model, capture=False)
    stream = engine.stream(prompts(8), [SamplingConfig(max_new_tokens=n) for n in (2, 6, 6, 6)])
    next(stream)
    assign(model)
    applied = [product.applies() for product in engine._decoder.fusion._products.values()]
    assert applied == [False] * 4
    assert len(list(stream)) == 3


def test_nothing_keeps_the_memory_that_weights_have_left(model):
    """Guards against a buffer held by the engine while the trainer has the model elsewhere."""
    engine = fused(model)
    check(engine, model, prompts(8))
    held = [StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    assert all(ref.expired() for ref in held)


def test_one_group_moves_at_a_time(model, monkeypatch):
    """Guards against a second copy of the model while its projections are fused."""
    moved, left = fusion.lay_together, []

    def watching(parameters):
        assert all(ref.expired() for ref in left)
        left.extend(StorageWeakRef(parameter.untyped_storage()) for parameter in parameters)
        moved(parameters)

    monkeypatch.setattr(fusion, "lay_together", watching)
    check(fused(model), model, prompts(8))
    assert len(left) == 2 * (3 + 3 + 2)


def test_unfuse(model):
    """Guards against weights that stay together, change, or are lost when they are separated."""
    engine = fused(model)
    before = tokens(check(engine, model, prompts(8)))
    state = copy.deepcopy(model.state_dict())
    with engine:
        engine.unfuse()
        assert engine.fusion.fused == ()
        assert not lie_together(weights(model))
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
        assert tokens(check(engine, model, prompts(8))) == before
        assert len(engine.fusion.fused) == 4
        assert engine.captures == 2
    stream = engine.stream(prompts(8), SamplingConfig(max_new_tokens=4))
    next(stream)
    with pytest.raises(EngineStateError):
        engine.unfuse()


def flatten(model):
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view(parameter.shape)


def share(model):
    model.share_memory()


def tie(model):
    attention(model, 0).k_proj.weight.data = attention(model, 1).k_proj.weight.data


@pytest.mark.parametrize("change", [move, flatten, share, tie])
def test_unfuse_leaves_what_was_laid_elsewhere(model, change):
    """Guards against weights taken out of a flat buffer, shared memory or a tie that came after they were fused."""
    engine = fused(model, fuse="auto")
    check(engine, model, prompts(8))
    change(model)
    where = weights(model)[1].data_ptr()
    engine.unfuse()
    assert weights(model)[1].data_ptr() == where
    if change is tie:
        assert attention(model, 1).k_proj.weight.data_ptr() == where
    check(engine, model, prompts(8))


def test_unfuse_in_inference_mode(model):
    """Guards against weights that cannot be trained any more, as those that inference mode makes."""
    engine = fused(model)
    check(engine, model, prompts(8))
    with torch.inference_mode():
        engine.unfuse()
    assert not lie_together(weights(model))
    ids = torch.tensor(prompts(8))
    model(input_ids=ids, labels=ids).loss.backward()
    assert not any(parameter.is_inference() for parameter in model.parameters())


def test_unfuse_what_an_engine_left_that_is_gone(model):
    """Guards against weights that nothing separates any more, because the engine that fused them was deleted."""
    check(fused(model), model, prompts(8))
    assert lie_together(weights(model))
    engine_of(model).unfuse()
    assert not lie_together(weights(model))


@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped", "left"])
def test_weights_stay_while_another_engine_reads_them(model, end):
    """Guards against captured steps of an open stream that are replayed over memory that the weights have left."""
    reader, engine, strict, elsewhere = engine_of(model), fused(model, fuse="auto"), fused(model), zoo.build("qwen2")
    stream = reader.stream(prompts(8), [SamplingConfig(max_new_tokens=n) for n in (2, 6, 6, 6)])
    next(stream)
    where = [parameter.data_ptr() for parameter in model.parameters()]
    check(engine, model, prompts(8))
    assert set(engine.fusion.refused.values()) == {"a call of another engine reads them where they are"}
    with pytest.raises(FusionError, match="a call of another engine reads them where they are"):
        check(strict, model, prompts(8))
    assert [parameter.data_ptr() for parameter in model.parameters()] == where
    check(fused(elsewhere), elsewhere, prompts(8))
    if end == "exhausted":
        assert len(list(stream)) == 3
    elif end == "closed":
        stream.close()
    elif end == "dropped":
        del stream
    else:
        reader.__exit__(None, None, None)
    for each in (engine, strict):
        check(each, model, prompts(8))
        assert len(each.fusion.fused) == 4
        assert each.fusion.refused == {}


def test_weights_may_move_after_a_stream_that_failed(model):
    """Guards against a call that counts as open for as long as somebody keeps the error that ended it."""
    reader, errors = engine_of(model), []
    stream = reader.stream(prompts(8), [SamplingConfig(max_new_tokens=n) for n in (2, 6, 6, 6)])
    next(stream)

    def read_on(*_):
        if not errors:
            with pytest.raises(EngineStateError, match="another rollout of this model") as error:
                list(stream)
            errors.append(error.value)

    hook = model.register_forward_hook(read_on)
    engine_of(model, capture=False).generate(prompts(8), SamplingConfig(max_new_tokens=2))
    hook.remove()
    assert len(errors) == 1
    check(fused(model), model, prompts(8))


def test_unfuse_while_another_engine_reads(model):
    """Guards against weights that are moved from under an open stream by an engine that is not running."""
    reader, engine = fused(model), fused(model)
    check(engine, model, prompts(8))
    stream = reader.stream(prompts(8), [SamplingConfig(max_new_tokens=n) for n in (2, 6, 6, 6)])
    next(stream)
    # What lies together need not move.
    check(fused(model), model, prompts(8))
    with pytest.raises(EngineStateError, match="another engine of this model"):
        engine.unfuse()
    assert lie_together(weights(model))
    assert len(engine.fusion.fused) == 4
    assert len(list(stream)) == 3
    engine.unfuse()
    assert not lie_together(weights(model))


def test_two_engines_share_what_is_fused(model):
    """Guards against engines that move the weights back and forth."""
    engine, other, apart = fused(model), fused(model), engine_of(model)
    for _ in range(2):
        for each in (engine, other, apart):
            check(each, model, prompts(8))
    assert [each.captures for each in (engine, other, apart)] == [1, 1, 1]
    assert lie_together(weights(model))


@pytest.mark.parametrize("capture", ["auto", False])
@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_between_the_projections(model, error, capture):
    """Guards against forwards or outputs that stay behind in the model when a step ends early."""
    engine = fused(model, capture=capture)
    check(engine, model, prompts(8))
    with left_as_found(model):
        # What runs between the first projection of the group and the second.
        trap = Trap(model.model.layers[1].mlp.act_fn, 3, raising(error), hook=False)
        try:
            with pytest.raises(type(error)):
                engine.generate(prompts(8), SamplingConfig(max_new_tokens=6))
        finally:
            trap.remove()
    products = engine._decoder.fusion._products.values()
    assert all(product._kept is None for product in products)
    check(engine, model, prompts(8))


def test_outputs_are_handed_out_once_for_their_input(model):
    """Guards against a part that is kept from step to step, handed out twice, or for another input."""
    engine = fused(model, capture=False)
    check(engine, model, prompts(8))
    found = engine._decoder.fusion
    product = found._products[next(iter(found._products))]
    layers, hidden, other = projections(model), torch.randn(2, 1, 32), torch.randn(2, 1, 32)
    expected = [layer(hidden) for layer in layers]
    with torch.no_grad(), found.in_force():
        query = layers[0](hidden)
        foreign = layers[1](other)
        parts = [query, layers[1](hidden)]
        again = layers[1](hidden)
        parts.append(layers[2](hidden))
        assert product._kept is None
        assert torch.equal(foreign, nn.Linear.forward(layers[1], other))
        assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
        assert again.untyped_storage().data_ptr() != query.untyped_storage().data_ptr()
        for part, right in zip((*parts, again), (*expected, expected[1]), strict=True):
            torch.testing.assert_close(part, right)
        layers[0](hidden)
        assert product._kept is not None
    assert product._kept is None


def test_fused_projections_of_an_engine_that_must_and_cannot(model):
    """Guards against weights that moved although the call was refused."""
    attention(model, 1).k_proj.forward = attention(model, 1).k_proj.forward
    engine = fused(model)
    where = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(FusionError, match=r"layers\.1\.self_attn: q_proj, k_proj, v_proj cannot be fused: k_proj has"):
        engine.generate(prompts(8), SamplingConfig(max_new_tokens=4))
    assert [parameter.data_ptr() for parameter in model.parameters()] == where
    del attention(model, 1).k_proj.forward
    check(engine, model, prompts(8))
    assert len(engine.fusion.fused) == 4


def test_off_nothing_moves(model):
    """Guards against weights that move without being asked."""
    engine = engine_of(model)
    with left_as_found(model):
        check(engine, model, prompts(8))
    assert engine.fusion.fused == ()
