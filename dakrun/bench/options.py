"""The command line options of `dakrun bench`: what to measure, and in which form to show it.

Knows click; what the values mean is in sweep.py, gemm_sweep.py and attention_sweep.py.
"""

import functools
from pathlib import Path
from typing import Any

import click

from dakrun.errors import UsageError

# The options that only one kernel has.
OWN = {
    "gemm": ("shapes", "model", "rows", "ablations"),
    "attention": ("cases", "head_dim"),
}

_OPTIONS = (
    click.option(
        "--kernel",
        type=click.Choice(list(OWN)),
        required=True,
        help="What to measure.",
    ),
    click.option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="MxK",
        help="gemm: rows and columns of a weight; repeatable. Default: 4096x4096, and 7168x7168, "
        "28672x7168 and 7168x28672 as in OPT-30B.",
    ),
    click.option(
        "--model",
        metavar="DIR|HUB_ID|NAME",
        help="gemm: the weights of all of a model's linear ops, lm_head included.",
    ),
    click.option(
        "-n",
        "--rows",
        type=click.IntRange(min=1),
        multiple=True,
        default=(1, 8, 16),
        show_default=True,
        metavar="N",
        help="gemm: rows of X, the batch; repeatable.",
    ),
    click.option(
        "--ratio",
        "ratios",
        multiple=True,
        default=("0",),
        show_default=True,
        metavar="0..1|turning-point",
        help="Share of a weight, or of the slots, in the remote tier; repeatable. At the turning "
        "point HBM and the remote tier take the same time.",
    ),
    click.option(
        "--remote",
        default="host",
        show_default=True,
        metavar="host|peer[:N]",
        help="The remote tier, as the profile names it.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float16", "bfloat16"]),
        default="float16",
        show_default=True,
        help="Of weights or KV, and of activations.",
    ),
    click.option(
        "--ablations",
        is_flag=True,
        help="gemm: measure without the congestion window and without wave alignment, too.",
    ),
    click.option(
        "--case",
        "cases",
        multiple=True,
        metavar="BATCH:HEADS/KV_HEADS:[SHORTEST-]LENGTH",
        help="attention: slots, query heads, KV heads, and positions with the new token, as many "
        "in each slot or between the two; repeatable. Default: ten cases from 8:56/56:64 to "
        "1:32/8:131072.",
    ),
    click.option(
        "--head-dim",
        type=click.Choice(["64", "80", "96", "128"]),
        default="128",
        show_default=True,
        help="attention: dimensions of a head.",
    ),
    click.option("--csv", "form", flag_value="csv", help="Print CSV, with units in the keys."),
    click.option("--json", "form", flag_value="json", help="Print JSON, with units in the keys."),
    click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Write it, too: .csv, .json or .md for Markdown.",
    ),
)


def bench_options(command: Any) -> Any:
    """Adds the options; own_options() picks those of a sweep."""
    return functools.reduce(lambda decorated, add: add(decorated), reversed(_OPTIONS), command)


def own_options(kernel: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Of `asked`, by parameter name, what the sweep of `kernel` takes, in a running command.

    Raises UsageError where an option is given that only another kernel has.
    """
    context = click.get_current_context()
    flags = {param.name: param.opts[-1] for param in context.command.params}
    own = ", ".join(flags[name] for name in OWN[kernel])
    for other, names in OWN.items():
        for name in () if other == kernel else names:
            if context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
                raise UsageError(
                    f"{flags[name]} is an option of --kernel {other}, not {kernel}",
                    hint=f"leave it out; --kernel {kernel} alone has {own}",
                )
    foreign = {name for names in OWN.values() for name in names} - set(OWN[kernel])
    return {name: value for name, value in asked.items() if name not in foreign}
