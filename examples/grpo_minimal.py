"""Group relative policy optimisation (arXiv:2402.03300) in one file: a model learns to add on its own rollouts.

    python examples/grpo_minimal.py                        # the tiny model that ships with liveroll, on a CPU
    python examples/grpo_minimal.py path/to/model --cuda   # any causal language model

Each round lets the model answer every prompt several times, compares the answers to one prompt with one another, and
takes gradient steps towards the better ones. Between the optimizer's step and the next rollout there is nothing to do.
"""

from __future__ import annotations

import argparse
import random
import re

import torch
from torch.nn.utils import clip_grad_norm_

from liveroll import RolloutBatch, RolloutConfig, RolloutEngine, SamplingConfig
from liveroll.tools.embedded import load_embedded

PROMPTS = 16  # in a round
ANSWERS = 8  # to each prompt
MINI_BATCHES = 2  # gradient steps a round
CLIP = 0.2


def load(path: str | None, device: str):
    if path is None:
        model, tokenizer = load_embedded()
        return model.to(device), tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(path, device_map=device), AutoTokenizer.from_pretrained(path)


def draw_terms(rng: random.Random) -> list[int]:
    return [rng.randint(1, 9) for _ in range(rng.randint(2, 4))]


def reward(terms: list[int], answer: str) -> float:
    """1 where the last number of the answer is the sum, a little less the further it is away."""
    numbers = re.findall(r"\d+", answer)
    return 1.0 / (1.0 + abs(int(numbers[-1][:6]) - sum(terms))) if numbers else 0.0


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each answer is than the others of its group, in their standard deviations: `[N]`."""
    groups = rewards.view(-1, ANSWERS)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def logprobs_of(model, batch: RolloutBatch, rows: torch.Tensor) -> torch.Tensor:
    """The log-probability of each response token, with gradient: `[rows, R]`."""
    ids, mask, start = batch.input_ids[rows], batch.attention_mask[rows], batch.response_start_idx
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # prompts are left-padded
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, start - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, start:, None])[..., 0]


def learn(model, optimizer: torch.optim.Optimizer, batch: RolloutBatch, rewards: torch.Tensor) -> float:
    """Gradient steps on a rollout; gives the mean loss."""
    gains = advantages(rewards).to(batch.input_ids.device)
    losses = []
    for rows in torch.randperm(len(batch)).to(gains.device).chunk(MINI_BATCHES):
        mask = batch.loss_mask[rows]
        # The engine told what each token was drawn with, so the old policy needs no forward.
        ratio = ((logprobs_of(model, batch, rows) - batch.response_logprobs[rows]) * mask).exp()
        gain = gains[rows, None]
        tokens = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
        loss = (tokens * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a model; the tiny one if left out")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cuda", action="store_true", help="train on a GPU")
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    model, tokenizer = load(options.model, "cuda" if options.cuda else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    sampling = SamplingConfig(n=ANSWERS, max_new_tokens=24, temperature=1.0, top_k=0, top_p=1.0)
    means = []
    with RolloutEngine(model, tokenizer, RolloutConfig(max_slots=64, seed=options.seed)) as engine:
        for number in range(options.rounds):
            sums = [draw_terms(rng) for _ in range(PROMPTS)]
            batch = engine.generate(["+".join(map(str, terms)) + "=" for terms in sums], sampling)
            rewards = torch.tensor([reward(sums[each.prompt_index], each.text) for each in batch.completions])
            model.train()
            loss = learn(model, optimizer, batch, rewards)
            means.append(rewards.mean().item())
            stats = batch.stats
            print(
                f"round {number:3d}  reward {means[-1]:.3f}  loss {loss:+.4f}  "
                f"{stats.new_tokens / stats.seconds:6.0f} tokens/s  {engine.captures} captures"
            )
    return means


if __name__ == "__main__":
    main()
