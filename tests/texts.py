"""Tiny tokenizers that fit the zoo's vocabularies, made without any download."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + ';' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)

CORPUS = (
    "The answer is 42, and the answer to the question is that there is no answer. Stop here. STOP. "
    "</think> Observation: "
    "日本語のテキスト、ここで終わり。 Привет, мир! déjà vu, naïve café 🙂🙃🙂\n\nQuestion: what is the answer?\n"
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


@cache
def bpe_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE as most models have it: tokens of several characters, and of parts of one."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=_SPECIAL, show_progress=False
    )
    backend.train_from_iterator([CORPUS] * 3, trainer)
    return _wrap(backend, "<pad>", "<eos>")


@cache
def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama's and Gemma's: spaces are part of words, and what has no token of its own is written in bytes."""
    words = [
        "▁",
        "▁the",
        "▁The",
        "▁stop",
        "st",
        "op",
        "▁a",
        "▁an",
        "the",
        "\n",
        "\n\n",
        "▁▁",
        "é",
        ".",
        "<",
        ">",
        "end",
    ]
    pieces = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words, *"abcdefghijklmnopqrstuvwxyzT"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaced = decoders.Replace("▁", " ")
    backend.decoder = decoders.Sequence([spaced, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return _wrap(backend, "<pad>", "<eos>")


@cache
def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    """As BERT's: words are joined by spaces that no token holds, and the text is tidied up afterwards."""
    pieces = [*_SPECIAL, "the", "##e", "##nd", "stop", "##s", ".", ",", "n", "'", "t", "do", "not", "is", "##.", "!"]
    backend = Tokenizer(models.WordPiece({piece: index for index, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    wrapped = _wrap(backend, "<pad>", "<eos>")
    wrapped.clean_up_tokenization_spaces = True
    return wrapped


def _wrap(backend: Tokenizer, pad: str | None, eos: str | None) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(_SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=eos, unk_token="<unk>", clean_up_tokenization_spaces=False
    )
