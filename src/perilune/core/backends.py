"""Several implementations of one operation, and the choice among them.

Every operation owns one `Backends`.  An implementation is registered with a function that says, for the arguments of a
call, why it cannot serve it (or None).  `auto` takes the first that can, best first, and logs once what it took and
why the better ones stood back; a backend asked for by name that cannot serve the call raises.
"""

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perilune.core.errors import BackendError, nearest

log = logging.getLogger("perilune.backends")
NAMES = ("auto", "reference", "chunked", "triton", "gluon")


def never(*args: Any, **kwargs: Any) -> str | None:
    """Refuses nothing."""
    return None


@dataclass(frozen=True)
class Backend:
    name: str
    run: Callable[..., Any]
    refuses: Callable[..., str | None]


class Backends:
    """The implementations of the operation `op`, best first.

    >>> backends = Backends("double")
    >>> backends.register("chunked", lambda x: x + x, refuses=lambda x: "x is odd" if x % 2 else None)
    >>> backends.register("reference", lambda x: 2 * x)
    >>> backends.pick("auto", 3)(3)
    6
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self._backends: dict[str, Backend] = {}
        self._logged: set[str] = set()

    def register(self, name: str, run: Callable[..., Any], refuses: Callable[..., str | None] = never) -> None:
        """Adds an implementation behind those already there."""
        assert name in NAMES[1:], name
        assert name not in self._backends, name
        self._backends[name] = Backend(name, run, refuses)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._backends)

    def pick(self, name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """The implementation called `name` (or the best for `auto`) for a call with these arguments.

        Raises BackendError if there is none of that name or it cannot serve the call.
        """
        if name != "auto":
            backend = self._backends.get(name)
            if backend is None:
                raise BackendError(
                    f"backend: expected one of this operation ({self.op}), got {name!r}; "
                    + nearest(name, ("auto", *self._backends))
                )
            if reason := backend.refuses(*args, **kwargs):
                raise BackendError(f"backend: {self.op} cannot run on {name!r}: {reason}; use backend='auto'")
            return backend.run
        chosen, refusals = self.choice(*args, **kwargs)
        reasons = "; ".join(f"{other}: {reason}" for other, reason in refusals.items())
        if chosen is None:
            raise BackendError(f"backend: {self.op} has none for this call ({reasons})")
        self._log_once(f"{self.op}: {chosen}" + (f" ({reasons})" if reasons else ""))
        return self._backends[chosen].run

    def choice(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, str]]:
        """The name `auto` takes for a call with these arguments, None if none can; and why each better one cannot."""
        refusals: dict[str, str] = {}
        for backend in self._backends.values():
            reason = backend.refuses(*args, **kwargs)
            if reason is None:
                return backend.name, refusals
            refusals[backend.name] = reason
        return None, refusals

    def _log_once(self, line: str) -> None:
        if line not in self._logged and not _being_compiled():
            self._logged.add(line)
            log.info(line)


def _being_compiled() -> bool:
    """Whether torch.compile looks at this call: a line in the log would break its graph."""
    torch = sys.modules.get("torch")  # not imported here, see the package
    return torch is not None and torch.compiler.is_compiling()
