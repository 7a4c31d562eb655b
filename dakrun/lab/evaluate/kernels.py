"""Products, decode attention and reads of tiers on a GPU, over buffers that points share.

The launches are those of `dakrun bench --kernel` and of `dakrun profile`.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import torch

from dakrun.engine import direct_accesses
from dakrun.hardware import LOCAL, Card
from dakrun.kernels import read_window
from dakrun.kernels.gemm.dispatch import Products
from dakrun.kernels.runtime import architecture, card_of, compile_ahead
from dakrun.lab.bench.attention import AttentionChains
from dakrun.lab.bench.ceilings import FULL, HBM_RING, Effort
from dakrun.lab.bench.gemm import GemmChains
from dakrun.lab.bench.rows import AttentionRow
from dakrun.lab.bench.sweep import Case
from dakrun.lab.bench.tiers import allocate, fill_random, whole
from dakrun.lab.evaluate.cases import (
    ablated,
    attention_case,
    dtype_of,
    foreseen,
    link_reads,
    product_case,
    remote_names,
)
from dakrun.lab.evaluate.points import AttentionPoint, ProductPoint, ReadPoint, Result
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.probe.measurement import ring_for
from dakrun.lab.probe.sweeps import Buffer
from dakrun.launches import TierAccess
from dakrun.memory.tiers import ALIGNMENT, Tiers
from dakrun.plan import is_windowed
from dakrun.units import ceil_div

# Chains of 512 MiB exceed L2 many times; half the replays.
QUICK = replace(FULL, chain_bytes=2**29, min_launches=4, replays=4, seconds=0.01, readings=3)
READ_BYTES = {LOCAL: 2**31, "remote": 2**29}


class Kernels:
    """Measures single ops on `device`. `close` frees the buffers; the next point makes new ones."""

    def __init__(self, scope: Scope, device: torch.device) -> None:
        self.scope, self.device = scope, device
        self.effort: Effort = QUICK if scope.quick else FULL
        self.card = card_of(device)
        self._tiers: Tiers | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._compiled: set[tuple[int, torch.dtype]] = set()

    def close(self) -> None:
        """Free the buffers."""
        self._buffers.clear()  # views would keep the memory
        if self._tiers is not None:
            self._tiers.close()
        self._tiers = None

    def product(self, point: ProductPoint) -> Result:
        """Measure a product, without the techniques that the point names."""
        case = product_case(self.scope, point, self.effort)
        reads = link_reads(self.scope, point, case)
        dtype = getattr(torch, dtype_of(self.scope, point.model))
        buffers = self._room(case, point.remote)
        card = ablated(self.card, point.without)
        products = Products(self.device, card)
        self._compile(products, point, dtype)
        chains = GemmChains(
            buffers, dtype, card, self.effort.replays, products=products, ablations=False
        )
        fill_random(buffers, dtype, scale=case.shape.cols**-0.5)
        times, _ = chains.products(case, self._accesses(point, case, card))
        local, remote = case.tier_bytes
        return Result(
            source="measured",
            seconds=statistics.median(times),
            ratio=case.ratio,
            weight_bytes=case.read_bytes,
            read_bytes=local + remote,
            remote_bytes=remote,
            link_bytes=remote * reads.times,
        )

    def attention(self, point: AttentionPoint) -> Result:
        """Measure decode attention, without the techniques that the point names."""
        case = attention_case(self.scope, point, replace(self.effort, min_launches=4))
        dtype = getattr(torch, dtype_of(self.scope, point.model))
        buffers = self._room(case, point.remote)
        card = ablated(self.card, point.without)
        chains = AttentionChains(buffers, dtype, card, self.effort.replays)
        chains.fill(case)
        row: AttentionRow = chains.row(
            case, self._accesses(point, case, card), bound_s=0.0, predicted_s=0.0, baseline_s=0.0
        )
        remote = sum(case.tier_bytes[1:])
        return Result(
            source="measured",
            seconds=row.time_s,
            ratio=case.ratio,
            read_bytes=case.read_bytes,
            remote_bytes=remote,
            link_bytes=remote,
        )

    def read(self, point: ReadPoint) -> Result:
        """Measure the bandwidths of HBM and of the remote tier while both are read."""
        (name,) = remote_names(self.scope, point.remote)
        ring = ring_for(point.in_flight // point.sms, self.card) if point.sms else None
        if point.sms and ring is None:
            each = f"{point.in_flight / point.sms / 1024:,.4g} KiB"
            return Result(source="measured", problem=f"an SM cannot keep {each} in flight")
        if point.sms + point.hbm_sms > self.card.sms:
            return Result(source="measured", problem=f"needs {point.sms + point.hbm_sms} SMs")
        sizes = {LOCAL: READ_BYTES[LOCAL], name: READ_BYTES["remote"]}
        buffers = self._at_least(sizes)
        fill_random(buffers, torch.float16)
        readers = []
        if ring is not None:
            readers.append(Buffer(buffers[name]).reader(point.sms, ring))
        if point.hbm_sms:
            readers.append(Buffer(buffers[LOCAL]).reader(point.hbm_sms, HBM_RING))
        runs = [read_window(readers, self.effort.seconds) for _ in range(self.effort.readings)]
        rates = [statistics.median(rates) for rates in zip(*runs, strict=True)]
        return Result(
            source="measured",
            remote_bytes_per_s=rates[0] if ring is not None else None,
            hbm_bytes_per_s=rates[-1] if point.hbm_sms else None,
        )

    def _accesses(
        self, point: ProductPoint | AttentionPoint, case: Case, card: Card
    ) -> Sequence[TierAccess]:
        """How the kernel reads the tiers: as in a plan, on `card`."""
        names = remote_names(self.scope, point.remote)
        sms = foreseen(self.scope, point, case).sms
        return [TierAccess(), *direct_accesses(self.scope.profile, names, sms[1:], card)]

    def _compile(self, products: Products, point: ProductPoint, dtype: torch.dtype) -> None:
        """Compile the kernels for the point's rows, side by side."""
        if (point.n, dtype) in self._compiled:
            return
        names, profile = remote_names(self.scope, point.remote), self.scope.profile
        mixes = not all(is_windowed(profile.tier(name), profile.card) for name in names)
        variants = products.variants([point.n], dtype, mixes=mixes)
        compile_ahead(variants, architecture(self.device.index))
        self._compiled.add((point.n, dtype))

    def _room(self, case: Case, remote: str) -> dict[str, torch.Tensor]:
        """Buffers for the operands of a chain of `case`."""
        (name,) = remote_names(self.scope, remote)
        sizes = [case.launches * nbytes for nbytes in case.held_bytes]
        return self._at_least(dict(zip((LOCAL, name), sizes, strict=True)))

    def _at_least(self, sizes: dict[str, int]) -> dict[str, torch.Tensor]:
        """Buffers of `sizes` bytes or more by tier."""
        held = {name: buffer.numel() for name, buffer in self._buffers.items()}
        if held.keys() != sizes.keys() or any(held[name] < sizes[name] for name in sizes):
            self.close()
            wanted = {
                name: ceil_div(max(size, held.get(name, 0), 1), ALIGNMENT) * ALIGNMENT
                for name, size in sizes.items()
            }
            self._tiers = allocate(wanted, self.device)
            self._buffers = whole(self._tiers)
        return self._buffers
