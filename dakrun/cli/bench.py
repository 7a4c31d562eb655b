"""The command `dakrun bench` and its options for the subject and the output.

Knows which options belong to models and which to a kernel; dakrun/lab/bench checks their values.
"""

import itertools
import shlex
import sys
from pathlib import Path
from typing import Any, Literal

import click

from dakrun.cli.console import eprint, stdout_console
from dakrun.cli.limits import limits_option
from dakrun.cli.lookups import resolve_run_profile
from dakrun.cli.option_kinds import choice_option, count_option, option, together
from dakrun.cli.options import (
    STRATEGIES,
    TRANSPORTS,
    budget_options,
    format_option,
    load_format_option,
    profile_option,
    wide_option,
)
from dakrun.errors import UsageError, check_new_file

MODEL: Literal["model"] = "model"
KERNELS = ("gemm", "attention", "prompt-attention")
RIVALS = {
    "attention": ("flashinfer",),
    "prompt-attention": ("flashinfer",),
    MODEL: ("transformers", "prefetch", "uva", "on-demand"),
}

# The parameter names of the options that only some subjects of a benchmark have.
OPTIONS_OF = {
    "gemm": ("shapes", "model", "rows", "ablations"),
    "attention": ("cases", "head_dim", "rival"),
    "prompt-attention": ("cases", "head_dim", "rival"),
    MODEL: (
        *(
            "model",
            "load_format",
            "format",
            "batch_sizes",
            "transports",
            "strategies",
            "prompt_len",
        ),
        *("new_tokens", "hbm_budget", "host_budget", "peer_budget", "rival", "plot"),
        *("popularity", "orders", "speculate"),
    ),
}

_bench_options = together(
    click.option(
        "--kernel",
        type=click.Choice(KERNELS),
        help="Kernel to measure; without it, decode steps of --model are measured.",
    ),
    option(
        "--shape",
        "shapes",
        multiple=True,
        metavar="MxK",
        help="gemm: rows and columns of a weight; repeatable. Default: 4096x4096, and 7168x7168, "
        "28672x7168 and 7168x28672 as in OPT-30B.",
    ),
    option(
        "--model",
        metavar="DIR|HUB_ID|NAME",
        help="Model to measure; gemm: the weights of all its linear ops, lm_head included.",
    ),
    load_format_option("model: "),
    format_option("model: "),
    count_option(
        "--batch-size",
        "batch_sizes",
        multiple=True,
        default=(8,),
        help="model: requests decoded together; repeatable.",
    ),
    choice_option(
        "--transport",
        "transports",
        choices=TRANSPORTS,
        multiple=True,
        default=("auto",),
        help="model: remote tiers read in place, or copied to HBM ahead of use; repeatable.",
    ),
    choice_option(
        "--strategy",
        "strategies",
        choices=STRATEGIES,
        multiple=True,
        default=("auto",),
        help="model: greedy, an offload ratio for each op; uniform, one for all; auto, what is "
        "predicted to be fastest; repeatable.",
    ),
    option(
        "--popularity",
        default="auto",
        metavar="auto|uniform|zipf:S|FILE",
        help="model: how often tokens choose each expert: what earlier runs counted (auto), all "
        "alike, Zipf's law, or a file's counts; routers of random weights choose by it.",
    ),
    choice_option(
        "--expert-order",
        "orders",
        choices=("use", "number"),
        multiple=True,
        default=("use",),
        help="model: experts of most use in HBM, or those of the lowest numbers; repeatable.",
    ),
    count_option("--prompt-len", default=32, help="model: tokens of a prompt."),
    count_option(
        "--new-tokens",
        minimum=3,
        default=32,
        help="model: tokens of a completion, which takes one decode step fewer.",
    ),
    click.option(
        "--rival",
        type=click.Choice(list(dict.fromkeys(itertools.chain(*RIVALS.values())))),
        help="model: also measure transformers' model on a GPU, with random weights and a CUDA "
        "graph for each step. transformers: all in HBM; prefetch: also with whole layers in host "
        "memory, as many as --ratio of the weights needs, copied to HBM ahead of their use; "
        "uva: the same, read in place by torch's kernels; on-demand: with experts there, copied "
        "when the CPU knows the router's choice (no graph). "
        "attention, prompt-attention: also measure FlashInfer's kernel (dakrun[flashinfer]).",
    ),
    count_option(
        "--speculate",
        minimum=0,
        default=0,
        help="model: also measure steps that carry N drafts of each row (see generate "
        "--speculate), and show the time of a token if a draft behind right ones is right with a "
        "chance of 0.5, 0.8 and 0.95.",
    ),
    count_option(
        "-n",
        "--rows",
        multiple=True,
        default=(1, 8, 16),
        help="gemm: rows of X, the batch; repeatable.",
    ),
    option(
        "--ratio",
        "ratios",
        multiple=True,
        default=("0",),
        metavar="0..1|turning-point|auto",
        help="Ratio of a weight, of the slots, or of a model's weight and KV bytes in the remote "
        "tier; repeatable. At a kernel's turning point HBM and the remote tier take the same "
        "time; auto is the planner's choice for a model.",
    ),
    option(
        "--remote",
        default="host",
        metavar="host|peer[:N]",
        help="Remote tier, by its name in the profile; a model may have several, as in host,peer.",
    ),
    budget_options("model: "),
    choice_option(
        "--dtype",
        choices=("float16", "bfloat16"),
        help="Type of weights, KV cache and activations.",
    ),
    option(
        "--ablations",
        is_flag=True,
        help="gemm: also measure without the congestion window and without wave alignment.",
    ),
    option(
        "--case",
        "cases",
        multiple=True,
        metavar="BATCH:HEADS/KV_HEADS:[SHORTEST-]LENGTH",
        help="attention: slots, query heads, KV heads, and positions in each slot, the new token's "
        "included, or a range of them; repeatable. Default: 19 cases from 8:56/56:64 to "
        "1:32/8:131072. prompt-attention: prompts of so many tokens; default: 1, 4 and 16 of 512 "
        "to 4,096, of Llama-3-8B.",
    ),
    choice_option(
        "--head-dim",
        choices=("64", "80", "96", "128"),
        default="128",
        help="attention, prompt-attention: dimensions of a head.",
    ),
    wide_option,
    option("--csv", "form", flag_value="csv", help="Print CSV, with units in the keys."),
    option("--json", "form", flag_value="json", help="Print JSON, with units in the keys."),
    option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Also write the results: .csv, .json or .md (Markdown); of a model, after each point.",
    ),
    option(
        "--plot",
        type=click.Path(path_type=Path),
        metavar="FILE.png",
        help="model: draw EB and the decode step against the offload ratio.",
    ),
)


@click.command()
@_bench_options
@profile_option
@limits_option
def bench(
    *,
    kernel: str | None,
    profile: str,
    form: str | None,
    output: Path | None,
    plot: Path | None,
    wide: bool,
    **given: Any,
) -> None:
    """Measure a model or a kernel; compare with memory bandwidth and the profile's prediction.

    --model alone: decode steps of batches of requests, with a part of all weights in a remote tier.
    Runs on the CPU if there is no GPU. Needs --model; also takes --load-format, --format,
    --batch-size, --transport, --strategy, --prompt-len, --new-tokens, --hbm-budget, --host-budget,
    --peer-budget, --popularity, --expert-order, --speculate, --rival, --plot.

    --kernel gemm: X W^T with a part of W in a remote tier, and cuBLAS with all of W in HBM. Needs a
    GPU; takes --shape, --model, --rows, --ablations.

    --kernel attention: one new token in each slot with some slots in a remote tier, and torch's
    SDPA with all slots in HBM. Needs a GPU; takes --case, --head-dim, --rival.

    --kernel prompt-attention: all tokens of prompts, in TFLOPS, and torch's FlashAttention. Needs a
    GPU; takes --case, --head-dim, --rival.

    All of them take --ratio, --remote, --dtype, --wide, --csv, --json, --output, --profile,
    --limits.
    """
    from dakrun.hardware import describe_profile
    from dakrun.lab.bench import run as benchmark
    from dakrun.lab.bench.model_sweep import ModelSweep
    from dakrun.lab.output import FORMATS, as_text, render, write
    from dakrun.plan.show import picture

    subject = kernel or MODEL
    own = _own_options(subject, given)
    if (rival := own.get("rival")) and rival not in RIVALS[subject]:
        raise UsageError(
            f"--rival {rival} is no rival of {_title(subject)}",
            hint=f"name any of {', '.join(RIVALS[subject])}",
        )
    sweep = benchmark.SWEEPS[subject](**own)
    if output:
        said = "a benchmark is written as .csv, .json or .md"
        check_new_file(output, FORMATS, said, option="-o")
    if plot:
        picture.check_target(plot)
    benchmark.check_device(sweep)
    models = [sweep.config] if isinstance(sweep, ModelSweep) else []  # kernels read 16 bits
    hardware = resolve_run_profile(profile, "cuda" if kernel else "auto", models, eprint)
    if profile == "auto":
        eprint(describe_profile(hardware))
    command = shlex.join(["dakrun", *sys.argv[1:]])
    for record in benchmark.measure(sweep, hardware, command=command, progress=eprint):
        if output:
            write(record, output)
    if plot:
        from dakrun.lab.bench.model_plot import draw

        draw(record, plot)
    if form:
        click.echo(as_text(record, form), nl=False)
    else:
        render(record, stdout_console(), wide=wide)


def _own_options(subject: str, given: dict[str, Any]) -> dict[str, Any]:
    """The entries of `given`, by parameter name, that the benchmark of `subject` takes.

    Needs a running command. Raises UsageError if the command line has an option that only other
    subjects take.
    """
    context = click.get_current_context()
    flags = {param.name: param.opts[-1] for param in context.command.params}
    foreign = {name for names in OPTIONS_OF.values() for name in names} - set(OPTIONS_OF[subject])
    for name in sorted(foreign):
        if context.get_parameter_source(name) != click.core.ParameterSource.DEFAULT:
            others = [_title(other) for other, names in OPTIONS_OF.items() if name in names]
            raise UsageError(
                f"{flags[name]} is an option of {' and '.join(others)}, not of {_title(subject)}",
                hint=f"leave it out; the options of {_title(subject)} alone are "
                + ", ".join(flags[own] for own in OPTIONS_OF[subject]),
            )
    return {name: value for name, value in given.items() if name not in foreign}


def _title(subject: str) -> str:
    return "whole models" if subject == MODEL else f"--kernel {subject}"
