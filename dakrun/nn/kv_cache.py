"""PartitionedKVCache: the keys and values of a batch, with some slots in a remote tier.

Knows where slots lie and how many positions are filled, not how attention reads them.
"""

from collections.abc import Sequence

import torch

from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.kernels.attention import BlockTables, KVShape, kv_blocks
from dakrun.kernels.attention.kv_blocks import DTYPES
from dakrun.launches import TierAccess
from dakrun.memory.tiers import HOST, allocate_tiers
from dakrun.nn.tiers import check_remote, profiled_access, remote_count


class PartitionedKVCache:
    """Keys and values of `batch` slots with room for `positions` each, in each of `layers`.

    >>> with PartitionedKVCache(8, 2, 64, 100, dtype=torch.float16, ratio=0.25) as cache:
    ...     cache.slots, cache.ratio  # local and remote slots
    ((6, 2), 0.25)

    The last slots, `ratio` of the batch, lie in the tier `remote`: "host", or "peer:N" for the
    memory of GPU N. The attribute `ratio` is rounded to whole slots. Slots are packed for
    SplitK_FlashAttn in KV blocks of 64 positions (dakrun.kernels.attention.kv_blocks).
    `tier_bytes` are the bytes allocated in each tier. `lengths`, int32 [batch] on `device`, counts
    the positions that are filled in every layer; read it only.

    Memory is allocated once and does not move: a CUDA graph that reads and appends stays valid as
    lengths grow. `access` and `profile` say how a GPU reads the remote tier, as for SplitKGEMM.
    `close`, or the end of a `with` block, frees the memory.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        positions: int,
        *,
        dtype: torch.dtype,
        layers: int = 1,
        ratio: float = 0.1,
        remote: str = HOST,
        profile: HardwareProfile | str | None = None,
        access: TierAccess | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Allocate empty slots of float16 or bfloat16, with heads of 64, 80, 96 or 128.

        Raises ValueError for an invalid size, dtype, device, ratio or tier, UsageError if the
        profile is not found or lacks the tier, and CannotRun if memory is short.
        """
        self.shape = KVShape(kv_heads, head_dim, positions)
        self.device = torch.empty(0, device=device).device
        if batch < 1 or layers < 1:
            raise ValueError(f"expected at least one slot and one layer, got {batch} and {layers}")
        if dtype not in DTYPES:
            raise ValueError(f"expected keys and values in float16 or bfloat16, got {dtype}")
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"expected a CPU or a CUDA GPU, got {self.device}")
        check_remote(ratio, remote)
        if access is None and self.device.type == "cuda":
            access = profiled_access(profile, remote, self.device, ratio)
        remote_slots = remote_count(ratio, batch)
        self.slots = (batch - remote_slots, remote_slots)  # in the local and the remote tier
        self.batch, self.layers, self.dtype, self.ratio = batch, layers, dtype, remote_slots / batch
        self.access = (TierAccess(), access or TierAccess())
        sizes = [layers * count * self.shape.slot_bytes for count in self.slots]
        self.tier_bytes = dict(zip((LOCAL, remote), sizes, strict=True))
        self._tiers = allocate_tiers(self.tier_bytes, self.device)
        size = self.shape.slot_bytes
        self._parts: list[torch.Tensor] | None = [
            self._tiers[tier].allocate((count, layers, size), torch.uint8)
            for tier, count in zip((LOCAL, remote), self.slots, strict=True)
        ]
        starts = [slot.data_ptr() for part in self._parts for slot in part]
        self.tables = BlockTables.of_slots(
            torch.tensor(starts, device=self.device), self.shape, layer_bytes=size
        )
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self._next_layer = 0
        self.appends = False  # whether the new tokens of a call follow filled positions

    def slots_of(self, layer: int) -> list[torch.Tensor]:
        """The packed slots of a layer, each in its tier; ValueError if this cache is closed."""
        return [slot for part in self.parts for slot in part[:, layer]]

    def begin(self, layer: int, count: int) -> None:
        """Raise ValueError unless `layer` is next and has room for `count` new positions.

        Every slot needs room. For layer 0 this waits for the device. In a captured CUDA graph every
        replay checks instead; a full slot then ends the CUDA context, as an index out of bounds
        does in torch.
        """
        self.slots_of(layer)  # raises if closed
        if layer != self._next_layer:
            raise ValueError(
                f"expected layer {self._next_layer} next, got {layer}: call layers in order, and "
                "reset() after an error"
            )
        if count > 1 and is_capturing(self.device):
            raise ValueError("expected one new token a slot in a CUDA graph; prefill before it")
        if layer > 0:
            return
        if count > self.shape.positions:
            raise ValueError(f"expected {self.shape.positions} tokens at most, got {count}")
        longest = self.lengths.max()
        if count > 1:
            self.appends = bool(longest > 0)
            require(
                longest + count <= self.shape.positions,
                f"expected room for {count} tokens in every slot of {self.shape.positions}",
            )
        require(
            longest < self.shape.positions,
            f"expected room in every slot, but {self.shape.positions} positions are filled",
        )

    def end(self, layer: int, count: int | torch.Tensor) -> None:
        """Record `count` new positions per slot of `layer`; the last layer adds them to lengths.

        `count` may be int32 [batch].
        """
        self._next_layer = (layer + 1) % self.layers
        if not self._next_layer:
            self.lengths += count

    def fill(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, padding: Sequence[int]
    ) -> None:
        """Write keys and values [batch, Hkv, P, D] to the first positions of a layer's slots.

        The first `padding[b]` positions of slot b are dropped. Allocates twice the bytes of a
        tier's slots temporarily, one tier after the other.
        """
        if any(padding):
            keys, values = (_rolled(x, padding) for x in (keys, values))
        heads, filled, dim = keys.shape[1:]
        first = 0
        for part in self.parts:
            count = len(part)
            if count:
                k, v = (x[first : first + count].flatten(0, 1) for x in (keys, values))
                packed = kv_blocks.pack(k, v, KVShape(count * heads, dim, filled))
                packed = packed.view(count, heads, -1)
                slots = part[:, layer].unflatten(1, (heads, -1))
                slots[..., : packed.shape[-1]].copy_(packed)
            first += count

    def drop(self, counts: torch.Tensor) -> None:
        """Forget the last `counts`, int32 [batch], positions of the slots, in every layer.

        The next tokens overwrite them. Raises ValueError between layers, or for wrong counts.
        """
        if self._next_layer or counts.shape != self.lengths.shape:
            raise ValueError("expected counts as [batch], and a call after the last layer")
        require(((counts >= 0) & (counts <= self.lengths)).all(), "expected counts up to lengths")
        self.lengths -= counts

    def reset(self) -> None:
        """Empty all slots in place; graphs stay valid."""
        self._next_layer = 0
        self.lengths.zero_()

    def close(self) -> None:
        """Free the memory; later calls raise ValueError. Closing twice does nothing."""
        self._parts = None  # they view the tiers
        self._tiers.close()

    @property
    def parts(self) -> list[torch.Tensor]:
        """Each tier's slots, uint8 [slots, layers, bytes]; ValueError if this cache is closed."""
        if self._parts is None:
            raise ValueError("this PartitionedKVCache is closed")
        return self._parts

    def __enter__(self) -> "PartitionedKVCache":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of `device` is being captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def require(condition: torch.Tensor, message: str) -> None:
    """Raise ValueError unless `condition`, bool [], holds; a CUDA graph asserts it on the GPU."""
    if is_capturing(condition.device):
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def _rolled(x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """x [batch, Hkv, P, D] with the first `padding[b]` positions of slot b moved to the end."""
    return torch.stack([slot.roll(-count, 1) for slot, count in zip(x, padding, strict=True)])
