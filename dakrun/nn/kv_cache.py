"""PartitionedKVCache: the keys and values of a batch, some of its slots in a remote tier.

Knows where they lie and how many positions are filled, not how they are attended to.
"""

from collections.abc import Sequence

import torch

from dakrun.hardware import LOCAL, HardwareProfile
from dakrun.kernels.attention import kv_blocks
from dakrun.kernels.attention.kv_blocks import DTYPES, KVShape
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.memory.tiers import HOST, allocate_tiers
from dakrun.nn.remote_tier import check_remote, profiled_access, remote_count


class PartitionedKVCache:
    """Room for `positions` keys and values of each of `batch` slots, in each of `layers`.

    The last slots, `ratio` of the batch, lie in the tier `remote`: "host", or "peer:N" for the
    memory of GPU N; as an attribute `ratio` is that share as rounded to whole slots. Slots are
    packed for SplitK_FlashAttn in blocks of 64 positions (dakrun.kernels.attention.kv_blocks), and
    `tier_bytes` is all that they take of each tier. Beside them lies `lengths` on `device`, int32
    [batch]: the positions that are filled in every layer. It is there to be read.

    Memory is taken at once, and stays where it is: a CUDA graph that reads and appends stays valid
    as lengths grow. `access`, or else `profile`, says how a GPU reads the remote tier, as for
    SplitKGEMM. `close`, or the end of a `with` block, gives the memory back.
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
        """Take the memory: of float16 or bfloat16, heads of 64, 80, 96 or 128, and no values yet.

        Raises ValueError for what cannot be meant, UsageError where the profile is not found or
        has no such tier, and CannotRun where this machine does not give the memory.
        """
        self.shape = KVShape(kv_heads, head_dim, positions)
        self.device = torch.empty(0, device=device).device
        if batch < 1 or layers < 1 or dtype not in DTYPES:
            raise ValueError(
                f"expected a slot and a layer at least, of float16 or bfloat16, got {batch} and "
                f"{layers} of {dtype}"
            )
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"expected a CPU or a CUDA GPU, got {self.device}")
        check_remote(ratio, remote)
        if access is None and self.device.type == "cuda":
            access = profiled_access(profile, remote, self.device, ratio)
        there = remote_count(ratio, batch)
        self.slots = (batch - there, there)  # in the local tier, and the remote one
        self.batch, self.layers, self.dtype, self.ratio = batch, layers, dtype, there / batch
        self.access = (TierAccess(), access or TierAccess())
        sizes = [layers * count * self.shape.slot_bytes for count in self.slots]
        self.tier_bytes = dict(zip((LOCAL, remote), sizes, strict=True))
        self._tiers = allocate_tiers(self.tier_bytes, self.device)
        self._parts = [
            tier.allocate((layers, count, self.shape.slot_bytes), torch.uint8)
            for tier, count in zip(self._tiers.values(), self.slots, strict=True)
        ]
        addresses = [[slot.data_ptr() for slot in self.slots_of(i)] for i in range(layers)]
        self.addresses = torch.tensor(addresses, device=self.device)  # int64 [layers, batch]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self._turn = 0  # the layer whose keys and values come next

    def slots_of(self, layer: int) -> list[torch.Tensor]:
        """The packed slots of a layer, each in its tier; ValueError once this cache is closed."""
        if not self._parts:
            raise ValueError("this PartitionedKVCache is closed")
        return [slot for part in self._parts for slot in part[layer]]

    def begin(self, layer: int, count: int) -> None:
        """ValueError unless `count` new positions of `layer` can be next.

        One can where there is room for it in every slot, several where all slots are empty: layer 0
        waits for the device to say so. A CUDA graph that is captured looks at every replay instead,
        and where there is no room ends the CUDA context, as torch does for an index out of bounds.
        """
        self.slots_of(layer)  # not closed
        if layer != self._turn:
            raise ValueError(
                f"expected layer {self._turn} next, got {layer}: layers take turns, and after an "
                "error only reset() makes layer 0 the next"
            )
        if count > 1 and is_capturing(self.device):
            raise ValueError("expected one new token a slot in a CUDA graph; prefill before it")
        if layer > 0:
            return
        if count > 1:
            require(~self.lengths.any(), f"expected empty slots for {count} tokens at once")
        if count > self.shape.positions:
            raise ValueError(f"expected {self.shape.positions} tokens at most, got {count}")
        require(
            self.lengths.max() < self.shape.positions,
            f"expected room in every slot, but {self.shape.positions} positions are filled",
        )

    def end(self, layer: int, count: int | torch.Tensor) -> None:
        """Say that `layer` has the new positions, `count` of each slot; the last makes them count.

        `count` may be int32 [batch].
        """
        self._turn = (layer + 1) % self.layers
        if not self._turn:
            self.lengths += count

    def fill(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, padding: Sequence[int]
    ) -> None:
        """Write the first positions of a layer's slots, keys and values [batch, Hkv, P, D].

        Of those of slot b the first `padding[b]` are left out. For a tier's slots at a time, it
        takes twice the memory of what is written.
        """
        if any(padding):
            keys, values = (_rolled(x, padding) for x in (keys, values))
        heads, filled, dim = keys.shape[1:]
        first = 0
        for part in self._parts:
            count = part.shape[1]
            if count:
                k, v = (x[first : first + count].flatten(0, 1) for x in (keys, values))
                packed = kv_blocks.pack(k, v, KVShape(count * heads, dim, filled))
                packed = packed.view(count, heads, -1)
                part[layer].view(count, heads, -1)[..., : packed.shape[-1]].copy_(packed)
            first += count

    def reset(self) -> None:
        """Empty all slots, in place, so that graphs stay valid."""
        self._turn = 0
        self.lengths.zero_()

    def close(self) -> None:
        """Give the memory back; nothing can be attended to any more. Repeating it does nothing."""
        self._parts = []  # they view the tiers
        self._tiers.close()

    def __enter__(self) -> "PartitionedKVCache":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on `device` goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def require(condition: torch.Tensor, message: str) -> None:
    """ValueError unless a bool [] tensor holds, or, in a CUDA graph, an assertion on the GPU."""
    if is_capturing(condition.device):
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)


def _rolled(x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """x [batch, Hkv, P, D] with the first `padding[b]` positions of slot b behind all others."""
    return torch.stack([slot.roll(-count, 1) for slot, count in zip(x, padding, strict=True)])
