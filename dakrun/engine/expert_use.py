"""Counts of the experts that a run's tokens chose and its steps read.

Knows the layers with experts and their order in memory; knows neither kernels nor files.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch

from dakrun.models.decoder import Decoder
from dakrun.models.experts import Router, mixtures, routers
from dakrun.plan import Plan

DECODE, PROMPTS = range(2)  # kinds of steps: without and with tokens of prompts
CHOSEN, READ = range(2)  # counts: tokens that chose an expert, steps that read a stack index


class ExpertUse:
    """`table`, int32 [kinds, layers with experts, counts, E] on `device`.

    What tokens chose is counted by the numbers of experts, what steps read by their indices in the
    stack. `orders` has the experts by stack index, for each layer. `rows` of the table is what a
    router adds to in a step; the host calls `begin_step` for each. `steps`, `tokens` and `routed`
    count decode steps, their rows, and the tokens of these, drafts included.
    """

    def __init__(self, model: Decoder, device: torch.device | str = "cpu") -> None:
        self.mixtures = mixtures(model)
        found = routers(model)
        self._numbers = {router.layer: number for number, router in enumerate(found)}
        self.orders = [list(router.order) for router in found]
        self._stack_indices: list[list[int] | None] = [
            list(router.stack_indices) if router.stack_indices else None for router in found
        ]
        experts = found[0].routing.experts
        self.table = torch.zeros(
            2, len(found), 2, experts, dtype=torch.int32, device=torch.device(device)
        )
        self._rows = [list(of_kind) for of_kind in self.table]  # views
        self.kind = DECODE
        self.steps = self.tokens = self.routed = 0

    def begin_step(self, rows: int, *, prompts: bool, width: int = 1) -> None:
        """Let what follows belong to a step of `rows` decode rows, or to one with `prompts`.

        A row has up to `width` tokens, the first and its drafts.
        """
        self.kind = PROMPTS if prompts else DECODE
        if not prompts:
            self.steps, self.tokens = self.steps + 1, self.tokens + rows
            self.routed += rows * width

    def rows(self, router: Router, kind: int | None = None) -> torch.Tensor:
        """The counts int32 [2, E], CHOSEN and READ, of a router in steps of a kind, as a view."""
        return self._rows[self.kind if kind is None else kind][self._numbers[router.layer]]

    def add(self, router: Router, tokens: Mapping[int, int]) -> None:
        """Count `tokens` by the stack indices of the experts that they chose, on the CPU."""
        rows, order = self.rows(router), self.orders[self._numbers[router.layer]]
        experts = torch.tensor([order[index] for index in tokens])
        rows[CHOSEN, experts] += torch.tensor(list(tokens.values()), dtype=torch.int32)
        rows[READ, torch.tensor(list(tokens))] += 1

    def stack_indices(self, router: Router) -> Sequence[int] | None:
        """The stack index of each expert of a router; None if all are in order of their numbers."""
        return self._stack_indices[self._numbers[router.layer]]

    def exchange(self, layer: int, first: int, second: int) -> None:
        """The experts at two stack indices of the layer number `layer` were exchanged."""
        order = self.orders[layer]
        order[first], order[second] = order[second], order[first]
        self._stack_indices[layer] = sorted(range(len(order)), key=order.__getitem__)

    def clear(self) -> None:
        """Forget all counts."""
        self.table.zero_()
        self.steps = self.tokens = self.routed = 0

    def counts(self) -> list[list[int]]:
        """Tokens that chose each expert, in all steps, by layer and by the expert's number."""
        return self.chosen().tolist()

    def chosen(self) -> torch.Tensor:
        """The same, int32 [layers with experts, E] on the device of the table."""
        return self.table[:, :, CHOSEN].sum(0, dtype=torch.int32)

    def read_per_step(self) -> float | None:
        """Mean number of experts of a layer that a decode step read; None without a step."""
        read = self.table[DECODE, :, READ]
        return int(read.sum()) / (len(read) * self.steps) if self.steps else None

    def tier_reads(self, plan: Plan) -> dict[str, list[list[float]]]:
        """Mean bytes that a decode step read in each tier of `plan`, by op and layer of experts.

        Empty without a step.
        """
        found: dict[str, list[list[float]]] = {}
        for number, mixture in enumerate(self.mixtures if self.steps else ()):
            read = self.table[DECODE, number, READ].tolist()
            for matrix in (mixture.up, mixture.down):
                layers, placed = found.setdefault(matrix.op, []), plan.op(matrix.op)
                shares = placed.op.shares(placed.placement[len(layers)])
                ends = [end * len(read) for end in itertools.accumulate(shares)]
                expert = placed.op.resident_bytes / len(read) / self.steps
                layers.append([
                    expert * sum(n * _overlap(at, start, end) for at, n in enumerate(read))
                    for start, end in zip([0.0, *ends], ends, strict=False)
                ])  # fmt: skip
        return found

    def local_share(self, plan: Plan) -> float | None:
        """Share of the bytes of experts that decode steps read in HBM; None without a step."""
        reads = [of for layers in self.tier_reads(plan).values() for of in layers]
        total = sum(map(sum, reads))
        return sum(of[0] for of in reads) / total if total else None


def _overlap(at: int, start: float, end: float) -> float:
    """The part of the expert at stack index `at` between two points of the stack."""
    return max(0.0, min(at + 1, end) - max(at, start))
