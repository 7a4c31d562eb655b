"""The command line options of `dakrun bench`: what to measure, and in which form to show it.

Knows click; what the values mean is in sweep.py, gemm_sweep.py, attention_sweep.py
and model_sweep.py.
"""

import functools
from pathlib import Path
from typing import Any, Literal

import click

from dakrun.cli.option_types import Size
from dakrun.errors import UsageError

MODEL: Literal["model"] = "model"
KERNELS = ("gemm", "attention")

# The options that not all of them have.
OWN = {
    "gemm": ("shapes", "model", "rows", "ablations"),
    "attention": ("cases", "head_dim"),
    MODEL: (
        *("model", "load_format", "batch_sizes", "transports", "strategies", "prompt_len"),
        *("new_tokens", "hbm_budget", "host_budget", "peer_budget", "rival", "plot"),
    ),
}

_OPTIONS = (
    click.option(
        "--kernel",
        type=click.Choice(KERNELS),
        help="Measure this kernel; without it, decode steps of --model.",
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
        help="The model to measure; gemm: the weights of all its linear ops, lm_head included.",
    ),
    click.option(
        "--load-format",
        type=click.Choice(["auto", "dummy"]),
        default="auto",
        show_default=True,
        help="model: its own weights, or random ones, which also a known name can have.",
    ),
    click.option(
        "--batch-size",
        "batch_sizes",
        type=click.IntRange(min=1),
        multiple=True,
        default=(8,),
        show_default=True,
        metavar="N",
        help="model: requests decoded together; repeatable.",
    ),
    click.option(
        "--transport",
        "transports",
        type=click.Choice(["auto", "direct", "staged"]),
        multiple=True,
        default=("auto",),
        show_default=True,
        help="model: remote bytes read where they lie, or copied ahead; repeatable.",
    ),
    click.option(
        "--strategy",
        "strategies",
        type=click.Choice(["greedy", "uniform"]),
        multiple=True,
        default=("greedy",),
        show_default=True,
        help="model: a remote share for each op, or the same for all; repeatable.",
    ),
    click.option(
        "--prompt-len",
        type=click.IntRange(min=1),
        default=32,
        show_default=True,
        metavar="N",
        help="model: tokens of a prompt.",
    ),
    click.option(
        "--new-tokens",
        type=click.IntRange(min=3),
        default=32,
        show_default=True,
        metavar="N",
        help="model: tokens of a completion, one more than its decode steps.",
    ),
    click.option(
        "--rival",
        type=click.Choice(["transformers"]),
        help="model: measure this on a GPU, too: random weights, all in HBM, a step in one CUDA "
        "graph.",
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
        metavar="0..1|turning-point|auto",
        help="Share of a weight, of the slots, or of a model's weight and KV bytes, in the remote "
        "tier; repeatable. At the turning point of a kernel HBM and the remote tier take the same "
        "time; auto is what the planner chooses for a model.",
    ),
    click.option(
        "--remote",
        default="host",
        show_default=True,
        metavar="host|peer[:N]",
        help="The remote tier, as the profile names it; a model's may be several, as in host,peer.",
    ),
    click.option("--hbm-budget", type=Size(), help="model: GPU memory to use, like 20GiB."),
    click.option("--host-budget", type=Size(), help="model: host memory to use."),
    click.option("--peer-budget", type=Size(), help="model: memory to use of each peer GPU."),
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
        help="Write it, too: .csv, .json or .md for Markdown; a model's after every point.",
    ),
    click.option(
        "--plot",
        type=click.Path(path_type=Path),
        metavar="FILE.png",
        help="model: draw EB and TPOT against the remote share.",
    ),
)


def bench_options(command: Any) -> Any:
    """Adds the options; own_options() picks those of a sweep."""
    return functools.reduce(lambda decorated, add: add(decorated), reversed(_OPTIONS), command)


def own_options(subject: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Of `asked`, by parameter name, what the sweep of `subject` takes, in a running command.

    Raises UsageError where an option is given that only others have.
    """
    context = click.get_current_context()
    flags = {param.name: param.opts[-1] for param in context.command.params}
    foreign = {name for names in OWN.values() for name in names} - set(OWN[subject])
    for name in sorted(foreign):
        if context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
            others = [_called(other) for other, names in OWN.items() if name in names]
            raise UsageError(
                f"{flags[name]} is an option of {' and '.join(others)}, not of {_called(subject)}",
                hint=f"leave it out; of {_called(subject)} are "
                + ", ".join(flags[own] for own in OWN[subject]),
            )
    return {name: value for name, value in asked.items() if name not in foreign}


def _called(subject: str) -> str:
    return "whole models" if subject == MODEL else f"--kernel {subject}"
