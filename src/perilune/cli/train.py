"""Train a recipe, judge it on held-out text beside compressors, and show what it writes.

perilune train nano
perilune train nano seed=1 stages.0.tokens=200000 --out runs/short
perilune train 1b_8k stages.0.micro_tokens=32768                       the same steps in parts, in less memory
perilune train small_1m stages.0.recompute=blocks                      less again, computing activations twice
perilune train 100b --rehearse                                         all its stages in small, on any machine
perilune train --resume runs/demo                                      where it stopped, to the same bits
perilune train --resume runs/demo stages.1.lr=2e-3 --out runs/lower    from there in a copy, at other rates
torchrun --nproc-per-node 8 -m perilune train 1b                       the same on eight GPUs (docs/parallel.md)
"""

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.cli.numbers import human
from perilune.core.errors import BackendError, CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from perilune.cli.interrupt import Interrupt
    from perilune.models.k3 import K3Model
    from perilune.train.checkpoint import Checkpoints
    from perilune.train.config import Run, Stage
    from perilune.train.loop import Progress, Trainer
    from perilune.train.metrics import Metrics
    from perilune.train.parallel.ranks import Ranks

MAY_DIFFER = re.compile(r"checkpoint_every|stages\.\d+\.(micro_tokens|recompute)|data\.sources\.[^.]+\.path")
"""Keys that may change when a run goes on in its folder, for they do not change what it learns: what goes through the
model at once and what of it is kept; that a text under another path is the same text is checked when it is read."""


@dataclass(frozen=True)
class Session:
    """A run at work in its folder, which this process has claimed, or the first of its ranks."""

    folder: Path
    trainer: "Trainer"
    checkpoints: "Checkpoints"
    console: "Console"
    tensorboard: bool
    recipe: tuple[str, ...] = ()
    """What was typed to begin it, its name and what was changed in it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from perilune.recipes import RECIPES

    parser.add_argument("recipe", nargs="?", help=f"{', '.join(RECIPES)}; none for --resume")
    parser.add_argument(
        "changes", nargs="*", default=[], metavar="key=value", help="changes to the recipe, dotted where nested"
    )
    parser.add_argument("--out", type=Path, default=None, help="the run's folder (runs/RECIPE)")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that is there")
    parser.add_argument(
        "--resume",
        type=Path,
        default=None,
        metavar="RUN",
        help="go on with the run in this folder, or from a checkpoint",
    )
    parser.add_argument("--device", type=device_name, default="auto", help="auto, cpu, cuda or cuda:1 (auto)")
    parser.add_argument(
        "--layout",
        nargs="+",
        default=[],
        metavar="key=value",
        help="how ranks share the work: context=N cuts rows over N of them, expert=N spreads experts, balanced=true, "
        "pipeline=N lays layers out in N stages",
    )
    parser.add_argument("--tensorboard", action="store_true", help="write what metrics.jsonl gets for TensorBoard too")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="two narrow layers, short contexts, two steps a stage, this machine's text",
    )
    parser.add_argument("--print", action="store_true", dest="show", help="print the resolved recipe and stop")


def device_name(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected auto, cpu, cuda or cuda:N, got {text!r}")
    return text


def run(args: argparse.Namespace) -> int:
    recipe = absolute(resolve(args))
    if args.show:
        import json

        print(json.dumps(recipe.to_dict(), indent=2))
        return 0
    if args.tensorboard:
        from perilune.train.tensorboard import summary_writer

        summary_writer()  # one that is missing shows before a folder is made

    from rich.console import Console

    from perilune.train.parallel.layout import Layout
    from perilune.train.parallel.ranks import explained, joined

    layout = Layout().override(args.layout)
    with joined(find_device(args.device), layout) as (ranks, device), explained(ranks):
        way = begin if args.resume is None else resume
        if args.resume is not None and args.out is not None and args.out.resolve() != args.resume.resolve():
            way = branch
        return way(args, recipe, Console(quiet=not ranks.first), ranks, device)


def resolve(args: argparse.Namespace) -> "Run":
    """The run that is asked for: a recipe, or the one to go on with, with its changes."""
    from perilune import recipes
    from perilune.recipes.rehearsal import rehearsal
    from perilune.train.folder import read_run

    if args.rehearse and args.resume is not None:
        raise ConfigError("--rehearse: expected a recipe, got a run to go on with; it is rehearsed or it is not")
    if args.resume is not None and (args.recipe is None or "=" in args.recipe):
        changes = [args.recipe, *args.changes] if args.recipe else []
        return read_run(run_of(args.resume)).override(changes)
    if args.recipe is None:
        raise ConfigError("the following arguments are required: recipe; see perilune train --help")
    recipe = recipes.get(args.recipe)
    return (rehearsal(recipe) if args.rehearse else recipe).override(args.changes)


def run_of(path: Path) -> Path:
    """The run's folder, of which `path` may be a checkpoint."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def absolute(recipe: "Run") -> "Run":
    """The same with paths that hold in any folder: a run is gone on with from elsewhere."""
    data, init = recipe.data, recipe.init
    found = recipe.replace(
        init=init and str(Path(init).resolve()),
        data=data.replace(
            sources={name: source.resolved() for name, source in data.sources.items()},
            tokenizer=data.tokenizer and str(Path(data.tokenizer).resolve()),
        ),
    )
    return found.from_dict(found.to_dict())  # read again as run.json will be: this folder's name may be no text


# three ways to start


def begin(args: argparse.Namespace, recipe: "Run", console: "Console", ranks: "Ranks", device: str) -> int:
    """A new run."""
    from perilune.train.checkpoint import Checkpoints
    from perilune.train.folder import check_folder, start_folder
    from perilune.train.lock import check_unclaimed
    from perilune.train.loop import Trainer

    folder = args.out or Path("runs") / (args.recipe + "-rehearsal" * args.rehearse)

    def check() -> None:
        check_folder(folder, args.overwrite)
        check_unclaimed(folder)

    ranks.from_first(check)
    with console.status("reading the corpus, training the tokenizer"):
        trainer = Trainer(recipe, device=device, ranks=ranks)
    with at_work(folder, ranks):
        ranks.from_first(lambda: start_folder(folder, recipe, args.overwrite))
        show_start(trainer, console)
        typed = (args.recipe, *args.changes, *["--rehearse"] * args.rehearse)
        return train(Session(folder, trainer, Checkpoints(folder, ranks), console, args.tensorboard, typed))


def resume(args: argparse.Namespace, recipe: "Run", console: "Console", ranks: "Ranks", device: str) -> int:
    """A run in its folder, from its newest whole checkpoint or, before the first, from its beginning."""
    from perilune.data.tokenizer import FILE, ByteBPE
    from perilune.train.checkpoint import Checkpoints
    from perilune.train.feed import Feed
    from perilune.train.folder import check_writable, differences, read_run, spell, write_json
    from perilune.train.loop import Trainer

    folder = args.resume
    if run_of(folder) != folder:
        raise ConfigError(f"--resume: expected a run to go on in, got a checkpoint, {folder}; add --out FOLDER")
    if args.overwrite:
        raise ConfigError(
            "--overwrite: expected --out FOLDER with it, got a run to go on with in its own folder; leave it out"
        )
    found = differences(recipe.to_dict(), read_run(folder).to_dict())
    if fixed := {key: pair for key, pair in found.items() if not MAY_DIFFER.fullmatch(key)}:
        raise ConfigError(
            f"{folder}: expected the run's own configuration, got {spell(fixed)}; leave that out to go on as it was, "
            "or add --out FOLDER to go on in a copy at other rates"
        )
    ranks.from_first(lambda: check_writable(folder))
    with at_work(folder, ranks):
        if ranks.from_first((folder / "result.json").exists):
            console.print(f"{folder}: finished; nothing is left to do", markup=False, soft_wrap=True)
            return 0
        checkpoints = Checkpoints(folder, ranks)
        checkpoint = checkpoints.latest()
        with console.status("reading the corpus"):
            feed = None
            if checkpoint is None and ranks.from_first((folder / FILE).exists):
                feed = ranks.only_first(lambda: Feed(recipe, ByteBPE.load(folder)))
            trainer = Trainer(recipe, feed, device=device, checkpoint=checkpoint, ranks=ranks)
        if found:
            ranks.from_first(lambda: write_json(folder / "run.json", recipe.to_dict()))
        console.print(f"going on after step {trainer.steps_done:,} of {trainer.steps:,}", soft_wrap=True)
        return train(Session(folder, trainer, checkpoints, console, args.tensorboard))


def branch(args: argparse.Namespace, recipe: "Run", console: "Console", ranks: "Ranks", device: str) -> int:
    """A run from a checkpoint of another, the newest or the one named, with other rates or as it was."""
    from perilune.train.checkpoint import Checkpoints, check_whole
    from perilune.train.folder import check_folder, clear_folder, copy_past, keep_tokenizer, write_json
    from perilune.train.lock import check_unclaimed
    from perilune.train.loop import Trainer

    source, folder = run_of(args.resume), args.out
    if folder.resolve() == source.resolve():
        raise ConfigError(f"--out: expected a folder for the copy, got the run's own, {folder}; choose another")

    def check() -> "Path | None":
        check_folder(folder, args.overwrite)
        check_unclaimed(folder)
        return Checkpoints(source).latest() if source == args.resume else check_whole(args.resume)

    checkpoint = ranks.from_first(check)
    if checkpoint is None:
        raise CheckpointError(f"{source}: expected a checkpoint to go on from, found none; train a recipe instead")
    with console.status("reading the corpus"):
        trainer = Trainer(recipe, device=device, checkpoint=checkpoint, ranks=ranks)

    def prepare() -> None:
        clear_folder(folder, args.overwrite)
        copy_past(source, folder)
        keep_tokenizer(folder, trainer.feed.tokenizer)

    with at_work(folder, ranks):
        ranks.from_first(prepare)
        checkpoints = Checkpoints(folder, ranks)
        trainer.checkpoint(checkpoints)
        ranks.from_first(lambda: write_json(folder / "run.json", recipe.to_dict()))  # now it can be gone on with
        console.print(f"going on after step {trainer.steps_done:,} of {trainer.steps:,}", soft_wrap=True)
        return train(Session(folder, trainer, checkpoints, console, args.tensorboard))


def find_device(name: str) -> str:
    """`auto` and `cuda` made definite.  ConfigError for a GPU that is not there."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not count):
        return "cpu"
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        raise ConfigError(f"--device: expected one of {count} GPUs, got {name}; choose another, or cpu")
    return f"cuda:{index}"


# what all of them do then


@contextmanager
def at_work(folder: Path, ranks: "Ranks") -> Iterator[None]:
    """The folder is this process's, or its ranks', until the block ends; DataError if another process has it."""
    from perilune.train.lock import claimed

    with ExitStack() as stack:
        ranks.only_first(lambda: stack.enter_context(claimed(folder)))
        yield


def train(session: Session) -> int:
    """All that is left of the run; returns the exit code."""
    from perilune.cli.interrupt import Interrupt
    from perilune.train.folder import keep_tokenizer

    trainer, folder = session.trainer, session.folder

    def keep() -> None:
        if not (folder / "tokenizer.json").exists():
            keep_tokenizer(folder, trainer.feed.tokenizer)

    with explained(session):
        trainer.ranks.from_first(keep)
        with Interrupt() as interrupt:
            climb(session, interrupt)
        if not trainer.ranks.any(interrupt.asked):
            finish(session)
            return 0
    session.console.print(
        f"stopped after step {trainer.steps_done:,} of {trainer.steps:,}; go on with: {way_on(session)}",
        markup=False,
        soft_wrap=True,
    )
    return interrupt.exit_code if interrupt.asked else 130  # another rank was asked


def climb(session: Session, interrupt: "Interrupt") -> None:
    """The steps of all stages that are left, with what every one leaves in the folder."""
    from perilune.cli.progress import watching
    from perilune.train.metrics import Metrics
    from perilune.train.tensorboard import TensorBoard

    folder, trainer = session.folder, session.trainer
    if not trainer.ranks.first:  # it writes nothing and shows nothing
        trainer.train(
            None,
            at_stage_end=lambda stage: take_snapshot(trainer, stage, None),
            checkpoints=session.checkpoints,
            stop=lambda: interrupt.asked,
        )
        return
    start = trainer.steps_done
    with ExitStack() as stack:
        metrics = stack.enter_context(Metrics(folder / "metrics.jsonl", after=start))
        snapshots = stack.enter_context(Metrics(folder / "snapshots.jsonl", after=start))
        watchers = [stack.enter_context(watching(session.console, trainer))]
        if session.tensorboard:
            watchers.append(stack.enter_context(TensorBoard(folder / "tensorboard", after=start)).write)
        trainer.train(
            metrics,
            lambda progress: tell(watchers, progress),
            lambda stage: take_snapshot(trainer, stage, snapshots),
            checkpoints=session.checkpoints,
            stop=lambda: interrupt.asked,
        )


def tell(watchers: "list[Callable[[Progress], None]]", progress: "Progress") -> None:
    for watcher in watchers:
        watcher(progress)


def take_snapshot(trainer: "Trainer", stage: "Stage", snapshots: "Metrics | None") -> None:
    """A line on what goes on inside the model at the end of a stage; of several ranks the first looks, at a copy."""
    from perilune.train.inspection import bits_by_source, inspect

    model, loads = trainer.whole_model(), {name: window.total() for name, window in trainer.loads.items()}

    def look() -> None:
        assert model is not None
        assert snapshots is not None
        tokenizer, corpora = trainer.feed.tokenizer, trainer.feed.corpora
        held_out = {name: [document.text for document in corpus.held_out] for name, corpus in corpora.items()}
        texts = [text for own in held_out.values() for text in own]
        figures = inspect(model, tokenizer, texts, context=stage.context, loads=loads)
        if len(held_out) > 1:
            figures["bits_by_source"] = bits_by_source(model, tokenizer, held_out, context=stage.context)
        snapshots.write(step=trainer.steps_done, stage=stage.name, tokens=trainer.tokens_done, **figures)
        snapshots.sync()

    trainer.ranks.from_first(look)


def finish(session: Session) -> None:
    """Keeps the model, judges it, writes and shows the verdict: in this order, so that what is lost comes again."""
    session.trainer.save(session.folder / "model")
    model = session.trainer.whole_model()

    def judge_it() -> None:
        assert model is not None
        conclude(session, model)

    session.trainer.ranks.from_first(judge_it)


def conclude(session: Session, model: "K3Model") -> None:
    """What is left to do once the model is kept."""
    from perilune.cli.result import judge, show_result
    from perilune.report import write_report
    from perilune.train.folder import write_json

    folder, console = session.folder, session.console
    result = judge(session.trainer, model, folder, console)
    write_json(folder / "result.json", result)
    show_result(result, console)
    try:
        write_report(folder)
    except BackendError as error:  # the page can be made later
        console.print(str(error), markup=False, soft_wrap=True)
    show_next(session)


@contextmanager
def explained(session: Session) -> Iterator[None]:
    """Adds to what ends a run early how to go on."""
    from perilune.train.folder import free_space
    from perilune.train.loop import Diverged

    try:
        yield
    except Diverged as error:
        raise Diverged(f"{error}: {lower_rate(session)}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{error}, then: {way_on(session)}") from error
    except OSError as error:
        what = f"{error.filename or session.folder}: {error.strerror or error}"
        raise DataError(f"{what} ({free_space(session.folder)}); mend that, then: {way_on(session)}") from error


def way_on(session: Session) -> str:
    return f"{command()} train --resume {shlex.quote(str(session.folder))}"


def lower_rate(session: Session) -> str:
    """The command that goes on from the last checkpoint at half the rate at which a run diverged."""
    trainer, folder, last = session.trainer, session.folder, session.checkpoints.last
    if last is None:
        return "there is no checkpoint yet, begin anew"
    rate = f"stages.{trainer.run.stages.index(trainer.stage)}.lr={trainer.stage.lr / 2:g}"
    copy = shlex.quote(f"{folder}-lower")
    return f"{last} is whole, from there in a copy: {way_on(session)} {rate} --out {copy}"


def command() -> str:
    """This command as it can be typed here."""
    if Path(sys.argv[0]).name == "__main__.py":
        return "python -m perilune"
    return "perilune" if shutil.which("perilune") else os.path.relpath(sys.argv[0])


def show_start(trainer: "Trainer", console: "Console") -> None:
    """What is learned from, and how large the model is; said by the first rank."""
    if not trainer.ranks.first:
        return
    for name, corpus in trainer.feed.corpora.items():
        size = f"{human(corpus.train_bytes)} bytes" if corpus.train_bytes is not None else "a stream"
        held_out = sum(document.byte_count for document in corpus.held_out)
        console.print(
            f"{name}: {size} to learn from, {human(held_out)} held out in {len(corpus.held_out):,} documents",
            markup=False,
            soft_wrap=True,
        )
        if corpus.skipped:
            count, example = len(corpus.skipped), corpus.skipped[0]
            console.print(f"{name}: {count:,} left out, such as {example}", markup=False, soft_wrap=True)
    console.print(
        f"{trainer.feed.tokenizer.vocab_size:,} tokens in the vocabulary; {human(trainer.parameters)} parameters"
        + (f"; {trainer.ranks.size} ranks" if trainer.ranks.size > 1 else ""),
        soft_wrap=True,
    )


def show_next(session: Session) -> None:
    """What to try now, as it can be typed here."""
    perilune, folder = command(), shlex.quote(str(session.folder))
    lines = [f"{perilune} chat {folder}", f'{perilune} generate {folder} --prompt "def "']
    if session.recipe:
        lines.append(f"{perilune} train {shlex.join(session.recipe)} seed=1 --out {folder}-seed1")
    report = session.folder / "report.html"
    where = f", and shown in {report}" if report.exists() else ""
    session.console.print(
        "\n  ".join([f"\nSaved in {session.folder}{where}. Next:", *lines]), markup=False, soft_wrap=True
    )
