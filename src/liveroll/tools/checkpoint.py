"""Loading a model and its tokenizer by name, and telling whether a checkpoint's files have changed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from liveroll.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
TINY = "tiny"
"""The name of the model that ships with the package, unless there is a folder of that name."""

_PATTERNS = ("*.safetensors", "*.bin", "*config.json", "tokenizer*", "chat_template*", "vocab*", "merges.txt")
_BLOCK = 1 << 16
_BLOCKS = 16


@dataclass(frozen=True)
class Checkpoint:
    """A model in eval mode on its device, and its tokenizer if it ships one."""

    model: Any
    tokenizer: Any | None


def load_checkpoint(name: str, dtype: str, device: str) -> Checkpoint:
    """Load a causal language model.

    Args:
        name: a checkpoint folder, the id of a model on the Hub, or `tiny`.
        dtype: one of `DTYPES`; `auto` keeps the stored one.
        device: `auto` for a GPU if there is one, or a torch device.

    Raises:
        ConfigError: there is no such model, dtype or device, or its files cannot be read or are not whole.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    try:
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    name = _folder_of(name)
    stored = "auto" if dtype == "auto" else getattr(torch, dtype)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(name, dtype=stored, output_loading_info=True)
        model = model.to(place).eval()
    except Exception as error:  # files may be broken in any way
        missing = "" if Path(name).is_dir() else "there is no such folder, and as the id of a model on the Hub: "
        raise ConfigError(f"cannot load the model {name!r}: {missing}{error}") from error
    if lacking := sorted(info["missing_keys"]):
        raise ConfigError(
            f"cannot load the model {name!r}: {len(lacking)} of its weights are not in its files and would be random, "
            f"the first {lacking[0]}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        if any(Path(name).glob("tokenizer*")):
            raise ConfigError(f"cannot load the tokenizer of {name!r}: {error}") from error
        tokenizer = None
    return Checkpoint(model, tokenizer)


def locate_checkpoint(name: str) -> str:
    """Give the absolute path of a checkpoint folder; a Hub id, and `tiny`, as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def digest_checkpoint(name: str) -> str | None:
    """Hash a checkpoint folder, so that one written over by another is noticed; None for a Hub id.

    Files of up to 1 MiB count whole; of a larger one the size and 16 evenly spaced blocks of 64 KiB, which any
    training step changes. So it stays cheap beside loading the model, and a copy of the folder hashes the same.
    """
    folder = Path(_folder_of(name))
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            if size <= _BLOCK * _BLOCKS:
                digest.update(file.read())
                continue
            for block in range(_BLOCKS):
                file.seek((size - _BLOCK) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _folder_of(name: str) -> str:
    """The folder that `tiny` is in; any other name as it is."""
    tiny = name == TINY and not Path(name).is_dir()
    return str(files("liveroll") / "assets" / "sums") if tiny else name
