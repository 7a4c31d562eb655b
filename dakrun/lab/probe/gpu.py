"""Measures a GPU and its remote tiers the way the kernels use them, and builds the profile.

The sweeps are in sweeps.py and in the *_costs.py files that kernel_costs.py calls; run.py saves the
profile.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial

import torch

from dakrun.config import Dtype
from dakrun.doctor.machine import gpu_facts
from dakrun.errors import CannotRun
from dakrun.hardware import ESTIMATED, LOCAL, ComputeRate, HardwareProfile, RemoteTier, Sweep
from dakrun.kernels import runtime
from dakrun.kernels.runtime import compiling, held_card
from dakrun.lab.ceilings import KIB, Ring, fitting, ring_for
from dakrun.lab.memory import fill_bytes, reader
from dakrun.lab.probe import congestion, gemm_costs, sweeps
from dakrun.lab.probe.effort import QUICK, Effort, buffer_sizes
from dakrun.lab.probe.kernel_costs import EVERY_MODEL, KernelCosts, measured_variants
from dakrun.lab.probe.sweeps import Bench
from dakrun.lab.samples import Log, Measurement, extended, provenance, spread
from dakrun.memory.limits import available_host_memory
from dakrun.memory.tiers import allocate_tiers
from dakrun.units import format_bytes

DTYPES: tuple[Dtype, ...] = ("float16", "bfloat16", "float32")
RING_COLUMNS = ("chunk_bytes", "stages", "bytes_per_s")
HOST_FRACTION = 0.9  # fraction of the available host memory that plans may use
Found = tuple[HardwareProfile, tuple[Measurement, ...]]


def measure_gpu(name: str, effort: Effort, kinds: Set[str] = ESTIMATED) -> Found:
    """Measure torch's current GPU, host memory and peer GPUs for a profile called `name`.

    Of the kinds of costs in ESTIMATED only `kinds` are measured.
    Raises CannotRun if memory is short or no kernel supports the GPU.
    """
    found = _measure(name, effort, EVERY_MODEL | kinds)
    torch.cuda.empty_cache()  # leave the memory to a run in this process
    return found


def measure_more(profile: HardwareProfile, effort: Effort, kinds: Set[str]) -> Found:
    """`profile`, which measure_gpu made of torch's current GPU, with costs of more `kinds`.

    Efficiencies are shares of the profile's rates.
    Raises CannotRun if memory is short or no kernel supports the GPU.
    """
    found = _measure_more(profile, effort, kinds)
    torch.cuda.empty_cache()
    return found


def _measure_more(profile: HardwareProfile, effort: Effort, kinds: Set[str]) -> Found:
    device = _device()
    free, _ = torch.cuda.mem_get_info(device)
    size = buffer_sizes(effort, free, available_host_memory(), [])[LOCAL]
    card, arch = runtime.card_of(device), runtime.architecture(device.index)
    with (
        compiling(measured_variants(effort, card, kinds), arch) as compiled,
        allocate_tiers({LOCAL: size}, device) as tiers,
    ):
        hbm = tiers[LOCAL].allocate((size,), torch.uint8)
        probe = KernelCosts(
            Bench(card, hbm, effort), profile.hbm_bytes_per_s, profile.compute["float16"], Log()
        )
        compiled()
        costs = probe.measure(kinds)
    figures = tuple(probe.log.measurements)
    return replace(
        profile,
        **costs,
        provenance=extended(profile.provenance, figures),
        sweeps={**profile.sweeps, **probe.sweeps},
    ), figures


def _device() -> torch.device:
    """Torch's current GPU; raises CannotRun if no kernel supports it."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not runtime.has_kernels(device):
        raise CannotRun(
            f"{torch.cuda.get_device_name(device)} does not run the kernels that measure it",
            hint="name a profile with --profile; dakrun doctor says what the kernels need",
        )
    return device


def _measure(name: str, effort: Effort, kinds: Set[str]) -> Found:
    device = _device()
    free, total = torch.cuda.mem_get_info(device)
    host_memory = available_host_memory()
    peers = _peers(device.index, effort.peer_bytes)
    sizes = buffer_sizes(effort, free, host_memory, peers)
    capacities = {"host": int(HOST_FRACTION * host_memory)}  # that plans may use
    capacities |= {f"peer:{gpu}": torch.cuda.mem_get_info(gpu)[1] for gpu in peers}
    card, arch = runtime.card_of(device), runtime.architecture(device.index)
    needed = measured_variants(effort, card, kinds)
    with compiling(needed, arch) as compiled, allocate_tiers(sizes, device) as tiers:
        buffers = {
            tier: memories.allocate((memories.capacity,), torch.uint8)
            for tier, memories in tiers.items()
        }
        fill_bytes(buffers)
        probe = GpuProbe(Bench(card, buffers.pop(LOCAL), effort))
        probe.launches()
        compute = {dtype: probe.compute_rate(dtype) for dtype in DTYPES}
        compiled()  # wait: compilation overlapped with measurements of the GPU alone
        remote = [
            probe.remote_tier(tier, buffer, capacities[tier]) for tier, buffer in buffers.items()
        ]
        together = probe.peers_together(buffers)
        kernels = KernelCosts(probe.bench, probe.hbm_rate, compute["float16"], probe.log)
        costs = kernels.measure(kinds)
        staged = probe.log.measure(
            "cost of staging an op",
            "s",
            lambda: gemm_costs.staged_seconds(probe.bench, buffers["host"]),
        )
        buffers.clear()
    remote, groups = congestion.grouped(remote, together)
    measurements = tuple(probe.log.measurements)
    arithmetic = "cuBLAS for float32 only, as it is not held," if held_card() else "cuBLAS"
    return HardwareProfile(
        name=name,
        description=f"{runtime.gpu_name()}, host memory over PCIe"
        + (f", {len(peers)} peer GPU{'s' * (len(peers) > 1)}" if peers else ""),
        provenance=provenance(
            f"bulk copies into shared memory, copy engine, {arithmetic} of torch "
            f"{torch.__version__}, chains of dakrun's kernels in CUDA graphs; random data",
            measurements,
        ),
        device="cuda",
        device_name=runtime.gpu_name(device),
        sms=card.sms,
        clusters=card.clusters,
        hbm_capacity_bytes=total,
        hbm_bytes_per_s=probe.hbm_rate,
        context_bytes=total - free,
        **costs,
        staged_seconds=staged,
        remote=tuple(remote),
        compute=compute,
        link_groups=groups,
        facts=gpu_facts(device.index, host_memory),
        sweeps={**probe.sweeps, **kernels.sweeps},
    ), measurements


class GpuProbe:
    """Measures one GPU; figures go to `log`, sweeps to `sweeps`."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.log = bench, Log()
        effort, every = bench.effort, bench.sms
        counts = (every,) if effort is QUICK else (every, every * 9 // 10, 64)
        hbm = bench.reads(
            ("ctas", *RING_COLUMNS),
            bench.rings(counts, effort.hbm_rings),
            lambda ctas, *ring: reader(bench.hbm, ctas, ring),
        )
        self.sweeps: dict[str, Sweep] = {"hbm": hbm}
        if effort.l2_bytes:  # working sets below and above the size of L2
            self.sweeps["l2"] = bench.reads(
                ("set_bytes", "bytes_per_s"),
                [(size,) for size in effort.l2_bytes],
                lambda size: reader(bench.hbm, every, (8 * KIB, 8), nbytes=size),
            )
        _, self.ring = fastest([row for row in hbm.rows if row[0] == every])
        self.hbm_rate = self.log.measure(
            "HBM read", "B/s", lambda: bench.alone(reader(bench.hbm, bench.sms, self.ring))
        )

    def remote_tier(self, tier: str, buffer: torch.Tensor, capacity: int) -> RemoteTier:
        """Measure a remote tier of `capacity` bytes and choose its congestion window."""
        bench, log = self.bench, self.log
        direct = self.sweeps[f"{tier} direct"] = bench.reads(
            ("sms", *RING_COLUMNS),
            bench.rings(sorted({*bench.effort.sms, bench.sms}), bench.effort.remote_rings),
            lambda sms, *ring: reader(buffer, sms, ring),
        )
        best = reader(buffer, *fastest(direct.rows))
        link_rate = log.measure(f"{tier} read, direct", "B/s", lambda: bench.alone(best))
        grid = self.sweeps[f"{tier} congestion"] = sweeps.congestion_sweep(bench, buffer, self.ring)
        points = [
            congestion.TierReading(int(n), int(size), far, near)
            for n, size, far, near, _ in grid.rows
        ]
        chosen = congestion.choose_window(points, link_rate, self.hbm_rate)
        chosen = congestion.widened(points, chosen)
        ring = ring_for(chosen.in_flight // chosen.sms, bench.card)
        assert ring is not None
        readers = (
            reader(buffer, chosen.sms, ring),
            reader(bench.hbm, bench.sms - chosen.sms, self.ring),
        )
        window = f"window of {format_bytes(chosen.in_flight)} on {chosen.sms} SMs"
        rate = log.measure(f"{tier} read, {window}", "B/s", lambda: bench.readings(*readers)[0])
        log.measure(f"HBM read beside {tier}, {window}", "B/s", lambda: bench.readings(*readers)[1])
        ctas = 64 if bench.sms >= 64 else bench.sms // 8 * 8
        shared = bench.reads(  # several SMs read the same chunks
            ("readers", "delivered_bytes_per_s"),
            [(1,), (2,), (4,), (8,)],
            lambda sharers: reader(buffer, ctas, (8 * KIB, 8), sharers=sharers),
        )
        found = {"amplification": (shared, "8 readers of each chunk")}
        if bench.card.clusters:
            cast = sweeps.multicast_sweep(bench, buffer, link_rate)
            found["multicast"] = (cast, "multicast to 8")
        for kind, (sweep, name) in found.items():
            self.sweeps[f"{tier} {kind}"] = sweep
            *_, (delivered, scatter) = sweep.points("delivered_bytes_per_s", "spread")
            log.keep(f"{tier}, {name}", "B/s", delivered, scatter, bench.effort.runs)
        return RemoteTier(
            name=tier,
            capacity_bytes=capacity,
            direct_bytes_per_s=min(rate, link_rate),
            staged_bytes_per_s=self._staged_rate(tier, buffer),
            window_bytes=chosen.in_flight,
            sms=chosen.sms,
        )

    def _staged_rate(self, tier: str, buffer: torch.Tensor) -> float:
        """Bytes/s of staging: copies into HBM while HBM is read. Logs copies both ways as well."""
        bench, log = self.bench, self.log
        local = bench.hbm[: buffer.numel() // 2]
        remote, copies = buffer[: local.numel()], partial(sweeps.copy_rates, bench)
        alone = log.measure(f"{tier} to HBM, copy engine", "B/s", partial(copies, local, remote))
        log.measure(f"HBM to {tier}, copy engine", "B/s", partial(copies, remote, local))
        copied, read = sweeps.staging_rates(bench, local, remote, alone, self.ring)
        log.add(f"HBM read beside copies from {tier}", "B/s", read)
        return log.add(f"{tier} to HBM, copy engine while HBM is read", "B/s", copied)

    def peers_together(self, buffers: dict[str, torch.Tensor]) -> float | None:
        """Bytes/s of all peers at once; None for fewer than two."""
        peers = [buffer for tier, buffer in buffers.items() if tier.startswith("peer")]
        if len(peers) < 2:
            return None
        ctas = self.bench.sms // len(peers)
        (ring,) = fitting([(16 * KIB, 8)], self.bench.card)
        readers = [reader(peer, min(ctas, 32), ring) for peer in peers]

        return self.log.measure(
            f"{len(peers)} peers together", "B/s",
            lambda: list(map(sum, zip(*self.bench.readings(*readers), strict=True))),
        )  # fmt: skip

    def launches(self) -> None:
        """Measure ops that only read, and empty launches."""
        self.sweeps["chain"] = sweeps.chain_sweep(self.bench)
        nowhere = [self.bench.hbm.data_ptr()] * 256
        for pdl, name in ((False, "launch in a graph"), (True, "launch in a graph, PDL")):
            self.log.add(name, "s", sweeps.chain_seconds(self.bench, nowhere, 0, pdl))

    def compute_rate(self, dtype: Dtype) -> ComputeRate:
        """FLOP/s by batch size, where products are compute-bound; the peak is the maximum.

        A GPU that is held to limits without wgmma is measured by dakrun's own products, as cuBLAS
        is not held.
        """
        points, rows = [], []
        for n in self.bench.effort.batch_sizes:
            if dtype == "float32" or held_card() is None or self.bench.card.has_wgmma:
                rates = sweeps.matmul_rates(self.bench, getattr(torch, dtype), n)
            else:
                rates = gemm_costs.product_rates(self.bench, n)
            points.append((n, self.log.add(f"matmul {dtype} N={n}", "FLOP/s", rates)))
            rows.append((*points[-1], spread(rates)))
        self.sweeps[f"matmul {dtype}"] = sweeps.rounded(("n", "flops_per_s", "spread"), rows)
        peak = max(rate for _, rate in points)
        return ComputeRate(peak=peak, measured=congestion.arithmetic_rates(points))


def fastest(rows: Sequence[Sequence[float]]) -> tuple[int, Ring]:
    """CTAs and ring of the row with the highest rate; rows are (ctas, chunk, stages, rate, ...)."""
    ctas, chunk, stages, *_ = max(rows, key=lambda row: row[3])
    return int(ctas), (int(chunk), int(stages))


def _peers(device: int, nbytes: int) -> list[int]:
    """The GPUs whose memory `device` can read and that have `nbytes` free."""
    return [
        gpu
        for gpu in range(torch.cuda.device_count())
        if gpu != device
        and torch.cuda.can_device_access_peer(device, gpu)
        and torch.cuda.mem_get_info(gpu)[0] >= nbytes
    ]
