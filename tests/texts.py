"""Tiny tokenizers that fit the zoo's vocabularies, made without any download."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)

_SPECIAL = ["<pad>", "<eos>", "<unk>"]
_LETTERS = [chr(code) for code in range(ord(" "), ord("~"))]


@cache
def character_tokenizer(pad: str | None = "<pad>", eos: str | None = "<eos>") -> PreTrainedTokenizerFast:
    """One token a character: three special tokens, then space to `}`; 97 in all, as many as the zoo has."""
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *_LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _wrap(backend, pad, eos)


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that a character may take up to four; 259 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend, "<pad>", "<eos>")


def _wrap(backend: Tokenizer, pad: str | None, eos: str | None) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(_SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=eos, unk_token="<unk>", clean_up_tokenization_spaces=False
    )
