"""The page: whole, self-contained, deaf to hostile text, and there for every state a run can be in."""

import base64
import hashlib
import json
import math
import random
import re
import sys
from html.parser import HTMLParser

import example_run
import pytest

from perilune.cli.main import main
from perilune.core.errors import BackendError, DataError
from perilune.report import write_report
from perilune.report.compare import comparison
from perilune.report.page import document, json_in_html, report
from perilune.report.read import FILES, read_run

SECTIONS = (
    "health", "quality", "learning", "optimizer", "long", "experts", "depth", "memory", "norms", "speed", "samples",
    "config",
)  # fmt: skip
CHARTS = (
    "bits", "bits-stages", "loss", "learning-rate", "grad-norm", "needle", "tasks", "position", "gini", "max-violation",
    "dead", "expert-load", "depth-attention", "half-life", "activations", "states", "throughput",
)  # fmt: skip


class Page(HTMLParser):
    """What a browser makes of a page: elements, and the text outside of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            attributes, text = self.scripts.pop()
            self.scripts.append((attributes, text + data))
        elif self._inside != "style":
            self.text += data

    def ids(self):
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def figures(self):
        return [json.loads(t) for a, t in self.scripts if a == {"type": "application/json"}]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return example_run.healthy(tmp_path_factory.mktemp("runs") / "healthy")


@pytest.fixture(scope="module")
def sick(tmp_path_factory):
    return example_run.sick(tmp_path_factory.mktemp("runs") / "sick")


@pytest.fixture
def light(monkeypatch):
    """Without plotly's script: 4.8 MB that not every test has to read."""
    monkeypatch.setattr("perilune.report.page.plotly_script", lambda: "var Plotly;")


def page_of(folder) -> Page:
    return Page(report(read_run(folder)))


@pytest.mark.usefixtures("light")
def test_every_section_and_chart_is_there(healthy):
    page = page_of(healthy)
    ids = page.ids()
    assert len(ids) == len(set(ids))
    assert set(SECTIONS) <= set(ids)
    assert [i for i in ids if i.startswith("chart-")] == [f"chart-{name}" for name in CHARTS]
    anchors = {a["href"][1:] for tag, a in page.elements if tag == "a"}
    assert anchors <= set(ids)
    assert set(SECTIONS) <= anchors
    assert sum("finding" in a.get("class", "").split() for _, a in page.elements) == 3


@pytest.mark.usefixtures("light")
def test_headline_figures_are_the_files_numbers(healthy):
    text = page_of(healthy).text
    result = json.loads((healthy / "result.json").read_text())
    for shown in (
        f"{result['bits_per_byte']['perilune']:.3f}",
        "1.2M",
        "4.42M parameters",
        "seed 0",
        "7 min",
        "cpu",
        "0.050",
    ):
        assert shown in text


@pytest.mark.usefixtures("light")
def test_embedded_figures_hold_the_files_numbers(healthy):
    written = [json.loads(line) for line in (healthy / "metrics.jsonl").read_text().splitlines()]
    curves = [trace.get("y") for figure in page_of(healthy).figures() for trace in figure["data"]]
    assert [line["losses"]["next_token"] for line in written] in curves
    assert [line["gini"] for line in written] in curves


@pytest.mark.parametrize("kind", ["healthy", "sick"])
def test_nothing_is_fetched_from_anywhere(kind, request):
    text = report(read_run(request.getfixturevalue(kind)))
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "video", "audio")
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "action", "data", "background")
            assert not name.startswith("on")
            assert name != "href" or value.startswith("#")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in style


def test_only_the_pages_own_scripts_may_run(sick):
    page = page_of(sick)
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    code = [text for attributes, text in page.scripts if attributes == {}]
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in code]
    assert len(code) == 2  # plotly, once, and the page's
    assert [len(text) > 1_000_000 for text in code] == [True, False]
    assert policy == (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; img-src data: blob:"
    )


@pytest.mark.usefixtures("light")
def test_hostile_text_is_only_text(sick):
    page = page_of(sick)
    assert page.text.count(example_run.HOSTILE) == 4  # prompt, sample, machine, a stage in a finding
    assert "</pre></main>" in page.text
    assert [tag for tag, _ in page.elements].count("main") == 1
    kinds = [attributes.get("type", "code") for attributes, _ in page.scripts]
    assert kinds.count("code") == 2
    assert set(kinds) == {"code", "application/json"}
    for figure in page.figures():
        shown = re.sub("<extra>(input|output)?</extra>|<br>", "", json.dumps(figure))
        assert "<" not in shown  # plotly reads tags


@pytest.mark.usefixtures("light")
def test_samples_are_shown_as_they_are(tmp_path):
    ending = example_run.result()
    ending["samples"] = [{"prompt": "def ", "text": "def f():\n  return 1"}]
    assert "def def f():\n  return 1" in page_of(example_run.write(tmp_path / "run", {"result.json": ending})).text


def test_half_a_surrogate_pair_is_spelled_out(tmp_path):
    folder = example_run.healthy(tmp_path / "run")
    result = json.loads((folder / "result.json").read_text())
    result["samples"] = [{"prompt": "a", "text": "\ud800!"}]
    example_run.write(folder, {"result.json": result})
    assert "<b>a</b>\\ud800!" in write_report(folder).read_text(encoding="utf-8")


def test_json_cannot_leave_its_script():
    values = {"text": "</script><!--<script>&", "n": [1.5, None]}
    text = json_in_html(values)
    assert not set("<>&") & set(text)
    assert json.loads(text) == values


@pytest.mark.usefixtures("light")
def test_titles_are_escaped(tmp_path):
    folder = example_run.write(tmp_path / "<b>&'\"", {"metrics.jsonl": example_run.metrics()[:30]})
    page = page_of(folder)
    assert "<b>&'\": training report" in page.text
    bold = [i for i, (tag, _) in enumerate(page.elements) if tag == "b"]
    assert all(page.elements[i - 1] == ("div", {"class": "tile"}) for i in bold)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("name", FILES)
def test_a_run_without_one_of_its_files_has_a_page(healthy, tmp_path, name):
    kept = {path.name: path.read_text() for path in healthy.iterdir() if path.name != name}
    page = page_of(example_run.write(tmp_path / "run", kept))
    assert set(SECTIONS) <= set(page.ids())
    assert f"{name} is not there" in page.text


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("name", FILES)
def test_a_run_of_one_file_has_a_page(healthy, tmp_path, name):
    page = page_of(example_run.write(tmp_path / "run", {name: (healthy / name).read_text()}))
    assert set(SECTIONS) <= set(page.ids())


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_anywhere_still_gives_a_page(healthy, tmp_path, name):
    files = {path.name: path.read_text() for path in healthy.iterdir()}
    whole = files[name]
    for i in range(8):
        files[name] = whole[: len(whole) * i // 8 + 3 * i]
        assert set(SECTIONS) <= set(page_of(example_run.write(tmp_path / "run", files)).ids())


@pytest.mark.usefixtures("light")
def test_a_run_still_going_says_so(tmp_path):
    text = page_of(example_run.going(tmp_path / "run")).text
    assert "This run is still going, or stopped early: step 214 of 293 (73%) is the last it logged." in text
    assert "The last line of metrics.jsonl is half-written" in text
    assert "result.json is not there yet." in text
    assert "Not judged yet" in text


@pytest.mark.usefixtures("light")
def test_a_single_step_has_a_page(tmp_path):
    page = page_of(example_run.write(tmp_path / "run", {"metrics.jsonl": example_run.metrics()[:1]}))
    assert "chart-loss" in page.ids()


@pytest.mark.usefixtures("light")
def test_numbers_that_are_none_still_give_a_page(healthy, tmp_path):
    steps = [
        line
        | {"losses": {"next_token": float("nan")}, "gini": None, "seconds": 0, "lr": float("inf"), "grad_norm": -1.0}
        for line in example_run.metrics()
    ]
    taken = example_run.snapshots()
    taken[-1] |= {"bits_per_byte": float("nan"), "expert_load": {"1": []}, "half_life": {"0": [[0, 0, 0]]}}
    taken[-1] |= {"depth_attention": [{"sublayer": "0.attention", "weights": []}], "state_rms": {"0": [float("nan")]}}
    ending = example_run.result()
    ending["bits_per_byte"] = {"perilune": float("inf")}
    ending["long_context"]["tasks"] = {"needle": [], "files": [{"length": 1, "accuracy": 1.0, "positions": []}]}
    ending["long_context"]["loss_by_position"] = [{"context": 1, "buckets": []}]
    ending["samples"] = []
    files = {"run.json": {"stages": 3}, "metrics.jsonl": steps, "snapshots.jsonl": taken, "result.json": ending}
    page = page_of(example_run.write(tmp_path / "run", files))
    assert set(SECTIONS) <= set(page.ids())
    assert "The loss is not a number" in page.text


def leaves(value, path=()):
    """The paths of all numbers."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    elif isinstance(value, float | int):
        yield path


@pytest.mark.usefixtures("light")
def test_odd_numbers_anywhere_still_give_a_page(healthy, tmp_path):
    rng = random.Random(0)
    whole = {path.name: path.read_text() for path in healthy.iterdir()}
    odd = (0, -1, -1e-300, 1e-300, 1e300, 2**70, math.nan, math.inf, -math.inf, 0.5)
    for _ in range(25):
        files = dict(whole)
        for name in FILES:
            values = (
                [json.loads(line) for line in whole[name].splitlines()] if "jsonl" in name else json.loads(whole[name])
            )
            for path in rng.sample(list(leaves(values)), 12):
                inside = values
                for key in path[:-1]:
                    inside = inside[key]
                inside[path[-1]] = rng.choice(odd)
            files[name] = values
        folder = example_run.write(tmp_path / "run", files)
        assert set(SECTIONS) <= set(page_of(folder).ids())
        comparison([read_run(folder), read_run(healthy)])


def test_the_same_files_give_the_same_page(healthy, tmp_path):
    first = write_report(healthy, tmp_path / "a.html").read_bytes()
    assert write_report(healthy, tmp_path / "b.html").read_bytes() == first
    assert first.count(b"plotly.js v") == 1


@pytest.mark.usefixtures("light")
def test_the_page_lies_in_the_runs_folder(tmp_path, capsys):
    folder = example_run.going(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize("words", [["report"], ["compare", "--out", "x.html"]])
def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys, words):
    assert main([*words, str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "expected a run, found none of run.json" in error


@pytest.mark.usefixtures("light")
def test_a_place_that_cannot_be_written_is_refused(healthy, tmp_path):
    with pytest.raises(DataError, match="expected a file in a folder that exists"):
        write_report(healthy, tmp_path / "nowhere" / "page.html")
    with pytest.raises(DataError, match="expected a file in a folder that exists"):
        write_report(healthy, tmp_path)


def test_without_plotly_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(BackendError, match=r"pip install 'perilune\[report\]'"):
        document("title", [], "")
