"""A batch generation to run: a tiny checkpoint, a prompts file, an output file, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from liveroll.cli import app

VOCABULARY = ["<pad>", "<end>", "<unk>", *"abcdefghijklmnopqrstuvwxyz =+?:"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "{{ m.role }}: {{ m.content }} {% endfor %}assistant: "
)


def save_checkpoint(folder: Path) -> Path:
    """Save a random Llama of two layers that reads single characters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(WordLevel({word: place for place, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    backend.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


class Work:
    """A prompts file and an output file, and the command that leads from one to the other."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.prompts = folder / "in.jsonl"
        self.out = folder / "out.jsonl"
        self.checkpoint = checkpoint

    def ask(self, *lines: Any) -> None:
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")

    def command(self, *options: str) -> list[str]:
        given = {"--model": self.checkpoint, "--prompts": self.prompts, "--out": self.out, "--dtype": "float32"}
        return ["generate", *(str(part) for option in given.items() for part in option), *options]

    def run(self, *options: str, expect: int = 0) -> str:
        """Run in this process; returns what was written to stderr."""
        result = CliRunner().invoke(app, self.command(*options))
        assert result.exit_code == expect, result.output + repr(result.exception)
        return result.stderr

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Run in a process of its own, as a user would."""
        program = [sys.executable, "-c", "from liveroll.cli import main; main()", *self.command(*options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(program, stderr=subprocess.PIPE, text=True, env=environment)

    def rows(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.out.read_text("utf-8").splitlines()]
        return sorted(rows, key=lambda row: row["index"])

    def wait_for_rows(self, count: int, process: subprocess.Popen[str]) -> None:
        while not self.out.exists() or self.out.read_bytes().count(b"\n") < count:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)


def tokens_of(rows: list[dict[str, Any]]) -> list[list[list[int]]]:
    """The tokens of every completion; log-probabilities may differ in their last digit with the batch."""
    return [[entry["token_ids"] for entry in row["completions"]] for row in rows]
