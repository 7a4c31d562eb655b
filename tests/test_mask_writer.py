"""The thread that writes masks of grammars: its side of the words that kernels wait for.

A test plays the GPU: it waits for a slot's counter, reads the mask, and writes a token to the log.
"""

import ctypes
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_tokenizer import make_tokenizer_files

from dakrun import StructuredOutputsParams
from dakrun.engine import LOG_STEPS, MaskWriter
from dakrun.geometry import NO_TOKEN
from dakrun.grammars import Grammars, Guidance
from dakrun.kernels import TokenMask, mask_words
from dakrun.requests import Tokenizer

VOCAB, SLOTS, END = 331, 4, 2
HE, SPACE = 260, 4 + 188  # tokens of tiny_tokenizer


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer.load(make_tokenizer_files(folder / "t"))
    return Grammars(tokenizer.as_json, VOCAB, [END])


class Gpu:
    """Steps of one request in a slot, as select_token takes them."""

    def __init__(self, log: torch.Tensor, slot: int, mask: TokenMask, position: int) -> None:
        self._log, self._slot, self._mask, self.position = log, slot, mask, position
        bits = (ctypes.c_uint32 * mask_words(VOCAB)).from_address(mask.bits)
        self._bits = np.ctypeslib.as_array(bits)
        self._ready = ctypes.c_uint32.from_address(mask.ready)

    @property
    def waits(self) -> bool:
        return self._ready.value < self._mask.base + self.position

    def allowed(self) -> list[int]:
        """The tokens that the mask allows, once it is there."""
        deadline = time.monotonic() + 20
        while self.waits:
            assert time.monotonic() < deadline, "expected a mask within 20 s"
            time.sleep(1e-4)
        found = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[:VOCAB]
        return [int(token) for token in np.flatnonzero(found)]

    def choose(self, token: int) -> None:
        self._log[self._slot, (self.position - 1) % LOG_STEPS] = token
        self.position += 1


@pytest.fixture
def log() -> torch.Tensor:
    return torch.zeros(SLOTS, LOG_STEPS, dtype=torch.int32)


def choice(grammars: Grammars, *texts: str) -> Guidance:
    return Guidance(grammars, StructuredOutputsParams(choice=texts))


def test_masks_follow_the_tokens_of_each_slot(grammars: Grammars, log: torch.Tensor) -> None:
    writer = MaskWriter(log, VOCAB, ahead=2)
    h, e, i = (grammars.tokenizer.tokenize_str(text)[0] for text in "hei")
    steps = []
    for slot, position in ((0, 5), (3, 40)):
        mask = writer.begin(slot, choice(grammars, "he", "hi").guide(), position)
        steps.append(Gpu(log, slot, mask, position))
    assert all(one.waits for one in steps)  # the stream has not come to the step yet
    writer.announce()
    for one in steps:
        assert one.allowed() == sorted([h, HE])
        one.choose(h)
    steps[1].allowed()
    steps[1].choose(i)
    assert steps[0].allowed() == sorted([e, i])
    steps[0].choose(e)
    for one in steps:
        assert one.allowed() == [END]
        one.choose(END)
        assert one.allowed() == [END]  # a step that was launched before the end was known
    writer.release_all()
    assert not any(one.waits for one in steps)


def test_the_thread_waits_less_for_python(grammars: Grammars, log: torch.Tensor) -> None:
    """Others give it Python's lock sooner while it runs."""
    before = sys.getswitchinterval()
    writer = MaskWriter(log, VOCAB, ahead=2)
    assert sys.getswitchinterval() == before
    for _ in range(2):
        writer.begin(0, choice(grammars, "he").guide(), 5)
        assert sys.getswitchinterval() < before
        writer.release_all()
        assert sys.getswitchinterval() == before


def test_what_a_grammar_forces_is_known(grammars: Grammars, log: torch.Tensor) -> None:
    """Where a mask has one token: it, and those behind it; not before it is asked for."""
    tokens = [grammars.tokenizer.tokenize_str(text)[0] for text in ("x", "h")]
    for forces in (False, True):
        writer = MaskWriter(log, VOCAB, ahead=2)
        writer.forces = forces
        guide = choice(grammars, "xhe", "hi")
        step = Gpu(log, 1, writer.begin(1, guide.guide(), 5), 5)
        writer.announce()
        assert len(step.allowed()) == 2
        step.choose(tokens[0])
        assert step.allowed() == [tokens[1]] or step.allowed() == [HE]
        deadline = time.monotonic() + 20
        while forces and not writer.forced() and time.monotonic() < deadline:
            time.sleep(1e-3)
        if forces:
            position, found = writer.forced()[1]
            assert position == 6 and grammars.tokenizer.decode_str(list(found)) == "he"
        else:
            assert writer.forced() == {}
        writer.release_all()
        assert writer.forced() == {}


def test_a_slot_that_changes_its_request_lets_old_steps_end(
    grammars: Grammars, log: torch.Tensor
) -> None:
    writer = MaskWriter(log, VOCAB, ahead=2)
    old = Gpu(log, 1, writer.begin(1, choice(grammars, "hehehe").guide(), 9), 9)
    writer.announce()
    old.allowed()
    old.choose(HE)
    old.allowed()
    new = Gpu(log, 1, writer.begin(1, choice(grammars, "he").guide(), 10), 10)
    for _ in range(2):  # those in flight
        assert not old.waits
        old.choose(HE)  # for position 10, and so where the new request's first token comes
    assert new.waits
    writer.announce()
    assert HE in new.allowed()
    time.sleep(0.01)
    assert HE in new.allowed()  # what the old request left is not taken for its token
    new.choose(HE)
    assert new.allowed() == [END]
    writer.release(1)
    assert not new.waits
    writer.release_all()


def test_a_request_that_resumes_goes_on_behind_its_tokens(
    grammars: Grammars, log: torch.Tensor
) -> None:
    writer = MaskWriter(log, VOCAB, ahead=2)
    h = grammars.tokenizer.tokenize_str("h")[0]
    step = Gpu(log, 2, writer.begin(2, choice(grammars, "he", "hi").guide([h]), 7), 7)
    writer.announce()
    assert h not in step.allowed() and len(step.allowed()) == 2
    step.choose(NO_TOKEN)  # logits that are not finite end the request
    step.position += 5
    step.allowed()
    early = Gpu(log, 1, writer.begin(1, choice(grammars, "he").guide(), 7), 7)
    early.choose(NO_TOKEN)  # before the mask is there: the thread may miss it
    writer.announce()
    early.position -= 1
    early.allowed()
    early.position += 1
    writer.release_failed([(0, [4]), (1, [NO_TOKEN])])
    assert not early.waits
    writer.release_all()


def test_a_thought_with_a_budget_ends_all_waits(grammars: Grammars, log: torch.Tensor) -> None:
    writer = MaskWriter(log, VOCAB, ahead=2)
    guide = Guidance(grammars, None, ("<t>", "</t>"), begun=True, budget=2).guide()
    step = Gpu(log, 0, writer.begin(0, guide, 3), 3)
    writer.announce()
    close = grammars.tokenizer.tokenize_str("</t>")
    for token in (HE, HE):
        assert len(step.allowed()) == VOCAB
        step.choose(token)
    for token in close:
        assert step.allowed() == [token]
        step.choose(token)
    step.position += 100
    assert len(step.allowed()) == VOCAB
    writer.release_all()


def test_an_error_of_the_thread_reaches_the_step_loop(
    grammars: Grammars, log: torch.Tensor
) -> None:
    writer = MaskWriter(log, VOCAB, ahead=2)
    guide = Guidance(grammars, None, ("<t>", "</t>"), begun=True, budget=0).guide()
    step = Gpu(log, 0, writer.begin(0, guide, 3), 3)
    writer.announce()
    assert len(step.allowed()) == 1
    step.choose(HE)  # not the token that was forced
    step.position += 100
    step.allowed()
    with pytest.raises(RuntimeError, match="masks of grammars"):
        writer.check()
    writer.release_all()
    writer.check()
