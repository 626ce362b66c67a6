import gzip
import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from perilune.core.errors import ConfigError, DataError
from perilune.train.baselines import KneserNey, compressors, kneser_ney


class SlowKneserNey:
    """The equations with dictionaries, one context at a time: the oracle."""

    def __init__(self, train: bytes, order: int) -> None:
        self.order = order
        self.counts: dict[int, Counter[bytes]] = {}
        self.counts[order + 1] = Counter(train[i : i + order + 1] for i in range(len(train) - order))
        for length in range(order, 0, -1):
            self.counts[length] = Counter(gram[1:] for gram in self.counts[length + 1])
        self.followers: dict[bytes, dict[bytes, int]] = defaultdict(dict)  # by context, of every length
        for length in range(1, order + 2):
            for gram, count in self.counts[length].items():
                self.followers[gram[:-1]][gram[-1:]] = count

    def discount(self, length: int, count: int) -> float:
        if count == 0:
            return 0.0
        n = Counter(self.counts[length].values())
        i = min(count, 3)
        if not n[i] or not n[1] + 2 * n[2]:
            return 0.75
        d = i - (i + 1) * n[1] / (n[1] + 2 * n[2]) * n[i + 1] / n[i]
        return d if 0 < d < i else 0.75

    def probability(self, context: bytes, byte: bytes) -> float:
        shorter = self.probability(context[1:], byte) if context else 1 / 256
        followers = self.followers.get(context)
        if not followers:
            return shorter
        length = len(context) + 1
        total = sum(followers.values())
        kept = followers.get(byte, 0) - self.discount(length, followers.get(byte, 0))
        passed_down = sum(self.discount(length, count) for count in followers.values())
        return (kept + passed_down * shorter) / total


def speech(length: int, seed: int = 0) -> bytes:
    words = [b"the ", b"cat ", b"sat\n", b"that ", "é ".encode(), b"a", b"than ", b"chat "]
    rng = random.Random(seed)
    return b"".join(rng.choice(words) for _ in range(length))[:length]


@pytest.mark.parametrize("order", [0, 1, 2, 3, 5, 7])
@pytest.mark.parametrize("length", [8, 30, 400])
def test_kneser_ney_is_the_textbook_one(order: int, length: int) -> None:
    train, test = speech(length), speech(200, seed=1) + b"unseen: \x00\xff"
    slow = SlowKneserNey(train, order)
    padded = b"\n" * order + test
    expected = [slow.probability(padded[i : i + order], test[i : i + 1]) for i in range(len(test))]
    windows = np.lib.stride_tricks.sliding_window_view(np.frombuffer(padded, dtype=np.uint8), order + 1)
    np.testing.assert_allclose(KneserNey(train, order).probability(windows), expected, rtol=1e-12)
    assert kneser_ney(train, test, order) == pytest.approx(-sum(map(math.log2, expected)) / len(test), rel=1e-12)


@pytest.mark.parametrize("order", [0, 2, 5, 7])
def test_probabilities_of_all_bytes_sum_to_one(order: int) -> None:
    train = speech(3000)
    model = KneserNey(train, order)
    seen = [train[i : i + order] for i in range(0, 100, 7)]
    unseen = [bytes(np.random.default_rng(i).integers(0, 256, order, dtype=np.uint8)) for i in range(15)]
    half_seen = [b"\xfe" * (order // 2) + train[i : i + order - order // 2] for i in range(15)]
    for context in seen + unseen + half_seen:
        windows = np.array([[*context, byte] for byte in range(256)], dtype=np.uint8)
        probabilities = model.probability(windows)
        assert probabilities.min() > 0
        assert probabilities.sum() == pytest.approx(1, rel=1e-12)


def test_longer_context_helps_where_there_is_something_to_learn() -> None:
    train, test = speech(20_000), speech(2_000, seed=1)
    bits = [kneser_ney(train, test, order) for order in range(4)]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 1.6  # eight words, 3 bits each, of some 3.7 bytes
    noise = bytes(np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8))
    assert kneser_ney(noise, noise[::-1], 5) > 7.9


def test_compressors_judge_the_held_out_text_alone() -> None:
    train, test = speech(5_000), speech(5_000, seed=1)
    bits = compressors(train, test)
    assert set(bits) == {"gzip -9", "xz -9e", "order-5 Kneser-Ney"}
    assert bits["gzip -9"] == 8 * len(gzip.compress(test, 9, mtime=0)) / len(test)
    assert bits["order-5 Kneser-Ney"] == kneser_ney(train, test, 5)
    other = compressors(train[::-1], test)
    assert other["gzip -9"] == bits["gzip -9"]
    assert other["xz -9e"] == bits["xz -9e"]
    assert other["order-5 Kneser-Ney"] > bits["order-5 Kneser-Ney"]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match="held_out_text: expected at least one byte"):
        compressors(b"some text", b"")
    with pytest.raises(DataError, match="train: expected more than 5 bytes"):
        kneser_ney(b"short", b"test")
    with pytest.raises(ConfigError, match="order: expected 0 to 7"):
        KneserNey(b"a" * 100, 8)
