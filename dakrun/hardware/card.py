"""A GPU as launches see it: what a kernel may take of it, and which techniques launches use.

The planner has it from a profile, kernels from the driver (kernels/runtime/card.py), and tests make
it by hand: an H100 can be held to another card's limits.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from dakrun.errors import UsageError
from dakrun.geometry import ATTENTION_RING_BYTES, KERNEL_TARGETS

MIN_SHARED_BYTES = 99 * 1024  # of a CTA, which the kernels need
DRIVER_BYTES = 1024  # of an SM's shared memory, which the driver keeps for each CTA
BARRIER_BYTES = 1024  # shared memory of a CTA for barriers, besides its ring
ANY_ROWS = 1 << 30  # more rows than any product has
# Rows up to which a norm's or router's CTA takes half of an SM. Qwen3-30B-A3B on an H200: steps of
# 1 and 8 rows take 8% and 12% less, steps of 64 rows 1% to 3% more: there the launch ahead has SMs
# alone, so that two CTAs of the norm share an SM as soon as it is free.
SPACED_ROWS = 16
HOPPER_SMS = 132
HOPPER_CLUSTERS = (66, 39, 30, 22, 17, 15, 15)  # of 2, 3, ... CTAs on an H200; some have 1 less
# Shared memory of an SM by compute capability (CUDA C++ Programming Guide, technical
# specifications). The guide's other cards run no kernels of dakrun.
SM_SHARED_BYTES = {"9.0": 228 << 10, "10.0": 228 << 10, "12.0": 100 << 10, "12.1": 100 << 10}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU's limits, and the techniques of launches, which an ablation leaves out one by one.

    `capability` is the compute capability, such as "9.0". `clusters` has the number of clusters
    that run at a time, for clusters of 2, 3, ... CTAs, one CTA per SM. Large ones leave some SMs of
    a GPC free. Empty: CTAs form no clusters. An SM has `ctas_per_sm` CTAs of SplitK_GEMM, attention
    and norms at a time, each of a different launch. The tiled GEMM multiplies many rows of X, up to
    `tiled_rows`; torch multiplies more, from unpacked weights, which is faster on that card.

    - even_waves: groups, tiles and SMs are chosen for even waves. Without it they are the largest,
      and the last wave has what is left.
    - multicast: CTAs that need the same remote row block fetch it once. Without it each reads it.
    - windows: congestion windows limit the reads of remote tiers.
    """

    capability: str
    sms: int
    shared_bytes_per_sm: int
    clusters: tuple[int, ...]
    ctas_per_sm: int = 2
    tiled_rows: int = ANY_ROWS
    even_waves: bool = True
    multicast: bool = True
    windows: bool = True

    @classmethod
    def of(
        cls,
        capability: str,
        *,
        sms: int,
        shared_bytes_per_sm: int | None = None,
        clusters: tuple[int, ...] = (),
    ) -> "Card":
        """The card of a compute capability with `sms` SMs; what is not given follows from these.

        Clusters are estimated from an H200's. A card with less than half of an H200's shared memory
        has no clusters, and one CTA per SM. There the tiled GEMM multiplies any number of rows: it
        is an estimate that torch gains nothing with the same mma.sync and W unpacked through HBM.
        On 10.0 torch has faster instructions (tcgen05).
        """
        shared = shared_bytes_per_sm or SM_SHARED_BYTES.get(capability, SM_SHARED_BYTES["9.0"])
        small = shared < SM_SHARED_BYTES["9.0"] // 2
        estimate = () if small else tuple(max(1, n * sms // HOPPER_SMS) for n in HOPPER_CLUSTERS)
        return cls(
            capability=capability,
            sms=sms,
            shared_bytes_per_sm=shared,
            clusters=clusters or estimate,
            ctas_per_sm=1 if small else 2,
            tiled_rows=0 if capability == "10.0" else ANY_ROWS,
        )

    def limited_to(self, capability: str) -> "Card":
        """This card held to the limits of another compute capability, with its own SMs.

        The tiled GEMM multiplies any number of rows, as torch's libraries are not held.
        Raises UsageError for an unknown compute capability, and for one that has more.
        """
        if capability == self.capability:
            return self
        if capability not in SM_SHARED_BYTES:
            raise UsageError(
                f"no limits are known of compute capability {capability!r}",
                hint=f"it is one of {', '.join(SM_SHARED_BYTES)}",
            )
        other = Card.of(capability, sms=self.sms)
        more = (
            other.shared_bytes_per_sm > self.shared_bytes_per_sm
            or (other.clusters and not self.clusters)
            or (other.has_wgmma and not self.has_wgmma)
        )
        if more:
            raise UsageError(
                f"a card of compute capability {self.capability} cannot be held to the limits of "
                f"{capability}, which has more",
                hint="give a compute capability that has less, like 12.0 on a Hopper",
            )
        clusters = self.clusters if other.clusters else ()
        return replace(other, clusters=clusters, tiled_rows=ANY_ROWS)

    @cached_property
    def runs_kernels(self) -> bool:
        """Whether dakrun's kernels run on it: they are built for it, and it has the memory."""
        built = f"sm_{self.capability.replace('.', '')}a" in KERNEL_TARGETS
        return built and self.shared_bytes >= MIN_SHARED_BYTES

    @property
    def has_wgmma(self) -> bool:
        """Whether warpgroups multiply from shared memory (wgmma); else warps do (mma.sync)."""
        return self.capability == "9.0"

    @property
    def tiled(self) -> bool:
        """Whether the tiled GEMM multiplies any rows of X."""
        return self.tiled_rows > 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA that has an SM alone."""
        return self.shared_bytes_per_sm - DRIVER_BYTES

    @property
    def lone_ring_bytes(self) -> int:
        """Shared memory for the ring of a CTA that has an SM alone."""
        return self.shared_bytes - BARRIER_BYTES

    @property
    def ring_bytes(self) -> int:
        """Shared memory for the ring of a CTA that shares an SM with those of other launches."""
        return self.shared_bytes_per_sm // self.ctas_per_sm - DRIVER_BYTES - BARRIER_BYTES

    @property
    def attention_ring_bytes(self) -> int:
        """Shared memory for the ring of a CTA of decode attention with long heads."""
        return min(ATTENTION_RING_BYTES, self.ring_bytes)

    def with_idle(self, ctas: int) -> int:
        """CTAs of a launch of `ctas`, idle ones included, which keep SMs from the next launch.

        A free SM would get two CTAs of that launch, where two share an SM.
        """
        return max(ctas, self.sms) if self.ctas_per_sm > 1 else ctas

    def ringless_bytes(self, rows: int, ctas: int) -> int:
        """Shared memory of a CTA without a ring, of a launch of `ctas`, idle ones included.

        Where each SM is to have one of them beside a CTA with a ring, it is as much as a ring's:
        SMs with two of them would get CTAs with rings later than others, which got two.
        """
        spaced = rows <= SPACED_ROWS and ctas == self.sms and self.ctas_per_sm > 1
        return self.ring_bytes if spaced else 0

    def places_evenly(self, rows: int) -> bool:
        """Whether each SM gets one CTA of a launch that starts early behind a router of `rows`.

        Else SMs that have no CTA of norm and router get two.
        """
        return rows <= SPACED_ROWS or self.ctas_per_sm == 1

    def shared_by(self, ctas: int) -> "Card":
        """This card as `ctas` CTAs of a launch see it that share each SM: with smaller SMs."""
        if ctas == 1:
            return self
        return replace(
            self,
            sms=ctas * self.sms,
            shared_bytes_per_sm=self.shared_bytes_per_sm // ctas,
            clusters=tuple(ctas * count for count in self.clusters),
        )

    @property
    def max_cluster(self) -> int:
        """CTAs of the largest cluster."""
        return 1 + len(self.clusters)

    def max_clusters(self, ctas: int) -> int:
        """Clusters of `ctas` CTAs that run at a time."""
        if ctas == 1:
            return self.sms
        return min(self.sms // ctas, self.clusters[ctas - 2]) if ctas <= self.max_cluster else 0
