"""`perilune plan NAME --gpus N`: tables, JSON, and one clear line for what cannot be."""

import json

import pytest

from perilune.cli.main import main
from perilune.cli.plan_tables import days, energy
from perilune.models.k3 import presets


def told(capsys, *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_tables_say_what_fits_and_how_fast(capsys) -> None:
    assert main(["plan", "small", "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    for words in ("small on 8 x h200", "tokens a second", "Muon's momentum", "AdamW's moments", "KDA", "at the peak"):
        assert words in out
    assert "2.5B tokens in " in out


def test_json_adds_up(capsys) -> None:
    values = told(capsys, "1b", "--gpus", "8", "--gpu", "h100")
    assert (values["gpu"], values["gpus"], values["tokens"]) == ("h100", 8, 20_000_000_000)
    assert [stage["name"] for stage in values["stages"]] == ["8k", "64k", "256k", "1m"]
    assert values["seconds"] == pytest.approx(sum(stage["seconds"] for stage in values["stages"]))
    assert values["joules"] == pytest.approx(values["seconds"] * 8 * 700)
    for stage in values["stages"]:
        x, parts = stage["layout"], stage["bytes"]
        assert x["data"] * x["context"] * x["pipeline"] == 8
        largest = max(sum(parts["passes"].values()), sum(parts["step"].values()))
        assert stage["peak_bytes"] == pytest.approx(sum(parts["states"].values()) + largest)
        assert stage["peak_bytes"] <= 0.9 * 80e9
        micro = max(sum(stage["micro_batch_seconds"].values()), stage["beside_seconds"])
        waits = x["micro_batches"] + x["pipeline"] - 1
        assert stage["step_seconds"] == pytest.approx(waits * micro + sum(stage["once_seconds"].values()))
        assert stage["tokens_per_second"] == pytest.approx(stage["batch_tokens"] / stage["step_seconds"])


@pytest.mark.parametrize("name", [name for name in presets.PRESETS if name not in ("k3", "100b")])
def test_every_preset_has_a_plan(name: str, capsys) -> None:
    values = told(capsys, name, "--gpus", "64", "--context", "8192")
    assert len(values["stages"]) == 1
    assert values["stages"][0]["tokens_per_second"] > 0


def test_options_take_the_place_of_stages(capsys) -> None:
    options = ["--gpus", "3", "--context", "4096", "--batch-tokens", "32768", "--tokens", "1000000"]
    (stage,) = told(capsys, "small", *options)["stages"]
    assert (stage["context"], stage["batch_tokens"], stage["tokens"]) == (4096, 32768, 1_000_000)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan 1b --gpus 0", "argument --gpus: expected a whole number from 1 up, got '0'"),
        ("plan 1b --gpus many", "argument --gpus: expected a whole number from 1 up, got 'many'"),
        ("plan 1b --gpus 8 --gpu h20", "--gpu: there is none called 'h20'; do you mean 'h200'?"),
        ("plan 1bb --gpus 8", "preset: there is none called '1bb'; do you mean '1b'?"),
        ("plan 1b --json", "--json: expected --gpus beside it, got none; say on how many GPUs"),
        ("plan 1b --tokens 5", "--tokens: expected --gpus beside it"),
        ("plan 1b --gpus 8 --context 8192 --batch-tokens 5", "--batch-tokens: expected at least the context, 8192"),
        ("plan 10b_8k --gpus 1", "--gpus: expected at least 3 for stage 8k, got 1; 3 fit"),
    ],
)
def test_bad_calls_get_one_line(words: str, expected: str, capsys) -> None:
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_without_gpus_parameters_are_counted_as_ever(capsys) -> None:
    assert main(["plan", "nano"]) == 0
    out = capsys.readouterr().out
    assert "nano: parameters" in out
    assert "h200" not in out


def test_units() -> None:
    assert [days(x) for x in (30, 600, 7200, 864_000)] == ["30.0 seconds", "10.0 minutes", "2.0 hours", "10.0 days"]
    assert [energy(x) for x in (3600, 7.2e6, 3.6e9, 7.2e12)] == ["1.0 Wh", "2.0 kWh", "1.0 MWh", "2.0 GWh"]
