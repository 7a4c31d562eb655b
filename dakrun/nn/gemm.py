"""SplitKGEMM: nn.Linear whose weight lies partly in a remote tier, where kernels read it in place.

Knows modules, tensors and tiers; replace.py puts it into models.
"""

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from dakrun.formats import Packed16, Quantised, Rows, Stored
from dakrun.hardware import HardwareProfile
from dakrun.kernels import reference
from dakrun.kernels.gemm.dispatch import products
from dakrun.launches import TierAccess
from dakrun.memory.tiers import HOST
from dakrun.nn.tiers import (
    TieredWeight,
    allocate,
    check_remote,
    fill,
    fill_quantized,
    kernel_format,
    profiled_access,
    remote_ratio,
    with_scale_dtype,
)


class SplitKGEMM(nn.Module):
    """nn.Linear for inference, y = x W^T + b, with a part of W in a remote tier.

    >>> linear = torch.nn.Linear(64, 40)
    >>> module = SplitKGEMM.from_linear(linear, ratio=0.4)  # 2 of 5 row blocks in host memory
    >>> x = torch.ones(3, 64)
    >>> torch.allclose(module(x), linear(x), atol=1e-5)
    True
    >>> module.ratio
    0.4
    >>> module.close()

    Shapes and dtypes: x is [..., in_features] and y [..., out_features], of W's dtype and on its
    device. Computes no gradients.

    Placement: the last row blocks of 8 rows, `ratio` of W, lie in the tier `remote`: "host", or
    "peer:N" for the memory of GPU N. The attribute `ratio` is rounded to whole row blocks.

    Kernels: on a GPU, W is packed if it is float16 or bfloat16 and in_features is a multiple of 8.
    SplitK_GEMM reads both tiers at once; on Hopper, the tiled GEMM does so for more than 32 rows of
    x, as in a prefill. On other GPUs cuBLAS computes more than 128 rows (64 with a remote part)
    after unpacking W piece by piece. Anything else is computed by plain torch, which on a GPU
    copies the remote rows in every call.

    CUDA graphs can capture a call with packed W once it has run with that number of rows, which
    compiles the kernel. Plain torch with a remote part cannot be captured.

    `access` gives the SMs and the bytes in flight for the remote tier. Without it, they come from
    `profile`: a HardwareProfile, its name or file, or None for the profile that `dakrun profile`
    saved for this GPU or a shipped one. A CPU uses neither.

    With `pdl` (programmatic dependent launch) a launch may start while its predecessor kernel runs.
    It then prefetches W, and waits for the predecessor to end before it reads x or writes y, so the
    results are the same bits. It helps only if one SplitKGEMM directly follows another: torch's
    kernels never let the next kernel start early. Off by default.

    W is no Parameter, so `to()` does not move it. `state_dict` contains it as nn.Linear's does,
    dense and on the CPU; loading one packs it into the same memory, which captured graphs see.
    `close`, or the end of the module, frees the memory.

    With `layout` W has elements of 4 or 8 bits, which `from_quantized` reads from the tensors of a
    checkpoint; no state dict is loaded into it.
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
        layout: Quantised | None = None,
    ) -> None:
        """Allocate W and the bias, uninitialized until a state dict is loaded.

        Raises ValueError for an invalid size, dtype, device, ratio or tier, UsageError if the
        profile is not found or lacks the tier, and CannotRun if memory is short.
        """
        super().__init__()
        like = torch.empty(0, device=device, dtype=dtype)
        _check(in_features, out_features, like)
        check_remote(ratio, remote)
        if access is None and kernel_format(like, in_features, layout):
            access = profiled_access(profile, remote, like.device, ratio)
        self.in_features, self.out_features = in_features, out_features
        self.remote, self.pdl = remote, pdl
        self._device, self._access = like.device, access or TierAccess()
        shape = (out_features, in_features)
        self._weight: TieredWeight | None
        self._tiers, self._weight = allocate(shape, like, ratio, remote, self._access, layout)
        self.ratio = remote_ratio(self._weight)
        if bias:
            self.bias = nn.Parameter(like.new_empty(out_features), requires_grad=False)
        else:
            self.register_parameter("bias", None)

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> "SplitKGEMM":
        """A SplitKGEMM with the weight and bias of `linear`.

        `options` are keyword arguments of the constructor but `dtype`; `device` defaults to the
        weight's. A weight on the CPU is copied to a GPU in pieces, so the GPU needs no room for all
        of it. Raises the constructor's errors.
        """
        module = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            dtype=linear.weight.dtype,
            **{"device": linear.weight.device} | options,
        )
        module.load_state_dict(linear.state_dict())
        return module.train(linear.training)

    @classmethod
    def from_quantized(
        cls,
        stored: Stored,
        tensors: Mapping[str, torch.Tensor],
        in_features: int,
        out_features: int,
        bias: torch.Tensor | None = None,
        **options: Any,
    ) -> "SplitKGEMM":
        """A SplitKGEMM with the weight that a quantized checkpoint stores in `tensors`.

        >>> from dakrun.formats.fp8 import Fp8
        >>> weight = torch.eye(16).to(torch.float8_e4m3fn)
        >>> tensors = {"weight": weight, "weight_scale": torch.tensor(0.5)}
        >>> module = SplitKGEMM.from_quantized(Fp8(), tensors, 16, 16, ratio=0.5)
        >>> module(torch.ones(1, 16))[0, :3]
        tensor([0.5000, 0.5000, 0.5000])
        >>> module.close()

        `stored` is a format of dakrun.formats; `tensors` are named by what follows the module's
        name, such as "qweight". `options` are keyword arguments of the constructor. Raises its
        errors, and ValueError for tensors that do not fit the format.
        """
        dtype = options.get("dtype") or torch.get_default_dtype()
        stored = with_scale_dtype(stored, tensors, out_features, in_features)
        layout = stored.layout(str(dtype).removeprefix("torch."), in_features)
        module = cls(in_features, out_features, bias is not None, layout=layout, **options)
        fill_quantized(module.weight, stored, layout, tensors, module._device)
        if module.bias is not None and bias is not None:
            module.bias.copy_(bias)
        return module

    @property
    def weight(self) -> TieredWeight:
        """W [out_features, in_features] in its tiers; ValueError once this module is closed."""
        if self._weight is None:
            raise ValueError("this SplitKGEMM is closed")
        return self._weight

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., out_features] of x [..., in_features]; ValueError if x does not match W."""
        weight, cols = self.weight, self.in_features
        if x.shape[-1:] != (cols,) or x.dtype != weight.dtype or x.device != self._device:
            raise ValueError(
                f"expected x as [..., {cols}] of {weight.dtype} on {self._device}, got "
                f"{list(x.shape)} of {x.dtype} on {x.device}"
            )
        rows = x.reshape(-1, cols).contiguous()
        if weight.for_kernels:
            y = self._gemm(rows, weight)
        else:
            y = reference.linear(rows, weight, self.bias)
        return y.view(*x.shape[:-1], self.out_features)

    def close(self) -> None:
        """Free the memory; later calls raise ValueError. Closing twice does nothing."""
        self._weight = None  # its tensors view the tiers
        self._tiers.close()

    def extra_repr(self) -> str:
        """The module's line in a printed model."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, ratio={self.ratio:.3g}, remote={self.remote}"
        )

    def _gemm(self, x: torch.Tensor, weight: TieredWeight) -> torch.Tensor:
        """y [N, out_features] of x [N, in_features] by the kernels."""
        if x.data_ptr() % 16:  # the tensor memory accelerator's alignment
            x = x.clone()
        y = x.new_empty(x.shape[0], self.out_features)
        accesses = (TierAccess(), self._access)
        with torch.cuda.device_of(x):
            products(x.device)(x, weight, accesses, y, bias=self.bias, pdl=self.pdl)
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
        """Pack the weight; torch loads the rest."""
        key, shape = prefix + "weight", torch.Size(self.weight.shape)
        dense = state_dict.get(key)
        if dense is None and strict:
            missing_keys.append(key)
        elif dense is not None and not isinstance(self.weight.format, Rows | Packed16):
            error_msgs.append(f"{key}: a quantized weight is loaded by from_quantized")
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
        """Refuse copies: their remote part would be pageable memory, which kernels cannot read."""
        raise TypeError("a SplitKGEMM cannot be copied or pickled; use its state_dict()")


def _check(rows: int, cols: int, like: torch.Tensor) -> None:
    if rows < 1 or cols < 1:
        raise ValueError(f"expected at least one feature in and out, got {rows} and {cols}")
    if like.device.type not in ("cpu", "cuda"):
        raise ValueError(f"expected a weight on a CPU or a CUDA GPU, got {like.device}")
    if not like.is_floating_point():
        raise ValueError(f"expected a floating-point weight, got {like.dtype}")
