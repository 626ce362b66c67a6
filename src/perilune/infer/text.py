"""Text in, text out, piece by piece, never half a character."""

import codecs
from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.data.tokenizer import ByteBPE
from perilune.infer.generate import seeded, step
from perilune.infer.sampler import Sampling
from perilune.models.k3 import K3Model


def stream_text(
    model: K3Model,
    tokenizer: ByteBPE,
    prompt: str,
    max_new_tokens: int,
    *,
    sampling: Sampling = Sampling(),
    seed: int | None = None,
) -> Iterator[str]:
    """The continuation of `prompt` as it is made, up to the end of the document or `max_new_tokens`."""
    session = TextSession(model, tokenizer, sampling=sampling, seed=seed)
    session.write(prompt)
    return session.reply(max_new_tokens)


class TextSession:
    """A text that somebody and a model write in turns.

    >>> session = TextSession(model, tokenizer, seed=0)
    >>> session.write("def ")
    >>> "".join(session.reply(20))

    What has been read stays in the model's cache, so every token goes through the model once, however many turns there
    are.  A document begins after the end of another, so the text follows an end-of-text token.  A reply may be left
    before its end, and other sessions of the same model may take turns with this one.
    """

    def __init__(
        self, model: K3Model, tokenizer: ByteBPE, *, sampling: Sampling = Sampling(), seed: int | None = None
    ) -> None:
        self.model, self.tokenizer, self.sampling = model, tokenizer, sampling
        self._device = next(model.parameters()).device
        self._generator = seeded(seed, self._device)
        # A model may have more rows than its tokenizer has tokens.
        self._known = torch.ones(tokenizer.vocab_size, dtype=torch.bool, device=self._device)
        self.reset()

    def reset(self) -> None:
        """Forgets the text.  The random draws go on from where they are."""
        self.ids = [self.tokenizer.eos_id]
        self._forget_reading()

    def _forget_reading(self) -> None:
        self._cache = self.model.new_cache(1)
        self._read = 0  # how many of the ids are in the cache

    def write(self, text: str) -> None:
        """Adds `text`; the model reads it when it replies.  Raises DataError if it is no Unicode."""
        self.ids += self.tokenizer.encode(text)

    @property
    def at_line_start(self) -> bool:
        """Whether what is written next begins a line, or a document."""
        return self.ids[-1] == self.tokenizer.eos_id or self.tokenizer.decode_bytes(self.ids[-1:]).endswith(b"\n")

    def reply(self, max_new_tokens: int) -> Iterator[str]:
        """The continuation of the text as it is made, up to the end of the document or `max_new_tokens`.

        A word's token begins with the space before it, so a space that ends the text is left to the first new token,
        which then has to begin with it.
        """
        owed = b" " if len(self.ids) > self._read + 1 and self.tokenizer.decode_bytes(self.ids[-1:]) == b" " else b""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds back bytes until a character is whole
        for _ in range(max_new_tokens):
            token = self._draw(owed)
            if token == self.tokenizer.eos_id:
                break
            new, owed = self.tokenizer.decode_bytes([token])[len(owed) :], b""
            if piece := decoder.decode(new):
                yield piece
        if rest := decoder.decode(b"", final=True):
            yield rest

    def _draw(self, owed: bytes) -> int:
        """One more token of the text; it begins with `owed`, in place of the token of those bytes at the end."""
        end = len(self.ids) - bool(owed)
        unread = torch.tensor([self.ids[self._read : end]], device=self._device)
        allowed = self._beginning_with(owed) if owed else self._known
        try:
            token = int(step(self.model, unread, self._cache, self.sampling, self._generator, allowed))
        except BaseException:  # some layers may have read it and others not
            self._forget_reading()
            raise
        self.ids[end:] = [token]
        self._read = end
        return token

    def _beginning_with(self, owed: bytes) -> Tensor:
        tokens = (self.tokenizer.decode_bytes([i]) for i in range(self.tokenizer.vocab_size))
        return torch.tensor([token.startswith(owed) for token in tokens], device=self._device)
