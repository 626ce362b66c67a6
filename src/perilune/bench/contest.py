"""What benchmarks of one operation against its peers share: all are checked first, and timed only if all are right."""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import inf, isfinite
from typing import Any, ClassVar

from rich.table import Column, Table
from torch import Tensor

from perilune.bench.case import Sheet
from perilune.bench.progress import Steps, Tell, quiet


class Contest(Sheet):
    """Contenders by label, each checked and then timed at every shape."""

    allowed: ClassVar[Mapping[str, float]]
    """The largest relative error of each quantity."""
    contenders: Collection[str]
    shapes: Sequence[Any]

    @abstractmethod
    def refused(self) -> str:
        """Why nothing can be timed on this machine, or nothing."""

    @abstractmethod
    def errors(self, label: str) -> dict[str, float]:
        """The largest relative errors of a contender, by the names of `allowed`."""

    @abstractmethod
    def time(self, shape: Any, label: str) -> dict[str, Any]:
        """Figures of a contender at a shape."""

    @abstractmethod
    def times_table(self, times: Sequence[dict[str, Any]]) -> Table:
        """A line for each of them."""

    def run(self, tell: Tell = quiet) -> dict[str, Any]:
        result: dict[str, Any] = {"name": self.name, "title": self.title, "check": "passed", "passed": True}
        result |= {"errors": {}, "times": [], "skipped": self.refused()}
        if result["skipped"]:
            return result
        steps = Steps(tell, len(self.contenders) * (1 + len(self.shapes)))
        for label in self.contenders:
            steps.next(f"checking {label}")
            errors = self.errors(label)
            result["errors"][label] = errors
            wrong = [f"{name} of {label} is off by {x:.1e}" for name, x in errors.items() if x > self.allowed[name]]
            if wrong and result["passed"]:
                result |= {"check": f"failed: {wrong[0]} of its size", "passed": False}
        if result["passed"]:
            for shape, label in product(self.shapes, self.contenders):
                steps.next(f"timing {label}, {shape}")
                result["times"].append(self.time(shape, label))
        return result

    def parts(self, result: dict[str, Any]) -> Iterator[Table | str]:
        if result["skipped"] or not result["passed"]:
            yield f"{self.name}: {result['skipped'] or 'check ' + result['check']}\nnot timed"
            return
        errors = table_of("largest errors, thousandths of the norm", "", *self.allowed)
        for label, by_name in [*result["errors"].items(), ("allowed", self.allowed)]:
            errors.add_row(label, *(f"{1e3 * by_name[name]:.1f}" for name in self.allowed))
        yield errors
        yield self.times_table(result["times"])


def error(x: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm; infinite where that is no number."""
    off = float((x.double() - exact).norm() / exact.norm())
    return off if isfinite(off) else inf


def reason(stop: Exception) -> str:
    """The first line of an exception that is not ours."""
    return f"{type(stop).__name__}: {(str(stop).strip() or 'no reason').splitlines()[0]}"[:200]


def table_of(title: str, first: str, *others: str) -> Table:
    """Names to the left, figures to the right."""
    return Table(Column(first, no_wrap=True), *(Column(head, justify="right") for head in others), title=title)
