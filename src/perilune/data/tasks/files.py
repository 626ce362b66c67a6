"""Files: short files one after the other, each with its own value for every key; another says which one counts."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from perilune.core.errors import ConfigError
from perilune.data.tasks.page import Page, Query
from perilune.data.tasks.task import Task
from perilune.data.tasks.words import Template, Word, choose_words
from perilune.data.tokenizer import ByteBPE


class Files(Task):
    """Look a key up in the file that another file names: `# see moon for river!` in one, and below `# file moon!` the
    line `# set river = stone!`, later `# set river is stone`.

    Every file sets every key, so that the answer takes both files and the second one's header.
    """

    name = "files"

    def __init__(
        self,
        tokenizer: ByteBPE,
        filler: Sequence[np.ndarray],
        *,
        files: int = 3,
        keys: int = 4,
        words: int = 64,
        **options: Any,
    ) -> None:
        """files, keys: how many of each, of keys at most.  words: how many values there are, and how many names of
        both others.  options: see `Task`."""
        super().__init__(tokenizer, filler, **options)
        if not (files >= 2 and keys >= 1 and files + keys <= words and files * keys <= words):
            raise ConfigError(
                f"files, keys: expected at least 2 files, 1 key and no more than {words} values in all, got {files} "
                f"files with {keys} keys; change one"
            )
        self.files, self.keys = files, keys
        chosen = choose_words(tokenizer, 2 * words)
        self._value, self._named = chosen[:words], chosen[words:]
        self._header = Template(tokenizer, "\n# file {file}!\n", file=self._named)
        self._pointer = Template(tokenizer, "\n# see {file} for {key}!\n", file=self._named, key=self._named)
        self._setting = Template(tokenizer, "\n# set {key} = {value}!\n", key=self._named, value=self._value)
        self._question = Template(tokenizer, "\n# set {key} is {value}\n", key=self._named, value=self._value)
        self.lines = "|".join(
            template.pattern for template in (self._header, self._pointer, self._setting, self._question)
        )
        self.chance = 1 / words
        statements = files * (self._header.longest + keys * self._setting.longest) + keys * self._pointer.longest
        self.least = 1 + statements + keys * self._question.longest

    def state(self, page: Page) -> list[list[Query]]:
        random = page.random
        number = page.number(self.keys)
        named = random.sample(self._named, self.files + number)
        files, keys = named[: self.files], named[self.files :]
        values = iter(random.sample(self._value, self.files * number))
        value = {(file, key): next(values) for file in files for key in keys}
        right = {key: random.choice(files) for key in keys}
        told = {key: random.choice([file for file in files if file is not right[key]]) for key in keys}
        ids: dict[tuple[Word, ...], list[int]] = {}  # of the lines in order, by what they are about
        for file in files:
            body: dict[tuple[Word, ...], list[int]] = {
                (file, key): self._setting(key, value[file, key]) for key in keys
            }
            body |= {(key,): self._pointer(right[key], key) for key in keys if told[key] is file}
            ids[file,] = self._header(file)
            ids |= random.sample(list(body.items()), len(body))
        lines = dict(zip(ids, page.state(list(ids.values()))))
        groups = []
        for key, file in right.items():
            answer = value[file, key]
            evidence = [lines[key,], lines[file,], lines[file, key]]
            groups.append([Query(self._question(key, answer), answer, evidence)])
        return groups

    def answers(self, text: str) -> Iterator[tuple[int, str]]:
        file = ""
        right: dict[str, str] = {}
        said: dict[tuple[str, str], str] = {}
        for line in re.finditer(self.lines, text):
            header, pointed, pointed_for, key, value, asked, _ = line.groups()
            if header:
                file = header
            elif pointed:
                right[pointed_for] = pointed
            elif key:
                said[file, key] = value
            else:
                yield line.start(), said.get((right.get(asked, ""), asked), "")
