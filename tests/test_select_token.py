"""Tokens are torch.argmax's or the sampler's, and move their rows on; idle rows stay."""

import math
import threading
import time
from typing import Any

import pytest
import torch
from packed_matrices import normal

from dakrun.config import SamplingParams
from dakrun.engine import sample
from dakrun.geometry import NO_TOKEN, NONE_ALLOWED
from dakrun.kernels import SAMPLING_WORDS, TokenMask, mask_words, sampling_words, select_token
from dakrun.kernels.runtime import DTYPES

UNTOUCHED = -9


def select(logits: torch.Tensor, *, finite: bool = True) -> list[int]:
    """The tokens of rows that all have a request; the log has none of rows that are not finite."""
    n, device = len(logits), logits.device
    tokens = torch.full((n,), UNTOUCHED, dtype=torch.int32, device=device)
    lengths = torch.zeros(n, dtype=torch.int32, device=device)
    slots = torch.arange(n, dtype=torch.int32, device=device)
    log = torch.full((n, 1), UNTOUCHED, dtype=torch.int32, pin_memory=logits.is_cuda)
    assert select_token(logits, tokens, lengths, slots, log) is tokens
    assert lengths.tolist() == [1] * n  # which also waits for a GPU
    assert log[:, 0].tolist() == (tokens.tolist() if finite else [NO_TOKEN] * n)
    return tokens.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 1001, 33000])
def test_it_is_argmax(vocabulary: int, dtype: torch.dtype, kernel_device: str) -> None:
    """Many are equal in bfloat16; rows of odd sizes are not aligned."""
    logits = normal(3, vocabulary, dtype=dtype, device=kernel_device)
    assert select(logits) == logits.cpu().argmax(-1).tolist()
    assert select(-logits.abs()) == (-logits.abs()).cpu().argmax(-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_equals(dtype: torch.dtype, kernel_device: str) -> None:
    logits = torch.full((5, 9001), -math.inf, dtype=dtype)
    logits[0, 0] = torch.finfo(dtype).min
    logits[1, [8191, 8190, 9000, 4500]] = 3.5
    logits[2, 5:] = -2.0
    logits[3] = -1e-3
    logits[3, [17, 8200]] = torch.tensor([-0.0, 0.0], dtype=dtype)
    logits[4] = 1e-7  # below the normal numbers of float16
    logits[4, 7000:] = 2e-7
    assert select(logits.to(kernel_device)) == [0, 4500, 5, 17, 7000]


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_is_the_largest(dtype: torch.dtype, kernel_device: str) -> None:
    logits = normal(4, 9001, dtype=dtype, device="cpu")
    logits[:, 100] = math.inf
    bits = logits.view(torch.int16)
    bits[0, [8999, 300]] = 0x7FFF
    bits[1, 9000] = -1  # with a sign
    bits[2, [5000, 5001]] = torch.tensor([-1, 0x7FFF], dtype=torch.int16)
    bits[3] = 0x7FC1
    assert select(logits.to(kernel_device), finite=False) == [300, 9000, 5000, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_finite_maximum_are_logged_as_such(
    dtype: torch.dtype, kernel_device: str
) -> None:
    """One NaN or infinity anywhere in a row is enough; rows beside it have their tokens."""
    largest = torch.finfo(dtype).max
    rows = {
        "largest": normal(1, 9001, dtype=dtype, device="cpu")[0].index_fill(
            0, torch.tensor([8191]), largest
        ),
        "masked": torch.full((9001,), -math.inf, dtype=dtype),
        "lowest": torch.full((9001,), -math.inf, dtype=dtype),
        **{f"{at} {bad}": torch.zeros(9001, dtype=dtype) for at in (0, 4711, 9000) for bad in "+n"},
    }
    rows["lowest"][77] = -largest
    for name in list(rows)[3:]:
        at, bad = name.split()
        rows[name][int(at)] = math.inf if bad == "+" else math.nan
    n = len(rows)
    integers = [[UNTOUCHED] * n, [5] * n, list(range(n))]
    tokens, lengths, slots = torch.tensor(integers, dtype=torch.int32, device=kernel_device)
    log = torch.full((n, 3), UNTOUCHED, dtype=torch.int32, pin_memory=kernel_device == "cuda")
    select_token(torch.stack(list(rows.values())).to(kernel_device), tokens, lengths, slots, log)
    assert lengths.tolist() == [6] * n
    assert tokens.tolist() == [8191, 0, 77, 0, 0, 4711, 4711, 9000, 9000], "of the vocabulary"
    assert log[:, 2].tolist() == [8191, NO_TOKEN, 77] + [NO_TOKEN] * 6


SAMPLED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=1e-40),
    SamplingParams(temperature=1.3, top_k=1),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(),
    SamplingParams(temperature=3.0, top_k=40, top_p=0.5),
    SamplingParams(temperature=0.3, top_p=1e-6),
    SamplingParams(temperature=2.0, top_k=10**9, top_p=0.999),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1, 7, 1001, 33000])
def test_sampled_rows_are_the_sampler_s(
    vocabulary: int, dtype: torch.dtype, kernel_device: str
) -> None:
    """Beside greedy rows and ones without a request; slots are in any order."""
    n = len(SAMPLED)
    logits = 2 * normal(n, vocabulary, dtype=dtype, device=kernel_device)
    slots = torch.randperm(n, generator=torch.Generator().manual_seed(vocabulary))
    seeds = [2**63 - 1 - 7 * i for i in range(n)]
    words = torch.zeros(n, SAMPLING_WORDS, dtype=torch.int32)
    for row, slot in enumerate(slots.tolist()):
        words[slot] = torch.tensor(sampling_words(SAMPLED[row], seeds[row]), dtype=torch.int32)
    device = torch.device(kernel_device)
    tokens, lengths = torch.zeros(2, n, dtype=torch.int32, device=device)
    lengths += torch.arange(10, 10 + n, device=device)
    lengths[2] = -1
    positions = [11 + i for i in range(n)]
    log = torch.full((n, 2), UNTOUCHED, dtype=torch.int32, pin_memory=logits.is_cuda)
    found = []
    for step in range(3):
        select_token(logits, tokens, lengths, slots.int().to(device), log, words.to(device))
        wanted = sample(logits.cpu(), SAMPLED, seeds, [p + step for p in positions]).tolist()
        wanted[2] = 0
        assert tokens.tolist() == wanted
        assert [int(log[slots[i], (10 + i + step) % 2]) for i in (0, 1, 3)] == [
            wanted[i] for i in (0, 1, 3)
        ]
        found.append(wanted[0])
    assert vocabulary < 1000 or len(set(found)) > 1


class Masks:
    """Masks of all slots, with their counters, as the host of a GPU has them."""

    def __init__(self, allowed: torch.Tensor, *, pinned: bool) -> None:
        """`allowed`: bool [slots, vocabulary]. No mask is there yet."""
        slots, vocabulary = allowed.shape
        self.bits = torch.zeros(slots, mask_words(vocabulary), dtype=torch.int32, pin_memory=pinned)
        padded = torch.zeros(slots, 32 * self.bits.shape[1], dtype=torch.int64)
        padded[:, :vocabulary] = allowed
        words = (padded.view(slots, -1, 32) << torch.arange(32)).sum(-1)
        self.bits.copy_(words.where(words < 2**31, words - 2**32))
        self.bits[:, -1] |= -1 << (vocabulary - 1) % 32 << 1  # past the vocabulary: for nobody
        self.ready = torch.zeros(slots, dtype=torch.int32, pin_memory=pinned)

    def of(self, slot: int, base: int) -> TokenMask:
        return TokenMask(self.bits[slot].data_ptr(), self.ready[slot:].data_ptr(), base)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocabulary", "share"), [(7, 0.5), (1001, 0.02), (33000, 0.5)])
def test_only_allowed_tokens_are_chosen(
    vocabulary: int, share: float, dtype: torch.dtype, kernel_device: str
) -> None:
    """As if the others' logits were -infinity, beside rows without a mask; a mask may come late."""
    n = len(SAMPLED)
    device, generator = torch.device(kernel_device), torch.Generator().manual_seed(vocabulary)
    logits = 2 * normal(n, vocabulary, dtype=dtype, device=kernel_device)
    allowed = torch.rand(n, vocabulary, generator=generator) < share
    allowed[:, vocabulary // 3] = True
    allowed[4] = False
    slots = torch.randperm(n, generator=generator)
    masks = Masks(allowed[slots.argsort()], pinned=logits.is_cuda)
    free = (1, 5)  # rows without a mask
    words = torch.zeros(n, SAMPLING_WORDS, dtype=torch.int32)
    for row, slot in enumerate(slots.tolist()):
        mask = None if row in free else masks.of(slot, 100 * row + 1)
        words[slot] = torch.tensor(sampling_words(SAMPLED[row], row, mask), dtype=torch.int32)
    masked = logits.cpu().masked_fill(~allowed, -math.inf)
    masked[free, :] = logits.cpu()[free, :]
    wanted = sample(masked, SAMPLED, range(n), range(21, 21 + n))
    lengths = torch.arange(20, 20 + n, dtype=torch.int32, device=device)
    tokens = torch.zeros(n, dtype=torch.int32, device=device)
    log = torch.full((n, 1), UNTOUCHED, dtype=torch.int32, pin_memory=logits.is_cuda)
    late = int(slots[2])

    def publish(rows: range) -> None:
        for row in rows:
            masks.ready[slots[row]] = 100 * row + 1 + lengths_before[row] + 1

    def publish_late() -> None:
        time.sleep(0.3)
        masks.bits[late] = bits
        publish(range(2, 3))

    lengths_before = lengths.tolist()
    publish(range(n))
    masks.ready[late] -= 1
    bits = masks.bits[late].clone()
    masks.bits[late] = -1
    masks.ready[slots[8]] = -1
    thread = threading.Thread(target=publish_late)
    thread.start()
    select_token(logits, tokens, lengths, slots.int().to(device), log, words.to(device))
    assert lengths.tolist() == [length + 1 for length in lengths_before]
    thread.join()
    wanted[4] = NONE_ALLOWED
    assert log[slots, 0].tolist() == wanted.tolist()
    wanted[4] = 0
    assert tokens.tolist() == wanted.tolist(), "of the vocabulary"


def test_a_mask_of_a_row_that_is_not_finite_is_not_waited_for(kernel_device: str) -> None:
    """Nor is one of a row without a request; minus infinity may be all that is allowed."""
    logits = torch.zeros(3, 40, dtype=torch.float16)
    logits[0, 3], logits[2, 8:] = math.nan, -math.inf
    allowed = torch.ones(3, 40, dtype=torch.bool)
    allowed[2, :8] = False
    masks = Masks(allowed, pinned=kernel_device == "cuda")
    masks.ready[2] = 6
    words = [sampling_words(SamplingParams(), 0, masks.of(slot, 1)) for slot in range(3)]
    integers = [[UNTOUCHED] * 3, [4, -1, 4], [0, 1, 2]]
    tokens, lengths, slots = torch.tensor(integers, dtype=torch.int32, device=kernel_device)
    log = torch.full((3, 1), UNTOUCHED, dtype=torch.int32, pin_memory=kernel_device == "cuda")
    sampling = torch.tensor(words, dtype=torch.int32, device=kernel_device)
    select_token(logits.to(kernel_device), tokens, lengths, slots, log, sampling)
    assert lengths.tolist() == [5, -1, 5]
    assert log[:, 0].tolist() == [NO_TOKEN, UNTOUCHED, NONE_ALLOWED]


def test_rows_move_on(kernel_device: str) -> None:
    """Of slots in any order; of those without a request nothing changes."""
    logits = normal(4, 512, dtype=torch.float16, device=kernel_device)
    chosen = logits.cpu().argmax(-1).tolist()
    integers = [[70, 71, 72, 73], [5, -1, 0, 11], [2, 0, 4, 1]]
    tokens, lengths, slots = torch.tensor(integers, dtype=torch.int32, device=kernel_device)
    log = torch.full((5, 3), UNTOUCHED, dtype=torch.int32, pin_memory=logits.is_cuda)
    newest = torch.full((5,), UNTOUCHED, dtype=torch.int32, device=kernel_device)
    wanted = log.clone()
    for step in range(4):
        newest.fill_(UNTOUCHED)
        select_token(logits, tokens, lengths, slots, log, newest=newest)
        for row, slot, start in ((0, 2, 5), (2, 4, 0), (3, 1, 11)):
            wanted[slot, (start + step) % 3] = chosen[row]
        assert lengths.tolist() == [6 + step, -1, 1 + step, 12 + step]
        assert tokens.tolist() == [chosen[0], 71, chosen[2], chosen[3]]
        assert newest.tolist() == [UNTOUCHED, chosen[3], chosen[0], UNTOUCHED, chosen[2]]
        assert torch.equal(log, wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 8)}, r"logits as \[N, V\] in 16 bits, got \[3, 8\] of torch.fl"),
        ({"logits": torch.zeros(3, 0).half()}, r"logits as \[N, V\] in 16 bits, got \[3, 0\]"),
        ({"logits": torch.zeros(8, 3).half().T}, "logits to be contiguous and aligned to 16 bytes"),
        ({"tokens": torch.zeros(3).long()}, r"tokens as \[3\] of torch.int32 on cpu, got"),
        ({"lengths": torch.zeros(4).int()}, r"lengths as \[3\] .* got \[4\]"),
        ({"slots": torch.zeros(6).int()[::2]}, "slots to be contiguous and aligned to 4 bytes"),
        ({"log": torch.zeros(3).int()}, r"log as \[slots, depth\] of torch.int32, got \[3\]"),
        ({"log": torch.zeros(3, 0).int()}, r"log as \[slots, depth\] of torch.int32, got \[3, 0\]"),
        ({"log": torch.zeros(3, 2).long()}, r"log as .* of torch.int32, got \[3, 2\] of torch.int"),
        ({"sampling": torch.zeros(3, 5).int()}, r"sampling as \[3, 14\] of .* \[3, 5\]"),
        ({"newest": torch.zeros(2).int()}, r"newest as \[3\] of torch.int32 on cpu, got \[2\]"),
        ({}, "current GPU"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    integers = {name: torch.zeros(3).int() for name in ("tokens", "lengths", "slots")}
    operands = {"logits": torch.zeros(3, 8).half(), "log": torch.zeros(3, 2).int(), **integers}
    with pytest.raises(ValueError, match=message):
        select_token(**{**operands, **change})
