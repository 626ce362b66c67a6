import inspect
import logging
import subprocess
import sys

import pytest

from perilune.core import errors
from perilune.core.errors import PeriluneError, nearest
from perilune.core.logs import show_logs

ERRORS = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, PeriluneError)]


def test_errors_of_users_are_caught_as_one_and_as_value_errors():
    assert len(ERRORS) >= 6
    for error in ERRORS:
        assert error is PeriluneError or issubclass(error, ValueError)
        assert not issubclass(error, OSError)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("trian", ["train", "eval"], "do you mean 'train'?"),
        ("nan", {"nano": 1}, "do you mean 'nano'?"),
        ("zzz", ["b", "a"], "there are a, b"),
        ("", ["b", "a"], "there are a, b"),
        ("x", [], "there are none"),
    ],
)
def test_nearest(name, known, hint):
    assert nearest(name, known) == hint
    assert nearest(name, iter(known)) == hint


def test_core_and_recipes_load_without_torch():
    modules = ["backends", "config", "errors", "logs"]
    code = f"import sys, perilune, perilune.recipes, {', '.join(f'perilune.core.{m}' for m in modules)}; "
    code += "print([m for m in ('torch', 'numpy', 'rich', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def logger():
    logger = logging.getLogger("perilune")
    kept = logger.handlers[:], logger.level
    logger.handlers.clear()
    yield logger
    logger.handlers[:], level = kept
    logger.setLevel(level)


def test_logs_are_shown_on_stderr_once(logger, capsys):
    show_logs()
    show_logs()
    logging.getLogger("perilune.backends").info("kda: chunked")
    logging.getLogger("perilune.backends").debug("much more")
    logging.getLogger("another.library").warning("not ours")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("kda: chunked") == 1
    assert "much more" not in err


def test_debug_shows_everything(logger, capsys):
    show_logs(debug=True)
    logging.getLogger("perilune.backends").debug("much more")
    assert "much more" in capsys.readouterr().err
