"""Products, decode attention and reads of tiers on a GPU, over buffers that points share.

The launches are those of `dakrun bench --kernel` and of `dakrun profile`.
"""

import statistics
from dataclasses import replace

import torch

from dakrun.hardware import LOCAL
from dakrun.kernels.runtime import card_of
from dakrun.lab.bench.kernel import accesses, windowed
from dakrun.lab.cases import Weight
from dakrun.lab.ceilings import FULL, HBM_RING, Effort, ring_for
from dakrun.lab.chain import launch_seconds
from dakrun.lab.chains import CHAINS, Chains, GemmChains
from dakrun.lab.evaluate import batches
from dakrun.lab.evaluate.cases import STORED, ablated, case_of, foreseen, remote_names
from dakrun.lab.evaluate.points import BatchPoint, OpPoint, ProductPoint, ReadPoint, Result
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.memory import Room, fill_random, read_rates, reader

# Chains of 512 MiB exceed L2 many times; half the replays.
QUICK = replace(FULL, chain_bytes=2**29, min_launches=4, replays=4, seconds=0.01, readings=3)
READ_BYTES = {LOCAL: 2**31, "remote": 2**29}
LINK_BOUND = 1.5  # times the time foreseen with all in HBM: the link limits such a launch
ONCE_ROWS = 64  # rows of X that one tile of either kernel holds: each byte crosses the link once


class Kernels:
    """Measures single ops on `device`. `close` frees the buffers; the next point makes new ones."""

    def __init__(self, scope: Scope, device: torch.device) -> None:
        self.scope, self.card, self._room = scope, card_of(device), Room(device)
        self.effort: Effort = QUICK if scope.quick else FULL
        self._compiled: set[tuple[int, str]] = set()
        self._compiled_batches = False
        self.close = self._room.close

    def op(self, point: OpPoint) -> Result:
        """Measure a product or decode attention, without the techniques that the point names."""
        scope = self.scope
        case, (name,) = case_of(scope, point, self.effort), remote_names(scope, point.remote)
        sizes = [case.launches * nbytes for nbytes in case.held_bytes]
        buffers = self._room.at_least(dict(zip((LOCAL, name), sizes, strict=True)))
        card, operand = ablated(self.card, point.without), case.operand
        dtype = getattr(torch, case.dtype)
        chains = CHAINS[type(operand)](buffers, dtype, card, self.effort.replays)
        key = (point.n if isinstance(point, ProductPoint) else 0, case.dtype)
        if isinstance(chains, GemmChains) and key not in self._compiled:
            tiers = [scope.profile.tier(name)]
            chains.compile([key[0]], mixes=not windowed(tiers, scope.profile.card))
            self._compiled.add(key)
        chains.fill(operand)
        _, access = accesses(case, scope.profile, (name,), card)
        times, _ = chains.kernel(case, access)
        (local, remote), seconds, link_bytes = case.tier_bytes, statistics.median(times), None
        if isinstance(point, ProductPoint) and point.n > ONCE_ROWS and point.ratio:
            link_bytes = self._link_bytes(chains, point, seconds)
        return Result(
            source="measured",
            seconds=seconds,
            ratio=case.ratio,
            weight_bytes=case.read_bytes if isinstance(operand, Weight) else None,
            read_bytes=local + remote,
            remote_bytes=remote,
            link_bytes=link_bytes,
        )

    def _link_bytes(self, chains: Chains, point: ProductPoint, seconds: float) -> float | None:
        """Bytes over the link in a launch of `seconds`: its time times the link's rate.

        The rate is that of the same product of ONCE_ROWS rows, replayed in turns with it, so that
        the state of the link and other work on the machine, which only slow a launch down, are in
        both times. The fastest replays have least of it. None if the link does not limit a launch.
        """
        assert isinstance(chains, GemmChains)
        scope, points = self.scope, [replace(point, ratio=0.0), point, replace(point, n=ONCE_ROWS)]
        in_hbm, *cases = (case_of(scope, of, self.effort) for of in points)
        if seconds <= LINK_BOUND * foreseen(scope, points[0], in_hbm).seconds:
            return None
        names = remote_names(scope, point.remote)
        access = [accesses(case, scope.profile, names, chains.card)[1] for case in cases]
        launch_s, once_s = map(min, chains.in_turns(list(zip(cases, access, strict=True))))
        return cases[0].tier_bytes[1] * launch_s / once_s

    def batch(self, point: BatchPoint) -> Result:
        """Measure a batched product."""
        if not self._compiled_batches:
            batches.compile_all(self.card, self._room.device)
            self._compiled_batches = True
        launch = batches.launch_of(point, self.card, self._room.device)
        times = launch_seconds(launch, batches.LAUNCHES, replays=self.effort.replays)
        nbytes = STORED[point.bits].nbytes(point.heads * point.rows, point.cols)
        return Result(
            source="measured", seconds=statistics.median(times), weight_bytes=nbytes,
            read_bytes=nbytes,
        )  # fmt: skip

    def read(self, point: ReadPoint) -> Result:
        """Measure the bandwidths of HBM and of the remote tier while both are read."""
        (name,) = remote_names(self.scope, point.remote)
        ring = ring_for(point.in_flight // point.sms, self.card) if point.sms else None
        if point.sms and ring is None:
            each = f"{point.in_flight / point.sms / 1024:,.4g} KiB"
            return Result(source="measured", problem=f"an SM cannot keep {each} in flight")
        if point.sms + point.hbm_sms > self.card.sms:
            return Result(source="measured", problem=f"needs {point.sms + point.hbm_sms} SMs")
        buffers = self._room.at_least({LOCAL: READ_BYTES[LOCAL], name: READ_BYTES["remote"]})
        fill_random(buffers, torch.float16)
        readers = []
        if ring is not None:
            readers.append(reader(buffers[name], point.sms, ring))
        if point.hbm_sms:
            readers.append(reader(buffers[LOCAL], point.hbm_sms, HBM_RING))
        runs = read_rates(readers, self.effort.seconds, self.effort.readings)
        rates = list(map(statistics.median, runs))
        return Result(
            source="measured",
            remote_bytes_per_s=rates[0] if ring is not None else None,
            hbm_bytes_per_s=rates[-1] if point.hbm_sms else None,
        )
