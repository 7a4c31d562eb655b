"""Drafts of a GPU's steps and their acceptance, as dakrun/drafts and engine/acceptance.py do it."""

import numpy as np
import pytest
import torch

from dakrun.drafts import FileIndex, continuation, longest_match
from dakrun.geometry import KV_BLOCK, LONGEST_MATCH
from dakrun.kernels.attention import BlockTables, KVShape, PromptSegment, PromptWork
from dakrun.kernels.draft_tokens import (
    DraftBuffers,
    Outcome,
    SlotDrafts,
    SlotTexts,
    accept_drafts,
)

POSITIONS, SLOTS = 700, 9
SHAPE = KVShape(2, 64, POSITIONS)
BY_MATCH = [0, 2, 3, *[6] * (LONGEST_MATCH - 2)]


class Case:
    """Slots with texts that repeat themselves, and rows of some of them in another order."""

    def __init__(self, device: str, width: int, rows: int = 7, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        newest = torch.zeros(SLOTS, dtype=torch.int32, device=device)
        self.texts = SlotTexts.empty(newest, POSITIONS, depth=64, proposed=12)
        self.starts = [*random.integers(0, POSITIONS - 40, SLOTS - 2), 0, 1]
        self.tokens, limits = [], []
        for slot, start in enumerate(self.starts):
            text = random.integers(3, 9, start + 1)
            if start > 40:
                text[-20:] = text[7:27]
            self.tokens.append(text)
            self.texts.text[slot, : start + 1] = torch.from_numpy(text)
            limits.append(SlotDrafts(int(start) + 9 + slot, int(start) + 5 * slot))
        limits[3] = SlotDrafts(int(self.starts[3]), POSITIONS)  # at its end
        self.limits = limits
        self.texts.limits.copy_(torch.tensor(limits, dtype=torch.int32))
        self.texts.by_match.copy_(torch.tensor(BY_MATCH, dtype=torch.int32))
        self.slots = random.permutation(SLOTS)[:rows].tolist()
        self.slots[0] = 3
        self.slots[2:] = [slot for slot in range(SLOTS) if slot not in (3, self.slots[1])][
            : rows - 2
        ]
        self.rows = torch.tensor(self.slots, dtype=torch.int32, device=device)
        starts = [int(self.starts[slot]) for slot in self.slots]
        starts[1] = -1  # a row without a request
        self.lengths = torch.tensor(starts, dtype=torch.int32, device=device)
        blocks = random.permutation(SLOTS * SHAPE.blocks).reshape(SLOTS, -1)
        addresses = torch.from_numpy(1 << 20 | blocks * SHAPE.layer_bytes).to(device)
        self.tables = BlockTables(addresses, SHAPE.head_bytes, 3 * SHAPE.layer_bytes)
        self.buffers = DraftBuffers(rows, width, SHAPE, 4, torch.device(device))
        self.width = width

    def wanted(self, row: int) -> tuple[list[int], int]:
        """The tokens of a row, by definition, and the length of the match."""
        text = self.tokens[self.slots[row]]
        start, limits = len(text) - 1, self.limits[self.slots[row]]
        if row == 1 or start >= limits.end:
            return [], -1
        match, match_end = longest_match(text)
        most = min(BY_MATCH[match], self.width - 1)
        most = max(0, min(most, min(limits.room, limits.end) - 1 - start))
        return [int(text[-1]), *continuation(text, match_end, most)], match


@pytest.mark.parametrize("width", [1, 4, 8, 32])
@pytest.mark.parametrize("seed", [0, 1])
def test_drafts_are_those_of_the_longest_match(seed: int, width: int, kernel_device: str) -> None:
    case = Case(kernel_device, width, seed=seed)
    found = case.buffers
    for buffer in (found.tokens, found.positions, found.kv_addresses):
        buffer.fill_(-7)
    found.draft(case.lengths, case.rows, case.texts, case.tables)
    segments, lengths = [], set[int]()
    for row, slot in enumerate(case.slots):
        tokens, match = case.wanted(row)
        lengths.add(len(tokens))
        start, idle = len(case.tokens[slot]) - 1, width - len(tokens)
        mine = slice(row * width, row * width + width)
        assert found.matches[row] == match
        assert found.tokens[mine].tolist() == tokens + [0] * idle
        positions = [*range(start, start + len(tokens))]
        assert found.positions[mine].tolist() == positions + [-1] * idle
        assert found.slots[mine].tolist() == [slot] * width
        for position, (key, layer, head) in zip(
            positions, found.kv_addresses[mine].tolist(), strict=False
        ):
            block = int(case.tables.addresses[slot, position // KV_BLOCK])
            assert key == block + position % KV_BLOCK * SHAPE.layout.row_bytes
            assert (layer, head) == (case.tables.layer_bytes, case.tables.head_bytes)
        if tokens:
            segments.append(PromptSegment(row * width, slot, start, len(tokens)))
    assert len(lengths) > 2 or width == 1
    work = found.work(len(case.slots))
    made = PromptWork.of(segments, kv_heads=2, group=4, head_dim=64, device=torch.device("cpu"))
    tiles = work.tiles[: int(work.count)].tolist()
    splits = found.rows.splits
    assert len(tiles) == len(case.slots) * splits(len(case.slots)) and splits(7) == 1
    used = [tile[:9] for tile in tiles if tile[1]]
    assert sorted(used) == sorted(tile[:9] for tile in made.tiles.tolist())
    assert all(tile == [0] * 8 + [1, 0, 0, 0] for tile in tiles if not tile[1])


@pytest.mark.parametrize(("passed", "known"), [(0, 7), (3, 7), (5, 6), (11, 3), (12, 12)])
def test_proposals_count_while_the_text_follows_them(
    passed: int, known: int, kernel_device: str
) -> None:
    """They were made `passed` tokens before the newest one, and have `known` tokens, or 12."""
    case = Case(kernel_device, 6)
    row = next(i for i, slot in enumerate(case.slots) if i > 1 and case.starts[slot] > 40)
    slot, start = case.slots[row], int(case.starts[case.slots[row]])
    case.texts.limits[slot] = torch.tensor([start + 90, start + 90], dtype=torch.int32)
    at = start - passed
    tokens = [*case.tokens[slot][at + 1 : start + 1].tolist(), *range(900, 912)][:12]
    tokens[known:] = [-1] * (12 - known)
    for wrong in (False, True):
        if wrong:
            tokens[0] += 1
        for match, counts in ((LONGEST_MATCH, True), (1, False)):
            made = torch.tensor([at, match, *tokens], dtype=torch.int32)
            case.texts.proposals[slot] = made
            found = case.buffers
            found.draft(case.lengths, case.rows, case.texts, case.tables)
            mine = found.tokens[row * 6 : row * 6 + 6].tolist()
            used = int((found.positions[row * 6 : row * 6 + 6] >= 0).sum())
            right = tokens[passed : max(passed, known)][:5]
            follows = not (wrong and passed) and passed < known
            if counts and follows:
                assert mine[1:used] == right and found.matches[row] == LONGEST_MATCH
            else:
                assert mine[:used] == own_drafts(case, row, used) and found.matches[row] < 32


def own_drafts(case: Case, row: int, count: int) -> list[int]:
    """The newest token of a row, and the first tokens that its own text proposes."""
    text = case.tokens[case.slots[row]]
    _, match_end = longest_match(text)
    return [int(text[-1]), *continuation(text, match_end, count - 1)]


COMMON = list(range(100, 112))


@pytest.mark.parametrize(
    ("text", "match", "drafts"),
    [
        ([1, 2, *COMMON], 8, [7, 8, 9]),  # the last answer went on so
        ([1, 102], 1, [*COMMON[3:], 7, 8, 9][:7]),
        ([50, 1, 102, 5, 102], 1, [5, 102, 5, 102, 5, 102, 5]),  # its own text is as good
        ([50, 7, 5, 7], 1, [5, 7, 5, 7, 5, 7, 5]),
        ([60, 100, 101, 102, 9, 100, 101, 102], 3, [9, 100, 101, 102, 9, 100, 101]),
        ([60, 103, 9, 101, 102, 103], 3, COMMON[4:11]),
        ([60, 102, 103, 9, 101, 102, 103], 2, [9, 101, 102, 103, 9, 101, 102]),  # one token longer
        ([60, 103, 9, 102, 103], 2, COMMON[4:11]),
        ([60, 102, 103], 2, COMMON[4:11]),
        ([*COMMON[:9], 60, *COMMON[:9]], 9, [60, *COMMON[:6]]),
        ([1, 2, 61], 0, []),
        ([1, 2, 61], 0, [105, *COMMON[6:]]),  # a token that is common there, then the index
        ([100], 1, COMMON[1:8]),
    ],
)
def test_the_index_of_all_answers_gives_drafts_where_it_knows_a_longer_end(
    text: list[int], match: int, drafts: list[int], kernel_device: str
) -> None:
    """The same as the CPU's index; contexts are 1, 2, 3 and 8 tokens long."""
    device = torch.device(kernel_device)
    texts = SlotTexts.empty(torch.zeros(4, dtype=torch.int32, device=device), 64, 64, 4, 1 << 12)
    texts.limits.fill_(64)
    texts.by_match.fill_(7)
    common = drafts[0] if drafts and not match else -1
    texts.common.fill_(common)
    index = FileIndex(4, entries=1 << 12)
    for slot, after in ((0, [5, 6, 4]), (1, [3, 3, 3]), (2, [7, 8, 9])):
        texts.text[slot, 0] = 50 + slot
        index.begin(slot, [50 + slot])
        rows = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2)]
        rows.append(torch.tensor([slot], dtype=torch.int32, device=device))
        for position, token in enumerate([*COMMON, *after], start=1):
            new, at = torch.tensor([[token], [position]], dtype=torch.int32, device=device)
            texts.steps.add_(1)
            accept_drafts(new, at, rows, texts)
            index.extend([slot], [[token]])
    texts.text[3, : len(text)] = torch.tensor(text)
    buffers = DraftBuffers(1, 8, SHAPE, 4, device)
    lengths, slots = torch.tensor([[len(text) - 1], [3]], dtype=torch.int32, device=device)
    tables = BlockTables(torch.zeros(4, 64, dtype=torch.int64, device=device), SHAPE.head_bytes)
    buffers.draft(lengths, slots, texts, tables)
    used = int((buffers.positions >= 0).sum())
    assert buffers.tokens[1:used].tolist() == drafts
    own, match_end = longest_match(np.array(text))
    index.begin(3, text)
    (length,), (others,) = index.propose([3], 7, common)
    found = continuation(np.array(text), match_end, 7)
    if length > own + (own > 1) or not own:
        found = [token for token in others.tolist() if token >= 0]
    assert found == drafts and int(buffers.matches[0]) == match


def test_long_texts_of_few_rows_are_divided(kernel_device: str) -> None:
    """Ranges of KV blocks that follow each other, up to the block of the last query."""
    shape, device = KVShape(1, 64, 64 * KV_BLOCK), torch.device(kernel_device)
    buffers = DraftBuffers(2, 3, shape, 2, device)
    newest = torch.zeros(2, dtype=torch.int32, device=device)
    texts = SlotTexts.empty(newest, 64 * KV_BLOCK, 64, 4)
    texts.limits.fill_(64 * KV_BLOCK)
    texts.by_match.fill_(2)
    lengths = torch.tensor([49 * KV_BLOCK - 1, 20 * KV_BLOCK], dtype=torch.int32, device=device)
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    tables = BlockTables(torch.zeros(2, 64, dtype=torch.int64, device=device), shape.head_bytes)
    buffers.draft(lengths, slots, texts, tables)
    assert buffers.rows.splits(2) == 4
    tiles = buffers.work(2).tiles.tolist()
    assert [tile[5:9] for tile in tiles[:4]] == [
        [0, 16, 0, 3],
        [16, 17, 1, 3],
        [33, 17, 2, 3],
        [0, 0, 0, 1],
    ]
    assert [tile[5:9] for tile in tiles[4:]] == [[0, 21, 0, 1], *[[0, 0, 0, 1]] * 3]
    assert tiles[0][9] == 0 and tiles[4][9] == 4 * 3 * 2


@pytest.mark.parametrize("width", [1, 4, 8])
def test_tokens_that_drafts_foresaw_are_accepted(width: int, kernel_device: str) -> None:
    case, random = Case(kernel_device, width, seed=5), np.random.default_rng(width)
    drafts, rows, texts = case.buffers, len(case.slots), case.texts
    drafts.draft(case.lengths, case.rows, texts, case.tables)
    chosen = torch.from_numpy(random.integers(3, 9, rows * width).astype(np.int32))
    wanted = {}
    for row, slot in enumerate(case.slots):
        tokens, match = case.wanted(row)
        if not tokens:
            continue
        right = min(row % 4, len(tokens) - 1)
        chosen[row * width : row * width + right] = torch.tensor(tokens[1 : 1 + right])
        if right < len(tokens) - 1:
            chosen[row * width + right] = 1 + tokens[1 + right]
        new = chosen[row * width : row * width + 1 + right].tolist()
        wanted[row] = (slot, new, Outcome(len(new), len(tokens) - 1, match if width > 1 else 0))
    before, newest = texts.text.clone(), torch.full((rows,), -9, dtype=torch.int32)
    newest, chosen = newest.to(kernel_device), chosen.to(kernel_device)
    after = drafts.positions + (drafts.positions >= 0).int()  # as select_token leaves them
    accept_drafts(
        chosen, after, (newest, case.lengths, case.rows), texts, drafts if width > 1 else None
    )
    if kernel_device == "cuda":
        torch.cuda.synchronize()
    for row, (slot, new, outcome) in wanted.items():
        start, end = len(case.tokens[slot]) - 1, len(case.tokens[slot]) - 1 + len(new)
        before[slot, start + 1 : end + 1] = torch.tensor(new)
        assert texts.newest[slot] == newest[row] == new[-1]
        assert texts.cached[slot] == end
        assert case.lengths[row] == (end if end < case.limits[slot].end else -1)
        assert Outcome.of(int(texts.log[slot, start % 64])) == outcome
    assert torch.equal(texts.text, before)
    assert case.lengths[0] == case.lengths[1] == -1 and newest[0] == newest[1] == -9
    assert int((texts.log != 0).sum()) == len(wanted)
