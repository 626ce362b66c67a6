"""What is worth a look: rules over a run's numbers, each a sentence with the figures it rests on.

A rule looks at one thing and returns a `Finding`, or None where the files do not say.  Thresholds stand in the rules.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from perilune.report import measures, words
from perilune.report.figures import depth_rows, sources
from perilune.report.measures import known, middle, recent
from perilune.report.read import RunFiles, Steps


class Level(IntEnum):
    FINE = 0
    WATCH = 1
    POOR = 2
    BROKEN = 3


@dataclass(frozen=True)
class Finding:
    level: Level
    weight: float
    """How much it matters beside others of its level, 0 to 1."""
    title: str
    text: str
    chart: str
    """The id of the section that shows it."""


def findings(run: RunFiles) -> list[Finding]:
    """All that the rules find, worst first."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    return sorted(found, key=lambda f: (-f.level, -f.weight, f.title))


def verdict(found: list[Finding]) -> str:
    """The health of a run in a sentence."""
    if not found:
        return "There is nothing to judge yet."
    named = {level: [f.title[0].lower() + f.title[1:] for f in found if f.level == level] for level in Level}
    watch, poor, broken = (len(named[level]) for level in (Level.WATCH, Level.POOR, Level.BROKEN))
    fine = f"{len(named[Level.FINE])} of {len(found)} checks are fine"
    if broken:
        return f"This run is broken: {words.listed(named[Level.BROKEN])}."
    if poor:
        return f"{fine}; {plural(poor, 'thing')} went wrong enough to act on."
    if watch:
        verb = "is" if watch == 1 else "are"
        return f"This run looks healthy: {fine}, and {plural(watch, 'thing')} {verb} worth a look."
    return f"This run looks healthy: all {len(found)} checks are fine. These say most about it."


def plural(n: int, noun: str) -> str:
    spelled = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return f"{spelled[n] if n < len(spelled) else f'{n:,}'} {noun}{'' if n == 1 else 's'}"


# learning


def loss_finite(run: RunFiles) -> Finding | None:
    steps = run.steps
    if steps is None:
        return None
    bad = ~np.isfinite(steps.next_token) & (steps.skipped == 0)
    if not bad.any():
        return Finding(
            Level.FINE, 0.05, "Every loss is a number", f"All {len(steps):,} steps have a finite loss.", "learning"
        )
    first = int(np.argmax(bad))
    text = (
        f"The loss is not a number in {int(bad.sum()):,} of {len(steps):,} steps, the first at step "
        f"{steps.step[first]:,.0f}; what came after it cannot be trusted."
    )
    return Finding(Level.BROKEN, 1.0, "The loss is not a number", text, "learning")


def spikes(steps: Steps) -> list[tuple[int, float]]:
    """Steps whose loss leaps above the median of the 25 before them in their stage: by 0.3 nats and six times the usual
    deviation.  Steps that were left out are none.  (index, height in nats)."""
    found: list[tuple[int, float]] = []
    for part in steps.parts:
        counted = np.isfinite(steps.next_token[part]) & (steps.skipped[part] == 0)
        values = np.where(counted, steps.next_token[part], math.nan)
        before = sliding_window_view(np.pad(values, (25, 0), constant_values=math.nan), 25)[: len(values)]
        judged = np.flatnonzero((np.isfinite(before).sum(1) >= 8) & np.isfinite(values))
        before = before[judged]
        usual = np.nanmedian(before, axis=1)
        deviation = 1.4826 * np.nanmedian(np.abs(before - usual[:, None]), axis=1)
        leap = values[judged] - usual
        high = leap > np.maximum(0.3, 6 * deviation)
        found += zip((part.start + judged[high]).tolist(), leap[high].tolist())
    return found


def loss_spikes(run: RunFiles) -> Finding | None:
    if run.steps is None or len(known(run.steps.next_token)) < 20:
        return None
    found = spikes(run.steps)
    if not found:
        return Finding(Level.FINE, 0.1, "No loss spikes", "No step's loss leaps above its neighbours.", "learning")
    index, height = max(found, key=lambda spike: spike[1])
    text = (
        f"{plural(len(found), 'step').capitalize()} leapt above the ones before; the highest by {height:.2f} "
        f"nats, at step {run.steps.step[index]:,.0f}."
    )
    level = Level.POOR if len(found) > 0.01 * len(run.steps) and height > 1 else Level.WATCH
    return Finding(level, min(1.0, height / 3), "The loss spikes", text, "learning")


def left_out(run: RunFiles) -> Finding | None:
    steps = run.steps
    if steps is None or not (count := int(steps.skipped.sum())):
        return None
    text = (
        f"{plural(count, 'step').capitalize()} of {len(steps):,} had a loss or gradient far above the ones before, and "
        f"changed nothing; the last was step {steps.step[steps.skipped > 0][-1]:,.0f}."
    )
    level = Level.POOR if count > 0.01 * len(steps) else Level.WATCH
    return Finding(level, min(1.0, 0.2 + 50 * count / len(steps)), "Steps were left out", text, "learning")


def loss_trend(run: RunFiles) -> Finding | None:
    """The last fifth of the last stage against the fifth before it."""
    if run.steps is None:
        return None
    values = known(run.steps.next_token[run.steps.parts[-1]])
    n = len(values) // 5
    if n < 5:
        return None
    before, after = float(np.mean(values[-2 * n : -n])), float(np.mean(values[-n:]))
    change = after - before
    error = math.sqrt((np.var(values[-2 * n : -n]) + np.var(values[-n:])) / n)
    if change > max(0.03, 2 * error):
        text = f"Over the last fifth of the last stage the mean loss rose from {before:.3f} to {after:.3f} nats."
        return Finding(Level.POOR, min(1.0, change), "The loss rises at the end", text, "learning")
    if change < -max(0.01, 2 * error):
        text = (
            f"Over the last fifth of the last stage it fell from {before:.3f} to {after:.3f} nats: more tokens "
            "would still help."
        )
        return Finding(Level.FINE, 0.5, "The loss is still falling", text, "learning")
    text = f"Over the last fifth of the last stage it stayed near {after:.3f} nats."
    return Finding(Level.FINE, 0.3, "The loss has settled", text, "learning")


def gradient(run: RunFiles) -> Finding | None:
    """The end against the second tenth of the steps, after the warm-up."""
    if run.steps is None or len(known(run.steps.grad_norm)) < 30:
        return None
    values = run.steps.grad_norm
    early, late = middle(values[len(values) // 10 : len(values) // 5]), recent(values)
    if not early or late is None:
        return None
    growth = late / early
    text = f"The gradient norm went from {early:.3g} early on to {late:.3g} at the end, {growth:.1f} times."
    if growth > 3:
        return Finding(
            Level.POOR if growth > 10 else Level.WATCH,
            min(1.0, growth / 20),
            "The gradient norm grows",
            text,
            "optimizer",
        )
    return Finding(Level.FINE, 0.15, "The gradient norm is steady", text, "optimizer")


# quality


def compressors(run: RunFiles) -> Finding | None:
    bits = run.result.bits_per_byte if run.result else {}
    ours = bits.get(measures.OURS)
    others = sorted((v, n) for n, v in bits.items() if n != measures.OURS and math.isfinite(v))
    if ours is None or not others:
        return None
    if not math.isfinite(ours):
        return Finding(
            Level.BROKEN, 0.9, "Bits per byte is not a number", "The held-out text could not be scored.", "quality"
        )
    worse = [n for v, n in others if ours >= v]
    value, name = others[0]
    if not worse:
        text = (
            f"{ours:.3f} bits per byte, {words.percent(1 - ours / value)} fewer than {name}, the best that needs "
            f"no network ({value:.3f})."
        )
        return Finding(Level.FINE, 0.9, f"Better than {name}", text, "quality")
    packers = [n for n in reversed(worse) if n.startswith(("gzip", "xz"))]  # the worst one first
    text = (
        f"{ours:.3f} bits per byte, where {name} needs {value:.3f}; the network earns nothing over "
        f"{words.listed(worse)} yet."
    )
    return Finding(Level.POOR if packers else Level.WATCH, 0.8, f"Worse than {(packers or worse)[0]}", text, "quality")


def quality_trend(run: RunFiles) -> Finding | None:
    scores = [(s.bits_per_byte, s.stage) for s in run.snapshots if s.bits_per_byte is not None]
    if len(scores) < 2:
        return None
    best, last = min(scores), scores[-1]
    text = (
        f"Held-out bits per byte were {best[0]:.3f} after stage {best[1]} and {last[0]:.3f} after {last[1]}, the last."
    )
    if last[0] > 1.01 * best[0]:
        return Finding(Level.WATCH, 0.6, "A later stage lost quality", text, "quality")
    text = (
        f"Held-out bits per byte fell from {scores[0][0]:.3f} after stage {scores[0][1]} to {last[0]:.3f} "
        f"after {last[1]}."
    )
    return Finding(Level.FINE, 0.3, "Stages build on each other", text, "quality")


def source_trend(run: RunFiles) -> Finding | None:
    """The last snapshot's sources, against the best that any stage before it reached on each."""
    *before, last = [s.bits_by_source for s in run.snapshots if s.bits_by_source] or [{}]
    if not last:
        return None
    best = {name: min((b[name] for b in before if name in b), default=math.inf) for name in last}
    worse = [name for name, bits in last.items() if bits > 1.01 * best[name]]
    text = "By source, bits per byte at the end: " + ", ".join(f"{name} {bits:.3f}" for name, bits in last.items())
    if worse:
        lost = ", ".join(f"{name} was {best[name]:.3f}" for name in worse)
        return Finding(Level.WATCH, 0.5, "A source was forgotten", f"{text}; {lost} after an earlier stage.", "quality")
    return Finding(Level.FINE, 0.3, "No source was forgotten", text + ".", "quality")


# experts


def balance(run: RunFiles) -> Finding | None:
    value = measures.gini(run)
    if value is None:
        return None
    text = f"The worst layer ends at a Gini of {value:.3f}"
    series = known(run.steps.gini) if run.steps else np.array([])
    if len(series) >= 60:
        third = len(series) // 3
        before, after = float(np.median(series[third : 2 * third])), float(np.median(series[-third // 2 :]))
        text += f", {before:.3f} in the middle of training and {after:.3f} towards the end"
        if after > 1.25 * before and after - before > 0.02:
            level = Level.POOR if value > 0.3 else Level.WATCH
            return Finding(level, min(1.0, 0.4 + value), "The experts' load drifts apart", text + ".", "experts")
    if value > 0.1:
        level = Level.POOR if value > 0.3 else Level.WATCH
        return Finding(
            level, min(1.0, value), "The experts' load is uneven", text + "; 0.1 or less is even.", "experts"
        )
    return Finding(Level.FINE, 0.6, "The experts' load is even", text + "; 0.1 or less is even.", "experts")


def dead_experts(run: RunFiles) -> Finding | None:
    count, share = measures.dead_experts(run), measures.dead_share(run)
    total = sum(len(loads) for loads in run.snapshots[-1].expert_load.values()) if run.snapshots else 0
    if share is None and count is not None and total:
        share = count / total
    if count is None and share is None:
        return None
    if not count and not share:
        of = f" of {total:,}" if total else ""
        return Finding(
            Level.FINE, 0.4, "No dead experts", f"Each{of} got tokens in the last window of steps.", "experts"
        )
    what = f"{plural(count, 'expert').capitalize()} got" if count else "Some experts got"
    part = f", {words.percent(share)} of all" if share else ""
    text = f"{what} no token in the last window of steps{part}: parameters that learn nothing."
    level = Level.POOR if (share or 0) >= 0.02 else Level.WATCH
    return Finding(level, min(1.0, 0.5 + (share or 0) * 2), "Dead experts", text, "experts")


# depth


def depth_map(run: RunFiles) -> Finding | None:
    """Sources that no sublayer reads, or one that all read alone."""
    snapshot = next((s for s in reversed(run.snapshots) if s.depth_attention), None)
    if snapshot is None:
        return None
    rows = np.array([row for row in depth_rows(snapshot) if np.isfinite(row).sum() > 1])
    if not len(rows):
        return None
    names = sources(snapshot)
    most = [float(np.nanmax(rows[:, j])) if np.isfinite(rows[:, j]).any() else math.nan for j in range(rows.shape[1])]
    ignored = [name for name, value in zip(names, most) if value < 0.05]
    if ignored:
        text = f"No sublayer draws as much as 5% of its input from {words.listed(ignored)}."
        return Finding(Level.WATCH, 0.55, "Depth attention ignores a source", text, "depth")
    live = float(np.median(rows[:, -1]))
    if live > 0.95:
        text = (
            f"The typical sublayer takes {words.percent(live)} of its input from the live sum: the older blocks "
            "hardly count."
        )
        return Finding(Level.WATCH, 0.5, "Depth attention is a plain residual", text, "depth")
    uniform = np.abs(rows * np.isfinite(rows).sum(1, keepdims=True) - 1)
    if float(np.nanmax(uniform)) < 0.05:
        text = "Every sublayer still reads the plain mean of its sources, as at the start."
        return Finding(Level.WATCH, 0.6, "Depth attention has not learned", text, "depth")
    row, column = np.unravel_index(int(np.nanargmax(rows)), rows.shape)
    reader = [name for name, weights in snapshot.depth_attention if len(weights) > 1][row]
    text = (
        f"Every source is read by some sublayer; the strongest link is {words.sublayer(reader)} from "
        f"{names[column]}, {words.percent(rows[row, column])}."
    )
    return Finding(Level.FINE, 0.45, "Depth attention uses all its sources", text, "depth")


def memory(run: RunFiles) -> Finding | None:
    """Heads at the decay's bound, and heads whose half-life depends on nothing or did not move."""
    taken = [s for s in run.snapshots if s.half_life]
    if not taken:
        return None
    heads = {(layer, i): v for layer, rows in taken[-1].half_life.items() for i, v in enumerate(rows)}
    if not heads:
        return None
    bound = run.setting("model.linear_attn_config.gate_lower_bound")
    floor = math.log(2) / -bound if isinstance(bound, int | float) and bound < 0 else math.log(2) / 5
    saturated = sum(median < 1.2 * floor for _, median, _ in heads.values())
    if saturated:
        text = (
            f"{saturated} of {len(heads)} heads have a median half-life near {floor:.2f} tokens, the least the "
            "gate allows: they forget a token at once."
        )
        level = Level.POOR if saturated > 0.25 * len(heads) else Level.WATCH
        return Finding(
            level, min(1.0, 0.4 + saturated / len(heads)), "KDA heads saturated at the bound", text, "memory"
        )
    first = {(layer, i): v for layer, rows in taken[0].half_life.items() for i, v in enumerate(rows)}
    frozen = [h for h, v in heads.items() if v[2] < 1.02 * v[0]]
    unmoved = [h for h, v in heads.items() if len(taken) > 1 and h in first and abs(v[1] - first[h][1]) < 1e-3 * v[1]]
    if frozen or unmoved:
        text = (
            f"{len(frozen)} of {len(heads)} heads keep every token for the same time; their decay ignores the text."
            if frozen
            else f"{len(unmoved)} of {len(heads)} heads have the half-life of the first stage's end, to a thousandth."
        )
        return Finding(Level.WATCH, 0.45, "KDA decay is frozen", text, "memory")
    medians = [v[1] for v in heads.values()]
    text = (
        f"Median half-lives reach from {words.human(min(medians))} to {words.human(max(medians))} tokens over "
        f"{len(heads)} heads; none sits at the bound."
    )
    return Finding(Level.FINE, 0.5, "KDA's memory spans many scales", text, "memory")


def activation_growth(run: RunFiles) -> Finding | None:
    snapshot = next((s for s in reversed(run.snapshots) if s.activation_rms), None)
    if snapshot is None:
        return None
    reads = [(name, value) for name, value, _ in snapshot.activation_rms if value > 0]
    if any(not math.isfinite(v) for _, a, b in snapshot.activation_rms for v in (a, b)):
        return Finding(
            Level.BROKEN, 0.8, "Activations are not numbers", "Some sublayer's input or output is not finite.", "norms"
        )
    if len(reads) < 2:
        return None
    name, most = max(reads, key=lambda entry: entry[1])
    early = float(np.median([value for _, value in reads[: -(-len(reads) // 3)]]))
    growth = most / early
    text = (
        f"What sublayers read grows {words.figure(growth)} times over depth, "
        f"from {words.figure(early)} in the first third to {words.figure(most)} at "
        f"{words.sublayer(name)}."
    )
    if growth > 20:
        return Finding(
            Level.POOR if growth > 200 else Level.WATCH,
            min(1.0, growth / 400),
            "Activations grow with depth",
            text,
            "norms",
        )
    return Finding(Level.FINE, 0.25, "Activations keep their size", text, "norms")


# long context


def needle(run: RunFiles) -> Finding | None:
    lengths, trained = measures.task(run, "needle"), run.trained_context
    inside = measures.within(lengths, trained)
    if inside is None:
        return None
    chance = inside.chance if math.isfinite(inside.chance) else 0.0
    at = f"{words.percent(inside.accuracy)} of needles are found at {words.length(inside.length)} tokens"
    if inside.accuracy < max(2 * chance, chance + 0.1):
        text = f"{at}, where guessing gets {words.percent(chance)}."
        return Finding(Level.POOR, 0.7, "Needles are not found", text, "long")
    beyond = [entry for entry in lengths if trained is not None and entry.length > trained]
    worst = min(beyond, key=lambda entry: entry.accuracy, default=None)
    if worst is not None and worst.accuracy < inside.accuracy - 0.15:
        text = (
            f"{at}, but {words.percent(worst.accuracy)} at {words.length(worst.length)}, beyond the "
            f"{words.length(trained or 0)} trained on."
        )
        return Finding(
            Level.WATCH,
            min(1.0, 0.4 + inside.accuracy - worst.accuracy),
            "Recall fades beyond the trained length",
            text,
            "long",
        )
    if inside.accuracy < 0.8:
        return Finding(Level.WATCH, 0.5, "Needles are missed", f"{at}.", "long")
    rest = (
        f", and {words.percent(worst.accuracy)} at {words.length(worst.length)}, longer than any text trained on"
        if worst
        else ""
    )
    return Finding(Level.FINE, 0.8, "Recall holds with length", f"{at}{rest}.", "long")


def blind_spot(run: RunFiles) -> Finding | None:
    """A place in the text where needles get lost, at a length that was trained on."""
    inside = measures.within(measures.task(run, "needle"), run.trained_context)
    places = [p for p in inside.positions if p.asked and math.isfinite(p.accuracy)] if inside else []
    if inside is None or len(places) < 2:
        return None
    worst = min(places, key=lambda place: place.accuracy)
    where = (
        f"between {100 * worst.start:.0f}% and {100 * worst.stop:.0f}% of a {words.length(inside.length)}-token text"
    )
    text = (
        f"{words.percent(worst.accuracy)} of the needles {where} are found, {words.percent(inside.accuracy)} "
        "over all places."
    )
    if worst.accuracy < inside.accuracy - 0.25:
        return Finding(Level.WATCH, 0.5, "There is a blind spot in the text", text, "long")
    return Finding(Level.FINE, 0.2, "No blind spot in the text", text, "long")


def other_tasks(run: RunFiles) -> Finding | None:
    context = run.result.long_context if run.result else None
    inside = {
        name: entry
        for name, lengths in (context.tasks if context else {}).items()
        if name != "needle" and (entry := measures.within(lengths, run.trained_context)) and math.isfinite(entry.chance)
    }
    if not inside:
        return None
    at_chance = [
        n for n, e in inside.items() if e.accuracy < e.chance + max(0.05, 2 * math.sqrt(e.chance / max(1, e.asked)))
    ]
    if at_chance:
        text = (
            f"At the longest trained length, {words.listed(at_chance)} {'is' if len(at_chance) == 1 else 'are'} "
            "no better than guessing."
        )
        return Finding(Level.WATCH, 0.4, "A task was not learned", text, "long")
    scores = words.listed([f"{name} {words.percent(entry.accuracy)}" for name, entry in inside.items()])
    return Finding(
        Level.FINE, 0.35, "Every task is beyond guessing", f"At the longest trained length: {scores}.", "long"
    )


def position_loss(run: RunFiles) -> Finding | None:
    """Whether later tokens profit from more text, also beyond the trained length."""
    curves, trained = measures.position_curves(run), run.trained_context
    if not curves or trained is None:
        return None
    tokens, buckets = list(curves.items())[-1]
    inside = [b for b in buckets if b.stop <= trained and math.isfinite(b.nats)]
    beyond = [b for b in buckets if b.start >= trained and math.isfinite(b.nats)]
    if not inside or not beyond:
        return None
    rise = beyond[-1].nats - inside[-1].nats
    text = (
        f"In texts of {words.length(tokens)} tokens the loss is {inside[-1].nats:.3f} nats up to the trained "
        f"length and {beyond[-1].nats:.3f} at the end."
    )
    if rise > 0.1:
        return Finding(
            Level.POOR if rise > 1 else Level.WATCH,
            min(1.0, 0.3 + rise),
            "The loss rises beyond the trained length",
            text,
            "long",
        )
    return Finding(Level.FINE, 0.4, "Longer texts do no harm", text, "long")


# speed


def throughput(run: RunFiles) -> Finding | None:
    """Steps below 70% of their stage's median."""
    if run.steps is None or len(known(run.steps.speed)) < 20:
        return None
    slow = counted = 0
    lost = 0.0
    for part in run.steps.parts:
        speeds, times = run.steps.speed[part][1:], run.steps.seconds[part][1:]  # a stage's first step prepares much
        usual = middle(speeds)
        if usual is None:
            continue
        with np.errstate(invalid="ignore"):
            dips = speeds < 0.7 * usual
        slow, counted = slow + int(dips.sum()), counted + len(speeds)
        lost += float(np.sum(times[dips] * (1 - speeds[dips] / usual)))
    share = slow / max(1, counted)
    spent = float(known(run.steps.seconds).sum())
    usual_speed = measures.speed(run) or 0.0
    if share > 0.03 or lost > 0.05 * spent:
        text = (
            f"{words.percent(share)} of the steps ran below 70% of their stage's median speed; that cost "
            f"{words.percent(lost / spent)} of the time."
        )
        return Finding(Level.WATCH, min(1.0, 0.2 + lost / spent), "Throughput dips", text, "speed")
    text = (
        f"{words.human(usual_speed)} tokens a second at the median; {words.percent(share)} of the steps were "
        "much slower."
    )
    return Finding(Level.FINE, 0.2, "The speed is steady", text, "speed")


RULES: tuple[Callable[[RunFiles], Finding | None], ...] = (
    loss_finite, loss_spikes, left_out, loss_trend, gradient, compressors, quality_trend, source_trend, balance,
    dead_experts, depth_map, memory, activation_growth, needle, blind_spot, other_tasks, position_loss, throughput,
)  # fmt: skip
