"""The tool that notes where CTAs run: its notes fit the sources, and what it tells of CTAs."""

import subprocess
import sys
from pathlib import Path

import pytest
from tools import cta_trace
from tools.cta_trace import ATTENTION, NOTES, Note, launches, table, with_notes

from dakrun.kernels import all_variants
from dakrun.kernels.runtime import compile_cubin, nvrtc

KEY = 8192 << 32 | 4096


def test_notes_fit_the_sources(tmp_path: Path) -> None:
    with_notes(tmp_path / "native")
    for name in NOTES:
        assert (tmp_path / "native" / name).read_text().count("NOTE(") > 3


def test_a_line_that_a_source_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NOTES, "embed.cu", {"no such line\n": ""})
    with pytest.raises(ValueError, match=r"embed\.cu has 0 times, not once:\nno such line"):
        with_notes(tmp_path / "native")


@pytest.mark.full
@pytest.mark.parametrize("source", NOTES)
def test_sources_with_notes_compile(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "native"
    with_notes(folder)
    monkeypatch.setattr(nvrtc, "resource_dir", lambda _: folder)
    macros = next(macros for name, macros in all_variants("sm_90a") if name == source)
    (kernel,) = compile_cubin(source, "sm_90a", {**macros, "NOTES_AT": 1 << 40}).kernels
    assert kernel.shared_bytes <= 2048


def a_launch(key: int, start: int, end: int, sms: list[int], idle: int = 0) -> list[Note]:
    """CTAs on `sms`, which end 1 us after each other, and more without work."""
    work = [
        Note(start, start + 500, end - 1000 * (len(sms) - 1 - i), sm, i, key)
        for i, sm in enumerate(sms)
    ]
    return work + [Note(start, 0, start + 100, 99, len(sms) + i, key) for i in range(idle)]


def test_sms_with_two_ctas_and_times_from_the_end_before() -> None:
    notes = a_launch(KEY, 1000, 20_000, [0, 1, 2], idle=2)
    notes += a_launch(ATTENTION, 19_000, 30_000, [0, 0, 1], idle=1)
    notes += a_launch(KEY, 25_000, 50_000, [2, 1, 0])
    found = launches(notes)
    (attention,), (product,) = found[ATTENTION], found[KEY]
    assert attention[:3] == (3, 2, 1) and product[:3] == (3, 3, 0)
    assert attention.start == (-1.0, -1.0, -1.0) and attention.end == (8.0, 9.0, 10.0)
    assert product.waited == (-4.5, -4.5, -4.5) and product.end == (18.0, 19.0, 20.0)
    lines = table(found).splitlines()
    assert lines[1].startswith("attention") and lines[1].split()[1:5] == ["1", "3", "2", "1"]
    assert lines[2].startswith("8192 x 4096") and lines[2].endswith("18.0  19.0  20.0")


def test_it_says_what_it_needs() -> None:
    found = subprocess.run(
        [sys.executable, cta_trace.__file__], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2 and "behind -- a command of dakrun" in found.stderr
