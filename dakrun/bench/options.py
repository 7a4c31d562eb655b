"""The command line options of `dakrun bench`: what to measure, and in which form to show it.

Knows click; what the values mean is in gemm_sweep.py.
"""

import functools
from pathlib import Path
from typing import Any

import click

_OPTIONS = (
    click.option(
        "--kernel",
        type=click.Choice(["gemm"]),
        required=True,
        help="What to measure.",
    ),
    click.option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="MxK",
        help="Rows and columns of a weight; repeatable. Default: 4096x4096, and 7168x7168, "
        "28672x7168 and 7168x28672 as in OPT-30B.",
    ),
    click.option(
        "--model",
        metavar="DIR|HUB_ID|NAME",
        help="The weights of all of a model's linear ops, lm_head included.",
    ),
    click.option(
        "-n",
        "--rows",
        type=click.IntRange(min=1),
        multiple=True,
        default=(1, 8, 16),
        show_default=True,
        metavar="N",
        help="Rows of X, the batch; repeatable.",
    ),
    click.option(
        "--ratio",
        "ratios",
        multiple=True,
        default=("0",),
        show_default=True,
        metavar="0..1|turning-point",
        help="Share of a weight in the remote tier; repeatable. At the turning point HBM and the "
        "remote tier take the same time.",
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
        help="Of weights and activations.",
    ),
    click.option(
        "--ablations",
        is_flag=True,
        help="Measure without the congestion window and without wave alignment, too.",
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
    """Adds the options; the command gets the sweep's under the names of gemm_sweep()."""
    return functools.reduce(lambda decorated, add: add(decorated), reversed(_OPTIONS), command)
