import json

import pytest
import torch

from perilune.core.errors import ConfigError, DataError
from perilune.data.corpus import Corpus, Document
from perilune.data.source import TextSource
from perilune.data.tasks import TASKS
from perilune.data.tokenizer import ByteBPE
from perilune.train.config import DataConfig, Stage
from perilune.train.feed import Feed
from tiny_run import DATA, STAGES, corpus, run, text

LONG = Stage(
    name="tasks", context=400, batch_tokens=800, tokens=8000, lr=1e-2, lr_end=1e-3, mix={"text": 1, "needle": 1}
)


def feed(*stages: Stage, **corpora: Corpus) -> Feed:
    data = DATA.replace(sources={name: TextSource() for name in corpora or {"text": None}})
    return Feed(run(stages=stages or STAGES, data=data), corpora=corpora or {"text": corpus()})


def test_stages_mix_sources_and_tasks() -> None:
    made = feed(LONG.replace(mix={"text": 2, "more": 1, "needle": 1}), text=corpus(), more=corpus())
    assert set(made.batches.streams) == {"text", "more", "needle"}
    made.begin(made_stage := LONG.replace(mix={"text": 1, "needle": 1}))
    batch = made.next()
    assert batch.input_ids.shape == (1, made_stage.batch_tokens)
    said = made.tokenizer.decode(batch.input_ids[0].tolist())
    assert " is " in said  # a needle
    assert "return x" in said  # and text


def test_only_what_is_mixed_is_read() -> None:
    assert set(feed().batches.streams) == {"text"}


def test_a_place_in_the_data_is_a_few_values() -> None:
    straight, resumed = feed(LONG), feed(LONG)
    for made in (straight, resumed):
        made.begin(LONG)
    for _ in range(5):
        straight.next()
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict())))
    for _ in range(5):
        assert torch.equal(straight.next().input_ids, resumed.next().input_ids)


def test_what_is_judged_on_comes_from_all_sources() -> None:
    made = feed(LONG.replace(mix={"text": 1, "more": 1}), text=corpus(), more=corpus())
    assert len(made.held_out) == 2 * len(corpus().held_out)


def test_a_tokenizer_may_be_given_or_named(tmp_path) -> None:
    bpe = ByteBPE.train(["other words altogether " * 9], 270)
    assert Feed(run(), bpe, {"text": corpus()}).tokenizer is bpe
    bpe.save(tmp_path)
    named = run(data=DataConfig(vocab_size=300, tokenizer=str(tmp_path)))
    assert Feed(named, corpora={"text": corpus()}).tokenizer.encode("other") == bpe.encode("other")


# what does not fit, and shows before anything is trained


def test_a_mix_of_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="mix: there is no source or task called 'needles'; do you mean 'needle'"):
        feed(STAGES[0], LONG.replace(mix={"text": 1, "needles": 1}))


def test_a_source_called_like_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.sources: expected names apart from those of tasks, got 'files'"):
        feed(text=corpus(), files=corpus())


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused() -> None:
    bpe = ByteBPE.train(["no pair"], 301, special_tokens=[f"<|{i}|>" for i in range(44)])
    with pytest.raises(ConfigError, match=r"model\.vocab_size: expected at least the tokenizer's 301, got 300"):
        Feed(run(), bpe, {"text": corpus()})


def test_a_context_too_short_for_a_task_is_refused_whichever_stage_has_it() -> None:
    with pytest.raises(DataError, match=r"needle: expected a length of at least .* tokens, got 48"):
        feed(LONG, STAGES[1].replace(mix={"text": 1, "needle": 1}))


def test_tasks_take_the_options_that_the_data_have_for_them() -> None:
    def pairs(options: dict) -> int:
        made = Feed(run(stages=(LONG,), data=DATA.replace(tasks=options)), corpora={"text": corpus()})
        return made.batches.streams["needle"].task.pairs

    assert (pairs({}), pairs({"needle": {"pairs": 2}})) == (8, 2)
    with pytest.raises(ConfigError, match=r"data\.tasks: there is no task called 'needles'; do you mean 'needle'"):
        pairs({"needles": {"pairs": 2}})
    with pytest.raises(ConfigError, match="pairs: expected 1 to 64"):
        pairs({"needle": {"pairs": 0}})


def test_documents_too_short_for_a_stage_are_refused_whichever_stage_it_is() -> None:
    with pytest.raises(DataError, match=r"min_document: expected at most .* tokens .*, got 100000"):
        feed(STAGES[0], STAGES[1].replace(min_document=100_000))


@pytest.mark.parametrize(("size", "enough"), [(999, False), (1000, True)])
def test_a_source_must_have_something_to_learn_from(size: int, enough: bool) -> None:
    little = Corpus((Document("a.txt", "a" * size),), (Document("b.txt", text(0)),))
    if enough:
        assert feed(text=little).corpora["text"].train_bytes == 1000
        return
    with pytest.raises(
        DataError, match="text: expected at least 1000 bytes to learn from and some to hold out, got 999"
    ):
        feed(text=little)


def test_a_source_must_have_something_to_judge_on() -> None:
    with pytest.raises(DataError, match="got 5000 and 0; add text"):
        feed(text=Corpus((Document("a.txt", "a" * 5000),), ()))


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ({"nedle": {}}, r"data\.tasks: there is no task called 'nedle'; do you mean 'needle'"),
        ({"needle": {"pears": 4}}, r"data\.tasks\.needle: there is no option called 'pears'; do you mean 'pairs'"),
        (
            {"retrieval": {"statement": "x"}},
            r"data\.tasks\.retrieval: there is no option called 'statement'; do you mean",
        ),
        ({"chains": {"hops": "x"}}, r"data\.tasks\.chains\.hops: expected int, got 'x'; give a value of that type"),
        ({"files": {"asked": True}}, r"data\.tasks\.files\.asked: expected float, got True"),
        ({"needle": {"held_out": 1}}, r"data\.tasks\.needle\.held_out: expected bool, got 1"),
    ],
)
def test_options_that_a_task_has_not_are_refused(tasks, said) -> None:
    with pytest.raises(ConfigError, match=said):
        Feed(run(data=DATA.replace(tasks=tasks)), corpora={"text": corpus()})


def test_every_option_of_a_task_can_be_given() -> None:
    for name, task in TASKS.items():
        assert {"asked", "stated", "learn"} <= task.options().keys()
        given = {"stated": 1, "asked": 0.5, **({"words": 32} if "words" in task.options() else {})}
        stage = LONG.replace(context=1600, batch_tokens=1600, mix={"text": 1, name: 1})
        Feed(run(stages=(stage,), data=DATA.replace(tasks={name: given})), corpora={"text": corpus()})
