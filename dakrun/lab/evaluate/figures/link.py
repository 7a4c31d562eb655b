"""Figure 7: HBM and the link read at the same time, by bytes in flight and by SMs."""

from collections.abc import Iterator

from dakrun.lab.evaluate.charts import Chart, Entry, Quantity
from dakrun.lab.evaluate.figures.base import Figure, scaled
from dakrun.lab.evaluate.points import ReadPoint
from dakrun.units import format_bytes, format_rate

OTHERS, FIXED = "all other SMs", "100 SMs"  # which read the local tier
SM_BYTES = 8 * 16 * 1024  # that an SM keeps in flight at most, in the largest ring
FIXED_SMS = 100  # of the paper, whose GPU has 132
KEPT = 0.98  # of HBM's best rate, which is taken to be unharmed


class LinkReads(Figure):
    """Figure 7."""

    name = "fig7"
    title = "Figure 7: rates of both tiers by bytes in flight, and by SMs on the link"
    paper = (
        "A link needs few bytes in flight for its full rate. With more of them requests wait in "
        "the memory system and HBM reads lose bandwidth; so the bytes in flight over the link "
        "are limited to a window, and few SMs read it."
    )
    claimed = (
        "Paper: past the window HBM loses bandwidth while the link gains none, and more SMs than "
        "saturate the link only cost HBM. Loss here, with the most bytes in flight:"
    )

    def make_charts(self) -> list[Chart]:
        tier, most = self.scope.profile.tier(self.scope.remote), self.scope.profile.sms
        sms, window = min(max(tier.sms, 1), most), max(tier.window_bytes, 1 << 18)
        sizes = [1 << shift for shift in ((14, 18, 20, 22) if self.scope.quick else range(14, 24))]
        counts = [1 << power for power in ((0, 3, 5) if self.scope.quick else range(7))]
        # (x, SMs on the link, bytes in flight)
        by_size = [(size / 1024, sms, size) for size in sizes if size <= SM_BYTES * sms]
        by_sms = [(float(n), n, min(window, SM_BYTES * n)) for n in counts if n < most]
        kinds = (
            ("bytes in flight", "bytes in flight over the link (KiB)", by_size,
             (tier.window_bytes / 1024, "the profile's window")),
            ("SMs on the link", "SMs on the link", by_sms, (tier.sms, "the profile's SMs")),
        )  # fmt: skip

        def entry(series: str, x: float, sms: int, size: int, hbm_sms: int) -> Entry:
            read = ReadPoint(remote=self.scope.remote, sms=sms, in_flight=size, hbm_sms=hbm_sms)
            return Entry(f"{series} on {self.scope.near}", x, read, 1 if series == OTHERS else 2)

        return [
            Chart(
                name=name, title="", x=axis, log_x=True, marks=[mark],
                shown=[
                    Quantity(f"{what} (GB/s)", scaled(key, 1e-9), title=f"{what}, by {name}")
                    for what, key in ((self.scope.near, "hbm_bytes_per_s"),
                                      (f"the link to {self.scope.remote}", "remote_bytes_per_s"))
                ],
                entries=[entry(OTHERS, x, n, size, max(most - n, 1)) for x, n, size in reads] + [
                    entry(FIXED, *of, FIXED_SMS)
                    for of in reads
                    if not self.scope.quick and most > FIXED_SMS and of[1] <= most - FIXED_SMS
                ],
            )
            for name, axis, reads, mark in kinds
        ]  # fmt: skip

    def rates(self) -> list[tuple[float, float, float]]:
        """(KiB in flight, bytes/s of the link, bytes/s of the local tier), in order."""
        return [
            (entry.x, result.remote_bytes_per_s, result.hbm_bytes_per_s)
            for entry, result in self.lines(self.charts[0]).get(
                f"{OTHERS} on {self.scope.near}", []
            )
            if result.remote_bytes_per_s and result.hbm_bytes_per_s
        ]

    def sentences(self) -> Iterator[str]:
        if not (rates := self.rates()):
            return
        near = self.scope.near
        _, link, hbm = map(max, zip(*rates, strict=True))
        enough = next(x for x, rate, _ in rates if rate >= KEPT * link)
        lost = next((x for x, _, rate in rates if x > enough and rate < KEPT * hbm), None)
        yield f"The link reaches {format_rate(link)} with {format_bytes(1024 * enough)} in flight."
        if lost is None:
            yield f"With more bytes in flight {near} keeps {format_rate(hbm)}."
            return
        last, _, rate = rates[-1]
        yield (
            f"With {format_bytes(1024 * lost)} or more in flight {near} slows: with "
            f"{format_bytes(1024 * last)} it reads {format_rate(rate)}, at best "
            f"{format_rate(hbm)}."
        )

    def here(self) -> list[str]:
        rates = [rate for *_, rate in self.rates()]
        return [f"{max(1 - rates[-1] / max(rates), 0):.0%}"] if rates else []

    def notes(self) -> list[str]:
        predicted = "The planner does not model congestion: predicted rates of {} never fall."
        return [
            *([predicted.format(self.scope.near)] if self.scope.predict else []),
            "The paper fixes 100 SMs on HBM; here all SMs that do not read the link do. The full "
            "run shows both.",
            "The link's rate is the lower of the link's own and of the memory behind it. Another "
            "GPU or the CPU that reads the same host memory at the same time takes its share.",
        ]
