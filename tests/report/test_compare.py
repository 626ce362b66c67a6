"""Runs side by side: what belongs together, what differs, and what the seeds' spread explains."""

import json
import math

import example_run
import numpy as np
import pytest

from perilune.cli.main import main
from perilune.core.errors import DataError
from perilune.report import compare, variants
from perilune.report.read import read_run
from perilune.report.variants import MEASURES, Measure, Sample, Variant, apart, conclusion, differences, grouped, sample

BITS = MEASURES[0]
SEEDS = (0, 1, 2)
VARIANTS = {
    "quantile": {"kind": "quantile", "block": 2},
    "sign": {"kind": "sign", "block": 2, "bits": 0.001, "gini": 0.12},
    "auxiliary": {"kind": "aux", "block": 2, "bits": 0.06, "gini": 0.2, "dead": 3},
    "plain": {"kind": "quantile", "block": None, "bits": 0.03},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [
        example_run.healthy(root / f"{name}-seed{seed}", seed + 10 * i, **options)
        for i, (name, options) in enumerate(VARIANTS.items())
        for seed in SEEDS
    ]


@pytest.fixture(scope="module")
def runs(folders):
    return [read_run(folder) for folder in folders]


@pytest.fixture
def light(monkeypatch):
    monkeypatch.setattr("perilune.report.page.plotly_script", lambda: "var Plotly;")


def named(*values_of):
    """Variants whose one measure has these values, and the measure."""
    stand_ins = [Variant(name, {}, []) for name, _ in values_of]
    values = {name: Sample(list(values)) for name, values in values_of}
    return stand_ins, values


def said(monkeypatch, *values_of, lower=True):
    stand_ins, values = named(*values_of)
    monkeypatch.setattr(variants, "sample", lambda variant, measure: values[variant.name])
    return conclusion(stand_ins, Measure("it", lambda run: None, "{:.2f}".format, lower))


def test_seeds_are_grouped_and_variants_named(runs):
    groups = grouped(runs)
    assert [v.name for v in groups] == list(VARIANTS)
    assert [[run.name for run in v.runs] for v in groups] == [[f"{n}-seed{s}" for s in SEEDS] for n in VARIANTS]


def test_only_differing_keys_are_listed_and_never_the_seed(runs):
    rows = dict(differences([v.settings for v in grouped(runs)]))
    assert rows == {
        "model.attn_res_block_size": [2, 2, 2, None],
        "model.balance.kind": ["quantile", "sign", "aux", "quantile"],
    }


def test_variants_of_one_name_are_told_apart_by_what_differs(tmp_path):
    one = example_run.healthy(tmp_path / "a" / "nano", 0)
    two = example_run.healthy(tmp_path / "b" / "nano", 0, "sign")
    assert [v.name for v in grouped([read_run(one), read_run(two)])] == ["nano: kind=quantile", "nano: kind=sign"]


def test_runs_without_a_configuration_go_by_their_names(tmp_path):
    steps = {"metrics.jsonl": example_run.metrics()[:20]}
    names = ("wide-s0", "wide-s1", "narrow_seed-3", "2024", "seed1")
    groups = grouped([read_run(example_run.write(tmp_path / name, steps)) for name in names])
    assert [(v.name, len(v.runs)) for v in groups] == [("wide", 2), ("narrow", 1), ("2024", 1), ("seed1", 1)]


def test_means_and_spreads_are_those_of_the_results(folders, runs):
    bits = [json.loads((f / "result.json").read_text())["bits_per_byte"]["perilune"] for f in folders[:3]]
    found = sample(grouped(runs)[0], BITS)
    assert found.values == bits
    assert found.mean == pytest.approx(np.mean(bits))
    assert found.spread == pytest.approx(np.std(bits, ddof=1))


def test_welchs_test_by_hand():
    # means 2 and 5, variances 1 and 1: t = 3 / sqrt(2/3) = 3.67 over 4 degrees, beyond 2.776
    assert apart(Sample([1, 2, 3]), Sample([4, 5, 6])) is True
    # means 2 and 4: t = 2.45, within
    assert apart(Sample([1, 2, 3]), Sample([3, 4, 5])) is False
    # variances 0.01 and 9, means 10 and 5: t = 5 / sqrt(3.0033) = 2.885 over 2.004 degrees, within 4.303
    assert apart(Sample([9.9, 10, 10.1]), Sample([2, 5, 8])) is False
    assert apart(Sample([1.0]), Sample([3, 4, 5])) is None
    assert apart(Sample([2.0, 2.0]), Sample([2.0, 2.0])) is False
    assert apart(Sample([2.0, 2.0]), Sample([3.0, 3.0])) is True


def test_it_is_said_in_words_what_the_seeds_explain(monkeypatch):
    text = said(monkeypatch, ("a", [1.0, 1.1, 1.2]), ("b", [1.05, 1.15, 1.25]), ("c", [2.0, 2.1, 2.2]))
    behind = "Behind by more than the seeds' spread: c (2.10). Within the seeds' spread: b (1.15)."
    assert text == f"a leads with 1.10 ± 0.10. {behind}"


def test_more_is_better_where_it_is(monkeypatch):
    assert said(monkeypatch, ("a", [0.5, 0.51]), ("b", [0.9, 0.91]), lower=False).startswith("b leads with 0.91")


def test_equals_and_single_seeds_are_said_to_be_so(monkeypatch):
    assert said(monkeypatch, ("a", [0, 0]), ("b", [0, 0])) == "all have 0.00 ± 0.00."
    text = said(monkeypatch, ("a", [1.0]), ("b", [2.0]))
    assert text == "a leads with 1.00. Not to be told from chance with one seed: b (2.00)."
    text = said(monkeypatch, ("a", [0, 0]), ("b", [0, 0]), ("c", [3, 3]))
    assert text.startswith("a and b lead with 0.00 ± 0.00.")


def test_the_conclusion_of_four_variants_with_three_seeds(runs):
    groups = grouped(runs)
    bits, gini, dead = (conclusion(groups, measure) for measure in MEASURES[:3])
    assert "Behind by more than the seeds' spread: plain (" in bits
    assert "auxiliary (" in bits
    assert "Within the seeds' spread: " in bits  # quantile and sign are as good as equal
    assert "Within the seeds' spread: plain" not in bits
    assert gini == (
        "quantile and plain lead with 0.050 ± 0.000. "
        "Behind by more than the seeds' spread: sign (0.120) and auxiliary (0.200)."
    )
    assert dead.startswith("quantile, sign and plain lead with 0 ± 0. ")


def test_curves_are_averaged_where_all_seeds_have_them():
    x, y = compare.average([([1, 2, 3], np.array([1.0, 2.0, math.nan])), ([2, 3, 4], np.array([4.0, 5.0, 6.0]))])
    assert (x, y) == ([2, 3], [3.0, 5.0])


def test_the_mean_curve_is_the_mean_of_the_files_numbers(folders, runs):
    needle = [json.loads((f / "result.json").read_text())["long_context"]["tasks"]["needle"] for f in folders[:3]]
    expected = np.mean([[entry["accuracy"] for entry in entries] for entries in needle], axis=0)
    chart = compare.tasks(grouped(runs))
    assert list(chart.figures) == ["needle", "variables", "aggregation", "files"]
    traces = [t for t in chart.figures["needle"]["data"] if t["name"] == "quantile"]
    assert len(traces) == 4  # three seeds and their mean
    assert traces[-1]["y"] == pytest.approx(expected.tolist())
    assert traces[0]["y"] == [entry["accuracy"] for entry in needle[0]]


@pytest.mark.usefixtures("light")
def test_the_page_shows_all_of_it(folders, runs, tmp_path, capsys):
    assert main(["compare", *map(str, folders), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert "Four variants, three seeds each" in text
    for id in ("conclusion", "settings", "figures", "learning", "experts", "long", "depth"):
        assert f'<section id="{id}">' in text
    charts = [
        "dots-0",
        "dots-5",
        "loss",
        "bits-stages",
        "gini",
        "tasks",
        "position",
        "activations",
        "live-sum",
        "half-life",
    ]
    for chart in charts:
        assert f'id="chart-{chart}"' in text
    for variant in grouped(runs):
        found = sample(variant, BITS)
        assert f"{found.mean:.3f} ± {found.spread:.3f}" in text
        assert ", ".join(f"{v:.3f}" for v in found.values) in text
    assert text == compare.comparison([read_run(folder) for folder in folders])


@pytest.mark.usefixtures("light")
def test_a_run_still_going_counts_in_no_figure(folders, tmp_path):
    going = example_run.going(tmp_path / "going", "sign")
    runs = [read_run(folders[0]), read_run(going)]
    assert sample(grouped(runs)[1], BITS) is None
    text = compare.comparison(runs)
    assert "going has not finished; its curves are shown, its figures are not counted." in text


@pytest.mark.usefixtures("light")
def test_only_unfinished_runs_have_a_page_too(tmp_path):
    runs = [read_run(example_run.going(tmp_path / name)) for name in ("a", "b")]
    assert "No run has finished yet." in compare.comparison(runs)


@pytest.mark.usefixtures("light")
def test_sick_runs_and_hostile_text_do_no_harm(folders, tmp_path):
    text = compare.comparison([read_run(folders[0]), read_run(example_run.sick(tmp_path / "<script>alert(1)"))])
    assert "<script>alert" not in text


@pytest.mark.usefixtures("light")
def test_the_same_seed_twice_is_noticed(folders):
    runs = [read_run(folders[0]), read_run(folders[0])]
    assert "seed 0 is there 2 times; its runs are not independent." in compare.comparison(runs)


@pytest.mark.usefixtures("light")
def test_other_data_is_cautioned(folders, tmp_path):
    other = json.loads((folders[0] / "run.json").read_text())
    other["data"]["vocab_size"] = 4096
    files = {path.name: path.read_text() for path in folders[0].iterdir()} | {"run.json": other}
    runs = [read_run(folders[0]), read_run(example_run.write(tmp_path / "other", files))]
    assert "They learn from different data" in compare.comparison(runs)


@pytest.mark.parametrize("nested", [[], {}])
def test_a_configuration_nested_too_deep_is_refused(folders, tmp_path, capsys, nested):
    for _ in range(900):
        nested = [nested] if isinstance(nested, list) else {"a": nested}
    other = example_run.write(tmp_path / "other", {"run.json": {"model": nested}})
    assert main(["compare", str(folders[0]), str(other), "--out", str(tmp_path / "page.html")]) == 2
    line = "perilune compare: other: expected a run's configuration, got one nested too deep; its run.json is damaged\n"
    assert capsys.readouterr().err == line


def test_one_run_is_nothing_to_compare(runs):
    with pytest.raises(DataError, match="expected two runs or more, got 1"):
        compare.comparison(runs[:1])
