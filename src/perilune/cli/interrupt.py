"""Ctrl-C and a polite kill: the first lets a run finish its step and save, the second ends it at once."""

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Catches SIGINT and SIGTERM while its block lasts.

    >>> with Interrupt() as interrupt:
    ...     while not interrupt.asked:
    ...         step()
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    @property
    def asked(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """As a shell gives it for a process that the signal ended: 130 for Ctrl-C, 143 for a kill."""
        assert self.signal is not None
        return 128 + self.signal

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            sys.exit(128 + number)
        self.signal = signal.Signals(number)
        os.write(2, b"\nstopping after this step; once more stops at once\n")  # print may be what was interrupted

    def __enter__(self) -> Self:
        self._before = [(number, signal.signal(number, self._take)) for number in SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)
