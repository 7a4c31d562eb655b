"""Costs of the project's kernels by kind: sweeps, fits, and the variants to compile.

Efficiencies are shares of given rates of HBM and of arithmetic. Makes no profile.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from dakrun.geometry import ATOM_COLS, ROWS_PER_BLOCK, SPLITK_MAX_ROWS
from dakrun.hardware import Card, ComputeRate, OpCosts, Sweep, weight_rate
from dakrun.kernels import Variant, variants
from dakrun.kernels.runtime.needs import longest_first
from dakrun.lab.probe import congestion, expert_costs, gemm_costs
from dakrun.lab.probe.attention_costs import HEAD_DIM, attention_sweep, sampling_sweep
from dakrun.lab.probe.effort import Effort
from dakrun.lab.probe.gemm_costs import DTYPE, QUANTIZED_FORMATS, QUANTIZED_ROWS
from dakrun.lab.probe.sweeps import Bench
from dakrun.lab.samples import Log
from dakrun.launches import few_rows

EVERY_MODEL = frozenset({"linear", "many_rows", "norm", "attention", "sampling"})
MIXTURES = frozenset({"experts", "router"})
SWEEPS: dict[str, Callable[[Bench], Sweep]] = {
    "linear": gemm_costs.linear_sweep,
    "many_rows": gemm_costs.many_rows_sweep,
    "norm": gemm_costs.norm_sweep,
    "attention": attention_sweep,
    "sampling": sampling_sweep,
    "router": expert_costs.router_sweep,
    "experts": expert_costs.experts_sweep,
    **{
        kind: partial(gemm_costs.quantized_sweep, stored=stored)
        for kind, stored in QUANTIZED_FORMATS.items()
    },
}
ELEMENT_BYTES = {  # of weights whose efficiency is a share of what HBM and arithmetic allow
    "many_rows": 2.0,
    "experts": 2.0,
    **{
        kind: stored.atom_bytes / (ROWS_PER_BLOCK * ATOM_COLS)
        for kind, stored in QUANTIZED_FORMATS.items()
    },
}
PRODUCTS = {"splitk_gemm.cu", "tiled_gemm.cu", "unpack.cu"}
# Files of native/ with the kernels that sweeps launch: of every model, and of mixtures.
LAUNCHED = {
    *PRODUCTS, "normalize.cu", "list_items.cu", "splitk_flash_attn.cu", "select_token.cu",
}  # fmt: skip
LAUNCHED_OF_MIXTURES = {
    "normalize.cu", "route.cu", "permute.cu", "grouped_splitk.cu", "grouped_tiled.cu",
}  # fmt: skip


class KernelCosts:
    """Measures costs by kind; figures go to `log`, sweeps to `sweeps`.

    `hbm_rate` is HBM's rate in bytes/s, `compute` the FLOP/s of the kernels' 16-bit dtype.
    """

    def __init__(self, bench: Bench, hbm_rate: float, compute: ComputeRate, log: Log) -> None:
        self.bench, self.hbm_rate, self.compute, self.log = bench, hbm_rate, compute, log
        self.sweeps: dict[str, Sweep] = {}

    def measure(self, kinds: Iterable[str]) -> dict[str, Any]:
        """OpCosts of each of `kinds`, fields of a profile."""
        return {
            kind: self.fitted(kind, of(self.bench)) for kind, of in SWEEPS.items() if kind in kinds
        }

    def fitted(self, kind: str, sweep: Sweep) -> OpCosts:
        """Fit the costs of a `kind` of op to its sweep.

        Efficiency is a share of HBM's rate; for kinds in ELEMENT_BYTES, of weight_rate.
        """
        self.sweeps[kind] = sweep
        found = congestion.op_costs(sweep, partial(self._rate, ELEMENT_BYTES.get(kind)))
        runs = self.bench.effort.runs
        for n, seconds, efficiency in zip(found.rows, found.seconds, found.efficiency, strict=True):
            worst = max(spread for rows, spread in sweep.points("n", "spread") if rows == n)
            self.log.keep(f"{kind} fixed cost N={n}", "s", seconds, worst, runs)
            self.log.keep(f"{kind} efficiency N={n}", "", efficiency, worst, runs)
        return found

    def _rate(self, element_bytes: float | None, n: int) -> float:
        if element_bytes is None:
            return self.hbm_rate
        return weight_rate(n, self.hbm_rate, self.compute, element_bytes)


def measured_variants(effort: Effort, card: Card, kinds: Iterable[str]) -> list[Variant]:
    """The kernel variants that are launched to measure `kinds` of costs on `card`."""
    kinds, most = frozenset(kinds), min(few_rows(card), SPLITK_MAX_ROWS)
    rows = {n for n in (*effort.rows, *effort.slots) if n <= most}
    of = partial(variants, DTYPE, card=card, head_dim=HEAD_DIM)
    needed: list[Variant] = []
    if kinds & EVERY_MODEL:
        needed += _from(LAUNCHED, of(rows))
    for stored in (stored for kind, stored in QUANTIZED_FORMATS.items() if kind in kinds):
        tiles = gemm_costs.quantized_tiles(effort, card, stored)
        needed += (
            (source, macros)
            for source, macros in _from(PRODUCTS, of(QUANTIZED_ROWS, formats=[stored]))
            if "WIDE" not in macros or (macros["TILES"], bool(macros["WIDE"])) in tiles
        )
    for routing in expert_costs.ROUTINGS if kinds & MIXTURES else ():
        needed += _from(LAUNCHED_OF_MIXTURES, of((), routing=routing))
    found: list[Variant] = []
    for source, macros in needed:
        if not macros.get("PREFIXES") and (source, macros) not in found:
            found.append((source, macros))
    return longest_first(found)


def _from(sources: Iterable[str], needed: Iterable[Variant]) -> list[Variant]:
    return [(source, macros) for source, macros in needed if source in sources]
