import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.config import Config, require
from perilune.core.errors import ConfigError
from perilune.train.config import DataConfig, OptimizerConfig, Stage
from tiny_run import run


@dataclass(frozen=True, kw_only=True)
class Part(Config):
    size: int
    name: str = "512"
    rate: float = 0.5

    def __post_init__(self) -> None:
        require(self.size > 0, "size", "at least 1", self.size, "give a larger one")


@dataclass(frozen=True, kw_only=True)
class Whole(Config):
    part: Part
    parts: tuple[Part, ...] = ()
    on: bool = False
    kind: Literal["a", "b"] = "a"
    limit: float | None = None
    block: int | Literal["full"] | None = None
    pair: tuple[int, str] = (1, "x")
    numbers: list[int] = field(default_factory=list)
    options: dict[str, float] = field(default_factory=dict)
    anything: Any = None


WHOLE = Whole(part=Part(size=1), parts=(Part(size=2), Part(size=3, name="b")), numbers=[1, 2], options={"a": 1.0})


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args)
    assert "\n" not in str(error.value)
    return str(error.value)


# there and back


def test_a_configuration_survives_json():
    assert Whole.from_dict(json.loads(json.dumps(WHOLE.to_dict()))) == WHOLE
    assert WHOLE.to_dict()["parts"] == [
        {"size": 2, "name": "512", "rate": 0.5},
        {"size": 3, "name": "b", "rate": 0.5},
    ]
    assert run().from_dict(json.loads(json.dumps(run().to_dict()))) == run()


whole_numbers = st.integers(1, 10**6)
any_whole = st.integers(1 - 2**63, 2**63 - 1)
parts = st.builds(Part, size=whole_numbers, name=st.text(max_size=5), rate=st.floats(allow_nan=False))
wholes = st.builds(
    Whole,
    part=parts,
    parts=st.lists(parts, max_size=3).map(tuple),
    on=st.booleans(),
    kind=st.sampled_from(["a", "b"]),
    limit=st.none() | st.floats(allow_nan=False),
    block=st.none() | whole_numbers | st.just("full"),
    pair=st.tuples(any_whole, st.text(max_size=3)),
    numbers=st.lists(any_whole, max_size=3),
    options=st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3),
    anything=st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(wholes)
def test_any_configuration_survives_json(whole):
    assert Whole.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_replace_checks_anew():
    assert WHOLE.replace(on=True).on
    assert not WHOLE.on
    assert "size: expected at least 1, got 0" in refusal(lambda: Part(size=1).replace(size=0))


# from plain values


def test_whole_numbers_are_floats_where_floats_are_meant():
    built = Whole.from_dict({"part": {"size": 1, "rate": 2}, "limit": 3, "options": {"a": 4}})
    assert [type(x) for x in (built.part.rate, built.limit, built.options["a"])] == [float] * 3


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], "Whole: expected an object, got []"),
        (3, "Whole: expected an object, got 3"),
        ({}, "part: expected a value, got none (1 missing)"),
        ({"part": {}}, "part.size: expected a value, got none (1 missing)"),
        ({"part": 3}, "part: expected an object, got 3"),
        ({"part": {"size": 1}, "kid": 1}, "kid: unknown key for Whole; do you mean 'kind'?"),
        ({"part": {"size": 1, "sise": 1}}, "part.sise: unknown key for Part; do you mean 'size'?"),
        ({"part": {"size": 1, 7: 1}}, "part.7: unknown key for Part"),
        ({"part": {"size": 0}}, "part.size: expected at least 1, got 0; give a larger one"),
        ({"part": {"size": 1.0}}, "part.size: expected int, got 1.0"),
        ({"part": {"size": True}}, "part.size: expected int, got True"),
        ({"part": {"size": "1"}}, "part.size: expected int, got '1'"),
        ({"part": {"size": None}}, "part.size: expected int, got None"),
        ({"part": {"size": 1, "name": 1}}, "part.name: expected str, got 1"),
        ({"part": {"size": 1, "rate": True}}, "part.rate: expected float, got True"),
        ({"part": {"size": 1, "rate": "fast"}}, "part.rate: expected float, got 'fast'"),
        ({"part": {"size": 1}, "on": 1}, "on: expected bool, got 1"),
        ({"part": {"size": 1}, "on": None}, "on: expected bool, got None"),
        ({"part": {"size": 1}, "kind": "c"}, "kind: expected one of 'a', 'b', got 'c'"),
        ({"part": {"size": 1}, "kind": ["a"]}, "kind: expected one of 'a', 'b', got ['a']"),
        ({"part": {"size": 1}, "limit": "low"}, "limit: expected float, got 'low'"),
        ({"part": {"size": 1}, "block": "half"}, "block: expected int or 'full', got 'half'"),
        ({"part": {"size": 1}, "parts": {"size": 1}}, "parts: expected a list, got {'size': 1}"),
        ({"part": {"size": 1}, "parts": "ab"}, "parts: expected a list, got 'ab'"),
        ({"part": {"size": 1}, "parts": [{"size": 1}, {"size": 0}]}, "parts.1.size: expected at least 1, got 0"),
        ({"part": {"size": 1}, "pair": [1]}, "pair: expected 2 items, got 1"),
        ({"part": {"size": 1}, "pair": ["x", 1]}, "pair.0: expected int, got 'x'"),
        ({"part": {"size": 1}, "numbers": [1, "2"]}, "numbers.1: expected int, got '2'"),
        ({"part": {"size": 1}, "options": [1]}, "options: expected an object, got [1]"),
        ({"part": {"size": 1}, "options": {"a": "b"}}, "options.a: expected float, got 'b'"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_stands(values, expected):
    assert refusal(Whole.from_dict, values).startswith(expected)


def test_a_mistake_of_ours_is_not_taken_for_the_users():
    @dataclass(frozen=True, kw_only=True)
    class Broken(Config):
        def __post_init__(self) -> None:
            len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError):
        Broken.from_dict({})


# from a command line


def test_overrides():
    changed = WHOLE.override(
        ["part.size=7", "parts.1.rate=2", "on=True", "limit=1e-3", "block=full", 'options={"b": 2}', "numbers.0=9"]
    )
    assert changed.part == Part(size=7)
    assert changed.parts == (Part(size=2), Part(size=3, name="b", rate=2.0))
    assert (changed.on, changed.limit, changed.block) == (True, 1e-3, "full")
    assert (changed.options, changed.numbers) == ({"b": 2.0}, [9, 2])
    assert WHOLE.part.size == 1
    assert WHOLE.numbers == [1, 2]


@pytest.mark.parametrize("text", ["512", "true", "null", "1e3", "[1]", "a=b", "None", "plain", ""])
def test_text_stays_text(text):
    assert WHOLE.override([f"part.name={text}"]).part.name == text


def test_quoted_text_loses_its_quotes():
    assert WHOLE.override(['part.name="12"']).part.name == "12"


@pytest.mark.parametrize(("text", "value"), [("None", None), ("null", None), ("2", 2), ("full", "full")])
def test_values_are_json_or_python(text, value):
    assert WHOLE.replace(block=5).override([f"block={text}"]).block == value


def test_overrides_are_checked_together():
    """Neither change alone would do: two experts in two groups, of which a token sees both."""
    both = ["model.num_experts=2", "model.num_experts_per_token=2", "model.num_expert_group=2", "model.topk_group=2"]
    assert run().override(both).model.num_experts == 2


def test_the_last_of_two_holds():
    assert WHOLE.override(["part.size=7", "part.size=8"]).part.size == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("on", "on: expected key=value, got no '='; write for example on=1"),
        ("=1", ": unknown key ''"),
        ("ons=1", "ons: unknown key 'ons'; do you mean 'on'?"),
        ("part.sise=1", "part.sise: unknown key 'sise'; do you mean 'size'?"),
        ("part.size.x=1", "part.size.x: part.size has no parts; assign to it as a whole"),
        ("limit.x=1", "limit.x: limit has no parts; assign to it as a whole"),
        ("parts.2.size=1", "parts.2.size: expected an index below 2, got '2'"),
        ("parts.-1.size=1", "parts.-1.size: expected an index below 2, got '-1'"),
        ("parts.x=1", "parts.x: expected an index below 2, got 'x'"),
        ("parts.²=1", "parts.²: expected an index below 2, got '²'"),
        ("part=1", "part: expected an object, got 1"),
        ("part.name=\ud800", "part.name: expected text, got half of a surrogate pair in '\\ud800'; write it as UTF-8"),
        ('part.name="\\ud800"', "part.name: expected text, got half of a surrogate pair in '\\ud800'"),
        ('anything=[1,{"a":"\\udfff"}]', "anything.1.a: expected text, got half of a surrogate pair in '\\udfff'"),
        ('options={"\\ud800":1}', "options: expected text, got half of a surrogate pair in '\\ud800'"),
        ("anything=" + "[" * 900 + "]" * 900, "anything.0.0"),
        ("part.size=many", "part.size: expected int, got 'many'"),
        ("part.size=" + "[" * 100_000, "part.size: expected int, got '[["),
        ("part.size=" + "1" * 5000, "part.size: expected int, got '11"),
        ("part.size=" + "1" * 400, "part.size: expected a whole number below 2^63, got 11"),
        (f"part.size={2**63}", "part.size: expected a whole number below 2^63, got 9223372036854775808"),
    ],
)
def test_overrides_that_cannot_be(text, expected):
    assert refusal(WHOLE.override, [text]).startswith(expected)


def test_an_empty_object_is_assigned_as_a_whole():
    assert "options has no parts" in refusal(WHOLE.replace(options={}).override, ["options.b=1"])


# the configuration of a run checks itself

STAGE = {"name": "s", "context": 8, "batch_tokens": 16, "tokens": 32, "lr": 1e-2, "lr_end": 1e-3}


@pytest.mark.parametrize(
    ("cls", "values", "expected"),
    [
        (Stage, {"context": 0}, "context: expected at least 1, got 0"),
        (Stage, {"context": 17}, "context: expected at most batch_tokens (16), got 17"),
        (Stage, {"batch_tokens": -1}, "batch_tokens: expected at least 1"),
        (Stage, {"tokens": 0}, "tokens: expected at least 1"),
        (Stage, {"lr": 0.0}, "lr: expected a finite rate above 0"),
        (Stage, {"lr": float("nan")}, "lr: expected a finite rate above 0"),
        (Stage, {"lr": float("inf")}, "lr: expected a finite rate above 0"),
        (Stage, {"lr": 1e38}, "lr: expected a finite rate above 0"),
        (Stage, {"lr_end": 1e38}, "lr_end: expected a finite rate of at least 0"),
        (Stage, {"mix": {"text": 0.0}}, "mix: expected finite shares of at least 0, one of them above, got"),
        (Stage, {"mix": {"text": 1e308, "needle": 1e308}}, "mix: expected finite shares of at least 0"),
        (Stage, {"lr_end": -1e-3}, "lr_end: expected a finite rate of at least 0"),
        (Stage, {"warmup": 1.0}, "warmup: expected a share of the stage in [0, 1), got 1.0"),
        (DataConfig, {"vocab_size": 256}, "vocab_size: expected at least 257, got 256"),
        (OptimizerConfig, {"momentum": 1.0}, "momentum: expected a decay in [0, 1), got 1.0"),
        (OptimizerConfig, {"weight_decay": -0.1}, "weight_decay: expected a finite number of at least 0"),
        (OptimizerConfig, {"weight_decay": float("nan")}, "weight_decay: expected a finite number of at least 0"),
        (OptimizerConfig, {"adamw_lr": -1.0}, "adamw_lr: expected a finite number of at least 0"),
        (OptimizerConfig, {"qk_clip": 0.0}, "qk_clip: expected a logit above 0, or null, got 0.0"),
        (OptimizerConfig, {"qk_clip_every": 0}, "qk_clip_every: expected at least 1, got 0"),
    ],
)
def test_a_run_is_refused_when_built(cls, values, expected):
    values = {**STAGE, **values} if cls is Stage else values
    assert refusal(lambda: cls(**values)).startswith(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"stages": ()}, "stages: expected at least one, got none"),
        ({"stages": (Stage(**STAGE), Stage(**STAGE))}, "stages: expected a name of its own for each, got s, s"),
        ({"seed": -1}, "seed: expected a number from 0"),
        ({"seed": 2**63}, "seed: expected a number from 0"),
        ({"load_window": 0}, "load_window: expected at least 1, got 0"),
        ({"data": DataConfig(vocab_size=301)}, "data.vocab_size: expected at most the model's 300, got 301"),
    ],
)
def test_parts_of_a_run_must_fit_together(changes, expected):
    assert refusal(lambda: run(**changes)).startswith(expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.num_experts_per_token=100", "model.num_experts_per_token: expected from 1 to num_experts (8), got 100"),
        ("model.hidden_size=0", "model.hidden_size: expected at least 1, got 0"),
        ("model.num_hidden_layers=1000000000", "model.linear_attn_config: expected kda_layers and full_attn_layers"),
        ("model.linear_attn_config.num_heads=0", "model.linear_attn_config.num_heads: expected at least 1, got 0"),
        ("model.linear_attn_config.short_conv_kernel_size=0", "model.linear_attn_config.short_conv_kernel_size: expec"),
        ("model.q_lora_rank=-1", "model.q_lora_rank: expected at least 1, got -1"),
        ("model.num_expert_group=0", "model.num_expert_group: expected at least 1, got 0"),
        ("model.num_shared_experts=-1", "model.num_shared_experts: expected at least 0, got -1"),
        ("model.rms_norm_eps=NaN", "model.rms_norm_eps: expected a finite number above 0, got nan"),
        ("model.balance.kind=quantil", "model.balance.kind: expected one of 'quantile', 'sign'"),
        ("stages.1.context=100000", "stages.1.context: expected at most batch_tokens (96), got 100000"),
    ],
)
def test_the_way_to_a_wrong_value_is_named(override, expected):
    assert refusal(run().override, [override]).startswith(expected)


def test_steps_are_whole_and_the_schedule_counts_them():
    stage = Stage(**{**STAGE, "tokens": 41})  # 2.56 steps of 16
    assert stage.steps == 3
    assert Stage(**{**STAGE, "tokens": 1}).steps == 1
    made = run(stages=(stage, stage.replace(name="t", tokens=16)))
    assert made.schedule.tokens == 64
    assert made.schedule.lr(48) == made.schedule.lr(64) == 1e-3
