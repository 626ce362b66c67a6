"""Byte-pair encoding over bytes: any text in, the same text out, whatever the language.

Bytes are never normalised, so that bits per token turn into bits per byte exactly.  Special tokens are asked for by id;
text that spells one stays text.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from perilune.core.errors import ConfigError, DataError
from perilune.core.text import has_half_pair

END_OF_TEXT = "<|endoftext|>"
FILE = "tokenizer.json"

# No token spans two of these pieces: a word with the space before it; up to three digits; punctuation, with the line
# break and the indentation after it (`:` and eight spaces are one step in Python); line breaks with the space around
# them; other space.  On the standard library, 2,048 tokens, this gives 3.17 bytes a token held out; GPT-2's rule 3.08,
# the rule of GPT-4 3.05.
PIECES = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:\s*\n\s*)?|\s*\n\s*|\s+"


class ByteBPE:
    """A byte-level BPE tokenizer, kept by the `tokenizers` library.

    >>> bpe = ByteBPE.train(["to be or not to be"], vocab_size=260)
    >>> bpe.decode(bpe.encode("to be")) == "to be"
    True
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wraps a byte-level BPE `tokenizer`, and from now on has it treat text as text.

        Raises DataError if a token is not made of bytes or there is no `<|endoftext|>`.
        """
        self._tokenizer = tokenizer
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True  # this is not kept in the file
        special = tokenizer.get_added_tokens_decoder()
        self.special_ids: dict[str, int] = {token.content: index for index, token in special.items()}
        if END_OF_TEXT not in self.special_ids:
            raise DataError(f"tokenizer: expected a special token {END_OF_TEXT}, got none; train it with this library")
        self._bytes = _token_bytes(tokenizer.get_vocab(with_added_tokens=True), self.special_ids)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Self:
        """Learns the `vocab_size` tokens, special ones included, that shorten `texts` best; the same texts in the same
        order give the same tokens.

        The specials take the last ids: `<|endoftext|>`, always there, then `special_tokens`.  Where the texts run out
        of pairs that occur twice the vocabulary stays smaller than asked; read `vocab_size` from the result.
        Raises ConfigError if there is no room for the 256 bytes or an ordinary token spells a special one.
        """
        specials = (END_OF_TEXT, *special_tokens)
        least = 256 + len(specials)
        if vocab_size < least:
            raise ConfigError(
                f"vocab_size: expected at least {least} (256 bytes and the special tokens), got {vocab_size}; raise it"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PIECES), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - len(specials),
            min_frequency=2,
            initial_alphabet=sorted(_BYTE_OF),  # every byte, seen or not
            show_progress=False,
        )
        tokenizer.train_from_iterator((_checked(text) for text in texts), trainer)
        for token in specials:
            if tokenizer.token_to_id(token) is not None:
                raise ConfigError(
                    f"special_tokens: expected names apart from ordinary tokens and each other, got {token!r}; "
                    f"write it as <|{token}|>"
                )
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        return cls(tokenizer)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The tokenizer that `save` wrote to the folder `path` (or to the file `path`)."""
        path = Path(path)
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise DataError(f"{path}: expected a {FILE}, found none; train a tokenizer or check the path")
        try:
            tokenizer = _from_json(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing narrower
            raise DataError(f"{file}: expected a tokenizer, got what cannot be read ({error}); save it anew") from None
        return cls(tokenizer)

    def save(self, folder: str | Path) -> Path:
        """Writes `tokenizer.json`, as other libraries read it, into `folder` (made if need be); returns its path."""
        file = Path(folder) / FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        return file

    @property
    def vocab_size(self) -> int:
        """How many ids there are, special ones included: the least number of rows of an embedding."""
        return len(self._bytes)

    @property
    def eos_id(self) -> int:
        """The id of `<|endoftext|>`, which stands between documents."""
        return self.special_ids[END_OF_TEXT]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; nothing is added, and no special id can come out."""
        return self._tokenizer.encode(_checked(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        batch = self._tokenizer.encode_batch_fast([_checked(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each text as int32 `[<|endoftext|>, tokens..., <|endoftext|>]`: what the batches of `packing` are made from.

        The one in front lets a model predict the first token, the one behind teaches it where to stop.
        """
        end = [self.eos_id]
        return [np.array(end + ids + end, dtype=np.int32) for ids in self.encode_batch(texts)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of the tokens, special ones spelled out.  Raises DataError for an id that does not exist."""
        try:
            return b"".join([self._bytes[_natural(index)] for index in ids])
        except IndexError:
            raise DataError(
                f"ids: expected 0 to {self.vocab_size - 1}, got others; is it this model's tokenizer?"
            ) from None

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of the tokens; where they cut a character in two, U+FFFD stands for its part."""
        if skip_special:
            special = set(self.special_ids.values())
            ids = [index for index in ids if index not in special]
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @cached_property
    def _lengths(self) -> np.ndarray:
        lengths = np.array([len(token) for token in self._bytes], dtype=np.int64)
        lengths[list(self.special_ids.values())] = 0
        return lengths

    def byte_lengths(self) -> np.ndarray:
        """`[vocab_size]` int64: how many bytes of text each token stands for; a special one stands for none."""
        return self._lengths.copy()


def _from_json(text: str) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, every token at the id that the file gives it.

    The library numbers added tokens one after the other, whatever the file says, so gaps are filled with reserved ones.
    """
    contents = json.loads(text)
    ids = {token["id"]: token for token in contents["added_tokens"]}
    taken = ids.keys() | set(contents["model"]["vocab"].values())
    for index in set(range(max(taken))) - taken:
        flags = {"special": True} | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ids[index] = {"id": index, "content": f"<|reserved_{index}|>", **flags}
    tokenizer = Tokenizer.from_str(json.dumps({**contents, "added_tokens": [ids[index] for index in sorted(ids)]}))
    for index, token in ids.items():
        if tokenizer.token_to_id(token["content"]) != index:
            raise ValueError(f"{token['content']} cannot have the id {index}")
    return tokenizer


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: printable Latin-1 as itself, the rest from U+0100 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _token_bytes(vocab: dict[str, int], special_ids: dict[str, int]) -> list[bytes]:
    """The bytes of every id; an id that no token has stands for none."""
    table = [b""] * (max(vocab.values()) + 1)
    for token, index in vocab.items():
        try:
            table[index] = token.encode() if token in special_ids else bytes([_BYTE_OF[char] for char in token])
        except KeyError:
            raise DataError(f"tokenizer: expected byte-level tokens, got {token!r}; use a byte-level BPE") from None
    return table


def _natural(index: int) -> int:
    if index < 0:
        raise IndexError
    return index


def _checked(text: str) -> str:
    if has_half_pair(text):
        raise DataError("text: expected valid Unicode, got half of a surrogate pair; decode it as UTF-8")
    return text
