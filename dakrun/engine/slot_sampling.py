"""Options by which the next tokens of slots are chosen, as the GPU's steps read them.

Knows options, guides and slots; neither rows nor graphs.
"""

from collections.abc import Iterable, Sequence

import torch

from dakrun.config import SamplingParams
from dakrun.engine.decode_step import DecodeStep
from dakrun.engine.mask_writer import MaskWriter
from dakrun.engine.step import Row
from dakrun.kernels import adjustments, sampling_words, without_options
from dakrun.memory.device import upload


class SlotSampling:
    """The options of all slots in `step.sampling`, what they change logits by, and `masks`."""

    def __init__(self, step: DecodeStep, slots: Iterable[int], ahead: int) -> None:
        """Steps in flight choose up to `ahead` tokens of a slot."""
        self._table, self._device = step.sampling, step.backend.like.device
        self._vocabulary = step.backend.model.config.vocab_size
        self.masks = MaskWriter(step.log, self._vocabulary, ahead)
        self._words = dict.fromkeys(slots, sampling_words(SamplingParams(), 0))
        self._adjustments: dict[int, torch.Tensor | None] = {}  # by slot

    def begin(self, rows: Sequence[Row]) -> None:
        """Say how the tokens of the rows' slots are chosen, where this has changed.

        All tokens of the rows' requests are known; their guides begin behind the rows.
        """
        words = {}
        for row in rows:
            params, seed, history, limit, guidance = row.sampling
            own = mask = None
            if params.adjusts:
                made = adjustments(params, *history, limit=limit, vocabulary=self._vocabulary)
                own = upload(made, self._device)
            if guidance is not None:
                mask = self.masks.begin(row.slot, guidance.guide(history.tokens), row.last + 1)
            else:
                self.masks.release(row.slot)
            words[row.slot] = sampling_words(params, seed, mask, own)
            self._adjustments[row.slot] = own
        self.masks.announce()
        changed = {slot: new for slot, new in words.items() if self._words[slot] != new}
        if changed:
            slots = upload(torch.tensor(list(changed), dtype=torch.int32), self._device)
            new = upload(torch.tensor(list(changed.values()), dtype=torch.int32), self._device)
            self._table[slots] = new
            self._words |= changed

    def drop_options(self) -> None:
        """Let the tokens of all slots be chosen without masks and changed logits."""
        self._words = {slot: without_options(own) for slot, own in self._words.items()}
        self._table.copy_(torch.tensor(list(self._words.values()), dtype=torch.int32))
