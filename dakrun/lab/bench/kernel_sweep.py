"""`dakrun bench --kernel`: operands and offload ratios of the command line, and the rows of cases.

Needs no GPU and no torch.
"""

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dakrun.config import Workload
from dakrun.errors import UsageError
from dakrun.hardware import HardwareProfile, RemoteTier
from dakrun.lab.cases import EXAMPLE, TURNING_POINT, Case, Operand, Prompts, Ratio, Slots, Weight
from dakrun.lab.ceilings import Effort
from dakrun.lab.output import Column, microseconds
from dakrun.lab.samples import spread
from dakrun.models import model_config
from dakrun.plan import Policy, decode_ops

BenchDtype = Literal["float16", "bfloat16"]

# A small square weight, and o, fc1 and fc2 of OPT-30B.
DEFAULT_SHAPES = tuple(
    Weight(*size) for size in ((4096, 4096), (7168, 7168), (28672, 7168), (7168, 28672))
)

# Few and many slots; OPT-30B's heads, Llama's with and without groups; one block to long contexts.
DEFAULT_SLOTS = (
    *(Slots(8, 56, 56, 1056), Slots(128, 56, 56, 544), Slots(512, 32, 32, 512)),
    *(Slots(64, 32, 8, 2048), Slots(64, 32, 8, 8192), Slots(16, 64, 8, 8192)),
    *(Slots(1, 32, 8, 131_072), Slots(2, 64, 8, 65_536)),
    *(Slots(512, 32, 32, 64), Slots(8, 56, 56, 64)),
    # Of Llama-3-8B, as "The Hidden Bottleneck in MLA Serving" measures FlashInfer.
    *(Slots(batch, 32, 8, 2048) for batch in (1, 4, 16, 128, 256)),
    *(Slots(64, 32, 8, length) for length in (256, 512, 1024, 4096)),
)
# Of the same article.
DEFAULT_PROMPTS = tuple(
    Prompts(batch, 32, 8, length) for batch in (1, 4, 16) for length in (512, 1024, 2048, 4096)
)


@dataclass(frozen=True, kw_only=True)
class KernelSweep:
    """All `operands` of one kernel, each with every offload ratio of `ratios`.

    `remote` is the remote tier by its name in the profile. With `ablations` every case is also
    measured without the congestion window and without wave alignment. A `rival` is FlashInfer.
    """

    operands: tuple[Operand, ...]
    ratios: tuple[Ratio, ...]
    remote: str
    dtype: BenchDtype
    ablations: bool = False
    rival: Literal["flashinfer"] | None = None

    def cases(self, turning_point: float, effort: Effort, *, tiers: int) -> Iterator[Case]:
        """The cases in order, with units in one or two `tiers`."""
        for operand, ratio in itertools.product(self.operands, self.ratios):
            yield Case.of(operand, self.dtype, ratio, turning_point, tiers, effort)

    def remote_tiers(self, profile: HardwareProfile) -> list[RemoteTier]:
        """The remote tier in `profile`; an empty list if every ratio is 0.

        Raises UsageError if the profile has no such tier or describes a CPU.
        """
        if profile.device != "cuda":
            raise UsageError(
                f"profile {profile.name} describes a CPU", hint="name a GPU's, or --profile auto"
            )
        names = Policy(remote=(self.remote,)).remote_tiers(profile) if any(self.ratios) else ()
        return [profile.tier(name) for name in names]

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of a table; those of ops and ablations only if the sweep has any."""
        gemm = [of for of in self.operands if isinstance(of, Weight)]
        hidden = {"case", "sdpa_s"} if gemm else {"shape", "n", "by", "cublas_s"}
        prompts = any(isinstance(of, Prompts) for of in self.operands)
        hidden |= {"bytes_per_s", "bound_over_time"} if prompts else {"flops_per_s"}
        hidden |= set() if self.rival else {"rival_s"}
        hidden |= set() if any(of.ops for of in gemm) else {"ops"}
        hidden |= set() if self.ablations else {"window_off_s", "alignment_off_s"}
        return tuple(column for column in COLUMNS if column.key not in hidden)


COLUMNS = (
    Column("shape", "shape"),
    Column("case", "case"),
    Column("ops", "op", rank=4),
    Column("n", "N"),
    Column("by", "kernel", rank=6),
    Column("ratio", "remote", "{:.2%}".format),
    Column("time_s", "time us", microseconds),
    Column("spread", "spread", "{:.1%}".format, rank=7),
    Column("bytes_per_s", "GB/s", lambda rate: f"{rate / 1e9:,.0f}"),
    Column("flops_per_s", "TFLOPS", lambda rate: f"{rate / 1e12:,.0f}"),
    Column("bound_over_time", "share of ceiling", "{:.1%}".format),
    Column("predicted_s", "predicted us", microseconds, rank=5),
    Column("cublas_s", "cuBLAS us", microseconds, rank=3),
    Column("sdpa_s", "SDPA us", microseconds, rank=3),
    Column("speedup", "speedup", "{:.2f}".format, rank=2),
    Column("rival_s", "FlashInfer us", microseconds, rank=2),
    Column("window_off_s", "no window us", microseconds, rank=1),
    Column("alignment_off_s", "unaligned us", microseconds, rank=1),
)


def kernel_row(
    case: Case, samples_s: Sequence[float], by: str, *, bound_s: float, predicted_s: float,
    baseline_s: float, **more_s: float | None,
) -> dict[str, Any]:  # fmt: skip
    """The figures of a case by key; keys carry units. Times are seconds of one launch.

    `samples_s` has one value per replay of the kernel `by`: "splitk", "tiled" or "torch". `bound_s`
    follows from the ceilings, `predicted_s` from the profile. `baseline_s` is torch's time with the
    whole operand in HBM. `more_s` are times of ablations and of a rival; None was not measured.
    """
    operand, time = case.operand, statistics.median(samples_s)
    return {
        **operand.figures(),
        **({"by": by} if isinstance(operand, Weight) else {}),
        "asked_ratio": case.requested,
        "ratio": case.ratio,
        f"{operand.key}_bytes": case.read_bytes,
        "launches": case.launches,
        "time_s": time,
        "spread": spread(samples_s),
        "bytes_per_s": case.read_bytes / time,
        **({"flops_per_s": operand.flops / time} if isinstance(operand, Prompts) else {}),
        "bound_s": bound_s,
        "bound_over_time": bound_s / time,
        "predicted_s": predicted_s,
        f"{operand.baseline}_s": baseline_s,
        "speedup": baseline_s / time,
        **more_s,
    }


def gemm_sweep(
    *, shapes: Iterable[str], model: str | None, rows: Iterable[int], ratios: Iterable[str],
    ablations: bool, **rest: Any,
) -> KernelSweep:  # fmt: skip
    """The sweep of the command line's options: its shapes and the model's, or DEFAULT_SHAPES.

    Equal shapes join their ops. Raises UsageError if an option is malformed.
    """
    named = [parse_shape(text) for text in shapes]
    if model is not None:
        one = Workload(batch_size=1, prompt_len=1, new_tokens=1, max_model_len=1)
        every = decode_ops(model_config(model), one)  # in order, lm_head included
        named += [Weight(*op.shape, (op.name,)) for op in every if op.category == "linear"]
    ops: dict[tuple[int, int], tuple[str, ...]] = {}
    for shape in named:
        size = (shape.rows, shape.cols)
        ops[size] = ops.get(size, ()) + shape.ops
    weights = tuple(Weight(*size, names) for size, names in ops.items()) or DEFAULT_SHAPES
    operands = tuple(replace(of, n=n) for of in weights for n in dict.fromkeys(rows))
    return KernelSweep(operands=operands, ratios=parse_ratios(ratios), ablations=ablations, **rest)


def attention_sweep(
    *, cases: Iterable[str], head_dim: str, ratios: Iterable[str],
    defaults: Sequence[Slots] = DEFAULT_SLOTS, **rest: Any,
) -> KernelSweep:  # fmt: skip
    """The sweep of the command line's options: its cases, of the kind of `defaults`, or these.

    Raises UsageError if an option is malformed.
    """
    kind = type(defaults[0])
    slots = tuple(dict.fromkeys(parse_slots(text, kind) for text in cases)) or defaults
    operands = tuple(replace(of, head_dim=int(head_dim)) for of in slots)
    return KernelSweep(operands=operands, ratios=parse_ratios(ratios), **rest)


def parse_shape(text: str) -> Weight:
    """The shape in a text such as "28672x7168"; UsageError for anything else."""
    match = re.fullmatch(r"([0-9]+)x([0-9]+)", text.strip().lower())
    if match is None:
        raise UsageError(
            f"{text!r} is not a shape MxK",
            hint="write the rows and columns of a weight, as in --shape 28672x7168",
        )
    return Weight(int(match[1]), int(match[2]))


def parse_slots(text: str, kind: type[Slots] = Slots) -> Slots:
    """Slots of a `kind` in a text such as "64:32/8:2048" or "64:32/8:1-8192"; else UsageError."""
    match = re.fullmatch(r"([0-9]+):([0-9]+)/([0-9]+):(?:([0-9]+)-)?([0-9]+)", text.strip())
    if match is None:
        raise UsageError(
            f"{text!r} is not a case BATCH:HEADS/KV_HEADS:[SHORTEST-]LENGTH",
            hint=f"write slots, query heads, KV heads and positions, {EXAMPLE}",
        )
    *sizes, shortest, length = match.groups()
    batch, heads, kv_heads = map(int, sizes)
    return kind(batch, heads, kv_heads, int(length), int(shortest) if shortest else None)


def parse_ratios(texts: Iterable[str]) -> tuple[Ratio, ...]:
    """Offload ratios without repetitions; UsageError if one is malformed."""
    return tuple(dict.fromkeys(parse_ratio(text, TURNING_POINT) for text in texts))


def parse_ratio(text: str, keyword: str) -> Any:
    """A number from 0 to 1, or `keyword`; UsageError for anything else."""
    if text == keyword:
        return text
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise UsageError(
            f"{text!r} is not an offload ratio",
            hint=f"write a number from 0 to 1, or {keyword}, as in --ratio 0.1",
        )
    return ratio
