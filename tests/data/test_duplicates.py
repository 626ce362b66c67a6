import random
import sys
from pathlib import Path

import pytest

from perilune.core.errors import ConfigError, DataError
from perilune.data.corpus import text_files
from perilune.data.duplicates import HASHES, NearDuplicates, bands, shingles
from perilune.data.source import TextSource, open_source

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aeiou" for c in "lmnrst"]


def text(words: int, seed: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=words)


def changed(words: list[str], share: float, seed: int) -> list[str]:
    """With so many of its words replaced, spread evenly: five shingles each are others then."""
    draw, every = random.Random(seed), round(1 / share)
    return [draw.choice(WORDS) + "x" if i % every == every // 2 else word for i, word in enumerate(words)]


def similarity(a: str, b: str) -> float:
    """The definition."""
    one, other = set(shingles(a)), set(shingles(b))
    return len(one & other) / len(one | other)


def test_shingles_are_runs_of_five_words() -> None:
    assert list(shingles("One, two; THREE four-five (six)!")) == ["one two three four five", "two three four five six"]
    assert list(shingles("just four words here")) == ["just four words here"]
    assert list(shingles("--- *** ---")) == ["--- *** ---"]
    assert list(shingles("")) == [""]
    assert list(shingles("我爱北京天安门")) == [
        "我 爱 北 京 天",
        "爱 北 京 天 安",
        "北 京 天 安 门",
    ]  # no spaces to go by
    assert list(shingles("naïve ÉTÉ x_1 42 ωμέγα ok")) == ["naïve été x_1 42 ωμέγα", "été x_1 42 ωμέγα ok"]


@pytest.mark.parametrize("limit", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_what_is_just_similar_enough(limit: float) -> None:
    count = bands(limit)
    rows = HASHES // count
    assert count * rows == HASHES
    assert 1 - (1 - limit**rows) ** count >= 0.99
    if rows < HASHES:
        assert 1 - (1 - limit ** (2 * rows)) ** (count // 2) < 0.99


def test_similar_texts_are_found_and_others_are_not() -> None:
    """Against the definition, over 300 pairs of all similarities; the estimate may err near the limit."""
    found, seen = [], []
    for i in range(300):
        words = text(400, i)
        a, b = " ".join(words), " ".join(changed(words, 1 / (4 + i), -i))
        index = NearDuplicates(0.8)
        assert index.keep("a", a) is None
        found.append(index.keep("b", b) == "a")
        seen.append(similarity(a, b))
    assert min(seen) < 0.3
    assert max(seen) > 0.95
    assert all(yes for yes, j in zip(found, seen) if j > 0.9)
    assert not any(yes for yes, j in zip(found, seen) if j < 0.7)
    assert sum(0.7 < j < 0.9 for j in seen) > 50
    assert abs(sum(yes == (j >= 0.8) for yes, j in zip(found, seen)) / 300 - 1) < 0.1


def test_layout_case_and_punctuation_make_no_other_text() -> None:
    index = NearDuplicates(1.0)
    words = text(100, 1)
    assert index.keep("a", " ".join(words)) is None
    assert index.keep("b", "\n\n".join(word.upper() + "!" for word in words)) == "a"
    assert index.keep("c", " ".join([*words, "more"])) is None
    assert len(index) == 2


def test_the_first_is_kept_and_the_same_everywhere() -> None:
    base = [text(200, i) for i in range(30)]
    texts = [
        (f"{i:03}.{n}", " ".join(changed(words, 1 / 40, 7 * n) if n else words))
        for n in range(3)
        for i, words in enumerate(base)
    ]
    index = NearDuplicates(0.6)
    said = {name: index.keep(name, words) for name, words in texts}
    assert {name for name, other in said.items() if other is None} == {f"{i:03}.0" for i in range(30)}
    assert all(other is None or other == f"{name[:3]}.0" for name, other in said.items())
    again = NearDuplicates(0.6)
    assert {name: again.keep(name, words) for name, words in texts} == said


def test_a_corpus_without_near_copies(tmp_path: Path) -> None:
    """What is nearly held out is not trained on; other copies and reasons are as before."""
    for i in range(40):
        words = text(300, i)
        (tmp_path / f"{i:02}-a.txt").write_text(" ".join(words))
        (tmp_path / f"{i:02}-b.txt").write_text(" ".join(changed(words, 1 / 100, i)))
    (tmp_path / "99.txt").write_text((tmp_path / "00-a.txt").read_text())
    plain, found = text_files(tmp_path, held_out=0.3), text_files(tmp_path, held_out=0.3, near_duplicates=0.8)
    names = [{d.name[:2] for d in side} for side in (plain.train, plain.held_out)]
    assert names[0] & names[1]  # without it some are on both sides
    assert {d.name for d in found.train + found.held_out} == {f"{i:02}-a.txt" for i in range(40)}
    assert "00-b.txt: nearly the text of 00-a.txt" in found.skipped
    assert "99.txt: the same text as 00-a.txt" in found.skipped
    assert len(found.skipped) == 41
    sides = {d.name: "train" for d in plain.train}
    assert all((sides.get(d.name) == "train") == (d in found.train) for d in found.train + found.held_out)
    source = TextSource(path=str(tmp_path), held_out=0.3, near_duplicates=0.8)
    opened = open_source(source)
    assert (opened.train, opened.held_out) == (found.train, found.held_out)


def test_mistakes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (0, -0.5, 1.01, float("nan")):
        with pytest.raises(ConfigError, match="near_duplicates: expected a similarity above 0, up to 1, got"):
            NearDuplicates(value)
        with pytest.raises(ConfigError, match="near_duplicates: expected a similarity above 0, up to 1, got"):
            TextSource(near_duplicates=value)
    for stream in ({"path": "x", "streamed": True}, {"path": "hf://datasets/a/b"}):
        with pytest.raises(ConfigError, match=r"null for a stream, which remembers no text, got 0\.8; see perilune"):
            TextSource(**stream, near_duplicates=0.8)
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(DataError, match=r"expected the package rensa, found none; pip install 'perilune\[data\]'"):
        NearDuplicates(0.8)


def test_what_has_no_utf8_has_a_sketch_and_a_name() -> None:
    """Files may be named in other bytes, and JSON can spell half of a pair."""
    kept = NearDuplicates(0.8)
    assert kept.keep("odd\udcfe.txt", "a text that is named oddly") is None
    assert kept.keep("b", "A text that is named, oddly") == "odd\\udcfe.txt"
    assert [kept.keep("c", "\ud800 !"), kept.keep("d", "\ud800 !"), kept.keep("e", "\ud801 !")] == [None, "c", None]
