import logging

import pytest
import torch

from perilune.core.backends import Backends
from perilune.core.errors import BackendError, PeriluneError


@pytest.fixture
def double():
    """The best serves even numbers, the next small ones, the last all."""
    backends = Backends("double")
    backends.register("triton", lambda x: ("triton", 2 * x), refuses=lambda x: "x is odd" if x % 2 else None)
    backends.register("chunked", lambda x: ("chunked", 2 * x), refuses=lambda x: "x is large" if x > 9 else None)
    backends.register("reference", lambda x: ("reference", 2 * x))
    return backends


@pytest.mark.parametrize(("x", "name"), [(4, "triton"), (100, "triton"), (3, "chunked"), (11, "reference")])
def test_auto_takes_the_first_that_can(double, x, name):
    assert double.pick("auto", x)(x) == (name, 2 * x)


@pytest.mark.parametrize("name", ["triton", "chunked", "reference"])
def test_a_name_is_obeyed(double, name):
    assert double.pick(name, 2)(2) == (name, 4)


def test_a_named_backend_that_cannot_serve_says_why_and_nothing_stands_in(double):
    with pytest.raises(BackendError, match="backend: double cannot run on 'triton': x is odd; use backend='auto'"):
        double.pick("triton", 3)


@pytest.mark.parametrize("name", ["chunkd", "gluon", "", "Reference"])
def test_an_unknown_name_offers_what_there_is(double, name):
    with pytest.raises(BackendError, match=rf"expected one of this operation \(double\), got '{name}'; ") as error:
        double.pick(name, 2)
    assert "chunked" in str(error.value) or "reference" in str(error.value)
    assert isinstance(error.value, PeriluneError)
    assert isinstance(error.value, ValueError)


def test_keywords_reach_the_refusals():
    backends = Backends("op")
    backends.register("chunked", lambda x, mask=None: x, refuses=lambda x, mask=None: "mask" if mask else None)
    assert backends.pick("auto", 1)(1) == 1
    with pytest.raises(BackendError, match=r"backend: op has none for this call \(chunked: mask\)"):
        backends.pick("auto", 1, mask=True)


def test_no_backends_at_all():
    with pytest.raises(BackendError, match="op has none for this call"):
        Backends("op").pick("auto")


def test_the_choice_is_logged_once_with_its_reasons(double, caplog):
    with caplog.at_level(logging.INFO, "perilune"):
        for x in (2, 4, 3, 5, 11, 13, 6):
            double.pick("auto", x)
    assert [record.message for record in caplog.records] == [
        "double: triton",
        "double: chunked (triton: x is odd)",
        "double: reference (triton: x is odd; chunked: x is large)",
    ]


def test_the_choice_can_be_asked_for_without_a_call(double, caplog):
    with caplog.at_level(logging.INFO, "perilune"):
        assert double.choice(2) == ("triton", {})
        assert double.choice(11) == ("reference", {"triton": "x is odd", "chunked": "x is large"})
        assert Backends("op").choice() == (None, {})
    assert caplog.records == []


def test_registering_is_by_known_names_once(double):
    assert double.names == ("triton", "chunked", "reference")
    for name in ("auto", "cuda", "chunked"):
        with pytest.raises(AssertionError):
            double.register(name, lambda x: x)


def test_a_choice_does_not_break_a_graph() -> None:
    backends = Backends("double")
    backends.register("chunked", lambda x: x + x)
    compiled = torch.compile(lambda x: backends.pick("auto", x)(x), backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    torch.compiler.reset()
