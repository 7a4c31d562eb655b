"""Chat templates, run in a process of their own: a template is a program, and may never end.

Run as a script, this file is that process. It needs transformers, but nothing else of dakrun: per
line of stdin it writes one of stdout, both JSON.
"""

import json
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

LIMIT_S = 5.0  # of one chat
LIMIT_BYTES = 512 << 20  # of memory, on top of what the process has when it starts
MAX_CHARACTERS = 32 << 20  # of a rendered chat


@dataclass(frozen=True)
class TemplateOptions:
    """Beside the messages, the arguments of a chat template, as transformers has them.

    With `continues` the text ends within the last message, as continue_final_message has it.
    `tools` are JSON schemas of functions, `kwargs` any other variables of the template.
    """

    continues: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


PLAIN = TemplateOptions()


class ChatTemplate:
    """A Jinja template with the tokenizer's special tokens by name, as transformers renders it.

    `started` is the local time that `strftime_now` stamps, by default that of this call: all chats
    of a run get the same. The process starts with `start` or the first chat, and again after a chat
    that it did not survive.
    """

    def __init__(
        self, template: str, special_tokens: Mapping[str, Any], *, started: datetime | None = None
    ) -> None:
        self._settings = {"chat_template": template, **special_tokens}
        self._started = started or datetime.now()
        self._process: subprocess.Popen[str] | None = None

    def render(
        self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = PLAIN
    ) -> str:
        """The text of `messages` and the start of the assistant's answer.

        Raises ValueError with the reason if there are none, or the template raises an exception or
        takes more than LIMIT_S seconds or LIMIT_BYTES of memory.
        """
        if not messages:
            raise ValueError("there are no messages")
        try:
            given = json.dumps([list(messages), *vars(options).values()])
        except (TypeError, RecursionError) as problem:
            raise ValueError(str(problem)) from None
        process = self._process or self._start()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(given + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BaseException as problem:
            self._process = None
            _end(process)
            if isinstance(problem, OSError):
                raise ValueError(f"its process ended: {problem.strerror}") from None
            raise
        if not answer:
            self._process = None
            code = _end(process)
            if code == -signal.SIGALRM:
                raise ValueError(f"it does not end within {LIMIT_S:g} s")
            raise ValueError(f"its process ended with exit code {code}")
        text, refusal = json.loads(answer)
        if refusal is not None:
            raise ValueError(refusal)
        return str(text)

    def start(self) -> None:
        """Start the process, unless it runs: it is ready about a second later."""
        if self._process is None:
            self._start()

    def _start(self) -> "subprocess.Popen[str]":
        limits = map(str, (LIMIT_S, LIMIT_BYTES, MAX_CHARACTERS))
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).resolve()), *limits, str(self._started)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            process_group=0,  # Ctrl-C is for the run, which ends this process
        )
        weakref.finalize(self, _end, process)
        assert process.stdin
        process.stdin.write(json.dumps(self._settings) + "\n")
        self._process = process
        return process


def _end(process: "subprocess.Popen[str]") -> int:
    """End a process that is of no use any more; its exit code, negative for a signal."""
    assert process.stdin and process.stdout
    with suppress(OSError):  # it has ended, and the rest of a line was not written
        process.stdin.close()
    process.kill()
    process.stdout.close()
    return process.wait()


def _serve(limit_s: float, limit_bytes: int, max_characters: int, started: datetime) -> None:
    """Render the chats on stdin, each within the limits; SIGALRM kills the process."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _set_clock(started)
    settings = json.loads(sys.stdin.readline())
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + limit_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin:
        text: str | None = None
        problem: str | None = None
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            chat, continues, tools, kwargs = json.loads(line)
            ((made,), _) = render_jinja_template(
                [chat],
                tools=tools,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **{**settings, **kwargs},
            )
            if len(made) > max_characters:
                problem = f"it makes {len(made)} characters, of at most {max_characters}"
            else:
                text = made
        except MemoryError:
            problem = f"it takes more than {limit_bytes >> 20} MiB of memory"
        except Exception as error:  # a template may raise anything
            problem = str(error) or type(error).__name__
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps((text, problem)) + "\n")
        sys.stdout.flush()


def _set_clock(started: datetime) -> None:
    """Make transformers' `strftime_now`, which takes no time, format that of the run's start."""
    from transformers.utils import chat_template_utils

    class Clock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Clock":
            return cls.fromisoformat(str(started))

    chat_template_utils.datetime = Clock
    stamp = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}"
    ((made,), _) = chat_template_utils.render_jinja_template([[]], chat_template=stamp)
    assert made == f"{started:%Y-%m-%d %H:%M:%S}", f"strftime_now gives {made}, not {started}"


if __name__ == "__main__":
    _serve(
        float(sys.argv[1]),
        int(sys.argv[2]),
        int(sys.argv[3]),
        datetime.fromisoformat(sys.argv[4]),
    )
