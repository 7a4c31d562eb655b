"""Drafts of tokens: ends of texts that occur before, the index of a file, lengths of drafts."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from planned import known, work

from dakrun.config import MAX_DRAFT, Speculation
from dakrun.drafts import (
    CommonToken,
    Drafter,
    DraftLengths,
    FileIndex,
    continuation,
    longest_match,
)
from dakrun.engine import DraftChoice
from dakrun.errors import UsageError
from dakrun.geometry import LONGEST_MATCH
from dakrun.plan import VERIFIED_TOKENS, DraftForecast
from dakrun.plan.footprint import activation_bytes, verified_tokens


def by_definition(text: list[int]) -> tuple[int, int]:
    """longest_match, position by position."""
    best = (0, len(text))
    for match_end in range(1, len(text)):
        length = 0
        most = min(match_end, LONGEST_MATCH)
        while length < most and text[match_end - 1 - length] == text[-1 - length]:
            length += 1
        if length and length >= best[0]:
            best = (length, match_end)
    return best


@pytest.mark.parametrize("alphabet", [1, 2, 3, 40])
def test_the_last_of_the_longest_matches_is_found(alphabet: int) -> None:
    random = np.random.default_rng(alphabet)
    for n in (*range(1, 12), 64, 65, 300):
        text = random.integers(0, alphabet, n)
        assert longest_match(text) == by_definition(text.tolist())


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    text = np.array([9, 1, 2, 3, 1, 2, 3])
    assert longest_match(text) == (3, 4)
    assert continuation(text, 4, 7) == [1, 2, 3, 1, 2, 3, 1]
    assert continuation(np.array([4, 5]), 2, 3) == []


def test_the_index_of_a_file_knows_what_followed_last() -> None:
    """Two answers begin alike; a fourth slot's text ends like their beginning."""
    index, common = FileIndex(4, entries=1 << 12), list(range(100, 120))
    for slot, after in ((0, [3, 4, 5]), (1, [7, 8, 9])):
        index.begin(slot, [50 + slot])
        for token in [*common, *after]:
            index.extend([slot], [[token]])
        index.begin(3, [1, 2, *common])
        lengths, tokens = index.propose([3], 6)
        assert lengths.tolist() == [8] and tokens[0, :4].tolist() == [*after, -1]
    index.begin(3, [5, 6])
    lengths, tokens = index.propose([3, 3], 2)
    assert lengths.tolist() == [0, 0] and (tokens < 0).all()


def test_tokens_enter_the_index_alike_one_by_one_and_together() -> None:
    random = np.random.default_rng(3)
    texts = random.integers(0, 50, (3, 40)).tolist()
    one, many = FileIndex(3, entries=1 << 14), FileIndex(3, entries=1 << 14)
    for index in (one, many):
        for slot in range(3):
            index.begin(slot, texts[slot][:5])
    for slot in range(3):
        for token in texts[slot][5:]:
            one.extend([slot], [[token]])
    done = [5, 5, 5]
    while min(done) < 40:
        counts = [min(n, 40 - at) for n, at in zip(random.integers(1, 5, 3), done, strict=True)]
        slots = [slot for slot in range(3) if counts[slot]]
        many.extend(slots, [texts[s][done[s] : done[s] + counts[s]] for s in slots])
        done = [at + n for at, n in zip(done, counts, strict=True)]
    for slot in range(3):
        for index in (one, many):
            index.begin(slot, texts[slot][:20])
    for found in zip(one.propose([0, 1, 2], 15), many.propose([0, 1, 2], 15), strict=True):
        assert (found[0] == found[1]).all()
    assert one.propose([0, 1, 2], 15)[1].tolist() == [text[20:35] for text in texts]


def test_a_full_index_forgets_what_is_old() -> None:
    random = np.random.default_rng(5)
    index, texts = FileIndex(1, entries=1 << 10), random.integers(0, 10_000, (60, 30)).tolist()
    for text in texts:
        index.begin(0, [1])
        index.extend([0], [text])
    for text, kept in ((texts[0], False), (texts[-1], True)):
        index.begin(0, text[:20])
        assert (index.propose([0], 8)[1].tolist() == [text[20:28]]) == kept


def test_drafts_are_as_long_as_they_are_likely_to_be_right() -> None:
    lengths = DraftLengths(most=8)
    assert lengths.by_match[0] == 0 and lengths.by_match[1] < lengths.by_match[16] == 8
    for _ in range(200):
        lengths.learn([16, 3], [8, 2], [0, 2])
    assert lengths.by_match[16] == 1 and lengths.by_match[3] == 8


@pytest.mark.parametrize(("cost", "drafted"), [(0.5, 2), (0.15, 2), (0.05, 4), (0.01, 6), (0, 8)])
def test_drafts_are_longer_where_tokens_cost_less(cost: float, drafted: int) -> None:
    """Half of the tokens are right; beyond LEAST_CHANCE the cost does not count."""
    lengths = DraftLengths(most=8, cost=cost)
    for _ in range(500):
        lengths.learn([5], [2], [1])
    assert lengths.by_match[5] == drafted


def test_drafts_without_a_match_are_few_where_tokens_cost_something() -> None:
    """At first one where a token costs little; none once that was wrong, or where it costs more."""
    assert DraftLengths(most=8).by_match[0] == 0
    lengths = DraftLengths(most=8, cost=0.05)
    assert lengths.by_match[0] == 1
    for _ in range(40):
        lengths.learn([0, 0], [1, 0], [0, 0])
    assert lengths.by_match[0] == 0


def test_the_token_that_is_common_where_nothing_is_known() -> None:
    common = CommonToken()
    assert common.token < 0
    common.learn([0, 3, 0], [[7, 1], [9], []])
    assert common.token == 7
    common.learn([2, 2, 0, 0], [[9], [9], [8], [-1]])
    assert common.token == 7
    common.learn([0], [[8, 8]])
    assert common.token == 8


def test_a_common_token_is_drafted_without_a_match() -> None:
    drafter = Drafter(slots=2, most=4, cost=0.001)
    drafter.begin(0, [1, 2])
    assert drafter.propose([0], [4], {}) == [[]]
    drafter.learn([0], [[50]])
    drafter.propose([0], [4], {})
    drafter.learn([0], [[60]])
    drafter.begin(1, [3, 4])
    assert drafter.propose([1, 0], [4, 1], {}) == [[50, 60], [50]]
    assert drafter.propose([1], [1], {1: [9, 9]}) == [[9]], "a grammar comes first"


def test_drafts_come_from_a_row_s_own_text_and_from_others() -> None:
    drafter = Drafter(slots=3, most=4)
    drafter.begin(0, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3])
    drafter.begin(1, [30, 31])
    drafter.begin(2, [40, 41, 42])
    assert drafter.propose([0, 1], [3, 4], {}) == [[4, 5, 6], []]
    drafter.learn([0, 1], [[4, 5, 9], list(range(32, 60))])
    drafter.learn([2], [list(range(32, 52))])
    (found,) = drafter.propose([2], [4], {2: []})
    assert found == [52, 53, 54, 55]
    assert drafter.propose([0], [2], {0: [8, 8, 8]}) == [[8, 8]]


def test_the_choice_of_drafts_is_read() -> None:
    assert Speculation.of("off") == Speculation() and Speculation.of("auto").mode == "auto"
    assert Speculation.of("suffix:3") == Speculation("suffix", 3)
    for wrong in ("", "on", "suffix:", "suffix:0", f"suffix:{MAX_DRAFT + 1}", "off:2", "auto:1"):
        with pytest.raises(UsageError, match="expected auto, off, suffix or suffix:K") as error:
            Speculation.of(wrong)
        assert "suffix:K" in error.value.hint


def test_the_index_has_a_fixed_size() -> None:
    index, random = FileIndex(64), np.random.default_rng(0)

    def size() -> int:
        return sum(array.nbytes for array in vars(index).values() if hasattr(array, "nbytes"))

    before = size()
    for _ in range(20):
        index.extend(range(64), random.integers(0, 50_000, (64, 9)).tolist())
        index.propose(range(64), 4)
    assert before == size() < 13 << 20


class Row:
    """A request whose drafts are right more or less often than those of others."""

    def __init__(self, tokens: float) -> None:
        self.tokens, self.kept = tokens, 0.0


def choice_of(mode: str, expected: float, drafts: int = 7) -> DraftChoice:
    """For up to 64 rows, where drafts are predicted to make steps `expected` times as long."""
    forecasts = [
        DraftForecast(rows=rows, drafts=drafts, plain_s=0.5, step_s=0.5 * expected)
        for rows in (1, 2, 4, 8, 16, 32, 64)
    ]
    return DraftChoice(Speculation.of(mode), forecasts)


def record(
    choice: DraftChoice, rows: list[Row], counts: list[int], drafts: int, seconds: float
) -> None:
    """Of a step without prompts."""
    choice.launched(drafts)
    choice.record_tokens(rows, counts, drafts)  # type: ignore[arg-type]
    choice.record_time(counts, drafts, seconds)


def run_of(
    rows: list[Row], longer: float, expected: float = 1.0, steps: int = 4000
) -> tuple[float, float, int]:
    """Seconds of `steps` tokens of a row under "auto" and under "off", and steps without drafts.

    Steps with drafts take `longer` seconds, others one.
    """
    choice, random = choice_of("auto", expected), np.random.default_rng(1)
    done = spent = 0.0
    plain = 0
    while done < steps:
        drafts = choice.next(rows)  # type: ignore[arg-type]
        counts = [1] * len(rows)
        if drafts:
            counts = [max(1, round(random.normal(row.tokens, 0.5))) for row in rows]
        seconds = random.normal(longer if drafts else 1.0, 0.02)
        record(choice, rows, counts, drafts, seconds)
        done, spent, plain = done + sum(counts) / len(rows), spent + seconds, plain + (not drafts)
    return spent, done, plain


@pytest.mark.parametrize("expected", [1.0, 3.0])
@pytest.mark.parametrize(("tokens", "longer"), [(0.0, 3.0), (0.0, 1.02), (2.5, 4.0), (1.3, 1.5)])
def test_useless_drafts_cost_little(tokens: float, longer: float, expected: float) -> None:
    """Whether they were predicted to cost as little or much."""
    spent, plain, _ = run_of([Row(tokens) for _ in range(8)], longer, expected)
    assert spent < 1.015 * plain


@pytest.mark.parametrize("expected", [1.0, 3.0])
@pytest.mark.parametrize(("tokens", "longer"), [(3.0, 1.05), (2.2, 1.5)])
def test_drafts_that_save_time_are_found(tokens: float, longer: float, expected: float) -> None:
    spent, plain, _ = run_of([Row(tokens) for _ in range(8)], longer, expected)
    late = 300 * (expected > longer)  # a trial may not cost much of what has passed
    assert spent < 1.1 * plain * longer / tokens + late


def test_the_rows_that_are_left_decide() -> None:
    """Drafts of four rows in eight are right: with these four alone they save time."""
    choice, random = choice_of("auto", 1.0), np.random.default_rng(2)
    rows = [Row(5.0 if number % 2 else 1.0) for number in range(8)]

    def drafts_of(some: list[Row], longer: float) -> list[int]:
        found = []
        for _ in range(60):
            found.append(choice.next(some))  # type: ignore[arg-type]
            counts = [round(row.tokens) if found[-1] else 1 for row in some]
            seconds = random.normal(longer if found[-1] else 1.0, 0.01)
            record(choice, some, counts, found[-1], seconds)
        return found[20:]

    assert all(drafts_of(rows, 2.0)), "3 tokens in the time of 2"
    assert all(drafts_of(rows[1::2], 4.0)), "5 in the time of 4"
    assert sum(map(bool, drafts_of(rows[::2], 4.0))) <= 1, "one in the time of 4"


def test_steps_without_drafts_are_measured_again() -> None:
    _, done, plain = run_of([Row(4.0)], 1.0, steps=4000)
    assert 5 < plain < 0.02 * done


def test_steps_with_prompts_say_how_good_drafts_are_and_measure_no_time() -> None:
    """With "auto" only drafts that are known to save time are worth a step beside prompts."""
    choice, rows = choice_of("auto", 1.0), [Row(1.0)] * 2
    record(choice, rows, [1, 1], 0, 1.0)
    assert choice.next(rows) and choice.tries  # type: ignore[arg-type]
    record(choice, rows, [3, 3], 7, 1.5)
    assert choice.next(rows) and not choice.tries  # type: ignore[arg-type]
    for _ in range(60):
        choice.record_tokens(rows, [1, 1], 7)  # type: ignore[arg-type]
    assert not choice.next(rows) or choice.tries  # type: ignore[arg-type]
    choice = choice_of("suffix:7", 1.0)
    for _ in range(16):
        choice.record_tokens(rows, [1, 1], 7)  # type: ignore[arg-type]
    assert not choice.next(rows)  # type: ignore[arg-type]


def test_rows_have_room_for_the_drafts_of_more_rows() -> None:
    """A runner may compute them in a larger batch."""
    forecasts = [
        DraftForecast(rows=rows, drafts=drafts, plain_s=1.0, step_s=1.0)
        for rows, drafts in ((1, 1), (2, 15), (4, 7))
    ]
    choice = DraftChoice(Speculation.of("suffix"), forecasts)
    found = [choice.next([Row(1.0)] * rows) for rows in (1, 2, 3, 4, 5)]  # type: ignore[list-item]
    assert found == [15, 15, 7, 7, 0]


def test_useless_drafts_pause() -> None:
    """Steps without are ever more of them, until drafts are right."""
    choice, rows = choice_of("suffix:7", 1.0), [Row(1.0)] * 2

    def steps(tokens: int) -> list[int]:
        found = []
        for _ in range(80):
            found.append(choice.next(rows))  # type: ignore[arg-type]
            counts = [tokens if found[-1] else 1] * 2
            record(choice, rows, counts, found[-1], 1.0)
        return found

    pauses = [[*[0] * steps, 7] for steps in (7, 15, 31)]
    assert steps(1) == [7] * 16 + list(itertools.chain(*pauses)) + [0] * 8
    assert steps(2) == [0] * 23 + [7] * 57


@pytest.mark.parametrize("longer", [1.0, 1.05, 1.09, 1.12])
@pytest.mark.parametrize("chance", [0.0, 0.01, 0.02, 0.04, 0.08])
def test_drafts_that_are_seldom_right_cost_little(chance: float, longer: float) -> None:
    """Of four rows, of which a draft accepted by chance is many tokens in its step."""
    choice, rows = choice_of("suffix", longer), [Row(1.0)] * 4
    random, spent, done = np.random.default_rng(3), 0.0, 0.0
    for _ in range(1000):
        drafts = choice.next(rows)  # type: ignore[arg-type]
        counts = [1 + int(bool(drafts) and random.random() < chance) for _ in rows]
        record(choice, rows, counts, drafts, longer if drafts else 1.0)
        spent, done = spent + (longer if drafts else 1.0), done + sum(counts) / 4
    assert done / spent > 0.98


def test_drafts_that_are_often_right_never_pause() -> None:
    """However much they are predicted to cost."""
    choice, rows = choice_of("suffix", 4.0), [Row(1.0)] * 8
    for number in range(200):
        assert choice.next(rows)  # type: ignore[arg-type]
        record(choice, rows, [2 if (number + row) % 5 == 0 else 1 for row in range(8)], 7, 4.0)


def test_the_time_of_drafts_that_were_not_accepted() -> None:
    choice, rows = choice_of("suffix:7", 1.5), [Row(1.0)] * 2
    record(choice, rows, [8, 8], 7, 3.0)
    assert choice.rejected_s == 0
    record(choice, rows, [1, 1], 7, 3.0)
    assert choice.rejected_s == pytest.approx(1.0), "a step was predicted to be 1.5 times as long"


def test_other_choices_are_not_measured() -> None:
    rows = [Row(1.0) for _ in range(65)]
    assert DraftChoice(Speculation.of("off"), []).next(rows[:2]) == 0  # type: ignore[arg-type]
    choice = choice_of("suffix:3", 9.0, drafts=3)
    record(choice, rows[:8], [1] * 8, 3, 9.0)
    assert choice.next(rows[:8]) == choice.next(rows[:64]) == 3  # type: ignore[arg-type]
    assert choice.next(rows) == choice.next([]) == 0, "too many rows, or none"  # type: ignore[arg-type]


def test_memory_of_steps_with_drafts_is_planned_and_bounded() -> None:
    """Logits of all their tokens among it; rows of large batches have fewer drafts, or none."""
    model, planned = known("llama-3-8b"), {}
    for batch in (8, 128, 512):
        for choice in ("off", "suffix:7"):
            made = replace(work(batch), speculation=Speculation.of(choice))
            planned[batch, choice] = activation_bytes(model, made)
            wanted = 0 if choice == "off" else min(8 * batch, VERIFIED_TOKENS)
            assert verified_tokens(made) == wanted
    more = {b: planned[b, "suffix:7"] - planned[b, "off"] for b in (8, 128, 512)}
    assert more[8] > 64 * model.vocab_size * 2
    assert more[8] < more[128] < more[512] < 1.01 * more[128]
