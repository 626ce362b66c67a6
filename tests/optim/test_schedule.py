import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError
from perilune.optim.schedule import LearningRateStage, Schedule

ONE = LearningRateStage(tokens=1000, peak=1.0, end=0.1)


@pytest.mark.parametrize(("tokens", "lr"), [(0, 0), (5, 0.5), (10, 1), (505, 0.55), (1000, 0.1), (9999, 0.1)])
def test_one_stage_warms_up_linearly_and_falls_as_a_cosine(tokens, lr):
    assert Schedule((ONE,)).lr(tokens) == pytest.approx(lr, abs=1e-15)


def test_a_stage_warms_up_from_where_the_one_before_ended():
    schedule = Schedule((ONE, LearningRateStage(tokens=100, peak=0.5, end=0.05, warmup=0.1)))
    assert schedule.tokens == 1100
    assert schedule.lr(1000) == pytest.approx(0.1)  # not 0: the rate carries over
    assert schedule.lr(1005) == pytest.approx(0.3)  # half way from 0.1 to 0.5
    assert schedule.lr(1010) == pytest.approx(0.5)
    assert schedule.lr(1055) == pytest.approx(0.275)
    assert schedule.lr(1100) == pytest.approx(0.05)


def test_without_warmup_a_stage_starts_at_its_peak():
    schedule = Schedule((LearningRateStage(tokens=10, peak=1.0, end=0.0, warmup=0.0),))
    assert schedule.lr(0) == 1.0
    assert schedule.lr(5) == pytest.approx(0.5)


stages = st.builds(
    LearningRateStage,
    tokens=st.integers(100, 10_000),
    peak=st.floats(0, 1),
    end=st.floats(0, 1),
    warmup=st.floats(0.05, 0.9),
)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(stages, min_size=1, max_size=4), st.floats(0, 1))
def test_the_rate_is_continuous_and_within_its_stages(stages, part):
    schedule = Schedule(tuple(stages))
    step = 1e-6 * min(s.tokens for s in stages)
    for at in (part * schedule.tokens, *(sum(s.tokens for s in stages[:i]) for i in range(1, len(stages) + 1))):
        before = schedule.lr(max(0.0, at - step))
        assert abs(schedule.lr(at) - before) < 1e-4  # the steepest slope is 1 / 0.05 of a stage
        assert 0 <= before <= 1


def test_a_resumed_run_sees_the_same_rates():
    first = Schedule((ONE,))
    rates = [first.lr(100 * step) for step in range(10)]
    again = Schedule.from_dict(first.to_dict())
    assert [again.lr(100 * step) for step in range(5, 10)] == rates[5:]


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match=r"warmup: expected a part of the stage in \[0, 1\), got 1.0"):
        LearningRateStage(tokens=1, peak=1.0, end=0.0, warmup=1.0)
    with pytest.raises(ConfigError, match="tokens: expected a positive number"):
        LearningRateStage(tokens=0, peak=1.0, end=0.0)
    with pytest.raises(ConfigError, match="peak: expected a finite rate"):
        LearningRateStage(tokens=1, peak=float("nan"), end=0.0)
    with pytest.raises(ConfigError, match="stages: expected at least one"):
        Schedule(())
    with pytest.raises(ConfigError, match="tokens_done: expected >= 0"):
        Schedule((ONE,)).lr(-1)


def test_recipes_can_import_it_without_torch():
    code = "import sys, perilune.optim.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_gives_its_names_on_first_use():
    import perilune.optim

    assert perilune.optim.Schedule is Schedule
    assert all(getattr(perilune.optim, name) for name in perilune.optim.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Sgd'"):
        perilune.optim.Sgd
