"""The words that tasks are made of, and the lines they stand in.

What a small model has to copy should be one token: a key or a value of several is several things to get right.
"""

import hashlib
import logging
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, product

from perilune.core.errors import ConfigError
from perilune.data.tokenizer import ByteBPE

log = logging.getLogger("perilune.data")

_WORD = re.compile(rb" [A-Za-z]{3,}")


@dataclass(frozen=True)
class Word:
    text: str
    """Without the space before it."""
    ids: tuple[int, ...]
    """With it."""


def choose_words(tokenizer: ByteBPE, number: int) -> list[Word]:
    """`number` different words, the same for the same tokenizer: tokens of a space and three or more ASCII letters, the
    last such in the vocabulary, which are the rarest, in the order of their SHA-256.  A common word turns up in the
    text between statements all the time, and there says nothing.

    A vocabulary with fewer such tokens gives made-up words instead (` bake`), all of the same number of tokens, as few
    as there are enough of; the log says so.
    """
    tokens = (tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size))
    texts = [token[1:].decode() for token in tokens if _WORD.fullmatch(token)]
    words = [word for text in texts if len((word := as_word(tokenizer, text)).ids) == 1]
    if len(words) < number:
        log.info(f"tasks: {len(words)} words of one token, {number} wanted; made-up ones of several tokens instead")
        return _made_up(tokenizer, number)
    return sorted(words[-number:], key=lambda word: _hash(word.text))


def choose_others(tokenizer: ByteBPE, chosen: Sequence[Word], number: int) -> list[Word]:
    """`number` words beside `choose_words(tokenizer, len(chosen))`, the next rarest: none of them is among those."""
    known = {word.text for word in chosen}
    return [word for word in choose_words(tokenizer, len(chosen) + number) if word.text not in known][:number]


def _made_up(tokenizer: ByteBPE, number: int) -> list[Word]:
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    for length in count(2):
        texts = sorted(map("".join, product(syllables, repeat=length)), key=_hash)
        by_size = defaultdict(list)
        for text, ids in zip(texts, tokenizer.encode_batch([f" {text}" for text in texts])):
            by_size[len(ids)].append(Word(text, tuple(ids)))
        for _, words in sorted(by_size.items()):
            if len(words) >= number:
                return words[:number]
    raise AssertionError


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def as_word(tokenizer: ByteBPE, text: str) -> Word:
    """`text` as it stands in a line, after a space."""
    return Word(text, tuple(tokenizer.encode(" " + text)))


class Template:
    r"""A line of text with places for words, as `"\n# {key} = {value}!\n"`; the space before a word is the word's.

    It begins and ends with a line break, so that what stands around it cannot change what it says.
    """

    def __init__(self, tokenizer: ByteBPE, template: str, **words: Sequence[Word]) -> None:
        """words: for each place, in the order they come, the words that can stand there.

        Raises ConfigError if the template has other places or is not a line.
        """
        literals = re.split(r" \{\w+\}", template)
        places = re.findall(r" \{(\w+)\}", template)
        if places != list(words) or not re.fullmatch(r"\n[^\n]+\n", template):
            example = "\n# " + " = ".join(f"{{{place}}}" for place in words) + "\n"
            raise ConfigError(f"template: expected a line such as {example!r}, got {template!r}; write its places so")
        self._literals = [tokenizer.encode(literal) for literal in literals]
        self.longest = sum(map(len, self._literals)) + sum(max(len(word.ids) for word in of) for of in words.values())
        """The most tokens it can take."""
        self.pattern = re.escape(literals[0][1:])
        """The expression that finds the line, without its line breaks; a group for each place."""
        for of, literal in zip(words.values(), literals[1:]):
            texts = sorted((word.text for word in of), key=len, reverse=True)  # the longest that fits is meant
            self.pattern += f" ({'|'.join(texts)})" + re.escape(literal.removesuffix("\n"))

    def __call__(self, *words: Word) -> list[int]:
        """The ids of the line with `words` in its places."""
        ids = list(self._literals[0])
        for word, literal in zip(words, self._literals[1:]):
            ids += word.ids
            ids += literal
        return ids
