"""Texts that are almost others: the same page under another header, a licence with another name in it.

Two texts are as similar as their shingles, runs of `SHINGLE` words without case and punctuation:

    J(a, b) = |shingles of both| / |shingles of either|                                         (Broder, 1997)

The `rensa` library estimates J by MinHash and finds candidates by locality-sensitive hashing: of `HASHES` numbers a
text, in bands of r, two texts of similarity J share a band with probability 1 - (1 - J^r)^(HASHES / r).
"""

import re
from collections.abc import Iterator

from perilune.core.errors import ConfigError
from perilune.core.text import printable
from perilune.data.shards import needed

SHINGLE = 5
HASHES = 256  # 1 KiB a text; the estimate of J errs by sqrt(J (1 - J) / HASHES), 0.025 at 0.8
FOUND = 0.99  # the share of texts just as similar as asked for that share a band with the other one
SEED = 42

# Scripts without spaces between words: Thai to Lao, Burmese, Khmer, kana, Han, Hangul; each letter counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[^\W{_UNSPACED}]+|[{_UNSPACED}]")


class NearDuplicates:
    """Texts that were kept, and whether another is almost one of them.

    similarity: from what J on it is.  Of those that are exactly so similar 99 % are found, of more similar ones more.
    Which of several similar texts is kept follows from their order alone: the first.
    Raises ConfigError for a similarity that is none, DataError without the package `rensa`.
    """

    def __init__(self, similarity: float) -> None:
        if not 0 < similarity <= 1:
            raise ConfigError(
                f"near_duplicates: expected a similarity above 0, up to 1, got {similarity}; 0.8 is usual"
            )
        self._sketch = needed("rensa", "near_duplicates").RMinHash
        self._kept = needed("rensa", "near_duplicates").RMinHashDeduplicator(
            similarity, HASHES, True, bands(similarity), SEED
        )

    def __len__(self) -> int:
        """How many texts were kept."""
        return self._kept.len()

    def keep(self, name: str, text: str) -> str | None:
        """Keeps `text` under a name of its own; or says which text that was kept it is almost, and does not."""
        name = printable(name)
        sketch = self._sketch(HASHES, SEED)
        sketch.update(list(shingles(text)))
        if found := self._kept.get_duplicates(sketch):
            return min(found)
        self._kept.add(name, sketch)
        return None


def shingles(text: str) -> Iterator[str]:
    """Every run of `SHINGLE` words; all words of a shorter text, the text itself where it has none."""
    words = _WORD.findall(text.lower())
    if len(words) <= SHINGLE:
        yield " ".join(words) or printable(text)
        return
    for i in range(len(words) - SHINGLE + 1):
        yield " ".join(words[i : i + SHINGLE])


def bands(similarity: float) -> int:
    """The fewest bands, each of a power of 2 hashes, that find a share `FOUND` of texts just so similar."""
    rows = HASHES
    while rows > 1 and 1 - (1 - similarity**rows) ** (HASHES // rows) < FOUND:
        rows //= 2
    return HASHES // rows
