"""The calls of the Python API that complete prompts: generate, chat and stream.

Knows prompts, parameters and results; knows neither plans nor memory (llm.py does).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from dakrun.config import SamplingParams
from dakrun.engine.engine import Engine
from dakrun.engine.results import too_long
from dakrun.engine.rows_bar import rows_bar
from dakrun.engine.waiting import Choose
from dakrun.errors import CannotRun, refuse_unsupported
from dakrun.plan import first_that_fits
from dakrun.requests import (
    Completion,
    Prompt,
    PromptRules,
    Request,
    RowError,
    as_requests,
)
from dakrun.requests.python_prompts import one_of, refuse_params, requests_in

_OPTIONS = ("params", "progress", "use_tqdm")
_CHAT_OPTIONS = (
    *("continue_final_message", "add_generation_prompt", "tools", "chat_template_kwargs"),
)
_NEUTRAL_IN_CHATS: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "chat_template_content_format": ("auto",),
}


class OfflineCalls(ABC):
    """Completes prompts by the `engine`, within the model's `rules`; LLM is one."""

    rules: PromptRules

    @property
    @abstractmethod
    def engine(self) -> Engine:
        """The engine that runs the requests; UsageError once it is closed."""

    @abstractmethod
    def run(
        self,
        requests: Iterable[Request | None],
        *,
        may_wait: bool = False,
        choose: Choose | None = None,
    ) -> Iterator[Completion | RowError]:
        """Results of Requests as they finish, `further` ones together: `stream` without its checks.

        See Engine.generate.
        """

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        progress: bool = True,
        **other: Any,
    ) -> list[Completion]:
        """Complete prompts; results are in the order of `prompts`, which may also be only one.

        A prompt is a text, a list of token ids, a list of `{"role", "content"}` messages, or a dict
        with one of these as its `prompt`, `prompt_token_ids` or `messages`. `params` hold for all
        prompts, or are a list with one SamplingParams for each. Prompts that may take the most
        tokens begin first, so that none runs alone at the end. In a terminal a bar shows how many
        prompts are done, unless `progress` or `use_tqdm` is False.

        The arguments of vLLM's LLM.generate are taken: `sampling_params` are `params`, and `other`
        may only have those that change nothing.

        Raises UsageError if a prompt or its parameters are wrong, and CannotRun if one of them does
        not fit in the KV cache, both before anything is computed. Raises CannotRun if the logits of
        a prompt are NaN or infinite.
        """
        refuse_unsupported(other, {}, _OPTIONS)
        requests = as_requests(prompts, one_of(params, sampling_params), self.rules)
        return self._complete(requests, progress=progress and use_tqdm)

    def chat(
        self,
        messages: Iterable[Mapping[str, Any]] | Iterable[Iterable[Mapping[str, Any]]],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        progress: bool = True,
        continue_final_message: bool | None = None,
        add_generation_prompt: bool | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        **other: Any,
    ) -> list[Completion]:
        """Answer a list of `{"role", "content"}` messages, or several such lists; see generate.

        With `continue_final_message` the answer continues the last message, the assistant's.
        `add_generation_prompt` may only be the opposite. `tools` are functions as in OpenAI's API;
        `tool_calls` of a completion has the calls in its text, if their format is known (see
        requests/README.md). `chat_template_kwargs` are more variables for the chat template.
        """
        refuse_unsupported(other, _NEUTRAL_IN_CHATS, (*_OPTIONS, *_CHAT_OPTIONS))
        requests = as_requests(
            messages,
            one_of(params, sampling_params),
            self.rules,
            chats=True,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._complete(requests, progress=progress and use_tqdm)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt] | Iterable[Request | None],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> Iterator[Completion | RowError]:
        """Completions as they finish, of the prompts that `generate` takes, or of Requests.

        The `id` of a result is the index of its prompt, or that of its Request. Prompts are all
        checked before the first begins. Requests are only taken when there is room, after the
        results of those that have ended, and have their own parameters; None instead of one says
        that none has arrived yet (see Engine.generate).

        A prompt ends in a RowError if it does not fit in the KV cache, or if the model's logits
        for it are NaN or infinite; a Request also if it has, or its parameters name, a token that
        is not in the vocabulary.
        One stream or `generate` runs at a time: another raises UsageError until the first has
        ended, is closed, or is garbage-collected.
        """
        own = one_of(params, sampling_params)
        if isinstance(prompts, Iterator):  # taken when the stream begins
            return self._stream_iterator(prompts, own)
        requests = requests_in(prompts)
        if requests is None:
            return self.run(as_requests(prompts, own, self.rules))  # type: ignore[arg-type]
        refuse_params(own)
        return self.run(requests)

    def _stream_iterator(
        self, given: Iterator[Any], params: SamplingParams | Iterable[SamplingParams] | None
    ) -> Iterator[Completion | RowError]:
        """The stream of an iterator of prompts or Requests; its first element tells which."""
        _ = self.engine  # an error if it is closed, before any is taken
        first = list(islice(given, 1))
        every = chain(first, given)
        if not first or first[0] is None or isinstance(first[0], Request):
            refuse_params(params)
            yield from self.run(every, may_wait=True)
        else:
            yield from self.run(as_requests(every, params, self.rules))

    def _complete(self, requests: list[Request], *, progress: bool) -> list[Completion]:
        """The results of `requests`, whose ids are their indexes; CannotRun if one has none."""
        longest, count = self.rules.max_model_len, len(requests)
        lengths = []
        for request in requests:
            length = len(request.prompt_ids)
            new = request.params.limit(longest - length)
            if length + new - 1 > (most := self.engine.admission.most_positions):
                raise _no_result(too_long(request, new, most))
            lengths.append((new, length))
        ordered = _LongestFirst(requests, lengths)
        results: dict[int, Completion] = {}
        with rows_bar(count, shown=progress) as one_done:
            for result in self.run(ordered, choose=ordered.choose):
                if isinstance(result, RowError):
                    raise _no_result(result)
                results[int(result.id)] = result
                one_done()
        return [results[i] for i in range(count)]


class _LongestFirst(Iterator[Request]):
    """Gives requests: first those that may take the most new tokens, equal ones in their order.

    `lengths` has (new tokens, tokens of the prompt) of each.
    """

    def __init__(self, requests: Sequence[Request], lengths: Sequence[tuple[int, int]]) -> None:
        order = sorted(range(len(requests)), key=lambda i: (lengths[i][0], -i))
        self._left = [(*lengths[i], requests[i]) for i in order]  # the longest is the last
        self._next = -1

    def __next__(self) -> Request:
        if not self._left:
            raise StopIteration
        *_, request = self._left.pop(self._next)
        self._next = -1
        return request

    def choose(self, fits: Callable[[int, int], bool]) -> bool:
        """Let about the longest request be next that `fits`, by its prompt and new tokens."""

        def fits_behind(i: int) -> bool:
            new, prompt, _ = self._left[-1 - i]
            return fits(prompt, new)

        found = first_that_fits(len(self._left), fits_behind)
        self._next = -1 - (found or 0)
        return found is not None


def _no_result(error: RowError) -> CannotRun:
    """The error of `generate` for a prompt that has no result."""
    return CannotRun(
        f"prompt {error.id}: {error.message}",
        hint="stream() gives the results of the other prompts",
    )
