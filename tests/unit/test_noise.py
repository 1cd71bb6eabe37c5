"""The noise is Gumbel, independent between streams, positions and tokens, and the same wherever it is made."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from liveroll.decode.noise import gumbel_noise

WORD = 2**32
GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
EDGES = [0, 1, -1, 2**31 - 1, -(2**31)]


def mix(word: int) -> int:
    word ^= word >> 16
    word = word * FIRST % WORD
    word ^= word >> 13
    word = word * SECOND % WORD
    return word ^ (word >> 16)


def unmix(word: int) -> int:
    word ^= word >> 16
    word = word * pow(SECOND, -1, WORD) % WORD
    word ^= (word >> 13) ^ (word >> 26)
    word = word * pow(FIRST, -1, WORD) % WORD
    return word ^ (word >> 16)


def word_of(low: int, high: int, position: int, token: int) -> int:
    """The hash in Python's integers, which neither wrap around nor have a sign."""
    low, high = low % WORD, high % WORD
    row = mix(mix(low ^ position * GOLDEN % WORD) ^ high)
    return mix(mix(token * GOLDEN % WORD ^ row) ^ low)


def stream_to(word: int, low: int, position: int, token: int) -> tuple[int, int]:
    """The stream whose hash for a position and token is `word`."""
    row = unmix(unmix(word) ^ low) ^ token * GOLDEN % WORD
    high = unmix(row) ^ mix(low ^ position * GOLDEN % WORD)
    return signed(low), signed(high)


def signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word


def gumbel_of(word: int) -> float:
    uniform = (word % 2**31 + 0.5) / 2**31
    return -math.log(-math.log1p(-uniform))


def noise_of(keys, positions, vocab_size):
    return gumbel_noise(torch.tensor(keys), torch.tensor(positions), vocab_size)


def many(rows: int, vocab_size: int, seed: int = 0):
    """Noise of random streams and positions."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator)
    return gumbel_noise(stream, torch.randint(0, 10_000, (rows,), generator=generator), vocab_size)


def test_equals_the_hash_in_plain_integers():
    """Guards against shifts that drag the sign along, and products that do not wrap: a device may do either."""
    keys = [(low, high) for low in EDGES for high in EDGES]
    positions = [0, 1, 7, 4095, 2**31 - 1] * 5
    noise = noise_of(keys, positions, 50)
    expected = [
        [gumbel_of(word_of(low, high, position, token)) for token in range(50)]
        for (low, high), position in zip(keys, positions, strict=True)
    ]
    np.testing.assert_allclose(noise.numpy(), np.array(expected), rtol=1e-5, atol=1e-5)


def test_extreme_words_stay_finite():
    """Guards against an infinite noise, which would choose or exclude its token whatever the model says."""
    words = [0, 2**31 - 1, 2**31, 2**32 - 1]
    keys = [stream_to(word, low=12345, position=9, token=3) for word in words]
    assert [word_of(*key, 9, 3) for key in keys] == words
    noise = noise_of(keys, [9] * 4, 4)[:, 3]
    assert noise.isfinite().all()
    # Half a step of 2^-31 at the one end, and 2^-24 at the other, where float32 has no more between it and 1.
    largest, smallest = -math.log(2.0**-32), -math.log(24 * math.log(2))
    torch.testing.assert_close(noise, torch.tensor([largest, smallest] * 2))


def test_independent_of_the_batch_and_the_vocabulary():
    """Guards against a sample that changes with the rows beside it, or where a head is padded."""
    keys, positions = [(1, 2), (-3, 4), (5, -6)], [10, 11, 12]
    noise = noise_of(keys, positions, 300)
    assert noise.dtype == torch.float32
    assert noise.equal(noise_of(keys, positions, 300))
    assert noise.flip(0).equal(noise_of(keys[::-1], positions[::-1], 300))
    for row in range(3):
        assert noise[row].equal(noise_of(keys[row : row + 1], positions[row : row + 1], 300)[0])
    assert noise[:, :77].equal(noise_of(keys, positions, 77))


def test_gumbel_over_tokens_streams_and_positions():
    """Guards against noise of another distribution along any of its three keys, which would bend every sample."""
    count = 20_000
    streams = torch.arange(count)[:, None] * torch.tensor([[0, 1]]) + torch.tensor([[77, 0]])
    along = {
        "tokens": noise_of([(77, 0)], [5], count)[0],
        "streams": gumbel_noise(streams, torch.full((count,), 5), 3)[:, 2],
        "positions": gumbel_noise(torch.tensor([[77, 0]]).expand(count, 2), torch.arange(count), 3)[:, 2],
        "random": many(400, 50).flatten(),
    }
    for name, noise in along.items():
        values = noise.double().numpy()
        uniform = -np.expm1(-np.exp(-values))
        assert stats.kstest(values, "gumbel_r").pvalue > 1e-3, name
        assert stats.kstest(uniform, "uniform").pvalue > 1e-3, name
        counts, _ = np.histogram(uniform, bins=256, range=(0, 1))
        assert stats.chisquare(counts).pvalue > 1e-3, name


def test_small_uniforms_stay_apart():
    """Guards against a coarse tail: the largest noises decide samples, and equal ones would favour low token ids."""
    tail = many(40, 50_000).flatten()
    tail = tail[tail > -math.log(1e-4)]
    assert 100 < len(tail) < 400
    assert len(tail.unique()) >= len(tail) - 2


def neighbours():
    """Pairs of rows that differ as little as two rows can."""
    base = (0x1234567, 0x7654321)
    yield "position", (base, 6), (base, 7)
    yield "first position", (base, 0), (base, 1)
    yield "swapped keys", (base, 6), (base[::-1], 6)
    for bit in (0, 1, 15, 16, 30):
        yield f"low bit {bit}", (base, 6), ((base[0] ^ 1 << bit, base[1]), 6)
        yield f"high bit {bit}", (base, 6), ((base[0], base[1] ^ 1 << bit), 6)
    yield "zero", ((0, 0), 0), ((0, 0), 1)
    yield "key for position", ((0, 0), 1), ((1, 0), 0)


@pytest.mark.parametrize(("one", "other"), [pair[1:] for pair in neighbours()], ids=[pair[0] for pair in neighbours()])
def test_neighbouring_rows_are_uncorrelated(one, other):
    """Guards against streams that repeat or follow one another: samples of a group would be alike."""
    count = 20_000
    noise = noise_of([one[0], other[0]], [one[1], other[1]], count).double().numpy()
    uniform = np.exp(-np.exp(-noise))
    limit = 4 / math.sqrt(count)
    for shift in (0, 1, 2, -1):
        assert abs(np.corrcoef(uniform[0], np.roll(uniform[1], shift))[0, 1]) < limit
    assert abs(np.corrcoef(uniform[0, :-1], uniform[0, 1:])[0, 1]) < limit


def test_choices_at_neighbouring_positions_are_independent():
    """Guards against a token that makes another one likelier at the next position, whatever the model says."""
    count, vocab = 20_000, 6
    stream = torch.tensor([[9, 9]]).expand(count, 2)
    choices = gumbel_noise(stream, torch.arange(count), vocab).argmax(dim=1).numpy()
    assert stats.chisquare(np.bincount(choices, minlength=vocab)).pvalue > 1e-3
    for lag in (1, 2, 4):
        pairs = np.zeros((vocab, vocab))
        np.add.at(pairs, (choices[:-lag], choices[lag:]), 1)
        assert stats.chi2_contingency(pairs).pvalue > 1e-3


def test_large_vocabularies():
    """Guards against a maximum that is bounded, biased or infinite where there are many tokens."""
    vocab = 150_000
    largest, place, smallest = [], [], []
    for seed in range(8):
        noise = many(32, vocab, seed)
        assert noise.isfinite().all()
        largest.append(noise.max(dim=1).values)
        place.append(noise.argmax(dim=1))
        smallest.append(noise.min())
    # The largest of V standard Gumbels is a Gumbel around ln V.
    maxima = torch.cat(largest).double().numpy()
    assert stats.kstest(maxima - math.log(vocab), "gumbel_r").pvalue > 1e-3
    assert maxima.max() < 22.2
    assert min(smallest) > -3.0
    assert stats.kstest(torch.cat(place).numpy() / vocab, "uniform").pvalue > 1e-3
