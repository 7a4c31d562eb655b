"""SplitKExperts: transformers' experts whose matrices lie partly in a remote tier.

Knows modules, tensors and tiers, no routers and no plans: the caller chooses the ratio.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from dakrun.kernels.experts import reference
from dakrun.launches import TierAccess
from dakrun.memory.tiers import HOST
from dakrun.nn.tiers import TieredWeight, allocate, check_remote, fill, remote_ratio

_NAMES = ("gate_up_proj", "down_proj")  # of the tensors [E, 2 I, H] and [E, H, I]


class SplitKExperts(nn.Module):
    """Experts for inference, with the interface of transformers' modules such as Qwen3MoeExperts.

    >>> module = SplitKExperts(4, 16, 8, ratio=0.5)  # the last two experts in host memory
    >>> module.load_state_dict({"gate_up_proj": torch.ones(4, 16, 16),
    ...                         "down_proj": torch.ones(4, 16, 8)})
    <All keys matched successfully>
    >>> index, weights = torch.tensor([[0, 3]]), torch.tensor([[0.75, 0.25]])
    >>> module(torch.ones(1, 16), index, weights).shape
    torch.Size([1, 16])
    >>> module.ratio
    0.5
    >>> module.close()

    y of a row is the sum of its experts' down(silu(gate(x)) * up(x)) by their weights, added in
    float32 in the order of the experts. Computes no gradients.

    Placement: `ratio` of the matrices, in row blocks of 8 rows, lies in the tier `remote`: "host",
    or "peer:N" for the memory of GPU N. `order` has the numbers of the experts by their use: the
    first ones lie in the local tier; by default they are the ones of the lowest numbers. Only
    experts that rows choose are read.

    Plain torch computes it, which on a GPU copies the chosen remote experts in every call, and
    waits for the choice, so that no CUDA graph can capture a call.

    The matrices are no Parameters, so `to()` does not move them. `state_dict` contains them as
    transformers' does, dense and on the CPU. `close`, or the end of the module, frees the memory.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        ratio: float = 0.1,
        remote: str = HOST,
        order: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Allocate the matrices, uninitialized until a state dict is loaded.

        Raises ValueError for an invalid size, dtype, ratio, tier or order, and CannotRun if memory
        is short.
        """
        super().__init__()
        sizes = num_experts, hidden_size, intermediate_size
        if min(sizes) < 1:
            raise ValueError(f"expected sizes of at least 1, got {sizes}")
        like = torch.empty(0, device=device, dtype=dtype)
        if not like.is_floating_point():
            raise ValueError(f"expected a floating-point weight, got {like.dtype}")
        check_remote(ratio, remote)
        self._order = list(range(num_experts) if order is None else order)
        if sorted(self._order) != list(range(num_experts)):
            raise ValueError(f"expected an order of {num_experts} experts, each of them once")
        self._stack_indices = sorted(range(num_experts), key=self._order.__getitem__)
        self.num_experts, self.hidden_dim, self.intermediate_dim = sizes
        self.remote, self._device = remote, like.device
        self._rows = (2 * intermediate_size, hidden_size)  # of an expert's matrices
        self._tiers, self._matrices = [], list[TieredWeight]()
        for rows, cols in zip(self._rows, (hidden_size, intermediate_size), strict=True):
            tiers, matrix = allocate(
                (num_experts * rows, cols), like, ratio, remote, TierAccess(), in_torch=True
            )
            self._tiers.append(tiers)
            self._matrices.append(matrix)
        held = [sum(part.nbytes for part in of.parts) for of in self._matrices]
        remote_bytes = (n * remote_ratio(of) for n, of in zip(held, self._matrices, strict=True))
        self.ratio = sum(remote_bytes) / sum(held)

    @classmethod
    def from_experts(cls, experts: nn.Module, **options: Any) -> "SplitKExperts":
        """A SplitKExperts with the matrices of transformers' module `experts`.

        `options` are keyword arguments of the constructor but `dtype`; `device` defaults to that of
        the matrices. Raises its errors, and ValueError for a module of another kind.
        """
        if (why := _why_not(experts)) is not None:
            raise ValueError(f"expected a module of experts as in Qwen3-MoE, {why}")
        gate_up, down = (getattr(experts, name) for name in _NAMES)
        module = cls(*down.shape, dtype=down.dtype, **{"device": down.device} | options)
        module.load_state_dict({"gate_up_proj": gate_up, "down_proj": down})
        return module.train(experts.training)

    @torch.no_grad()
    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """y [n, H] of rows [n, H] with experts [n, k], an integer each, and their weights [n, k].

        Experts of the number E, which stands for those of other processes, are left out. Raises
        ValueError for other shapes, or another dtype or device than those of the matrices.
        """
        up, down = self._open()
        n, hidden, (like, _) = len(hidden_states), self.hidden_dim, (up, down)
        if (
            hidden_states.shape != (n, hidden)
            or top_k_index.shape != top_k_weights.shape
            or top_k_index.dim() != 2
            or len(top_k_index) != n
            or hidden_states.dtype != like.dtype
            or hidden_states.device != self._device
        ):
            raise ValueError(
                f"expected rows as [n, {hidden}] of {like.dtype} on {self._device}, experts and "
                f"weights as [n, k], got {list(hidden_states.shape)} of {hidden_states.dtype} on "
                f"{hidden_states.device}, {list(top_k_index.shape)}, {list(top_k_weights.shape)}"
            )
        chosen = reference.grouped(top_k_index, top_k_weights.float(), self._stack_indices)
        inner = reference.gate_up(hidden_states, chosen, up, self._rows[0])
        return reference.down(inner, chosen, down, torch.zeros_like(hidden_states))

    def close(self) -> None:
        """Free the memory; later calls raise ValueError. Closing twice does nothing."""
        self._matrices = []  # whose tensors view the tiers
        for tiers in self._tiers:
            tiers.close()

    def extra_repr(self) -> str:
        """The module's line in a printed model."""
        return (
            f"num_experts={self.num_experts}, hidden_size={self.hidden_dim}, "
            f"intermediate_size={self.intermediate_dim}, ratio={self.ratio:.3g}, "
            f"remote={self.remote}"
        )

    def _open(self) -> list[TieredWeight]:
        if not self._matrices:
            raise ValueError("this SplitKExperts is closed")
        return self._matrices

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, matrix in zip(_NAMES, self._open(), strict=True):
            stacked = matrix.dense().view(self.num_experts, -1, matrix.shape[1])
            destination[prefix + name] = stacked[self._stack_indices]
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
        """Write the matrices to their tiers; torch finds what else is there."""
        for name, matrix, rows in zip(_NAMES, self._open(), self._rows, strict=True):
            key, shape = prefix + name, torch.Size((self.num_experts, rows, matrix.shape[1]))
            dense = state_dict.get(key)
            if dense is None and strict:
                missing_keys.append(key)
            elif dense is not None and dense.shape != shape:
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {dense.shape} from "
                    f"checkpoint, the shape in current model is {shape}."
                )
            elif dense is not None:
                stacked = dense.detach()[self._order].flatten(0, 1)
                fill(matrix, stacked, self._device)
        keys = [prefix + name for name in _NAMES]
        super()._load_from_state_dict(
            {name: value for name, value in state_dict.items() if name not in keys},
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def __getstate__(self) -> NoReturn:
        """Refuse copies, as SplitKGEMM does."""
        raise TypeError("a SplitKExperts cannot be copied or pickled; use its state_dict()")


def replace_experts(model: nn.Module, **options: Any) -> dict[str, SplitKExperts]:
    """Replace each module of experts in `model` by SplitKExperts.from_experts(experts, **options).

    Returns the new modules by name. Modules are replaced one at a time, each freeing its old
    matrices. Experts of another kind, such as with biases or another activation, are kept.
    """
    found = [name for name, of in model.named_modules() if name and _why_not(of) is None]
    replaced = {}
    for name in found:
        replaced[name] = SplitKExperts.from_experts(model.get_submodule(name), **options)
        model.set_submodule(name, replaced[name])
    return replaced


def _why_not(experts: nn.Module) -> str | None:
    """Why a SplitKExperts instead would compute something else; None if it would not."""
    parameters = dict(experts.named_parameters())
    if sorted(parameters) != sorted(_NAMES) or any(p.dim() != 3 for p in parameters.values()):
        return f"got one with the parameters {', '.join(parameters) or 'none'}"
    gate_up, down = (parameters[name].shape for name in _NAMES)
    if gate_up != (down[0], 2 * down[2], down[1]):
        return f"got gate_up_proj {list(gate_up)} and down_proj {list(down)}"
    activation = getattr(experts, "act_fn", None)
    probe = torch.linspace(-4, 4, 9)
    if not callable(activation) or not activation(probe).equal(nn.functional.silu(probe)):
        return f"got the activation {activation}"
    if not getattr(experts, "is_concatenated", True):
        return "got gates that alternate with ups"
    return None
