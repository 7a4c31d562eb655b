"""Sampling: exact distributions, the masks of transformers, and independence from the batch."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from dakrun.config import SamplingParams
from dakrun.engine import noise, request_seed, sample, sampler
from dakrun.geometry import NO_TOKEN

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def params(**changes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **changes})  # type: ignore[arg-type]


def draw(logits: torch.Tensor, p: SamplingParams, count: int, seed: int = 7) -> torch.Tensor:
    """`count` tokens of one row of logits, at as many steps."""
    rows = logits.expand(count, -1)
    return sample(rows, [p] * count, [seed] * count, range(count))


def random_logits(n: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def support(logits: torch.Tensor, p: SamplingParams) -> torch.Tensor:
    """Which tokens are kept."""
    return torch.stack([sampler.kept_tokens(row, p) for row in logits])


def assert_follows(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Pearson's chi-square statistic is within five standard deviations of its mean."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    kept = probabilities > 0
    assert counts[~kept].sum() == 0
    expected = probabilities[kept].double() * len(tokens)
    assert expected.min() > 5, "the test needs more samples"
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum().item()
    freedom = int(kept.sum()) - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("dtype", DTYPES)
def test_temperature_zero_is_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-1.0, -2.0, -3.0, -1.0]], dtype=dtype)
    tokens = sample(logits, [SamplingParams(top_k=2, top_p=0.5)] * 2, [1, 2], [0, 0])
    assert tokens.dtype == torch.int64 and tokens.tolist() == [1, 0]


def test_all_greedy_rows_take_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_draw", lambda *_: pytest.fail("drew"))
    monkeypatch.setattr(sampler, "noise", lambda *_: pytest.fail("made random numbers"))
    logits = random_logits(5, 33)
    tokens = sample(logits, [SamplingParams()] * 5, range(5), range(5))
    assert torch.equal(tokens, logits.argmax(-1))


def test_empty_batch() -> None:
    assert sample(torch.empty(0, 7), [], [], []).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_sample_the_same_numbers_alike(dtype: torch.dtype) -> None:
    logits = torch.randint(-8, 9, (64, 50), generator=torch.Generator().manual_seed(3)) / 4
    rows = [params(top_k=k, top_p=p) for k in (0, 5) for p in (1.0, 0.7)] * 16
    reference = sample(logits.double(), rows, range(64), range(64))
    assert torch.equal(sample(logits.to(dtype), rows, range(64), range(64)), reference)


def mixed(n: int) -> list[SamplingParams]:
    kinds = [
        SamplingParams(),
        params(),
        params(temperature=0.3),
        params(top_k=4),
        params(top_p=0.8),
        params(temperature=1.7, top_k=9, top_p=0.6),
        params(top_k=1000),
    ]
    return [kinds[i % len(kinds)] for i in range(n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    n, vocab = 70, 517
    logits, rows = random_logits(n, vocab).to(dtype), mixed(n)
    seeds, steps = [request_seed(0, str(i)) for i in range(n)], [i * 3 for i in range(n)]

    def of(order: Sequence[int]) -> list[int]:
        picked = [logits[i] for i in order]
        pick = [[values[i] for i in order] for values in (rows, seeds, steps)]
        return sample(torch.stack(picked), *pick).tolist()  # type: ignore[arg-type]

    together = of(range(n))
    assert [of([i])[0] for i in range(n)] == together
    order = np.random.default_rng(1).permutation(n).tolist()
    assert of(order) == [together[i] for i in order]
    assert of(range(13, 29)) == together[13:29]


def test_seed_and_step_choose_the_sample() -> None:
    logits = torch.zeros(1, 1000)

    def one(seed: int, step: int) -> int:
        return int(sample(logits, [params()], [seed], [step]))

    assert one(5, 0) == one(5, 0)
    assert len({one(5, step) for step in range(50)}) > 40
    assert len({one(seed, 0) for seed in range(50)}) > 40


@pytest.mark.gpu
def test_the_device_makes_no_difference() -> None:
    n = 210
    logits, rows = random_logits(n, 50_272).half(), mixed(n)
    on_cpu = sample(logits, rows, range(n), range(n))
    on_gpu = sample(logits.cuda(), rows, range(n), range(n))
    assert on_gpu.is_cuda and torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize(
    "p",
    [
        params(),
        params(temperature=0.5),
        params(temperature=3.0),
        params(top_k=3),
        params(top_p=0.75),
        params(temperature=1.5, top_k=6, top_p=0.9),
    ],
    ids=str,
)
def test_tokens_follow_the_exact_distribution(p: SamplingParams) -> None:
    logits = torch.tensor([[0.3, -1.0, 1.2, 0.0, 0.9, -0.4, 1.1, -1.5, 0.6, 0.2]])
    scores = logits.double() / p.temperature
    if p.top_k:
        scores = TopKLogitsWarper(p.top_k)(None, scores)
    if p.top_p < 1:
        scores = TopPLogitsWarper(p.top_p)(None, scores)
    assert_follows(draw(logits, p, 6_000), scores.softmax(-1)[0])
    many_seeds = sample(logits.expand(6_000, -1), [p] * 6_000, range(6_000), [0] * 6_000)
    assert_follows(many_seeds, scores.softmax(-1)[0])


def test_joint_distribution_of_two_steps_is_a_product() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5]])
    probabilities = logits.softmax(-1)[0]
    count = 6_000
    first = sample(logits.expand(count, -1), [params()] * count, range(count), [0] * count)
    second = sample(logits.expand(count, -1), [params()] * count, range(count), [1] * count)
    assert_follows(3 * first + second, torch.outer(probabilities, probabilities).flatten())


@pytest.mark.parametrize("top_k", [1, 2, 7, 50, 299, 300, 1000])
def test_top_k_keeps_what_transformers_keeps(top_k: int) -> None:
    logits = random_logits(40, 300, seed=top_k)
    kept = TopKLogitsWarper(top_k)(None, logits) > -math.inf
    assert torch.equal(support(logits, params(top_k=top_k)), kept)


def test_top_k_keeps_equals_of_the_last() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    assert support(logits, params(top_k=2)).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_top_p_keeps_what_transformers_keeps(top_p: float, temperature: float) -> None:
    logits = random_logits(40, 300, seed=int(top_p * 1000))
    kept = TopPLogitsWarper(top_p)(None, logits.double() / temperature) > -math.inf
    assert torch.equal(support(logits, params(temperature=temperature, top_p=top_p)), kept)


def test_top_p_comes_after_top_k() -> None:
    logits = random_logits(40, 300, seed=9)
    scores = TopPLogitsWarper(0.6)(None, TopKLogitsWarper(12)(None, logits.double()))
    assert torch.equal(support(logits, params(top_k=12, top_p=0.6)), scores > -math.inf)


def test_top_p_keeps_equals_of_the_last() -> None:
    logits = torch.tensor([[0.0, 5.0, 0.0, 0.0, 0.0]])
    assert support(torch.zeros(1, 10), params(top_p=0.5)).all()
    assert support(logits, params(top_p=0.5)).tolist() == [[False, True, False, False, False]]
    assert support(logits, params(top_p=0.99)).all()


def test_banned_tokens_and_extreme_temperatures() -> None:
    logits = torch.tensor([[-math.inf, 2.0, -math.inf, 1.0, 60_000.0, -60_000.0]])
    assert set(draw(logits[:, :4], params(temperature=100.0), 500).tolist()) == {1, 3}
    assert set(draw(logits, params(temperature=1e-300), 50).tolist()) == {4}
    assert set(draw(logits, params(top_k=1), 50).tolist()) == {4}


def test_wrong_arguments_name_what_was_expected() -> None:
    logits = torch.zeros(2, 4)
    with pytest.raises(AssertionError, match="expected 2 parameters"):
        sample(logits, [params()], [0, 0], [0, 0])
    with pytest.raises(AssertionError, match="floating point"):
        sample(logits.long(), [params()] * 2, [0, 0], [0, 0])


def reference_noise(seed: int, position: int, token: int) -> float:
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((mix((seed + golden) & mask) + (position + 1) * golden) & mask)
    v = ((mix((state + (token + 1) * golden) & mask) >> 32) + 0.5) / 2**32
    return -math.log(-math.log1p(-v))


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (1, 0), (0, 1), (2**63 - 1, 12_345), (2**64 - 1, 7)]
)
def test_noise_is_that_of_splitmix64(seed: int, position: int) -> None:
    wanted = [reference_noise(seed, position, token) for token in range(1000)]
    assert noise(seed, position, 1000) == pytest.approx(np.array(wanted), rel=1e-5, abs=1e-5)


def test_a_token_that_is_not_kept_is_never_drawn() -> None:
    """Even if the noise of the only one that is kept is the lowest, once in 2^25 tokens."""
    seed, position, kept, vocabulary = 114, 5, 110_485, 151_936
    assert noise(seed, position, vocabulary)[kept] == np.finfo(np.float32).min
    logits = torch.zeros(1, vocabulary)
    logits[0, kept] = 9.0
    for params in ({"top_k": 1}, {"top_p": 0.01}):
        some = SamplingParams(temperature=1.0, **params)  # type: ignore[arg-type]
        assert sample(logits, [some], [seed], [position]).item() == kept


def test_noise_is_spread_evenly() -> None:
    by_token = noise(3, 5, 50_000)
    by_position = np.array([noise(3, position, 1)[0] for position in range(50_000)])
    by_seed = np.array([noise(seed, 5, 1)[0] for seed in range(50_000)])
    for found in (by_token, by_position, by_seed):
        uniform = np.exp(-np.exp(-found.astype(np.float64)))
        assert_follows(
            torch.from_numpy(np.floor(uniform * 100).astype(np.int64)), torch.full((100,), 0.01)
        )


def test_request_seed_is_stable_and_differs() -> None:
    assert request_seed(0, "line-1") == request_seed(0, "line-1") == 7103010754281170937
    seeds = {request_seed(s, i) for s in range(3) for i in ("a", "b", "1", "\ud800", "")}
    assert len(seeds) == 15 and all(0 <= s < 2**63 for s in seeds)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum_get_no_token(dtype: torch.dtype, temperature: float) -> None:
    """NaN, infinity, or -infinity everywhere; a single -infinity is a masked token."""
    logits = random_logits(6, 40).to(dtype)
    logits[0, 7] = math.nan
    logits[2, [3, 9]] = torch.tensor([math.nan, math.inf], dtype=dtype)
    logits[3, 39] = math.inf
    logits[4] = -math.inf
    logits[5, 11] = -math.inf
    given = params(temperature=temperature, top_k=20, top_p=0.9)
    found = sample(logits, [given] * 6, range(6), [0] * 6).tolist()
    alone = sample(logits[[1, 5]], [given] * 2, [1, 5], [0] * 2).tolist()
    assert found == [NO_TOKEN, alone[0], NO_TOKEN, NO_TOKEN, NO_TOKEN, alone[1]]
    assert min(alone) >= 0
