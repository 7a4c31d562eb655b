"""Tokens of several logits of a slot, one after the other: as the sampler chooses step by step."""

import threading
import time

import numpy as np
import pytest
import torch
from packed_matrices import normal
from test_adjustments import ROWS, histories, sampling_of

from dakrun.config import SamplingParams
from dakrun.engine import sample
from dakrun.geometry import NO_TOKEN
from dakrun.kernels import (
    TokenMask,
    mask_words,
    sampling_words,
    select_in_order,
    select_token,
)
from dakrun.kernels.runtime import DTYPES

WIDTH, UNTOUCHED, NOT_YET = 4, -9, -3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [7, 1001])
def test_penalties_count_the_drafts_that_were_chosen(
    vocabulary: int, dtype: torch.dtype, kernel_device: str
) -> None:
    """And no others: a step without drafts behind goes on from there."""
    past, n, chance = histories(vocabulary), len(ROWS), np.random.default_rng(vocabulary)
    logits = normal(n * WIDTH + n, vocabulary, dtype=dtype, device=kernel_device)
    logits[:, :8] += 3
    words, _kept = sampling_of(ROWS, past, vocabulary, kernel_device, WIDTH + 1)
    starts = [len(row.prompt) + len(row.tokens) - 1 for row in past]
    drafts = np.full((n, WIDTH), 1, dtype=np.int32)
    lengths = np.array([[start + i for i in range(WIDTH)] for start in starts], dtype=np.int32)
    lengths[1, 2:] = lengths[4, 1:] = -1  # fewer drafts than there is room for
    wanted: list[list[int]] = []
    for row, params in enumerate(ROWS):
        used, right = int((lengths[row] >= 0).sum()), int(chance.integers(WIDTH))
        chosen = list[int]()
        for i in range(used):
            (token,) = sample(
                logits[row * WIDTH + i][None].cpu(), [params], [row], [starts[row] + i + 1],
                [past[row]],
            ).tolist()  # fmt: skip
            chosen.append(token)
            past[row].tokens.append(max(token, 0))  # type: ignore[attr-defined]
            if token < 0 or i + 1 == used:
                break
            drafts[row, i + 1] = token if i < right else (token + 1) % vocabulary
            if i >= right:
                break
        wanted.append(chosen)
    device = torch.device(kernel_device)
    on_device = [torch.tensor(x.reshape(-1), device=device) for x in (drafts, lengths)]
    slots = torch.arange(n, dtype=torch.int32, device=device)
    repeated = slots.repeat_interleave(WIDTH)
    tokens = torch.full((n * WIDTH,), UNTOUCHED, dtype=torch.int32, device=device)
    log = torch.full((n, 2048), UNTOUCHED, dtype=torch.int32, pin_memory=logits.is_cuda)
    given, positions = on_device
    of_drafts = logits[: n * WIDTH]
    select_in_order(of_drafts, given, tokens, positions, repeated, log, words, width=WIDTH)
    after = positions.view(n, WIDTH).tolist()
    for row, params in enumerate(ROWS):
        chosen = wanted[row] if params.adjusts else []
        mine = tokens[row * WIDTH : (row + 1) * WIDTH].tolist()
        assert mine == [*(max(t, 0) for t in chosen), *[UNTOUCHED] * (WIDTH - len(chosen))]
        moved = [before + (i < len(chosen)) for i, before in enumerate(lengths[row].tolist())]
        assert after[row] == moved
        places = [start % 2048 for start in range(starts[row], starts[row] + WIDTH)]
        logged = log[row, places].tolist()
        assert logged == [*chosen, *[UNTOUCHED] * (WIDTH - len(chosen))]
    ends = [len(row.prompt) + len(row.tokens) - 1 for row in past]
    newest = torch.zeros(n, dtype=torch.int32, device=device)
    at = torch.tensor(ends, dtype=torch.int32, device=device)
    select_token(logits[n * WIDTH :].clone(), newest, at, slots, log, words)
    found = sample(logits[n * WIDTH :].cpu(), ROWS, range(n), [end + 1 for end in ends], past)
    assert newest.tolist() == found.clamp(min=0).tolist()


def test_masks_are_waited_for_one_by_one(kernel_device: str) -> None:
    """The host writes each when it sees the token before; a wrong draft ends the row."""
    vocabulary, start = 40, 10
    logits = torch.zeros(3 * WIDTH, vocabulary, dtype=torch.float16, device=kernel_device)
    logits[:, 30] = 5.0
    logits[2 * WIDTH + 1] = torch.nan
    pinned = kernel_device == "cuda"
    bits = torch.zeros(3, mask_words(vocabulary), dtype=torch.int32, pin_memory=pinned)
    ready = torch.full((3,), start, dtype=torch.int32, pin_memory=pinned)
    log = torch.full((3, 64), NOT_YET, dtype=torch.int32, pin_memory=pinned)
    words = [
        sampling_words(SamplingParams(), 0, TokenMask(bits[i].data_ptr(), ready[i:].data_ptr()))
        for i in range(3)
    ]
    drafts = [[0, 11, 12, 13], [0, 11, 5, 13], [0, 11, 12, 13]]
    places = [[start + i for i in range(WIDTH)]] * 3
    given, positions, slots = (
        torch.tensor(rows, dtype=torch.int32, device=kernel_device).view(-1)
        for rows in (drafts, places, [[i] * WIDTH for i in range(3)])
    )
    tokens = torch.full((3 * WIDTH,), UNTOUCHED, dtype=torch.int32, device=kernel_device)
    seen, stop = log.numpy(), threading.Event()

    def host() -> None:
        """Only token p is allowed at position p."""
        at = [start + 1] * 3
        while not stop.is_set():
            for slot in range(3):
                if at[slot] == start + 1 or seen[slot, at[slot] - 2] != NOT_YET:
                    bits[slot] = 0
                    bits[slot, at[slot] // 32] = 1 << at[slot] % 32
                    ready[slot] = at[slot]
                    at[slot] += 1
            time.sleep(1e-3)

    thread = threading.Thread(target=host)
    thread.start()
    sampling = torch.tensor(words, dtype=torch.int32, device=kernel_device)
    select_in_order(logits, given, tokens, positions, slots, log, sampling, width=WIDTH)
    found = tokens.view(3, WIDTH).tolist()  # which also waits for a GPU
    stop.set()
    thread.join()
    assert found == [
        [11, 12, 13, 14],
        [11, 12, UNTOUCHED, UNTOUCHED],
        [11, 0, UNTOUCHED, UNTOUCHED],
    ]
    assert log[0, start : start + 4].tolist() == [11, 12, 13, 14]
    assert log[2, start : start + 3].tolist() == [11, NO_TOKEN, NOT_YET]


def test_what_does_not_fit_is_refused() -> None:
    logits, log = torch.zeros(6, 8).half(), torch.zeros(2, 4, dtype=torch.int32)
    six, words = torch.zeros(6, dtype=torch.int32), torch.zeros(2, 14, dtype=torch.int32)
    with pytest.raises(ValueError, match="expected rows of 4 tokens, got 6 tokens"):
        select_in_order(logits, six, six, six, six, log, words, width=4)
    with pytest.raises(ValueError, match=r"drafts as \[6\] of torch.int32"):
        select_in_order(logits, six[:5], six, six, six, log, words, width=3)
