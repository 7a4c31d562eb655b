"""SplitKGEMM: nn.Linear whose weight lies partly in a remote tier and is read where it lies.

Knows modules, tensors and tiers, no plans: how much lies in the remote tier is the caller's choice.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from dakrun.hardware import HardwareProfile
from dakrun.kernels import reference
from dakrun.kernels.gemm.dispatch import products
from dakrun.kernels.gemm.packing import PackedTensor
from dakrun.kernels.gemm.splitk_config import TierAccess
from dakrun.memory.tiers import HOST
from dakrun.nn.remote_tier import check_remote, profiled_access
from dakrun.nn.tiered_weight import TieredWeight, allocate, fill, has_kernel, remote_share


class SplitKGEMM(nn.Module):
    """y = x W^T + b as nn.Linear computes it, without gradients, W lying in two tiers.

    x is [..., in_features] and y [..., out_features], of W's dtype and on its device. `ratio` is
    the share of W, its last rows, in the tier `remote`: "host", or "peer:N" for the memory of GPU
    N; as an attribute it is that share as rounded to whole row blocks of 8 rows.

    On a GPU, float16 and bfloat16 with in_features a multiple of 8 are packed, and a kernel reads
    both tiers at once: SplitK_GEMM, or the tiled GEMM for more than 32 rows of x, as in a prefill,
    where the GPU is a Hopper. On others cuBLAS computes more than 128 rows, 64 with a remote part,
    from what is unpacked piece by piece. CUDA graphs can capture it once it has run with as many
    rows, which compiles the kernel. Elsewhere W lies row by row and plain torch computes; on a GPU
    it then copies the remote rows for every call, which no graph can capture.

    `access` says with how many SMs, and how many bytes in flight, the remote tier is read. Without
    it `profile` says so: a HardwareProfile, the name or file of one, or None for the one that
    `dakrun profile` kept of this GPU, else a shipped one. On a CPU neither plays a part.

    With `pdl` a launch may start while the kernel ahead of it runs (programmatic dependent
    launch). It then reads W, which no kernel writes, and waits for that kernel to end before it
    reads x or writes y, so no bit of y changes. It is off by default since it helps only where one
    SplitKGEMM directly follows another: torch's kernels never let the next one start.

    W is no Parameter: `to()` leaves it where it is. `state_dict` has it all the same, in one piece
    on the CPU, as nn.Linear's does; loading one packs it into the same memory, so that captured
    graphs see it. `close`, or the end of the module, gives the memory back.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        ratio: float = 0.1,
        remote: str = HOST,
        profile: HardwareProfile | str | None = None,
        access: TierAccess | None = None,
        pdl: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take memory for W and the bias; their values are any until a state dict is loaded.

        Raises ValueError for what cannot be meant, UsageError where the profile is not found or
        has no such tier, and CannotRun where this machine does not give the memory.
        """
        super().__init__()
        like = torch.empty(0, device=device, dtype=dtype)
        _check(in_features, out_features, like)
        check_remote(ratio, remote)
        if access is None and has_kernel(like, in_features):
            access = profiled_access(profile, remote, like.device, ratio)
        self.in_features, self.out_features = in_features, out_features
        self.remote, self.pdl = remote, pdl
        self._device, self._access = like.device, access or TierAccess()
        shape = (out_features, in_features)
        self._weight: TieredWeight | None
        self._tiers, self._weight = allocate(shape, like, ratio, remote, self._access)
        self.ratio = remote_share(self._weight)
        if bias:
            self.bias = nn.Parameter(like.new_empty(out_features), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        ratio: float = 0.1,
        remote: str = HOST,
        profile: HardwareProfile | str | None = None,
        access: TierAccess | None = None,
        pdl: bool = False,
        device: torch.device | str | None = None,
    ) -> "SplitKGEMM":
        """One with the weight and bias of `linear`, on `device` or else where they are.

        A weight on the CPU goes to a GPU in pieces, so the GPU need not have room for all of it.
        """
        module = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            ratio=ratio,
            remote=remote,
            profile=profile,
            access=access,
            pdl=pdl,
            device=linear.weight.device if device is None else device,
            dtype=linear.weight.dtype,
        )
        module.load_state_dict(linear.state_dict())
        return module

    @property
    def weight(self) -> TieredWeight:
        """W [out_features, in_features] in its tiers; ValueError once this module is closed."""
        if self._weight is None:
            raise ValueError("this SplitKGEMM is closed")
        return self._weight

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., out_features] of x [..., in_features]; ValueError for any other x."""
        weight, cols = self.weight, self.in_features
        if x.shape[-1:] != (cols,) or x.dtype != weight.dtype or x.device != self._device:
            raise ValueError(
                f"expected x as [..., {cols}] of {weight.dtype} on {self._device}, got "
                f"{list(x.shape)} of {x.dtype} on {x.device}"
            )
        rows = x.reshape(-1, cols).contiguous()
        if isinstance(weight, PackedTensor):
            y = self._gemm(rows, weight)
        else:
            y = reference.linear(rows, weight, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def close(self) -> None:
        """Give the memory back; nothing can be computed any more. Repeating it does nothing."""
        self._weight = None  # its tensors view the tiers
        self._tiers.close()

    def extra_repr(self) -> str:
        """What a printed model says of this module."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ratio={self.ratio:.3g}, remote={self.remote}"
        )

    def _gemm(self, x: torch.Tensor, weight: PackedTensor) -> torch.Tensor:
        """y [N, out_features] of x [N, in_features] by the kernels."""
        if x.data_ptr() % 16:  # what the tensor memory accelerator asks for
            x = x.clone()
        y = x.new_empty(x.shape[0], self.out_features)
        reads = (TierAccess(), self._access)
        with torch.cuda.device_of(x):
            products(x.device)(x, weight, reads, y, bias=self.bias, pdl=self.pdl)
        return y

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        destination[prefix + "weight"] = self.weight.dense().cpu()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Pack the weight and leave the rest to torch, which knows of no such parameter."""
        key, shape = prefix + "weight", torch.Size(self.weight.shape)
        dense = state_dict.get(key)
        if dense is None and strict:
            missing_keys.append(key)
        elif dense is not None and dense.shape != shape:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {dense.shape} from "
                f"checkpoint, the shape in current model is {shape}."
            )
        elif dense is not None:
            fill(self.weight, dense.detach(), self._device)
        super()._load_from_state_dict(
            {name: value for name, value in state_dict.items() if name != key},
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def __getstate__(self) -> NoReturn:
        """A copy's remote part would be ordinary memory, which the kernel cannot read."""
        raise TypeError("a SplitKGEMM is neither copied nor pickled: take its state_dict()")


def replace_linears(model: nn.Module, **options: Any) -> dict[str, SplitKGEMM]:
    """Put SplitKGEMM.from_linear(linear, **options) in place of every nn.Linear below `model`.

    Returns the new modules by name. One at a time is replaced, and its old weight then let go.
    What stays as it is: a Linear whose weight another module has, too, as a tied lm_head has that
    of the embeddings, and subclasses of nn.Linear, which may compute something else.
    """
    owners = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and owners[id(module.weight)] == 1
    ]
    replaced = {}
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        replaced[name] = SplitKGEMM.from_linear(linear, **options)
        model.set_submodule(name, replaced[name])
    return replaced


def _check(rows: int, cols: int, like: torch.Tensor) -> None:
    if rows < 1 or cols < 1:
        raise ValueError(f"expected a feature in and out at least, got {rows} and {cols}")
    if like.device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected a weight on a CPU or a CUDA GPU, got {like.device}")
    if not like.is_floating_point():
        raise ValueError(f"expected a floating-point weight, got {like.dtype}")
