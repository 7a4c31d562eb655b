"""Hardware profiles: TOML there and back, compute rates between points, malformed files."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planned import GH200 as MACHINE

from dakrun.errors import UsageError
from dakrun.hardware import (
    ComputeRate,
    HardwareProfile,
    KernelModel,
    OpCosts,
    Provenance,
    RemoteTier,
    Sweep,
    find_profile,
    gpu_names,
    kept_profiles_dir,
    load_profile,
    parse_profile,
    profile_text,
    shipped_profiles,
)
from dakrun.hardware import files as profile_files

GH200 = profile_text(MACHINE)

positive_int = st.integers(1, 2**60)
positive = st.one_of(st.floats(1, 1e18), positive_int.map(float))
text = st.text(min_size=1)


@st.composite
def compute_rates(draw: st.DrawFn) -> ComputeRate:
    points = draw(st.dictionaries(st.integers(1, 10**6), positive, max_size=4))
    return ComputeRate(peak=draw(positive), measured=tuple(sorted(points.items())))


@st.composite
def op_costs(draw: st.DrawFn) -> OpCosts:
    rows = sorted(draw(st.sets(st.integers(1, 10**4), min_size=1, max_size=4)))
    values = st.tuples(st.floats(0, 1), st.floats(1e-6, 1))
    seconds, efficiency = zip(*(draw(values) for _ in rows), strict=True)
    return OpCosts(rows=tuple(rows), seconds=seconds, efficiency=efficiency)


@st.composite
def sweeps(draw: st.DrawFn) -> Sweep:
    columns = draw(st.lists(text, max_size=3))
    value = st.one_of(
        st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**52).map(float)
    )
    rows = draw(st.lists(st.tuples(*[value] * len(columns)), max_size=6))
    return Sweep(columns=tuple(columns), rows=tuple(rows))


kernel_models = st.builds(
    KernelModel,
    busiest_cta_weight=st.floats(0, 1),
    remote_attention_cost=st.floats(0, 10),
    launch_gap_seconds=st.floats(0, 1),
    link_latency_seconds=st.floats(1e-9, 1),
    pass_launch_seconds=st.floats(0, 1),
)


@st.composite
def profiles(draw: st.DrawFn) -> HardwareProfile:
    groups = draw(st.dictionaries(text, positive, max_size=2))
    group = st.sampled_from(["", *groups])
    names = st.lists(text.filter(lambda name: name != "hbm"), unique=True, max_size=3)
    sms = draw(st.integers(4, 10**6))
    return HardwareProfile(
        name=draw(st.text()),
        description=draw(st.text()),
        provenance=Provenance(
            kind=draw(st.sampled_from(["measured", "spec-sheet", "nominal"])),
            date=draw(text),
            source=draw(text),
        ),
        device=draw(st.sampled_from(["cuda", "cpu"])),
        device_name=draw(st.text()),
        sms=sms,
        clusters=tuple(draw(st.lists(st.integers(1, sms), max_size=7))),
        hbm_capacity_bytes=draw(positive_int),
        hbm_bytes_per_s=draw(positive),
        context_bytes=draw(st.integers(0, 2**60)),
        linear=draw(op_costs()),
        attention=draw(op_costs()),
        remote=tuple(
            RemoteTier(
                name=name,
                capacity_bytes=draw(positive_int),
                direct_bytes_per_s=draw(positive),
                staged_bytes_per_s=draw(positive),
                window_bytes=draw(positive_int),
                sms=draw(st.integers(1, sms)),
                group=draw(group),
            )
            for name in draw(names)
        ),
        kernel_model=draw(kernel_models),
        compute=draw(
            st.dictionaries(st.sampled_from(["float32", "float16", "bfloat16"]), compute_rates())
        ),
        link_groups=groups,
        hbm_group=draw(group),
        facts=draw(st.dictionaries(text, st.one_of(st.text(), st.integers(-(2**60), 2**60)))),
        sweeps=draw(st.dictionaries(text, sweeps(), max_size=2)),
    )


@given(profiles())
def test_toml_there_and_back(profile: HardwareProfile) -> None:
    if not profile.compute:
        with pytest.raises(UsageError, match="'compute' is missing"):
            parse_profile(profile_text(profile), source="x")
        return
    assert parse_profile(profile_text(profile), source="x") == profile


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert parse_profile(profile_text(profile), source="x") == profile
    if name != "dgx-spark":  # CPU and GPU have one memory
        assert profile.tier("host").capacity_bytes > 0
    for dtype in ("float32", "float16", "bfloat16"):
        assert profile.flops_per_s(dtype, 8) > 0


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GH200.replace('"gh200"', '"mine"'), encoding="utf-8")
    assert load_profile(str(path)).name == "mine"


@given(compute_rates(), st.integers(1, 10**6))
def test_rates_lie_between_the_measured_points(rate: ComputeRate, n: int) -> None:
    if not rate.measured:
        assert rate.at(n) == rate.peak
        return
    below = [r for m, r in rate.measured if m <= n][-1:] or [rate.measured[0][1]]
    above = [r for m, r in rate.measured if m >= n][:1] or [rate.measured[-1][1]]
    low, high = sorted(below + above)
    assert low * (1 - 1e-9) <= rate.at(n) <= high * (1 + 1e-9)


def test_rates_are_linear_in_the_logarithms() -> None:
    rate = ComputeRate(peak=1e15, measured=((8, 1e13), (128, 1.6e14)))
    assert rate.at(32) == pytest.approx(4e13)
    assert [rate.at(n) for n in (1, 8, 128, 512)] == pytest.approx([1e13, 1e13, 1.6e14, 1.6e14])


@given(op_costs(), st.integers(1, 10**5))
def test_costs_lie_between_those_listed(costs: OpCosts, n: int) -> None:
    for found, listed in zip(costs.at(n), (costs.seconds, costs.efficiency), strict=True):
        near = [value for m, value in zip(costs.rows, listed, strict=True) if m <= n][-1:]
        near += [value for m, value in zip(costs.rows, listed, strict=True) if m >= n][:1]
        assert min(near) * (1 - 1e-9) <= found <= max(near) * (1 + 1e-9)


def test_costs_are_linear_in_the_rows() -> None:
    costs = OpCosts(rows=(8, 16, 64), seconds=(1e-6, 2e-6, 6e-6), efficiency=(1.0, 0.9, 0.5))
    assert [costs.at(n) for n in (1, 8)] == [(1e-6, 1.0)] * 2
    assert [costs.at(n) for n in (64, 512)] == [(6e-6, 0.5)] * 2
    assert costs.at(16) == (2e-6, 0.9)
    assert costs.at(12) == pytest.approx((1.5e-6, 0.95))
    assert costs.at(40) == pytest.approx((4e-6, 0.7))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema = 3", "schema = 9", "schema is 9"),
        ("schema = 3\n", "", "schema is None"),
        ("schema = 3", "schema = ", "not TOML"),
        ("sms = 132\n", "", "'sms' is missing"),
        ("sms = 132", "sms = 0", "sms is 0"),
        ("sms = 132", 'sms = "many"', "sms is 'many'"),
        ("sms = 132", "sms = 1.5", "sms is 1.5"),
        ("sms = 132", "sms = true", "sms is True"),
        ("sms = 132", "sms = 20", "remote tier host: sms is 32"),
        ("sms = 32", "sms = 133", "remote tier host: sms is 133"),
        ("sms = 32", "sms = 1.5", "remote tier host: sms is 1.5"),
        ("bytes_per_s = 4000000000000.0", "bytes_per_s = 1e-300", "hbm_bytes_per_s is 1e-300"),
        ("bytes_per_s = 4000000000000.0", "bytes_per_s = inf", "hbm_bytes_per_s is inf"),
        ("direct_bytes_per_s = 450", "direct_bytes_per_s = 1e-300 # ", "bytes_per_s is 1e-300"),
        ("peak_flops_per_s = 989", "peak_flops_per_s = 1e-300 # ", "compute rates are not"),
        ("[device]", "[gadget]", "'device' is missing"),
        ("[costs]", "[prices]", "prices is unknown"),
        ("[hbm]", "[[hbm]]", "wrong type"),
        ('kind = "spec-sheet"', 'kind = "guess"', "provenance.kind is 'guess'"),
        ('kind = "cuda"', 'kind = "tpu"', "device is 'tpu'"),
        ('date = "2026-11-21"', "date = 2026-11-21", "date or source"),
        ('date = "2026-11-21"', 'when = "2026-11-21"', "provenance.when is unknown"),
        ('name = "gh200"', "name = 200", "200 is not a name"),
        ('name = "host"', 'name = "hbm"', "remote tier is named 'hbm'"),
        ('name = "host"', "name = 5", "remote tier is named 5"),
        ("window_bytes = 4194304", "window_bytes = -1", "window_bytes is -1"),
        ("window_bytes = 4194304", "window_bytes = inf", "window_bytes is inf"),
        ("direct_bytes_per_s", "speed", "remote.speed is unknown"),
        ("context_bytes = 600000000", "context_bytes = -1", "context_bytes is -1"),
        ("[costs.linear]", "[costs.linears]", "costs.linears is unknown"),
        ("efficiency = [0.93]", "efficiency = [1.5]", "efficiencies are [1.5]"),
        ("efficiency = [0.93]", "efficiency = [0.93, 0.9]", "not of one length"),
        ("efficiency = [0.93]", "efficiency = 0.93", "wrong type"),
        ("efficiency = [0.93]", 'efficiency = ["high"]', "efficiency are ['high']"),
        ("efficiency = [0.93]", "share = [0.93]", "costs.attention.share is unknown"),
        ("seconds = [5.8e-06]", "seconds = [-1]", "fixed cost is"),
        (
            "seconds = [5.8e-06]",
            "seconds = [1e308]",
            "a fixed cost is",
        ),
        ("staged_seconds = ", "staged_seconds = 1e300 # ", "staged_seconds is 1e+300"),
        ("efficiency = [0.93]", "efficiency = [1e-300]", "efficiencies are [1e-300]"),
        (
            "seconds = [5.8e-06]",
            "seconds = [nan]",
            "a fixed cost is",
        ),
        ("rows = [8]", "rows = []", "not of one length"),
        ("rows = [8]", "rows = [0]", "costs are of [0] rows"),
        ("rows = [8]", "rows = [8.5]", "costs are of [8.5] rows"),
        ("rows = [8, 16, 32, 64]", "rows = [8, 32, 16, 64]", "costs are of [8, 32, 16, 64] rows"),
        ("busy_sms = ", "busy_sms = 0.0 # ", "kernel_model.busy_sms is 0.0"),
        ("busy_sms = ", "busy_sms = nan # ", "kernel_model.busy_sms is nan"),
        ("busy_sms = ", "busy_sms = true # ", "kernel_model.busy_sms is True"),
        ("busy_sms = ", 'busy_sms = "all" # ', "kernel_model.busy_sms is 'all'"),
        ("busy_sms = ", "sms = ", "kernel_model.sms is unknown"),
        ("link_latency_seconds = ", "link_latency_seconds = 0 # ", "link_latency_seconds is 0"),
        ("[compute.float16]", "[compute.float8]", "compute.float8 is unknown"),
        ("[compute.float16]", "[compute.float16]\nmeasured = [[8, 1e12], [4, 1e12]]", "ascending"),
        ("[compute.float16]", "[compute.float16]\nmeasured = [[0, 1e12], [4, 1e12]]", "ascending"),
        ("[compute.float16]", "[compute.float16]\nmeasured = [8, 1e12]", "wrong type"),
        ("[compute.float16]", "[compute.float16]\nmeasured = [[inf, 1e12]]", "ascending"),
        ("[compute.float16]", "[compute.float16]\nmeasured = [[8, inf]]", "compute rates"),
        ("[[remote]]", '[[remote]]\ngroup = "ports"', "link group 'ports' is not listed"),
        ("[[remote]]", "[[remote]]\ngroup = []", "remote tier host: group is []"),
        ("[[remote]]", f"[link_groups]\nports = {10**400}\n[[remote]]", "rate of a link group"),
        ("[[remote]]", "[link_groups]\nports = 0\n[[remote]]", "rate of a link group"),
        ("[[remote]]", "[sweeps.x]\ncolumns = ['a']\nrows = [[1, 2]]\n[[remote]]", "rows differ"),
        ("[[remote]]", "[sweeps.x]\ncolumns = ['a']\nrows = [[nan]]\n[[remote]]", "not finite"),
        ("[[remote]]", "[sweeps.x]\ncolumns = ['a']\n[[remote]]", "'rows' is missing"),
        ("offload_ratio = 0.1", "offload_ratio = 2", "published offload_ratio is 2"),
        ("offload_ratio = 0.1\n", "", "wrong type"),
        ("batch_size = 8", "batch_size = 0", "published opt-30b: batch_size is 0"),
        ('model = "opt-30b"', 'model = ""', "no model or source"),
        ('name = "gh200"', 'colour = 1\nname = "gh200"', "colour is unknown"),
        ("[device]", "[devices]\n[device]", "devices is unknown"),
        ("sms = 132", "sms = 132\nwarps = 4", "device.warps is unknown"),
        ("capacity_bytes =", "ranks = 2\ncapacity_bytes =", "hbm.ranks is unknown"),
        ("context_bytes =", "context = 1\ncontext_bytes =", "costs.context is unknown"),
        ("rows = [8]", "rows = [8]\ncolumns = [8]", "costs.attention.columns is unknown"),
        (
            "[compute.float16]",
            "[compute.float16]\nboost = 1e15",
            "compute.float16.boost is unknown",
        ),
        ("batch_size = 8", "batch_size = 8\nbatch = 8", "published.batch is unknown"),
        ("context_bytes = 600000000", "context_bytes = true", "context_bytes is True"),
        ("staged_seconds = ", "staged_seconds = true # ", "staged_seconds is True"),
        ("seconds = [5.8e-06]", "seconds = [true]", "seconds are [True]"),
        ("efficiency = [0.93]", "efficiency = [true]", "efficiency are [True]"),
        ("efficiency = [0.93]", "efficiency = [1.01]", "efficiencies are [1.01]"),
        ("peak_flops_per_s = ", "peak_flops_per_s = true # ", "True is not a number"),
        ("[compute.float16]", "[compute.float16]\nmeasured = [[8, true]]", "True is not a number"),
        ("[[remote]]", "[link_groups]\nports = true\n[[remote]]", "rate of a link group"),
        ("offload_ratio = 0.1", "offload_ratio = true", "published offload_ratio is True"),
    ],
)
def test_malformed_profiles(old: str, new: str, said: str) -> None:
    assert old in GH200
    with pytest.raises(UsageError) as caught:
        parse_profile(GH200.replace(old, new, 1), source="mine.toml")
    message = str(caught.value)
    assert message.startswith("mine.toml: ") and said in message
    assert "profiles/" in caught.value.hint
    assert "\n" not in message + caught.value.hint


def test_a_gpu_has_an_sm_for_each_tier() -> None:
    few = GH200.replace("sms = 132", "sms = 1").replace("sms = 32", "sms = 1")
    with pytest.raises(UsageError, match="gh200: sms is 1") as caught:
        parse_profile(few, source="x")
    assert "HBM" in caught.value.hint
    parse_profile(few.replace('kind = "cuda"', 'kind = "cpu"'), source="x")


def test_two_tiers_of_one_name_are_refused() -> None:
    tier = re.search(r"\[\[remote\]\]\n(?:.+\n)+", GH200)
    assert tier is not None
    with pytest.raises(UsageError, match="same name"):
        parse_profile(GH200.replace(tier[0], f"{tier[0]}\n{tier[0]}"), source="x")


def test_what_a_profile_lacks_is_said() -> None:
    profile = load_profile("gh200")
    with pytest.raises(UsageError, match="no remote tier 'peer:1'") as caught:
        profile.tier("peer:1")
    assert "host" in caught.value.hint
    only_half = parse_profile(GH200.partition("[compute.bf")[0], source="x")
    with pytest.raises(UsageError, match="no compute rate for bfloat16"):
        only_half.flops_per_s("bfloat16", 8)


def test_a_profile_without_a_kernel_model_has_the_defaults() -> None:
    before, _, rest = GH200.partition("[kernel_model]")
    text = before + rest[rest.index("[[remote]]") :]
    assert parse_profile(text, source="x").kernel_model == KernelModel()
    slow = "[kernel_model]\nlaunch_gap_seconds = 1e-3\n[[remote]]"
    model = parse_profile(text.replace("[[remote]]", slow), source="x").kernel_model
    assert model == KernelModel(launch_gap_seconds=1e-3)


@pytest.mark.parametrize("name", ["nope", "nope.toml", ""])
def test_unknown_profiles(name: str) -> None:
    with pytest.raises(UsageError, match="no profile") as caught:
        load_profile(name)
    assert "gh200" in caught.value.hint


@pytest.mark.parametrize(
    ("gpu", "found"),
    [("NVIDIA GH200 480GB", "gh200"), ("NVIDIA H200", "h200-pcie5"), ("Tesla K80", None)],
)
def test_profile_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, gpu: str, found: str | None
) -> None:
    # The driver's list of GPUs: there is no other way to name a GPU that is not there.
    monkeypatch.setattr(profile_files, "gpu_names", lambda: [gpu])
    assert find_profile(device="cpu").name == "cpu"
    if found:
        assert find_profile(device="cuda").name == found
        return
    with pytest.raises(UsageError, match=f"no profile for {gpu}") as caught:
        find_profile(device="cuda")
    assert "--profile" in caught.value.hint


@pytest.mark.parametrize("content", [b"schema = 3\nname = ", b"schema = 3", b"\xff"])
def test_a_damaged_profile_that_was_kept(content: bytes) -> None:
    folder = kept_profiles_dir()
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_bytes(content)
    with pytest.raises(UsageError, match=r"mine\.toml") as caught:
        find_profile(device="cpu")
    assert "dakrun profile" in caught.value.hint


def test_gpu_names_are_strings() -> None:
    assert all(isinstance(name, str) and name for name in gpu_names())
