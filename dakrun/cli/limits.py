"""The option --limits: a GPU held to what another card has."""

import functools
from typing import TYPE_CHECKING, Any

import click

from dakrun.cli.console import eprint
from dakrun.cli.option_kinds import Command
from dakrun.errors import CannotRun, UsageError

if TYPE_CHECKING:
    from dakrun.hardware import Card

_option = click.option(
    "--limits",
    metavar="CAPABILITY",
    help="Hold the GPU to the shared memory, clusters and instructions of another card, by its "
    "compute capability, such as 12.0; default: its own limits.",
)


def limits_option(command: Command) -> Command:
    """Add --limits, under which every launch of the command is held to another card's limits."""

    @functools.wraps(command)
    def with_limits(*, limits: str | None, **options: Any) -> int | None:
        if limits is None:
            return command(**options)
        if options.get("ray") is not None:
            raise UsageError("--limits does not go with --ray", hint="drop one of them")
        from dakrun.hardware import how_kernels_run
        from dakrun.kernels.runtime import held_to

        card = _card(limits, options.get("device"))
        if not options.get("quiet"):
            eprint(
                f"held to the limits of {limits}: {how_kernels_run(card)}; what torch multiplies "
                "is not held: models without kernels, formats whose tiles do not fit, and what "
                "bench compares with"
            )
        with held_to(card):
            return command(**options)

    decorated: Command = _option(with_limits)
    return decorated


def _card(limits: str, device: str | None) -> "Card":
    """The card of torch's current GPU, held to `limits`."""
    import torch

    from dakrun.kernels.runtime import described_card

    if device == "cpu" or not torch.cuda.is_available():
        raise CannotRun(
            "--limits holds a CUDA GPU, and none is used here",
            hint="dakrun plan --profile rtx-pro-6000 predicts such a card without a GPU",
        )
    return described_card(torch.device("cuda", torch.cuda.current_device())).limited_to(limits)
