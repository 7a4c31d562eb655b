"""SIGINT and SIGTERM as exceptions, which can be deferred while something must not be interrupted.

Knows signals, and threads that end soon after one.
"""

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

from dakrun.errors import DakrunError

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
_STOPPING = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; raised where Ctrl-C would raise KeyboardInterrupt."""


class Interrupted(DakrunError):
    """The signal of `cause` stopped a run with results in `output`; `hint` says how to go on."""

    def __init__(self, output: object, *, hint: str, cause: BaseException) -> None:
        super().__init__(f"the rows that had finished are in {output}", hint=hint)
        self.exit_code = exit_code(cause)


def exit_code(cause: BaseException | None) -> int:
    """The exit code of a process that ends with the KeyboardInterrupt `cause`."""
    return EXIT_TERMINATED if isinstance(cause, Terminated) else EXIT_INTERRUPTED


class Workers(ThreadPoolExecutor):
    """Threads whose `with` block drops the calls not yet begun if it ends with an exception.

    A call that has begun cannot be stopped, and the block waits for it: keep calls short.
    """

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shutdown(wait=True, cancel_futures=error is not None)


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """In the block, let SIGTERM raise Terminated instead of ending the process.

    Does nothing if SIGTERM is ignored or handled already.
    """
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
    """Handle SIGINT and SIGTERM that arrive in the block at its end."""
    if not _is_main_thread():  # Python runs signal handlers in the main thread only
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _STOPPING}
    for number in _STOPPING:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        for first in arrived[:1]:
            signal.raise_signal(first)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
