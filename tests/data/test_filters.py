import base64
import json
import random

import pytest

from perilune.data.corpus import standard_library
from perilune.data.filters import reason_to_drop

NOISE = random.Random(0).randbytes(3000)
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen. "


def lines(count: int, form: str) -> str:
    words = random.Random(count).choices(["opened", "closed", "failed", "retried", "socket", "request"], k=3 * count)
    return "".join(form.format(i=i, a=words[3 * i], b=words[3 * i + 1], c=words[3 * i + 2]) for i in range(count))


DROPPED = {
    "a binary file read as Latin-1": ("binary", NOISE.decode("latin-1")),
    "a binary file with its bytes replaced": ("binary", NOISE.decode("utf-8", "replace")),
    "base64 in one line": ("encoded data", base64.b64encode(NOISE).decode()),
    "base64 in lines": ("encoded data", base64.encodebytes(NOISE * 2).decode().replace("\n", "") + "\n"),
    "hexadecimal": ("encoded data", PROSE + NOISE.hex()),
    "dates": ("machine log", lines(50, "2026-01-{i:02} 12:00:{i:02} {a} {b} {c}\n")),
    "dates with milliseconds": ("machine log", lines(50, "[2026-01-31T12:00:{i:02},123] {a} {b} {c}\n")),
    "syslog": ("machine log", lines(50, "Jan {i:2} 12:00:{i:02} host {a}[{i}]: {b} {c}\n")),
    "the kernel": ("machine log", lines(50, "[   12.{i:06}] {a} {b} {c}\n")),
    "a web server": ("machine log", lines(50, '192.0.2.{i} - - [31/Jan/2026:12:00:{i:02}] "GET /{a}/{b}" 200 {c}\n')),
    "one line": ("repetition", "All work and no play makes Jack a dull boy.\n" * 100),
    "one word": ("repetition", "again " * 1000),
    "further apart than zlib looks": ("repetition", "".join(f"{NOISE[i : i + 25].hex()}\n" for i in range(1000)) * 6),
    "an object": ("cut short", '{"a": [1, 2, {"b": "c'),
    "a list of objects": ("cut short", json.dumps([{"a": i} for i in range(9)])[:-1]),
    "a page": ("cut short", "<!DOCTYPE html>\n<html><body><p>" + PROSE),
    "the middle of a character": ("cut short", (PROSE * 300 + "é").encode()[:-1].decode("utf-8", "replace")),
}


@pytest.mark.parametrize("what", DROPPED)
def test_no_text_is_dropped_with_its_reason(what: str) -> None:
    reason, text = DROPPED[what]
    assert reason_to_drop(text) == reason


KEPT = {
    "nothing": "",
    "a line": PROSE,
    "a short refrain": "Row, row, row your boat\n" * 4,
    "notes": "[1] See the first page.\n" + "".join(f"[{i}] See page {i}.\n" for i in range(2, 60)),
    "a script without spaces": "天地玄黄宇宙洪荒日月盈昃辰宿列张寒来暑往秋收冬藏闰余成岁律吕调阳" * 2,
    "Chinese in one line": "".join(chr(0x4E00 + x + 256 * (i % 9)) for i, x in enumerate(NOISE)),
    "a diary": "".join(f"2026-01-{i:02} 12:00\n{PROSE}{i} times.\nThen {i} more.\n" for i in range(1, 29)),
    "an object": json.dumps({"a": [1, 2, {"b": "c"}]}) + "\n",
    "a page": f"<html><body><p>{PROSE}</p></body></html>\n",
    "a wiki's link": "[[Orbit]]s have a nearest point.",
    "colours of a terminal": "\x1b[31mred\x1b[0m\n" + PROSE * 20,
}


@pytest.mark.parametrize("what", KEPT)
def test_text_is_kept(what: str) -> None:
    assert reason_to_drop(KEPT[what]) is None


def test_every_file_of_the_library_is_text() -> None:
    corpus = standard_library()
    assert [document.name for document in corpus.train + corpus.held_out if reason_to_drop(document.text)] == []
