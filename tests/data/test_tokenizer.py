import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError, DataError
from perilune.data.tokenizer import END_OF_TEXT, ByteBPE

TEXTS = [
    Path(__file__).read_text(encoding="utf-8"),
    "def f(x):\n        return x\n\n" * 20,
    "naïve café, 東京 🎈🎈 " * 10,
]
MIXED = "for i in range(3):\n        print('naïve', \"東京\", '🎈👩‍👩‍👧')\r\n\t\x00\x7f\u00a0\ufeff  "


@pytest.fixture(scope="module")
def bpe() -> ByteBPE:
    return ByteBPE.train(TEXTS, vocab_size=600, special_tokens=["<|open|>", "<|close|>"])


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(bpe: ByteBPE, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.byte_lengths()[ids].sum() == len(text.encode())
    assert not set(ids) & set(bpe.special_ids.values())


def test_every_byte_has_a_token_of_length_one(bpe: ByteBPE) -> None:
    lengths = bpe.byte_lengths()
    alone = {bpe.decode_bytes([i]) for i in np.flatnonzero(lengths == 1)}
    assert alone == {bytes([byte]) for byte in range(256)}
    assert lengths.shape == (bpe.vocab_size,)
    assert lengths.max() > 4


def test_byte_lengths_sum_to_the_text(bpe: ByteBPE) -> None:
    assert bpe.byte_lengths()[bpe.encode(MIXED)].sum() == len(MIXED.encode())
    assert bpe.byte_lengths()[bpe.eos_id] == 0
    bpe.byte_lengths()[:] = 7  # a caller's own copy
    assert bpe.byte_lengths()[bpe.eos_id] == 0


def test_specials_take_the_last_ids(bpe: ByteBPE) -> None:
    size = bpe.vocab_size
    assert size == 600
    assert bpe.special_ids == {END_OF_TEXT: size - 3, "<|open|>": size - 2, "<|close|>": size - 1}
    assert bpe.eos_id == size - 3


def test_text_that_spells_a_special_token_stays_text(bpe: ByteBPE, tmp_path: Path) -> None:
    bpe.save(tmp_path)
    for tokenizer in (bpe, ByteBPE.load(tmp_path)):
        for token in tokenizer.special_ids:
            for text in (token, f"a{token}b", f"  {token}\n{token} ", token * 3):
                for ids in (tokenizer.encode(text), *tokenizer.encode_batch([text, text])):
                    assert not set(ids) & set(tokenizer.special_ids.values())
                    assert tokenizer.decode(ids) == text
        inner = tokenizer.encode_documents([f"x{END_OF_TEXT}y"])[0]
        assert (inner == tokenizer.eos_id).sum() == 2


def test_nothing_is_added_unasked(bpe: ByteBPE) -> None:
    assert bpe.encode("") == []
    assert bpe.encode_batch([]) == []
    assert bpe.encode_batch(["", "a b", MIXED]) == [[], bpe.encode("a b"), bpe.encode(MIXED)]


def test_documents_open_and_end_with_end_of_text(bpe: ByteBPE) -> None:
    for text, ids in zip(["", MIXED], bpe.encode_documents(["", MIXED])):
        assert ids.dtype == np.int32
        assert ids.tolist() == [bpe.eos_id, *bpe.encode(text), bpe.eos_id]
        assert bpe.decode(ids, skip_special=True) == text
        assert bpe.decode(ids) == END_OF_TEXT + text + END_OF_TEXT


def test_cut_characters_do_not_stop_decoding(bpe: ByteBPE) -> None:
    character = "\U000e0100"  # not in the texts, nor are its first two bytes: four tokens
    ids = bpe.encode(character)
    assert len(ids) == 4
    assert bpe.decode(ids[:3]) == "\ufffd"
    assert bpe.decode([*ids[1:], *bpe.encode("a")]).endswith("\ufffda")
    assert b"".join(bpe.decode_bytes([i]) for i in ids).decode() == character


@pytest.mark.parametrize("index", [-1, 600, 10**6])
def test_unknown_ids_are_refused(bpe: ByteBPE, index: int) -> None:
    with pytest.raises(DataError, match="ids: expected 0 to 599"):
        bpe.decode([1, index])


def test_arrays_decode_like_lists(bpe: ByteBPE) -> None:
    assert bpe.decode(np.array(bpe.encode(MIXED))) == MIXED


def test_indentation_is_one_token(bpe: ByteBPE) -> None:
    tokens = [bpe.decode_bytes([i]) for i in bpe.encode("def f(x):\n        return x\n")]
    assert b"\n        " in [token[-9:] for token in tokens]


def test_training_is_deterministic(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from perilune.data.tokenizer import ByteBPE
ByteBPE.train({TEXTS!r}, 500).save(sys.argv[1])
"""
    files = []
    for seed in ("0", "1"):  # two processes: hash order must not matter
        env = {"PYTHONHASHSEED": seed, "PATH": "", "RAYON_NUM_THREADS": str(1 + int(seed))}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / seed)], check=True, env=env)
        files.append((tmp_path / seed / "tokenizer.json").read_bytes())
    assert files[0] == files[1]


def test_save_and_load_keep_everything(bpe: ByteBPE, tmp_path: Path) -> None:
    file = bpe.save(tmp_path / "new" / "folder")
    assert file == tmp_path / "new" / "folder" / "tokenizer.json"
    for path in (file, file.parent):
        again = ByteBPE.load(path)
        assert again.encode(MIXED) == bpe.encode(MIXED)
        assert again.special_ids == bpe.special_ids
        np.testing.assert_array_equal(again.byte_lengths(), bpe.byte_lengths())


def test_ids_with_gaps_between_them_are_those_of_the_file(tmp_path: Path) -> None:
    names = ["<|endoftext|>", "<|open|>", "<|sep|>", "<|close|>"]
    bpe = ByteBPE.train([MIXED], 256 + len(names), special_tokens=names[1:])
    file = bpe.save(tmp_path)
    content = json.loads(file.read_text())
    first = bpe.eos_id
    places = dict(zip(names, (first, first + 1, first + 4, first + 9)))
    for token in content["added_tokens"]:
        token["id"] = places[token["content"]]
    file.write_text(json.dumps(content))
    loaded = ByteBPE.load(file)
    assert {name: loaded.special_ids[name] for name in names} == places
    assert loaded.vocab_size == first + 10
    assert loaded.encode(MIXED) == bpe.encode(MIXED)
    assert loaded.decode([places["<|sep|>"]]) == "<|sep|>"
    assert loaded.decode([first + 2, first + 8], skip_special=True) == ""  # reserved, not an error
    assert loaded.byte_lengths()[first:].tolist() == [0] * 10
    loaded.save(tmp_path / "again")
    assert ByteBPE.load(tmp_path / "again").special_ids == loaded.special_ids
    content["added_tokens"][0]["id"] = 3  # a byte's
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match="cannot have the id 3"):
        ByteBPE.load(file)


def test_what_is_no_byte_level_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected a tokenizer\.json, found none"):
        ByteBPE.load(tmp_path)
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: expected a tokenizer, got what cannot be read"):
        ByteBPE.load(tmp_path)
    ByteBPE.train(["a"], 257).save(tmp_path)
    content = json.loads(file.read_text())
    added = content["added_tokens"]
    file.write_text(json.dumps(content | {"added_tokens": []}))
    with pytest.raises(DataError, match="expected a special token"):
        ByteBPE.load(tmp_path)
    content["model"]["vocab"] = {"word piece": 0}
    file.write_text(json.dumps(content | {"added_tokens": [added[0] | {"id": 1}]}))
    with pytest.raises(DataError, match="expected byte-level tokens, got 'word piece'"):
        ByteBPE.load(tmp_path)


def test_a_poor_text_gives_a_smaller_vocabulary() -> None:
    bpe = ByteBPE.train(["abc"], 1000)
    assert bpe.vocab_size == 257
    assert bpe.decode(bpe.encode(MIXED)) == MIXED


def test_bad_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size: expected at least 257"):
        ByteBPE.train(["a"], 256)
    with pytest.raises(ConfigError, match=r"special_tokens: expected names apart .* got 'a'"):
        ByteBPE.train(["a"], 300, special_tokens=["a"])
    with pytest.raises(ConfigError, match=r"got '<\|endoftext\|>'"):
        ByteBPE.train(["a"], 300, special_tokens=[END_OF_TEXT])
    bpe = ByteBPE.train(["a"], 300)
    for call in (lambda: bpe.encode("\ud800"), lambda: bpe.encode_batch(["a", "é\udfff"])):
        with pytest.raises(DataError, match="text: expected valid Unicode"):
            call()
