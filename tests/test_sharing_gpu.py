"""A GPU that is held to another card's limits: consecutive launches share an SM only as they allow.

The size of an SM's shared memory is a hint to the driver (jit.py), so that the GPU itself is asked:
each CTA writes down its SM, and the times between which it was there.
"""

import ctypes
from pathlib import Path

import pytest
import torch
from cards import here

from dakrun.kernels.runtime import held_to, kernel

pytestmark = pytest.mark.gpu

KIB = 1024
LAUNCHES = 6
SPIN_NS = 300_000
SOURCE = """
struct Args {
  long long* spans;  // [CTAs, 3]: SM, begin, end
  long long spin_ns;
};

__device__ long long now() {
  long long ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
  return ns;
}

extern "C" __global__ void occupy(const __grid_constant__ Args args) {
  unsigned sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  asm volatile("griddepcontrol.launch_dependents;");  // the next launch may begin beside this one
  const long long begin = now();
  while (now() - begin < args.spin_ns) {
  }
  if (threadIdx.x == 0) {
    long long* span = args.spans + 3 * blockIdx.x;
    span[0] = sm, span[1] = begin, span[2] = now();
  }
}
"""


class Args(ctypes.Structure):
    _fields_ = (("spans", ctypes.c_void_p), ("spin_ns", ctypes.c_longlong))


def most_on_an_sm(folder: Path, shared_bytes: int) -> int:
    """CTAs of consecutive overlapping launches that were on one SM at a time, at most."""
    source = folder / "occupy.cu"
    source.write_text(SOURCE)
    occupy, sms = kernel(str(source), "occupy"), here().sms
    spans = torch.zeros(LAUNCHES, sms, 3, dtype=torch.int64, device="cuda")
    for launch in spans:
        args = Args(launch.data_ptr(), SPIN_NS)
        occupy.launch(sms, 32, args, shared_bytes=shared_bytes, pdl=True)
    events: dict[int, list[tuple[int, int]]] = {}
    for sm, begin, end in spans.view(-1, 3).tolist():
        assert end - begin >= SPIN_NS, "every CTA has run"
        events.setdefault(sm, []).extend([(begin, 1), (end, -1)])
    most = 0
    for changes in events.values():
        there = 0
        for _, change in sorted(changes):  # at the same time, those that leave come first
            there += change
            most = max(most, there)
    return most


@pytest.mark.parametrize("kib", [99, 48, 32])
def test_launches_share_an_sm_as_the_limits_allow(kib: int, tmp_path: Path) -> None:
    card = here().limited_to("12.0")
    with held_to(card):
        assert most_on_an_sm(tmp_path, kib * KIB) == card.shared_bytes_per_sm // ((kib + 1) * KIB)


def test_the_probe_sees_what_shares_an_sm(tmp_path: Path) -> None:
    """Two CTAs with half of an SM's shared memory each, as attention has them."""
    card = here()
    shared = card.shared_bytes_per_sm // 2 - KIB
    assert most_on_an_sm(tmp_path, shared) == 2


def test_a_kernel_that_claims_more_fails(tmp_path: Path) -> None:
    with held_to(here().limited_to("12.0")), pytest.raises(RuntimeError, match="are held to"):
        most_on_an_sm(tmp_path, 100 * KIB)
