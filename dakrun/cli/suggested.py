"""The sampling that generation_config.json suggests, of a model or of a folder: taken, or named."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dakrun.config import SamplingParams


def with_suggested(
    params: "SamplingParams", generation_config: str, model: str, options: Iterable[str]
) -> "SamplingParams":
    """`params` with what --generation-config suggests; `options` on the command line come first.

    Call it in a command.
    """
    from dakrun.models.generation import with_suggestion
    from dakrun.models.hub import suggesting_directory

    context, default = click.get_current_context(), click.core.ParameterSource.DEFAULT
    given = frozenset(name for name in options if context.get_parameter_source(name) is not default)
    return with_suggestion(params, suggesting_directory(generation_config, model), given)


def say_suggested(folder: Path, say: Callable[[str], None]) -> None:
    """Say which sampling the model suggests, if any, before a greedy run."""
    from dakrun.models.generation import described, suggestion, unsupported

    if suggested := suggestion(folder):
        others = ", ".join(unsupported(suggested))
        end = f"of which {others} is not supported" if others else ""
        say(
            f"greedy; the model's generation_config.json suggests {described(suggested)}, "
            + (end or "which --generation-config auto takes")
        )
