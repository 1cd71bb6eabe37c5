"""Checkpoints that are broken, or not whole."""

from __future__ import annotations

import json

import pytest
from batch_work import save_checkpoint

from liveroll import ConfigError
from liveroll.tools.checkpoint import load_checkpoint


def _more_layers(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3, "layer_types": None}))


BROKEN = {
    "a download that broke off": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:3000]),
        "cannot load the model ",
    ),
    "no weights at all": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "cannot load the model "),
    "no number of heads": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama", "num_attention_heads": 0}'),
        "cannot load the model ",
    ),
    "a layer too few": (_more_layers, r"would be random, the first model\.layers\.2\."),
    "a torn tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot load the tokenizer of "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint(name, tmp_path):
    """Guards against a traceback, text drawn from random weights, or a tokenizer that is said to be missing."""
    damage, message = BROKEN[name]
    damage(save_checkpoint(tmp_path))
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(str(tmp_path), "auto", "cpu")


def test_a_checkpoint_without_a_tokenizer(tmp_path):
    """Guards against token ids that cannot be generated from for want of a tokenizer."""
    for path in save_checkpoint(tmp_path).glob("tokenizer*"):
        path.unlink()
    assert load_checkpoint(str(tmp_path), "auto", "cpu").tokenizer is None
