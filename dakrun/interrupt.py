"""SIGINT, SIGTERM and SIGHUP as exceptions, deferred while something must not be interrupted.

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
EXIT_HUNG_UP = 128 + signal.SIGHUP
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived; raised where Ctrl-C would raise KeyboardInterrupt."""


class HungUp(KeyboardInterrupt):
    """SIGHUP arrived: the terminal was closed."""


class Interrupted(DakrunError):
    """The signal of `cause` stopped a run; `state` is that of its output, `hint` how to go on."""

    def __init__(self, state: str, *, hint: str, cause: BaseException) -> None:
        super().__init__(state, hint=hint)
        self.exit_code = exit_code(cause)


def exit_code(cause: BaseException | None) -> int:
    """The exit code of a process that ends with the KeyboardInterrupt `cause`."""
    if isinstance(cause, Terminated):
        return EXIT_TERMINATED
    return EXIT_HUNG_UP if isinstance(cause, HungUp) else EXIT_INTERRUPTED


class Workers(ThreadPoolExecutor):
    """Threads whose `with` block drops the calls not yet begun if it ends with an exception.

    A call that has begun cannot be stopped, and the block waits for it: keep calls short.
    """

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shutdown(wait=True, cancel_futures=error is not None)


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """In the block, let SIGTERM raise Terminated and SIGHUP HungUp, not end the process.

    One that is ignored, as SIGHUP is under nohup, or handled already stays as it is.
    """
    raised = {signal.SIGTERM: _terminate, signal.SIGHUP: _hang_up}
    if not _is_main_thread():
        raised = {}
    ours = [number for number in raised if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, raised[number])
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Handle the first of SIGINT, SIGTERM and SIGHUP that arrives in the block at its end.

    Those that are ignored stay so.
    """
    if not _is_main_thread():  # Python runs signal handlers in the main thread only
        yield
        return
    arrived: list[int] = []
    handlers = {number: signal.getsignal(number) for number in _STOPPING}
    handlers = {n: handler for n, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in handlers:
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


def _hang_up(number: int, frame: FrameType | None) -> None:
    raise HungUp


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
