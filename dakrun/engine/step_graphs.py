"""CUDA graphs of decode steps: of each batch bucket plain, with shared prefixes, and with drafts.

Knows buckets and launches, neither requests nor slots.
"""

from collections.abc import Sequence
from functools import partial

import torch

from dakrun.engine.buckets import Bucket
from dakrun.engine.decode_step import DecodeStep
from dakrun.engine.staging import Staging
from dakrun.engine.verify_step import VerifyStep
from dakrun.kernels.runtime import capture, edge_kinds, graph_edges, programmatic_lead

MAX_PDL_LEAD = 2  # from list_items to embed, and to a norm; the first product waits for all
MIN_PDL_EDGES = 2  # per layer: launches that may start before their predecessor kernel ends

Graphs = dict[Bucket, torch.cuda.CUDAGraph]


class StepGraphs:
    """The graphs of `step` by bucket, in one pool of memory.

    `plain` and `verifying`, those with drafts, are captured ahead; `cascades`, those of rows that
    share prefixes, once there are such rows. The first matrices of a step are staged by the step
    before, if that stages the same ones: `filled` says whose first matrices the ring holds.
    """

    def __init__(self, step: DecodeStep, buckets: Sequence[Bucket]) -> None:
        """Capture all `buckets`, the largest first; rows must be idle."""
        self._step, self._backend, self._buckets = step, step.backend, buckets
        self._pool = torch.cuda.graph_pool_handle()
        self.plain: Graphs = {}
        self.cascades: Graphs = {}
        self.verifying: Graphs = {}
        self.filled: Staging | None = None
        step.prepare(buckets)
        step.cascades = True
        self.fill(sum(buckets[-1]))
        step.run(buckets[-1])
        step.cascades = False
        for bucket in reversed(buckets):
            self.fill(sum(bucket))
            step.run(bucket)  # compiles its kernels
            self.plain[bucket] = capture(partial(step.run, bucket), self._pool)
            self._check(bucket)
        self.filled = None

    def fill(self, tokens: int) -> None:
        """Stage the first matrices of a step of `tokens` tokens, unless the step before has."""
        staging = self._backend.stagings.of(tokens)
        if staging and staging is not self.filled:
            staging.fill()
        self.filled = staging

    def add_drafts(self, verify: VerifyStep) -> None:
        """Capture the steps of `verify`; rows must be idle."""
        self.filled = None
        for bucket in reversed(self._buckets):
            if bucket in verify.widths:
                run = partial(verify.run, bucket)
                self.fill(verify.tokens(bucket))
                run()  # compiles its kernels
                self.verifying[bucket] = capture(run, self._pool)
        self.filled = None

    def replay(self, bucket: Bucket) -> None:
        """Launch a step without drafts of the rows of `bucket`."""
        graphs = self.plain
        if self._step.cascades:
            graphs = self.cascades
            if bucket not in graphs:
                self._add_cascade(bucket)
        graphs[bucket].replay()

    def capture_ahead(self, rows: int) -> None:
        """Capture one more graph of up to `rows` rows that share prefixes, if one is missing."""
        later = (b for b in reversed(self._buckets) if sum(b) <= rows)
        if bucket := next((b for b in later if b not in self.cascades), None):
            self._add_cascade(bucket)

    def _add_cascade(self, bucket: Bucket) -> None:
        run = partial(self._step.run, bucket)
        self.cascades[bucket] = capture(run, self._pool, quickly=True)

    def _check(self, bucket: Bucket) -> None:
        """Check that launches overlap as far as they may, and no further."""
        # Edges to and from copies of staged matrices and torch's kernels are not programmatic.
        stages = self._backend.stagings.of(sum(bucket)) is not None
        if stages or self._backend.kernel_for(sum(bucket)) == "torch":
            return
        pdl, others = edge_kinds(self.plain[bucket])
        minimum = MIN_PDL_EDGES * self._backend.model.config.num_layers
        assert pdl >= minimum, f"expected {minimum} PDL edges, got {pdl}, {others} others"
        # Attention reads lengths, block tables and its list of items before its PDL wait.
        lead = programmatic_lead(graph_edges(self.plain[bucket]))
        assert lead <= MAX_PDL_LEAD, f"expected a full edge behind embed, got {lead} PDL"
