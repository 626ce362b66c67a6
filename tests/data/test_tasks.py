import hashlib
import json
import random
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError, DataError
from perilune.data.packing import IGNORE
from perilune.data.stream import Stream
from perilune.data.tasks import TASKS, Needle, Question, Sample, Task, TaskStream
from perilune.data.tasks.page import Filler, Page, Query
from perilune.data.tasks.words import Template, Word, as_word, choose_words
from perilune.data.tokenizer import ByteBPE

VOCABULARIES = ("words", "tiny", "bytes")


@cache
def texts() -> tuple[str, ...]:
    """Ten documents of code-like lines, one of them long, one short, one with characters of several bytes."""
    draw = random.Random("texts")
    words = ["".join(draw.choice("aeioustrnl") for _ in range(draw.randint(3, 6))) for _ in range(260)]

    def line() -> str:
        return draw.choice(["# {} = {}", "    {}({})", "{} é {}"]).format(draw.choice(words), draw.choice(words))

    sizes = [600, 2, *[draw.randint(20, 80) for _ in range(8)]]
    return tuple("".join(f"{line()}\n" for _ in range(size)) for size in sizes)


@cache
def tokenizer(vocabulary: str) -> ByteBPE:
    """One with words of one token, one of 300 tokens, one that is bytes alone."""
    return ByteBPE.train(texts(), {"words": 1600, "tiny": 300, "bytes": 257}[vocabulary])


@cache
def task(name: str, vocabulary: str = "words", **options: object) -> Task:
    bpe = tokenizer(vocabulary)
    return TASKS[name](bpe, bpe.encode_documents(texts()), **options)


def both(task: Task, length: int, seed: int, count: int) -> list[Sample]:
    return [draw(length, seed, i) for i in range(count) for draw in (task.sample, task.probe)]


def without(sample: Sample, span: tuple[int, int], task: Task, instead: str = "\n") -> str:
    """The sample's text with `instead` in place of a span of tokens."""
    start, stop = span
    return task.tokenizer.decode(sample.ids[:start]) + instead + task.tokenizer.decode(sample.ids[stop:])


def assert_sound(task: Task, sample: Sample, length: int) -> None:
    """All that holds for every sample, whatever the task."""
    decode, ids = task.tokenizer.decode, sample.ids
    assert ids.shape == sample.learn.shape == (length,)
    assert ids.dtype == np.int32
    assert ids[0] == task.tokenizer.eos_id
    assert task.tokenizer.eos_id not in ids[1:]
    assert sample.questions
    assert task.solve(decode(ids)) == [question.answer for question in sample.questions]
    for question in sample.questions:
        assert decode(ids[question.start : question.stop]) == " " + question.answer
        assert re.fullmatch(task.lines, decode(ids[question.ask : question.stop]).removeprefix("\n"))
        assert question.evidence == tuple(sorted(question.evidence))
        assert question.evidence[-1][1] <= question.ask
        for start, stop in question.evidence:
            assert re.fullmatch(f"\n({task.lines})\n", decode(ids[start:stop]))
    assert [q.ask for q in sample.questions] == sorted(q.ask for q in sample.questions)
    assert all(a.stop < b.ask for a, b in pairwise(sample.questions))


@pytest.mark.parametrize("name", TASKS)
@given(
    vocabulary=st.sampled_from(VOCABULARIES),
    length=st.integers(0, 3000),
    seed=st.integers(0, 2**40),
    index=st.integers(0, 2**40),
)
@example(vocabulary="bytes", length=0, seed=0, index=0)
@settings(derandomize=True, deadline=None, max_examples=30)
def test_what_is_asked_can_be_read(name: str, vocabulary: str, length: int, seed: int, index: int) -> None:
    """From the least length on; the independent reader finds every answer."""
    drawn = task(name, vocabulary)
    length += drawn.least
    for sample in (drawn.sample(length, seed, index), drawn.probe(length, seed, index)):
        assert_sound(drawn, sample, length)


@pytest.mark.parametrize("name", TASKS)
def test_every_part_of_the_evidence_is_needed(name: str) -> None:
    """Without any one of them the reader finds another answer or none.  What hides one of the smaller records from a
    question for the largest does not show, but a larger one could have stood there."""
    drawn = task(name)
    parts = Counter()
    for sample in both(drawn, drawn.least + 200, seed=1, count=12):
        for i, question in enumerate(sample.questions[:8]):
            parts[len(question.evidence)] += 1
            for start, stop in question.evidence:
                said = drawn.tokenizer.decode(sample.ids[start:stop])
                answer = drawn.solve(without(sample, (start, stop), drawn))[i]
                if answer == question.answer:
                    assert "# most" in drawn.tokenizer.decode(sample.ids[question.ask : question.start])
                    larger = re.sub(r"\d!\n", "9!\n", said)
                    answer = drawn.solve(without(sample, (start, stop), drawn, larger))[i]
                assert answer != question.answer, (said, question)
    assert {
        "needle": {1},
        "variables": {1, 2, 3, 4},
        "aggregation": {1, 2, 3, 4},
        "files": {3},
        "scattered": {1, 2, 3, 4},
        "retrieval": {1},
        "chains": {1, 2, 3},
    }[name] == set(parts)


@pytest.mark.parametrize("name", TASKS)
def test_a_guess_scores_chance(name: str) -> None:
    """The most frequent answer to each form of question, over many probes."""
    drawn = task(name)
    given_answers: dict[str, Counter[str]] = defaultdict(Counter)
    for index in range(1000):
        sample = drawn.probe(drawn.least, 0, index)
        for question in sample.questions:
            form = drawn.tokenizer.decode(sample.ids[question.ask : question.start]).split()[1]
            form = form if form in ("count", "total", "most", "let", "set") else ""
            given_answers[form][question.answer] += 1
    asked = sum(counter.total() for counter in given_answers.values())
    guessed = sum(max(counter.values()) for counter in given_answers.values()) / asked
    assert drawn.chance <= guessed <= drawn.chance + 0.02


@pytest.mark.parametrize("name", TASKS)
def test_a_page_of_the_task_itself_is_no_distraction(name: str) -> None:
    """Filler made of the task's own lines, cut and joined anywhere."""
    drawn = task(name)
    pages = [sample.ids for sample in both(drawn, drawn.least + 50, seed=7, count=10)]
    again = TASKS[name](drawn.tokenizer, pages)
    for length in (again.least, again.least + 111, 5000):
        for sample in both(again, length, seed=0, count=6):
            assert_sound(again, sample, length)


@pytest.mark.parametrize("name", TASKS)
def test_halves_of_lines_are_not_joined(name: str) -> None:
    """Filler in which one document begins lines of the task and another ends them."""
    drawn = task(name)
    texts = [drawn.tokenizer.decode(sample.ids) for sample in both(drawn, drawn.least, seed=7, count=10)]
    lines = [line[0].split(" ") for text in texts for line in re.finditer(drawn.lines, text)]
    begun = "".join(" ".join(words[:2]) for words in lines)
    ended = "".join(" " + " ".join(words[2:]) for words in lines)
    documents = [np.array(drawn.tokenizer.encode(text)) for text in (begun, ended) * 3]
    filler = Filler(drawn.tokenizer, documents, drawn.lines)
    for seed in range(20):
        text, ends = filler.read_shuffled(1000, random.Random(seed), longest=30)
        assert (text.shape, ends[0], ends[-1]) == ((1000,), 0, 1000)
        assert not re.search(drawn.lines, drawn.tokenizer.decode(text))
    again = TASKS[name](drawn.tokenizer, documents)
    for length in (again.least + 111, 3000):
        for sample in both(again, length, seed=0, count=15):
            assert_sound(again, sample, length)


@pytest.mark.parametrize("name", TASKS)
def test_too_short_a_length_is_refused(name: str) -> None:
    drawn = task(name)
    for draw in (drawn.sample, drawn.probe):
        assert len(draw(drawn.least, 0, 0).ids) == drawn.least
        with pytest.raises(DataError, match=rf"{name}: expected a length of at least {drawn.least} tokens, got 20;"):
            draw(20, 0, 0)


@pytest.mark.parametrize("name", TASKS)
def test_samples_differ_and_probes_are_none_of_them(name: str) -> None:
    drawn = task(name)
    length = drawn.least + 64
    drawn_samples = [
        draw(length, seed, i).ids.tobytes()
        for draw in (drawn.sample, drawn.probe)
        for seed in (0, 1)
        for i in range(30)
    ]
    assert len(set(drawn_samples)) == 120


def digests() -> dict[str, str]:
    """Of samples and probes over bytes, for which nothing was trained."""
    hashes = {}
    for name in TASKS:
        drawn = task(name, "bytes")
        ids = [sample.ids.astype("<i4").tobytes() for sample in both(drawn, drawn.least + 999, seed=3, count=3)]
        hashes[name] = hashlib.sha256(b"".join(ids)).hexdigest()[:16]
    return hashes


def test_samples_are_the_same_everywhere() -> None:
    """In another process with other hashes of strings, and as they were when this was written."""
    here = digests()
    code = "import json, test_tasks; print(json.dumps(test_tasks.digests()))"
    env = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join([*sys.path, __file__.rpartition("/")[0]])}
    there = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(there.stdout) == here
    assert here == {
        "needle": "64b407959c52b550",
        "variables": "012942e00d455479",
        "aggregation": "a87e8a94902c4396",
        "files": "7b610362bd517f91",
        "scattered": "271db23ef3e7de73",
        "retrieval": "cb4268c5c2221520",
        "chains": "8677d3669b53807e",
    }


def test_sampling_leaves_other_randomness_alone() -> None:
    random.seed(0), np.random.seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist()
    for name in TASKS:
        task(name).sample(1000, 0, 0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("name", TASKS)
def test_filler_is_text_from_the_documents(name: str) -> None:
    """Between a sample's lines stands nothing that is not in them."""
    drawn = task(name)
    sample = drawn.probe(3000, 0, 0)
    text = drawn.tokenizer.decode(sample.ids[1:])
    rest = re.sub(drawn.lines, "\0", text).split("\0")
    found = [line for part in rest for line in part.split("\n")[1:-1]]
    source = "".join(texts())
    assert len(found) > 100
    assert all(line in source for line in found)


@pytest.mark.parametrize("name", TASKS)
def test_probes_ask_once_and_last(name: str) -> None:
    drawn = task(name)
    depths = []
    for index in range(10):
        sample = drawn.probe(1024, 0, index)
        assert sample.questions[-1].stop == 1024 - 1
        assert all(a.stop + 1 == b.ask for a, b in pairwise(sample.questions))
        depths += [start / sample.questions[0].ask for q in sample.questions for start, _ in q.evidence]
        asked = [drawn.tokenizer.decode(sample.ids[q.ask : q.start]) for q in sample.questions]
        assert len(set(asked)) == len(asked)
    assert min(depths) < 0.05
    assert max(depths) > 0.9


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_needle_for_every_depth(vocabulary: str) -> None:
    """Bin i of 8 holds one pair, at every length; which is asked when is random."""
    drawn = task("needle", vocabulary)
    orders = set()
    for length in (drawn.least, drawn.least + 1, drawn.least + 77, 2048, 8192):
        for index in range(20):
            sample = drawn.probe(length, 0, index)
            bins = [int(sample.depth(question) * 8) for question in sample.questions]
            assert sorted(bins) == list(range(8))
            orders.add(tuple(bins))
    assert len(orders) > 80


def test_training_samples_ask_again_and_again() -> None:
    for name in TASKS:
        drawn = task(name)
        shares = [
            sum(q.stop + 1 - q.ask for q in sample.questions) / sample_length
            for sample_length in (drawn.least, 2048)
            for sample in (drawn.sample(sample_length, 0, i) for i in range(0, 60, 2))
        ]
        assert max(shares[30:]) > 0.7, name
        assert max(shares) <= 0.8, name
        assert min(shares[30:]) < 0.2, name  # in long samples some ask rarely
        rare = task(name, asked=0.0).sample(2048, 0, 0)
        assert len(rare.questions) == 1


def test_training_samples_speak_of_one_thing_or_several() -> None:
    """Any number of things up to a probe's; with one alone a value can be copied without knowing whose it is."""
    for name in ("needle", "variables", "aggregation", "files"):
        drawn = task(name)
        groups = {len(drawn.probe(1024, 0, i).questions) for i in range(20)}
        assert len(groups) == 1
        lines = [len({span for q in drawn.sample(2048, 0, i).questions for span in q.evidence}) for i in range(60)]
        assert len(set(lines)) >= min(5, groups.pop())
    answers = [len({q.answer for q in task("needle").sample(2048, 0, i).questions}) for i in range(100)]
    assert set(answers) == set(range(1, 9))


@pytest.mark.parametrize("name", ["retrieval", "chains"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_what_is_held_out_is_never_trained_on(name: str, vocabulary: str) -> None:
    """Neither its keys nor its phrasings; what is asked so can be read all the same."""
    taught, kept = task(name, vocabulary), task(name, vocabulary, held_out=True)
    for length in (kept.least, kept.least + 77, 2048):
        for sample in both(kept, length, seed=5, count=6):
            assert_sound(kept, sample, length)
    decode = taught.tokenizer.decode
    trained = "".join(decode(taught.sample(taught.least + 300, seed, i).ids) for seed in (0, 1) for i in range(100))
    probed = "".join(decode(kept.probe(kept.least + 300, 0, i).ids) for i in range(100))
    assert len(re.findall(taught.lines, trained)) > 500
    assert re.search(kept.lines, trained) is None
    assert len(re.findall(kept.lines, probed)) > 500
    assert re.search(taught.lines, probed) is None

    def named(of: Task) -> set[str]:
        return {word.text for one in of.tasks for word in (one.keys if name == "retrieval" else one.names)}

    assert len(named(taught)) == len(named(kept)) == 64
    assert not named(taught) & named(kept)
    values = [{word.text for one in of.tasks for word in one.values} for of in (taught, kept)]
    assert values[0] == values[1]
    assert not values[0] & named(kept)


@pytest.mark.parametrize("name", ["retrieval", "chains"])
def test_a_phrased_task_uses_all_its_phrasings(name: str) -> None:
    for held_out in (False, True):
        drawn = task(name, held_out=held_out)
        texts = [drawn.tokenizer.decode(sample.ids) for sample in both(drawn, 600, seed=0, count=30)]
        used = [[i for i, one in enumerate(drawn.tasks) if re.search(one.lines, text)] for text in texts]
        assert all(len(which) == 1 for which in used)  # one of them a sample
        assert {which[0] for which in used} == set(range(len(drawn.tasks)))


def test_statements_stand_early() -> None:
    early = task("needle", stated=0.1).sample(4096, 0, 0)
    filler = len(early.ids) - sum(q.stop + 1 - q.ask for q in early.questions)
    assert max(span[1] for q in early.questions for span in q.evidence) < 0.1 * filler + 1500


def test_scattered_evidence_is_far_away() -> None:
    """Asked at the end, half of what is needed is more than half the window away, from the start to near the end."""
    drawn = task("scattered")
    for length in (drawn.least + 64, 1024, 4096):
        samples = [drawn.probe(length, 0, i) for i in range(20)] + [drawn.sample(length, 0, i) for i in range(1, 40, 2)]
        spans = [(q.ask - start, start) for s in samples for q in s.questions for start, _ in q.evidence]
        assert statistics.median(distance for distance, _ in spans) >= length / 2
        assert min(start for _, start in spans) < 0.05 * length
        assert max(start for _, start in spans) > 0.75 * length
    anywhere = [q.ask / 1024 for i in range(0, 40, 2) for q in drawn.sample(1024, 0, i).questions]
    assert statistics.quantiles(anywhere, n=4)[0] < 0.75


def test_lines_stand_where_documents_meet() -> None:
    """At the nearest of the joints 0, 10, 25 and 40; by hand."""
    page = Page(45, random.Random(0), until=1.0, bend=0.0, vary=True)
    lines = page.state([[7], [8], [9]])
    for line, depth in zip(lines, (0.1, 0.4, 0.8)):  # 4, 16 and 32 of 40 tokens
        line.depth = depth
    page.ask(Query([6], Word("", ()), lines), last=True)
    sample = page.lay_out(0, np.arange(100, 140), joints=np.array([0, 10, 25, 40]))
    assert sample.ids.tolist() == [0, 7, *range(100, 110), 8, *range(110, 125), 9, *range(125, 140), 6]
    assert sample.questions[0].evidence == ((1, 2), (12, 13), (28, 29))


def test_scattered_shuffles_documents() -> None:
    """A sample holds pieces of many documents, in an order of its own."""
    bpe = tokenizer("words")
    documents = [np.array(bpe.encode(f"{letter * 3}\n" * 200), dtype=np.int32) for letter in "abcdefgh"]
    drawn = TASKS["scattered"](bpe, documents)
    orders = set()
    for index in range(10):
        text = bpe.decode(drawn.probe(2000, 0, index).ids)
        letters = re.sub(drawn.lines, "", text)
        pieces = re.findall(r"([a-h])\1\1\n(?:\s*\1+\n)*", letters)
        assert len(set(pieces)) >= 4
        orders.add("".join(pieces))
    assert len(orders) == 10


def test_words_are_one_token_each() -> None:
    bpe = tokenizer("words")
    words = choose_words(bpe, 128)
    assert all(len(word.ids) == 1 and re.fullmatch("[A-Za-z]{3,}", word.text) for word in words)
    assert all(bpe.decode(word.ids) == " " + word.text for word in words)
    assert len({word.text for word in words}) == 128
    rarest = sorted(words, key=lambda word: word.ids)[-50:]  # those that merged last
    assert set(choose_words(bpe, 50)) == set(rarest)


def test_a_small_vocabulary_gets_made_up_words(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="perilune.data")
    words = choose_words(tokenizer("tiny"), 128)
    assert len({word.text for word in words}) == 128
    assert all(tokenizer("tiny").decode(word.ids) == " " + word.text for word in words)
    assert {len(word.ids) for word in words} == {3}
    assert "0 words of one token, 128 wanted; made-up ones of several tokens instead" in caplog.text


def test_templates_are_lines() -> None:
    bpe = tokenizer("words")
    words = [as_word(bpe, "on"), as_word(bpe, "one")]
    line = Template(bpe, "\n; {a} -> {b}\n", a=words, b=words)
    assert bpe.decode(line(*words)) == "\n; on -> one\n"
    assert len(line(*words)) <= line.longest
    assert re.search(line.pattern, "x; one -> on\n").groups() == ("one", "on")
    closed = Template(bpe, "\n; {a} -> {b}!\n", a=words, b=words)
    assert bpe.decode(closed(*words)) == "\n; on -> one!\n"
    assert re.search(closed.pattern, "; one -> on") is None
    for template in (
        "# {a} = {b}\n",
        "\n# {a} = {b}",
        "\n# {b} = {a}\n",
        "\n# {a}={b}\n",
        "\n{a}\n{b}\n",
    ):
        with pytest.raises(ConfigError, match=r"template: expected a line such as '\\n# {a} = {b}\\n'"):
            Template(bpe, template, a=words, b=words)


def test_a_needle_may_be_asked_as_it_is_stated() -> None:
    drawn = task("needle", statement="\n@ {key} is {value}\n", question="\n@ {key} is {value}\n")
    for sample in both(drawn, 500, seed=0, count=10):
        assert_sound(drawn, sample, 500)
    assert "@" in drawn.tokenizer.decode(sample.ids)


def test_what_is_learned() -> None:
    """Answers, and by default the text between lines; of the lines, which were drawn, nothing else."""
    for name in TASKS:
        everything, text, answers = (task(name, learn=learn).sample(700, 0, 0) for learn in ("all", "text", "answers"))
        assert np.array_equal(everything.ids, answers.ids)
        assert np.array_equal(text.ids, task(name).sample(700, 0, 0).ids)
        assert not everything.learn[0]
        together = np.where(everything.answers() == IGNORE, everything.labels(), everything.answers())
        assert together.tolist() == [*everything.ids[1:], IGNORE]  # every token, by one of the two
        assert ((everything.answers() == IGNORE) | (everything.labels() == IGNORE)).all()
        inside = {i for q in answers.questions for i in range(q.start, q.stop)}
        for sample in (everything, text, answers):
            labels = sample.answers()
            assert set(np.flatnonzero(labels != IGNORE)) == {i - 1 for i in inside}
            assert all(labels[i - 1] == sample.ids[i] for i in inside)
        assert not answers.learn.any()
        drawn = {i for q in text.questions for i in range(q.ask, q.stop + 1)}
        drawn |= {i for q in text.questions for span in q.evidence for i in range(*span)}
        assert not set(np.flatnonzero(text.learn)) & drawn
        assert text.learn.sum() > 20
        said = task(name).tokenizer.decode([i for i, learned in zip(text.ids, text.learn) if learned])
        assert re.search(task(name).lines, said) is None  # no line of the task is learned


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("needle", {"pairs": 65}, "pairs: expected 1 to 64"),
        ("needle", {"question": "\n# {key} is {value}!\n"}, "question: expected the value last"),
        ("needle", {"learn": "some"}, "learn: expected 'text', 'answers' or 'all', got 'some'"),
        ("needle", {"asked": 1.5}, "asked: expected a share from 0 to 1, got 1.5"),
        ("variables", {"stated": -0.1}, "stated: expected a share from 0 to 1, got -0.1"),
        ("variables", {"chains": 0}, "chains x hops: expected 1 to 64 variables, got 0 x 4"),
        ("aggregation", {"things": 17}, "things: expected 1 to 16"),
        ("variables", {"question": "\n# {name} is {value}!\n"}, "question: expected the value last"),
        ("files", {"files": 1}, "files, keys: expected at least 2 files"),
        ("retrieval", {"pairs": 65}, "pairs: expected 1 to 64"),
        ("chains", {"hops": 0}, "chains x hops: expected 1 to 64 variables, got 2 x 0"),
    ],
)
def test_options_that_cannot_be_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TASKS[name](tokenizer("words"), tokenizer("words").encode_documents(texts()), **options)
    with pytest.raises(DataError, match="filler: expected documents with tokens in them, got none"):
        TASKS[name](tokenizer("words"), [np.array([], dtype=np.int32)])


def test_depth_is_of_the_first_evidence() -> None:
    ids = np.zeros(100, dtype=np.int32)
    question = Question(80, 85, 86, "x", ((20, 26), (60, 66)))
    assert Sample(ids, (question,), ids > 0).depth(question) == 0.25


def sizes(stream: TaskStream, number: int) -> list[int]:
    return [stream.size(i) for i in range(number)]


def test_a_stream_of_samples() -> None:
    stream: Stream = TaskStream(task("needle"), seed=5)
    stream.resize(512, min_document=1000)
    lengths = sizes(stream, 9)
    segment = stream.read(sum(lengths))
    samples = [task("needle").sample(length, 5, i) for i, length in enumerate(lengths)]
    assert segment.starts.tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
    assert segment.ids.tolist() == [int(i) for sample in samples for i in sample.ids]
    assert segment.labels.tolist() == [int(i) for sample in samples for i in sample.labels()]
    assert segment.answers.tolist() == [int(i) for sample in samples for i in sample.answers()]


def test_samples_of_a_stage_have_three_lengths() -> None:
    """The context's, a half and a quarter of it, about as often; never one that is too short for the task."""
    stream = TaskStream(task("needle"), seed=2)
    stream.resize(2048)
    counts = Counter(sizes(stream, 300))
    assert counts.keys() == {2048, 1024, 512}
    assert min(counts.values()) > 70
    stream.resize(256)
    assert set(sizes(stream, 50)) == {256, 128}
    stream.resize(128)
    assert set(sizes(stream, 50)) == {128}


@given(lengths=st.lists(st.sampled_from([128, 256, 600]), min_size=1, max_size=4), stop=st.integers(0, 3))
@settings(derandomize=True, deadline=None, max_examples=20)
def test_a_stream_goes_on_where_it_was(lengths: list[int], stop: int) -> None:
    """Also with other lengths, and past what other ranks read."""
    assume(stop < len(lengths))
    straight, first, second = (TaskStream(task("needle"), seed=1) for _ in range(3))
    read = []
    for i, length in enumerate(lengths):
        straight.resize(length)
        straight.read(straight.size())
        read.append(straight.read(sum(sizes(straight, 2))))
        if i <= stop:
            first.resize(length)
            first.skip(sum(sizes(first, 3)))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.state_dict() == {"index": 3 * (stop + 1)}
    for i in range(stop + 1, len(lengths)):
        second.resize(lengths[i])
        second.skip(second.size())
        again = second.read(sum(sizes(second, 2)))
        assert np.array_equal(again.ids, read[i].ids)
        assert np.array_equal(again.labels, read[i].labels)


def test_a_stream_refuses_what_it_cannot_give() -> None:
    stream = TaskStream(task("needle"))
    stream.resize(256)
    size = stream.size()
    for tokens in (0, size - 1, size + 1):
        with pytest.raises(DataError, match=f"tokens: expected the end of a sample .*, got {tokens};"):
            stream.read(tokens)
    with pytest.raises(DataError, match="needle: expected a length of at least"):
        stream.resize(20)
    with pytest.raises(DataError, match="expected the state of a task, got epoch"):
        stream.load_state_dict({"epoch": 1})
    assert stream.read(size).ids.shape == (size,)  # none of this has changed it


def test_pairs_and_words_can_be_fewer() -> None:
    drawn = task("needle", pairs=2, words=4)
    assert isinstance(drawn, Needle)
    assert drawn.chance == 0.25
    assert len({word.text for word in drawn.keys + drawn.values}) == 8
    assert len(drawn.probe(200, 0, 0).questions) == 2
