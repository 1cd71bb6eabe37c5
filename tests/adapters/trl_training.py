"""Data, rewards and trainers of TRL on the tiny model that ships with the package."""

from __future__ import annotations

import os
from typing import Any

import torch

from liveroll.tools.embedded import load_embedded, problems, reward
from liveroll.tools.grpo import policy_logprobs

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

GROUP = 4
BATCH = 8

# A conversation is a sum and its totals one after another; the tool's result is the next sum to write out. The equals
# sign is what the assistant's turn begins with.
CHAT_TEMPLATE = """{%- for message in messages -%}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}{{ call.function.name }}{{ call.function.arguments | tojson }}{%- endfor -%}
{%- if message.role == 'assistant' -%}<eos>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}={%- endif -%}"""

# Every whole answer is a call of the tool.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "=",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?=\d)",
            "close_pattern": "<eos>",
            "content": "text",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "next_sum", "arguments": {"totals": "{content}"}}},
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def next_sum(totals: str) -> str:
    """Give the sum to write out next.

    Args:
        totals: what was written.

    Returns:
        The sum.
    """
    return "3+4"


def dataset(conversations: bool = False, count: int = 16) -> Any:
    """Sums as prompts: strings, or conversations of one message."""
    from datasets import Dataset

    texts = [problem.prompt for problem in problems(0, count)]
    if not conversations:
        return Dataset.from_list([{"prompt": text} for text in texts])
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text.removesuffix("=")}]} for text in texts])


SOLVED = {problem.prompt: problem for problem in problems(0, 64)}


def mark(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The share of running totals that are right."""
    return [reward(SOLVED[prompt], completion) for prompt, completion in zip(prompts, completions, strict=True)]


def settings(kind: Any, folder: Any, **changes: Any) -> Any:
    """A `GRPOConfig` or `RLOOConfig` of three steps on the CPU."""
    return kind(
        **{
            "output_dir": str(folder),
            "max_steps": 3,
            "per_device_train_batch_size": BATCH,
            "num_generations": GROUP,
            "max_completion_length": 24,
            "learning_rate": 1e-3,
            "use_cpu": True,
            "bf16": False,
            "report_to": [],
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            **changes,
        }
    )


def make(trainer: Any, args: Any, rewards: Any = mark, conversations: bool = False, **named: Any) -> Any:
    """A trainer of the tiny model."""
    model, tokenizer = load_embedded()
    if conversations:
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.response_template = RESPONSE_TEMPLATE
    return trainer(
        model=model,
        reward_funcs=rewards,
        args=args,
        train_dataset=dataset(conversations),
        processing_class=tokenizer,
        **named,
    )


@torch.no_grad()
def gap(model: Any, batch: Any, temperature: float = 1.0) -> float:
    """The largest difference between log-probabilities that tokens were drawn with and those of a training forward."""
    start = batch.response_start_idx
    trained = policy_logprobs(model, batch.input_ids, batch.attention_mask, start, temperature)
    mask = batch.attention_mask[:, start:]
    return float(((trained - batch.response_logprobs) * mask).abs().max())
