"""Figure 7: HBM and the link read at the same time, by bytes in flight and by SMs."""

from dakrun.lab.evaluate.figures.base import Figure, gigabytes, panel_of, sentence
from dakrun.lab.evaluate.panel import Panel
from dakrun.lab.evaluate.points import Entry, FigureData, ReadPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.units import format_bytes, format_rate

IN_FLIGHT, SMS = "bytes in flight", "SMs on the link"
OTHERS, FIXED = "all other SMs on HBM", "100 SMs on HBM"
SM_BYTES = 8 * 16 * 1024  # that an SM keeps in flight at most, in the largest ring
FIXED_SMS = 100  # of the paper, whose GPU has 132
KEPT = 0.98  # of HBM's best rate, which is taken to be unharmed


class LinkReads(Figure):
    """Figure 7."""

    name = "fig7"
    title = "Figure 7: HBM and the link against bytes in flight, and against SMs on the link"
    paper = (
        "A link needs few bytes in flight for its full rate. With more of them requests wait in "
        "the memory system and HBM reads lose bandwidth; so the bytes in flight over the link "
        "are limited to a window, and few SMs read it."
    )

    def entries(self, scope: Scope) -> list[Entry]:
        tier = scope.profile.tier(scope.remote)
        shifts = (14, 18, 20, 22) if scope.quick else range(14, 24)
        powers = (0, 3, 5) if scope.quick else range(7)
        counts = [1 << power for power in powers if 1 << power < scope.profile.sms]
        hbm_sms = [OTHERS] if scope.quick or scope.profile.sms <= FIXED_SMS else [OTHERS, FIXED]
        sms = min(max(tier.sms, 1), scope.profile.sms)
        most = SM_BYTES * sms
        reads = [
            (IN_FLIGHT, (1 << shift) / 1024, sms, 1 << shift)
            for shift in shifts
            if 1 << shift <= most
        ]
        reads += [
            (SMS, float(n), n, min(max(tier.window_bytes, 1 << 18), SM_BYTES * n)) for n in counts
        ]
        return [
            Entry(
                panel=panel,
                series=series,
                x=x,
                rank=1 if series == OTHERS else 2,
                point=ReadPoint(
                    remote=scope.remote,
                    sms=of_link,
                    in_flight=in_flight,
                    hbm_sms=self.hbm_sms(series, of_link, scope),
                ),
            )
            for series in hbm_sms
            for panel, x, of_link, in_flight in reads
            if series == OTHERS or of_link <= scope.profile.sms - FIXED_SMS
        ]

    def hbm_sms(self, series: str, of_link: int, scope: Scope) -> int:
        """SMs on HBM beside `of_link` on the link."""
        return FIXED_SMS if series == FIXED else max(scope.profile.sms - of_link, 1)

    def panels(self, data: FigureData, scope: Scope) -> list[Panel]:
        tier = scope.profile.tier(scope.remote)
        titles = {IN_FLIGHT: "bytes in flight over the link (KiB)", SMS: "SMs on the link"}
        window = (tier.window_bytes / 1024, "the profile's window")
        marks = {IN_FLIGHT: [window], SMS: [(float(tier.sms), "the profile's SMs")]}
        return [
            panel_of(
                data,
                name,
                value,
                title=f"{what}, by {name}",
                x=titles[name],
                y=f"{what} (GB/s)",
                log_x=True,
                marks=marks[name],
            )
            for name in data.panels()
            for what, value in (
                ("HBM", lambda r: gigabytes(r.hbm_bytes_per_s)),
                (f"the link to {scope.remote}", lambda r: gigabytes(r.remote_bytes_per_s)),
            )
        ]

    def rates(self, data: FigureData) -> list[tuple[float, float, float]]:
        """(KiB in flight, bytes/s of the link, bytes/s of HBM), in order."""
        line = data.lines(IN_FLIGHT).get(OTHERS, [])
        return [
            (entry.x, result.remote_bytes_per_s, result.hbm_bytes_per_s)
            for entry, result in line
            if result.remote_bytes_per_s and result.hbm_bytes_per_s
        ]

    def finding(self, data: FigureData, scope: Scope) -> str:
        rates = self.rates(data)
        if not rates:
            return sentence([], data)
        link, hbm = max(rate for _, rate, _ in rates), max(rate for *_, rate in rates)
        enough = next(x for x, rate, _ in rates if rate >= KEPT * link)
        lost = next((x for x, _, rate in rates if x > enough and rate < KEPT * hbm), None)
        parts = [f"The link reaches {format_rate(link)} with {format_bytes(1024 * enough)} in "
                 "flight."]  # fmt: skip
        if lost is None:
            parts.append(f"HBM keeps {format_rate(hbm)} at every larger number of bytes in flight.")
        else:
            last = rates[-1]
            parts.append(
                f"HBM slows from {format_bytes(1024 * lost)} in flight on: with "
                f"{format_bytes(1024 * last[0])} it reads {format_rate(last[2])}, and "
                f"{format_rate(hbm)} at best."
            )
        return sentence(parts, data)

    def claim(self, data: FigureData, scope: Scope) -> str:
        rates = self.rates(data)
        lost = 1 - rates[-1][2] / max(rate for *_, rate in rates) if rates else None
        here = "not measured yet" if lost is None else f"{max(lost, 0):.0%}"
        return (
            "Paper: past the window HBM loses bandwidth while the link gains none, and more SMs "
            "than saturate the link only cost HBM. HBM's loss here, with the most bytes in flight: "
            f"{here}."
        )

    def notes(self, scope: Scope) -> list[str]:
        predicted = ["The planner does not model congestion: predicted rates of HBM never fall."]
        return [
            *(predicted if scope.predict else []),
            "The paper fixes 100 SMs on HBM; here all SMs that do not read the link do. The full "
            "run shows both.",
            "The link's rate is the lower of the link's own and of the memory behind it. Another "
            "GPU or the CPU that reads the same host memory at the same time takes its share.",
        ]
