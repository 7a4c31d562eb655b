"""Biases, penalties and forbidden tokens: those of transformers, in torch and in the kernel."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from packed_matrices import normal
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from dakrun.config import SamplingParams
from dakrun.engine import sample, sampler
from dakrun.engine.adjustments import History, adjusted
from dakrun.geometry import NO_TOKEN, NONE_ALLOWED
from dakrun.kernels import SAMPLING_WORDS, adjustments, sampling_words, select_token
from dakrun.kernels.runtime import DTYPES
from dakrun.plan.footprint import adjustment_bytes

VOCAB = 60
PROMPT, TOKENS, ENDS = (3, 5, 5, 9, 7), [5, 11, 5, 40, 9, 7], (2, 50)
HISTORY = History(PROMPT, TOKENS, ENDS)
SEQUENCE = torch.tensor([[*PROMPT, *TOKENS]])


def logits_of(vocabulary: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def changed(params: SamplingParams, history: History = HISTORY) -> torch.Tensor:
    return adjusted(logits_of(), params, history)


def of_transformers(processor: Any, sequence: torch.Tensor = SEQUENCE) -> torch.Tensor:
    return processor(sequence, logits_of()[None].clone())[0]


@pytest.mark.parametrize("penalty", [1.3, 0.6])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    wanted = of_transformers(RepetitionPenaltyLogitsProcessor(penalty))
    assert torch.equal(changed(SamplingParams(repetition_penalty=penalty)), wanted)


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.7, 1.0])
@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float) -> None:
    logits = torch.stack([logits_of(300, seed) for seed in range(20)])
    kept = MinPLogitsWarper(min_p)(None, logits.double() / temperature) > -math.inf
    params = SamplingParams(temperature=temperature, min_p=min_p)
    found = torch.stack([sampler.kept_tokens(row, params) for row in logits])
    assert torch.equal(found, kept)


def test_bad_words_are_those_of_transformers() -> None:
    """Some reach into the prompt, or match only in part; single tokens are always forbidden."""
    words = [
        (8,),
        (7, 1),
        (9, 7, 30),
        (40, 7, 31),
        (7, 5, 11, 5, 40, 9, 7, 32),
        (1, 7, 33),
        (9, 7, 7),
    ]
    wanted = of_transformers(NoBadWordsLogitsProcessor([list(word) for word in words]))
    found = changed(SamplingParams(bad_words=words))
    assert torch.equal(found, wanted)
    assert (found == -math.inf).nonzero()[:, 0].tolist() == [1, 7, 8, 30, 32]
    short = History((9,), [], ())
    assert changed(SamplingParams(bad_words=[(9, 7), (3, 9, 4)]), short).isinf().nonzero() == 7


def test_min_tokens_are_those_of_transformers() -> None:
    for least in (6, 7):
        processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), least, list(ENDS), "cpu")
        found = changed(SamplingParams(min_tokens=least))
        assert torch.equal(found, of_transformers(processor))
    found = changed(SamplingParams(min_tokens=7, stop_token_ids=[4, VOCAB]))
    assert found.isinf().nonzero()[:, 0].tolist() == [2, 4, 50]


def test_logit_bias_is_that_of_transformers() -> None:
    processor = SequenceBiasLogitsProcessor([[[5], 1.5], [[58], -100.0]])
    processor.prepared_bias_variables = False
    assert torch.equal(
        changed(SamplingParams(logit_bias={"5": 1.5, 58: -100})), of_transformers(processor)
    )


def test_frequency_and_presence_count_new_tokens_as_in_vllm() -> None:
    """vllm/model_executor/layers/utils.py, apply_penalties: of the completion alone."""
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25)
    wanted = logits_of()
    for token, times in {5: 2, 11: 1, 40: 1, 9: 1, 7: 1}.items():
        wanted[token] = wanted[token] - times * 0.5 + 0.25
    assert torch.equal(changed(params), wanted)


def test_bias_comes_first_then_repetition_then_the_others() -> None:
    params = SamplingParams(
        logit_bias={5: 4.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=1.0
    )
    logits = torch.zeros(VOCAB)
    found = adjusted(logits, params, HISTORY)
    assert found[5] == 4 / 2 - 2 * 0.5 - 1 and found[3] == 0 and found[11] == -1.5


def test_a_grammar_beats_what_is_forbidden() -> None:
    params = SamplingParams(min_tokens=20, bad_words=[(1,)], logit_bias={2: -100.0})
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    for tokens, wanted in (((1, 2, 17), 17), ((2,), 2), ((), NONE_ALLOWED)):
        allowed.fill_(False)[list(tokens)] = True
        found = sample(logits_of()[None], [params], [0], [11], [HISTORY], {0: allowed})
        assert found.item() == wanted
    everything = SamplingParams(bad_words=[(token,) for token in range(VOCAB)])
    assert sample(logits_of()[None], [everything], [0], [11], [HISTORY]).item() == NONE_ALLOWED


ROWS = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(),
    SamplingParams(temperature=0.8, frequency_penalty=0.7, presence_penalty=-0.3, top_p=0.9),
    SamplingParams(logit_bias={0: 3.0, 5: -100.0}, presence_penalty=2.0),
    SamplingParams(temperature=1.5, repetition_penalty=0.8, top_k=5, min_p=0.05, top_p=0.95),
    SamplingParams(min_tokens=12, stop_token_ids=[4], bad_words=[(1,), (6, 0), (5, 6, 3)]),
    SamplingParams(
        temperature=2.0, frequency_penalty=2.0, repetition_penalty=1.1, bad_words=[(5, 0)]
    ),
    SamplingParams(temperature=0.5, top_k=10**9, logit_bias={3: 5.0, 4: 5.0}, min_p=1e-4),
    SamplingParams(bad_words=[(token,) for token in range(7)]),
]  # fmt: skip


def histories(vocabulary: int) -> list[History]:
    """As many as ROWS, some of requests that begin and some of ones that go on."""
    some = torch.Generator().manual_seed(vocabulary)

    def tokens(count: int) -> list[int]:
        return torch.randint(min(vocabulary, 50), (count,), generator=some).tolist()

    lengths = [
        (9, 0),
        (30, 5),
        (1, 0),
        (2, 2000),
        (4, 3),
        (1500, 7),
        (2, 4),
        (3, 0),
        (1, 1),
        (5, 5),
    ]
    return [History(tokens(n), tokens(new), (2,)) for n, new in lengths]


def sampling_of(
    rows: Sequence[SamplingParams],
    past: Sequence[History],
    vocabulary: int,
    device: str,
    limit: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Words of the rows' slots, which are in the same order, and what they point to."""
    own = [
        adjustments(
            params, *row, limit=len(row.tokens) + limit, vocabulary=vocabulary
        ).to(device)
        for params, row in zip(rows, past, strict=True)
    ]  # fmt: skip
    words = [
        sampling_words(params, seed, None, table if params.adjusts else None)
        for seed, (params, table) in enumerate(zip(rows, own, strict=True))
    ]
    return torch.tensor(words, dtype=torch.int32, device=device), own


def run_both(
    rows: Sequence[SamplingParams], past: Sequence[History], steps: Sequence[torch.Tensor]
) -> list[list[int]]:
    """The tokens of each step with the given logits, which the kernel chooses as torch does.

    Row i is that of slot n - 1 - i.
    """
    device, (n, vocabulary) = steps[0].device, steps[0].shape
    words, _kept = sampling_of(rows, past, vocabulary, str(device), len(steps))
    starts = [len(row.prompt) + len(row.tokens) - 1 for row in past]
    lengths = torch.tensor(starts, dtype=torch.int32, device=device)
    slots = torch.arange(n, dtype=torch.int32, device=device).flip(0)
    tokens = torch.zeros(n, dtype=torch.int32, device=device)
    log = torch.full((n, 1), -9, dtype=torch.int32, pin_memory=device.type == "cuda")
    found = []
    for number, logits in enumerate(steps, 1):
        select_token(logits, tokens, lengths, slots, log, words.flip(0))
        positions = [start + number for start in starts]
        wanted = sample(logits.cpu(), rows, range(n), positions, past).tolist()
        assert lengths.tolist() == positions
        assert log[:, 0].tolist() == wanted[::-1]
        for row, token in zip(past, wanted, strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]
        found.append(wanted)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [7, 1001, 33000])
def test_the_kernel_chooses_as_torch(
    vocabulary: int, dtype: torch.dtype, kernel_device: str
) -> None:
    """Step after step, counting its own tokens; few logits are large, so that tokens repeat."""
    count = 3 if kernel_device == "cpu" else 40
    steps = [normal(len(ROWS), vocabulary, dtype=dtype, device=kernel_device) for _ in range(count)]
    for logits in steps:
        logits[:, :8] += 3
    found = run_both(ROWS, histories(vocabulary), steps)
    assert vocabulary > 7 or found[-1][-1] == NONE_ALLOWED


def test_each_option_changes_the_kernel_s_choice(kernel_device: str) -> None:
    """The logits are 6, 5, 4, ... in every step, so that it is known what each option does."""
    rows = {
        (1, 0, 2, 0, 1, 0): SamplingParams(bad_words=[(0, 0), (1, 0, 1), (9, 1, 0, 0), (9, 0)]),
        (0, 0, 1, 0, 1, 2): SamplingParams(bad_words=[(9, 9)], frequency_penalty=0.75),
        (1, 1, 1, 0, 0, 0): SamplingParams(min_tokens=3, stop_token_ids=[0]),
        (0, 1, 0, 0, 0, 0): SamplingParams(repetition_penalty=1.01, presence_penalty=1.2),
        (2, 2, 2, 2, 2, 2): SamplingParams(bad_words=[(0,)], logit_bias={0: 9, 1: -1.5}),
    }
    logits = 6 - torch.arange(12, dtype=torch.bfloat16, device=kernel_device)
    past = [History((9,), []) for _ in rows]
    past[3] = History((0, 9), [])
    found = run_both(list(rows.values()), past, [logits.repeat(len(rows), 1)] * 6)
    assert [*zip(*found, strict=True)] == list(rows)


def test_their_memory_is_what_the_plan_has() -> None:
    """Besides the header, and lists of forbidden tokens."""
    for vocabulary in (7, 1001, 33000):
        _, tables = sampling_of(ROWS, histories(vocabulary), vocabulary, "cpu", 300)
        for params, past, table in zip(ROWS, histories(vocabulary), tables, strict=True):
            tokens = len(past.prompt) + len(past.tokens) + 300
            lists = 3 * sum(len(word) for word in params.bad_words) + 2
            assert 4 * table.numel() <= adjustment_bytes(tokens, vocabulary) + 48 + 4 * lists


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_no_penalty_makes_float16_logits_infinite(penalty: float) -> None:
    params = SamplingParams(repetition_penalty=penalty, presence_penalty=2, logit_bias={1: 100})
    logits = torch.tensor([[0.0, 65504, -65504]], dtype=torch.float16)
    past = History((0, 1, 2), [1])
    assert adjusted(logits[0].float(), params, past).isfinite().all()
    assert sample(logits, [params], [0], [4], [past]).item() in (0, 1)


def test_penalties_that_overflow_leave_no_token(kernel_device: str) -> None:
    params = SamplingParams(repetition_penalty=1e-6)
    logits = torch.full((1, 40), 1e36, dtype=torch.bfloat16, device=kernel_device)
    words, _kept = sampling_of([params], [History((1,))], 40, kernel_device, 4)
    integers = torch.zeros(3, 1, dtype=torch.int32, device=kernel_device)
    log = torch.zeros(1, 1, dtype=torch.int32, pin_memory=kernel_device == "cuda")
    select_token(logits, *integers, log, words)
    assert integers[1].item() == 1 and log.item() == NO_TOKEN
    assert sample(logits.cpu(), [params], [0], [1], [History((1,))]).item() == NO_TOKEN
    assert words.shape == (1, SAMPLING_WORDS)
