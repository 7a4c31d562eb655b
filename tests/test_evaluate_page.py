"""The page of an evaluation: its parts, its pictures, and the sentences made from results."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from dakrun.hardware import load_profile
from dakrun.lab.evaluate.charts import Chart, Entry, Quantity, brief
from dakrun.lab.evaluate.figures import FIGURES, Figure
from dakrun.lab.evaluate.figures.base import Curve, faster, thresholds
from dakrun.lab.evaluate.figures.capacity import paper_ratios
from dakrun.lab.evaluate.figures.ratios import bounds, remote_reads, uniform_over_greedy
from dakrun.lab.evaluate.page import page
from dakrun.lab.evaluate.points import PARTS, Result, StepPoint
from dakrun.lab.evaluate.scope import Scope
from dakrun.lab.evaluate.svg import LETTER, RIGHT, axis_of
from dakrun.lab.evaluate.svg import figure as drawn
from dakrun.lab.evaluate.tables import digits
from dakrun.lab.panel import Panel, Series
from dakrun.lab.rivals.architecture import meta_model
from dakrun.lab.rivals.host_layers import layer_bytes, offloaded
from dakrun.models.known import known_model

MODELS = ("opt-30b", "opt-6.7b")
UNITS = (
    "GB/s",
    "(GB)",
    "ms",
    "us",
    "%",
    "(x)",
    "tokens",
    "KiB",
    "MiB",
    "SMs",
    "(N)",
    "op",
    "model",
    "slots",
)
BYTES = 6e10


def scope_of(profile: str = "gh200", *, quick: bool = True) -> Scope:
    models = {name: model for name in MODELS if (model := known_model(name))}
    return Scope(
        models=models,
        profile=load_profile(profile),
        remote="host",
        quick=quick,
        predict=False,
        rivals=("prefetch",),
    )


def made_up(entry: Entry, scope: Scope, problem: str | None = None) -> Result:
    """A result that depends on nothing but the entry's place."""
    if problem:
        return Result(source="measured", problem=problem)
    return Result(
        source="measured",
        seconds=0.01 + entry.x / 1000,
        predicted_s=0.011 + entry.x / 1000,
        ratio=entry.x / 100,
        required_ratio=0.2,
        weight_bytes=BYTES,
        read_bytes=BYTES,
        link_bytes=BYTES * (2 if "without" in entry.series else 1),
        hbm_bytes_per_s=4e12,
        remote_bytes_per_s=4e11,
        tokens_per_s=100.0,
    )


def filled(name: str, scope: Scope, problem: str | None = None) -> Figure:
    """A figure with made-up results of all its points."""
    figure = FIGURES[name](scope, {})
    figure.results |= {e.point.key: made_up(e, scope, problem) for e in figure.entries}
    return figure


def everything(scope: Scope, problem: str | None = None) -> dict[str, Figure]:
    return {name: filled(name, scope, problem) for name in FIGURES}


def steps(**series: list[tuple[float, float]]) -> Figure:
    """Figure 8 with the (percent, seconds) of each series."""
    entries, results = [], {}
    for name, points in series.items():
        for x, seconds in points:
            point = StepPoint(model="opt-30b", new_tokens=9, ratio=x / 100, by=name)
            entries.append(Entry(name, x, point))
            results[point.key] = Result(source="measured", seconds=seconds, weight_bytes=BYTES)
    shown = [Quantity("y (s)", lambda result: result.seconds)]
    chart = Chart(name="opt-30b", title="t", x="x (%)", shown=shown, entries=entries)
    figure = FIGURES["fig8"](scope_of(), results)
    figure.charts = [chart]
    return figure


class Reader(HTMLParser):
    """Ids, and addresses that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for key, value in attrs:
            if key == "id" and value:
                self.ids.append(value)
            if key in ("src", "href", "srcset", "data") and not (value or "").startswith("#"):
                self.fetched.append(value or "")


@pytest.fixture(scope="module")
def text() -> str:

    scope = scope_of()
    run = {"machine": "a machine <1>", "command": "dakrun evaluate --quick -o out"}
    return page(list(everything(scope).values()), scope, run)


def test_the_page_has_every_figure_and_asks_for_nothing_from_elsewhere(text: str) -> None:
    reader = Reader()
    reader.feed(text)
    assert set(FIGURES) <= set(reader.ids)
    assert len(reader.ids) == len(set(reader.ids))
    assert reader.fetched == []
    assert "script" not in reader.tags
    assert not re.search(r"url\((?!#)|@import|https?://", text)
    assert "a machine &lt;1&gt;" in text
    assert "dakrun evaluate --only fig8 --quick -o out" in text


def test_every_picture_has_axes_with_units(text: str) -> None:
    pictures = re.findall(r"<svg role.*?</svg>", text, re.DOTALL)
    assert len(pictures) >= 2 * len(FIGURES)
    for picture in pictures:
        root = ElementTree.fromstring(picture)
        assert root.get("role") == "img"
        y, x = (root.get("aria-label") or "").split("; ")[0].split(" against ")[-2:]
        assert any(unit in y for unit in UNITS), y
        assert any(unit in x for unit in (*UNITS, "ratio")), x


def test_references_within_a_picture_exist(text: str) -> None:
    ids = set(re.findall(r' id="([^"]+)"', text))
    referred = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
    assert {one or other for one, other in referred} <= ids


def test_predicted_against_measured(text: str) -> None:
    assert re.search(r"median \d+\.\d%, worst \+\d+\.\d%, over \d+ points", text)


def test_missing_points_are_drawn_with_their_reason() -> None:

    scope = scope_of()
    found = everything(scope, "the budgets are 34.81 GiB too small")
    shown = page([found["fig8"]], scope, {})
    assert "the budgets are 34.81 GiB too small" in shown
    assert "points have no time; markers say why" in shown
    assert not any(of.title.endswith("required ratio") for of in found["fig10"].panels())
    assert all(figure.finding() for figure in found.values())


def test_a_lack_of_memory_is_counted() -> None:

    found = FIGURES["fig10"](scope_of(), {})
    large = Result(source="measured", problem="needs 99.0 GB", short_of_memory=True)
    found.results |= {entry.point.key: large for entry in found.entries}
    shown = page([found], found.scope, {})
    assert f"{len(found.entries)} of them for lack of memory" in shown
    assert any(of.title.endswith("required ratio") for of in found.panels())


def test_a_page_without_any_result() -> None:

    scope = scope_of()
    shown = page([kind(scope, {}) for kind in FIGURES.values()], scope, {})
    assert "nothing measured yet" in shown
    assert "are not there yet" in shown


@pytest.mark.parametrize("profile", ["gh200", "h200-pcie5", "cpu"])
@pytest.mark.parametrize("quick", [True, False])
def test_figures_have_points_and_panels(profile: str, quick: bool) -> None:
    scope = scope_of(profile, quick=quick)
    for name, figure in everything(scope).items():
        assert figure.charts and all(chart.entries for chart in figure.charts), name
        for chart in figure.charts:
            places = {(entry.series, entry.x) for entry in chart.entries}
            assert len(places) == len(chart.entries), name
        assert figure.panels(), name


def test_cases_of_figures_10_and_14() -> None:
    for quick in (True, False):
        names = {
            chart.name: chart.categories
            for name in ("fig10", "fig14")
            for chart in FIGURES[name](scope_of(quick=quick), {}).charts[:1]
        }
        paper = ["8 x 32", "32 x 1,024", "128 x 256", "128 x 512", "128 x 1,024"]
        many = ["8 x 32", "256 x 1,024", "512 x 512", "512 x 1,024"]
        wanted = {"opt-30b in 96 GB": paper, "opt-6.7b in 96 GB": many[: 2 if quick else 4]}
        assert names == wanted


def test_rivals_of_figure_10_keep_what_the_budget_holds() -> None:
    large, *_ = FIGURES["fig10"](scope_of(quick=False), {}).charts
    ratios = [e.point.figures()["ratio"] for e in large.entries if e.series == "prefetch"]
    assert ratios[0] == 0 < ratios[1] < ratios[3] == ratios[4] == 1
    quick, *_ = FIGURES["fig10"](scope_of(), {}).charts
    assert not any(e.series == "prefetch" for e in quick.entries)


def rivals_of(name: str, scope: Scope) -> dict[str, list[float]]:
    """The percents of each rival in a figure's first chart."""
    entries = FIGURES[name](scope, {}).charts[0].entries
    return {of: [e.x for e in entries if e.series == of] for of in scope.rivals}


def test_rivals_of_figures_1_8_and_9() -> None:
    """Whole layers near 9%, 10%, 30% and 60%, which is more than all weights in batch 512."""
    rivals = ("transformers", "prefetch", "uva", "accelerate", "vllm-uva")
    scope = replace(scope_of(quick=False), rivals=rivals)
    for name, near, *few in (("fig8", 8.14, 10.17, 30.52, 59), ("fig9", 8.22, 10.57, 30.53)):
        found = rivals_of(name, scope)
        assert found.pop("transformers") == [0]
        for rival, places in found.items():
            outside = [near, *few] if rival in ("prefetch", "uva") else few
            assert places == pytest.approx(outside)
    found = rivals_of("fig9", replace(scope, quick=True))
    assert all(found[name] == pytest.approx([10.57]) for name in rivals[1:])


@pytest.mark.parametrize("name", ["fig8", "fig9"])
def test_rivals_have_as_many_bytes_outside_as_dakrun(name: str) -> None:
    scope = scope_of()
    figure = FIGURES[name](scope, {})
    for chart in figure.charts:
        places = {of: {e.x: e.point for e in chart.entries if e.series == of}
                  for of in ("direct", "staged", "prefetch")}  # fmt: skip
        ops = scope.ops(chart.name, batch_size=figure.batch_size)
        both = sum(op.layers * op.resident_bytes for op in ops)
        model = meta_model(scope.models[chart.name])
        for x, point in places["prefetch"].items():
            layers = offloaded(model, point.ratio)
            assert layers * layer_bytes(model)[0] == pytest.approx(x / 100 * both, rel=5e-3)
            for transport in ("direct", "staged"):
                plan = scope.roomy().plan(places[transport][x])
                assert plan.ratio * both == pytest.approx(x / 100 * both, rel=5e-3)


def test_a_cpu_has_no_hbm() -> None:
    scope = scope_of("cpu")
    for name, figure in everything(scope).items():
        for panel in figure.panels():
            texts = [panel.title, panel.x, panel.y, *panel.categories]
            texts += [of.name for of in panel.series]
            assert not any("HBM" in text for text in texts), (name, panel.title)
        said = [figure.title, *figure.sentences(), *figure.here()]
        assert not any("HBM" in text for text in said), (name, said)
    assert "outside local memory (%)" in scope.outside


def test_finding_of_figure_8() -> None:
    direct = [(0.0, 0.010), (5.0, 0.008), (10.0, 0.012), (20.0, 0.030)]
    staged = [(0.0, 0.010), (5.0, 0.010), (10.0, 0.013), (20.0, 0.025)]
    found = steps(direct=direct, staged=staged, prefetch=[(10.0, 0.024)])
    finding = found.finding()
    assert "fastest with 5% outside HBM and read in place" in finding
    assert "1.25 x as fast as all in HBM" in finding
    assert "reading in place is 1.08 x as fast as copying ahead" in finding
    assert "From about 12% on, copies are faster" in finding
    assert "At 10%, dakrun is 2.00 x as fast as prefetch" in finding
    assert "1.25 x as fast as all in HBM" in found.claim()
    for key, nbytes in zip(found.results, [0, 0, 1.5e9, 0, *[0] * 4, 2e9], strict=True):
        found.results[key] = replace(found.results[key], remote_bytes=nbytes)
    assert "as fast as prefetch (1.5 GB and 2 GB outside HBM are read)." in found.finding()


@pytest.mark.parametrize(
    ("staged", "said"),
    [
        (0.0080, "fastest with 5% outside HBM and copied ahead, 8.00 ms, 1.25 x as fast as all in"),
        (0.00997, "10.00 ms with everything in HBM, and no more than 0.5% less with bytes outside"),
        (0.0110, "fastest with everything in HBM, 10.00 ms"),
    ],
)
def test_the_better_transport_counts(staged: float, said: str) -> None:
    direct = [(0.0, 0.010), (5.0, 0.012)]
    found = steps(direct=direct, staged=[(0.0, 0.010), (5.0, staged)])
    assert said in found.finding()
    gain = f"{max(1.0, 0.010 / staged):.2f} x as fast as all in HBM"
    assert gain in found.claim()


def test_required_ratios_of_figure_10() -> None:
    ratios = paper_ratios()
    assert [ratio.case for ratio in ratios] == [
        "32 x 1,024",
        "128 x 256",
        "128 x 512",
        "128 x 1,024",
    ]
    assert [round(ratio.mixed) for ratio in ratios] == [6, 10, 37, 60]
    assert [round(ratio.planned) for ratio in ratios] == [13, 19, 42, 63]
    assert all(ratio.paper < ratio.decimal < ratio.planned for ratio in ratios)
    fig10 = filled("fig10", scope_of(quick=False))
    head, *rows = fig10.table()
    assert [row[:2] for row in rows] == [[ratio.case, f"{ratio.paper:.1f}"] for ratio in ratios]
    assert all(len(row) == len(head) and row[-1] == "20.0" for row in rows)
    claim = fig10.claim()
    for text in ("6% for 32 x 1,024", "60% for 128 x 1,024", "20.0% for 128 x 512"):
        assert text in claim
    assert "6.2%, 9.9%, 36.7%, 60.3%, which are its figures" in fig10.notes()[0]


def test_multicast_is_measured_on_the_papers_matrix() -> None:
    """Bytes by the time and by tiles; the page has a row for each N."""
    for quick in (True, False):
        scope = scope_of(quick=quick)
        table1 = filled("table1", scope)
        (chart,) = table1.charts
        assert {of.point.figures()["op"] for of in chart.entries} == {"7168x7168"}
        assert [row[0] for row in table1.table()[1:]] == [
            "256",
            "512",
            "1,024",
            "2,048",
            "4,096",
        ]
        assert table1.finding() == (
            "7168x7168: with N = 4,096 a byte of the weight crosses the link 1 x with multicast "
            "and 2 x without. The tiles of the launches ask for 1 x and 8 x."
        )
        assert table1.claim().endswith("Here, at the largest N: it saves 50%.")
        product = FIGURES["fig13"](scope, {}).charts[0]
        assert [of.point for of in product.entries] == [of.point for of in chart.entries]


def test_crossing() -> None:
    one, other = Curve({0.0: 1.0, 1.0: 2.0, 2.0: 4.0}), Curve({0.0: 2.0, 1.0: 3.0, 2.0: 3.0})
    assert one.crossing(other) == pytest.approx(1.5)
    assert other.crossing(one) is None
    assert Curve().crossing(one) is None
    assert one.crossing(Curve({2.0: 3.0})) == 2.0


def test_factors() -> None:
    one, other = Curve({0.0: 1.0, 1.0: 2.0}), Curve({1.0: 5.0, 2.0: 9.0})
    assert one.largest(other) == (1.0, 2.5)
    assert one.largest(Curve()) is None
    assert one.fastest() == (0.0, 1.0)
    assert Curve().fastest() is None


def test_words_for_factors() -> None:
    assert faster(1.5, "a", "b") == "a is 1.50 x as fast as b"
    assert faster(0.5, "a", "b") == "a takes 2.00 x as long as b"
    assert faster(1.001, "a", "b") == "a and b take the same time"
    assert brief("x" * 60) == "x" * 45 + "..."
    assert brief("out of memory: 3 GiB; try less") == "out of memory"


def test_thresholds_are_where_an_op_is_at_its_fastest() -> None:
    scope = scope_of()
    few, many = (scope.products("opt-30b", n=n)[0] for n in (8, 512))
    assert thresholds(few, "float16", scope) == pytest.approx((scope.turning_point,) * 2)
    a, b = thresholds(many, "float16", scope)
    assert a == 0
    assert b > scope.turning_point


def test_series_are_measured_predicted_or_missing() -> None:
    found = steps(direct=[(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)])
    keys = list(found.results)
    found.results[keys[1]] = Result(source="predicted", seconds=2.0)
    found.results[keys[2]] = Result(source="measured", problem="too large: 3 GB")
    (panel,) = found.panels()
    assert [(of.kind, of.points[0][0], of.note) for of in panel.series] == [
        ("measured", 0.0, ""),
        ("predicted", 1.0, ""),
        ("missing", 2.0, "too large"),
    ]


def test_axes_and_their_ticks() -> None:
    assert axis_of([1, 10]).ticks() == [0, 2, 4, 6, 8, 10]
    assert axis_of([-1, 1]).ticks() == [-1, -0.5, 0, 0.5, 1]
    assert axis_of([1, 900], log=True).ticks() == [1, 10, 100, 1000]
    assert axis_of([3100, 4400], log=True).ticks() == [3000, 3500, 4000, 4500, 5000]
    assert axis_of([0, 100], root=True).ticks() == [0, 1, 2, 5, 10, 20, 40, 60, 80, 100]
    assert axis_of([0, 100], root=True)(25) == 0.5
    assert axis_of([], log=True).ticks()
    assert LETTER * len("100") / 2 <= RIGHT  # the last tick's text lies in the picture


def test_names_of_categories_are_wrapped_between_words() -> None:
    """But for one that would lie across its neighbours; long ones lie apart."""
    for names, lines in (
        (PARTS, ["linear", "layers", "attention", "norms", "activation", "RoPE", "other"]),
        (("a" * 30, *"bcdef"), ["aaaaaa"] * 5 + list("bcdef")),
    ):
        bars = Series(name="s", points=[(0, 1)])
        picture = drawn(Panel(title="t", x="x", y="y", categories=names, series=[bars]))
        texts = re.findall(r'y="([0-9.]+)" text-anchor="middle">([^<]+)<', picture)
        assert [text for _, text in texts] == lines
        heights = {text: float(y) for y, text in texts}
        assert names != PARTS or heights["attention"] > heights["norms"]


def test_figures_of_tables_have_no_exponents() -> None:
    values = (16_097.3, 9_999.7, 2_024.04, 0.10281)
    assert [digits(x) for x in values] == ["16,097", "10,000", "2,024", "0.1028"]


def test_points_that_can_be_drawn() -> None:
    series = Series(name="s", points=[(0, 1), (1, float("nan")), (1, 2)])
    panel = Panel(title="t", x="x", y="y", series=[series], log_x=True)
    assert panel.usable(series) == [(1, 2)]


def test_ticks_cover_figure_8_and_its_first_12_percent_have_a_picture_of_their_own() -> None:
    whole, part, _, *_ = filled("fig8", scope_of(quick=False)).panels()
    assert part.title == f"{whole.title}: the first 12%"
    assert max(x for series in part.series for x, _ in series.points) == 12
    ticks = [float(text) for text in re.findall(r'middle">(\d+)</text>', drawn(whole))]
    assert ticks[0] == 0 and ticks[-1] == 100 and len(ticks) >= 8


def test_marks_have_letters_that_the_legend_explains() -> None:
    series = [Series(name="s", points=[(1, 1), (2, 2)])]
    panel = Panel(title="t", x="x", y="y", series=series, marks=[(1, "one"), (1.1, "two")])
    shown = drawn(panel)
    assert '<b class="key">A</b>one' in shown and '<b class="key">B</b>two' in shown


def test_bounds_of_figure_8() -> None:
    scope = scope_of()
    local, remote, _ = scope.rates
    ideal, prefetch = bounds("opt-30b", 8, scope)
    best = min(ideal, key=lambda of: of[2])
    assert best[0] == pytest.approx(100 * scope.turning_point, abs=1)
    assert ideal[0][2] / best[2] == pytest.approx((local + remote) / local, rel=0.01)
    assert all(of[2] <= other[2] * (1 + 1e-9) for of, other in zip(ideal, prefetch, strict=True))
    ops = scope.ops("opt-30b", batch_size=8)
    read = sum(op.layers * op.read_bytes for op in ops)
    assert remote_reads(ops, 0) == 0
    assert remote_reads(ops, 1) == pytest.approx(read)
    assert remote_reads(ops, 0.5) < read / 2


def test_greedy_is_never_slower_than_uniform_by_rates() -> None:
    scope = scope_of()
    gains = [uniform_over_greedy("opt-6.7b", step / 20, scope) for step in range(21)]
    assert gains[0] == pytest.approx(1)
    assert min(gains) > 1 - 1e-9
    assert max(gains) > 1.1
