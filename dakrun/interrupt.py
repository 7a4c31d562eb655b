"""SIGINT and SIGTERM: both end a run by an exception, but never halfway through a row.

Knows signals only; what has to be whole is said by whoever calls `defer_signals`.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dakrun.errors import DakrunError

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM came; raised where Ctrl-C would raise KeyboardInterrupt."""


class Interrupted(DakrunError):
    """A run was stopped by a signal; `hint` tells how to go on."""

    def __init__(self, message: str, *, hint: str, cause: BaseException) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code(cause)


def exit_code(cause: BaseException | None) -> int:
    """The exit code of a process that `cause`, a KeyboardInterrupt, ends."""
    return EXIT_TERMINATED if isinstance(cause, Terminated) else EXIT_INTERRUPTED


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise Terminated where SIGTERM would end the process at once, unless it is ignored."""
    if not _is_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Act on SIGINT and SIGTERM at the end of the block instead of within it."""
    if not _is_main_thread():  # Python runs signal handlers in the main thread alone
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _STOPPING}
    for number in _STOPPING:
        signal.signal(number, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        for first in came[:1]:
            signal.raise_signal(first)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
