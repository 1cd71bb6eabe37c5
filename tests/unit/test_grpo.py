"""The GRPO loss: advantages, masking, clipping and the direction of its gradient."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from liveroll import RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.tools.grpo import group_advantages, grpo_loss, policy_logprobs, rollout_logprobs
from liveroll.tools.grpo_trainer import GRPOTrainer


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).train()


@pytest.fixture
def batch(model):
    settings = SamplingConfig(max_new_tokens=6, n=4, temperature=1.0, top_k=0, top_p=1.0, seed=3)
    with RolloutEngine(model, config=RolloutConfig(max_slots=8)) as engine:
        return engine.generate([[1, 5, 6, 7], [1, 9]], settings)


def test_advantages_are_normalised_within_each_group():
    """Guards against normalising over the whole batch, which rewards an easy prompt for being easy."""
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 5.0, 5.0, 5.0, 9.0], dtype=torch.float64)
    easy, hard = group_advantages(rewards, 4).reshape(2, 4)
    torch.testing.assert_close(easy, torch.tensor([-1.0, 1.0, 1.0, -1.0], dtype=torch.float64), rtol=1e-5, atol=0)
    expected = torch.tensor([-1.0, -1.0, -1.0, 3.0], dtype=torch.float64) / math.sqrt(3)
    torch.testing.assert_close(hard, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0])
def test_a_group_that_agrees_has_no_advantage(value):
    """Guards against dividing zero by zero, or a rounding error by almost nothing, when all rewards are equal."""
    advantages = group_advantages(torch.full((8,), value), 8)
    assert advantages.tolist() == [0.0] * 8


def test_masked_tokens_contribute_neither_value_nor_gradient():
    """Guards against padding after a response being trained on, or poisoning the loss with its infinities."""
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-1.0, -50.0, float("-inf")]], requires_grad=True)
    old = torch.tensor([[-1.5, -2.0, -3.0], [-1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    advantages = torch.tensor([1.0, -1.0])
    loss = grpo_loss(logprobs, old, advantages, mask)
    loss.backward()
    by_hand = (-min(math.exp(0.5), 1.2) - 1 - 1 + 1) / 4
    assert loss.item() == pytest.approx(by_hand)
    assert logprobs.grad is not None
    assert logprobs.grad[1].tolist() == [0.25, 0.0, 0.0]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "pushes"),
    [(0.0, 1.0, True), (0.0, -1.0, True), (0.5, 1.0, False), (0.5, -1.0, True), (-0.5, 1.0, True), (-0.5, -1.0, False)],
)
def test_clipping_stops_only_a_push_that_has_gone_far_enough(log_ratio, advantage, pushes):
    """Guards against clipping on the wrong side, which would freeze a token that moved the wrong way."""
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    grpo_loss(logprobs, logprobs.detach() - log_ratio, torch.tensor([advantage]), torch.ones(1, 1)).backward()
    assert logprobs.grad is not None
    gradient = logprobs.grad.item()
    assert (gradient != 0) == pushes
    assert gradient == pytest.approx(-advantage * math.exp(log_ratio) if pushes else 0.0)


def test_engine_and_trainer_agree_on_every_logprob(model, batch):
    """Guards against an off-by-one between logits and tokens, and against positions counted over padding."""
    start = batch.response_start_idx
    mask = batch.attention_mask[:, start:]
    trained = policy_logprobs(model, batch.input_ids, batch.attention_mask, start)
    torch.testing.assert_close(trained * mask, rollout_logprobs(batch), rtol=1e-4, atol=1e-5)


def test_a_step_makes_the_rewarded_answer_likelier(model, batch):
    """Guards against a wrong sign in the loss: the rewarded answer must gain and the others of its group lose."""
    start = batch.response_start_idx
    mask = batch.attention_mask[:, start:]
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])

    def likelihoods():
        with torch.no_grad():
            return (policy_logprobs(model, batch.input_ids, batch.attention_mask, start) * mask).sum(dim=1)

    before = likelihoods()
    gap = GRPOTrainer(model, learning_rate=1e-3, warm_up=1, mini_batches=1).learn(batch, rewards, group_size=4)
    change = likelihoods() - before
    assert gap < 1e-4
    assert change[0] > 0
    assert change[1:4].sum() < 0


def test_equal_rewards_leave_the_model_alone(model, batch):
    """Guards against a step without signal: Adam would still move by its momentum, or fail on an empty batch."""
    before = [parameter.clone() for parameter in model.parameters()]
    GRPOTrainer(model).learn(batch, torch.ones(8), group_size=4)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_rollout_without_logprobs_is_refused(model):
    """Guards against training on zeros in place of log-probabilities, which the ratio would hide."""
    with RolloutEngine(model) as engine:
        batch = engine.generate([[1, 5]], SamplingConfig(max_new_tokens=2, logprobs=False))
    with pytest.raises(ValueError, match="logprobs=True"):
        rollout_logprobs(batch)
