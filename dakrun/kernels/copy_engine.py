"""Copies between memory tiers by a GPU's copy engine, in the order of torch's current stream."""

import torch


def copy(to: torch.Tensor, of: torch.Tensor) -> None:
    """Start copying `of` into `to`: contiguous tensors of as many bytes, in any two tiers.

    It is the current GPU that copies, also from a peer's memory, where torch would have the peer do
    it. Host memory must be page-locked.
    Raises ValueError where the tensors are not alike.
    """
    from cupy.cuda import runtime

    if to.nbytes != of.nbytes or not (to.is_contiguous() and of.is_contiguous()):
        raise ValueError(
            f"expected contiguous tensors of one size, got {to.nbytes} and {of.nbytes} bytes"
        )
    stream = torch.cuda.current_stream().cuda_stream
    runtime.memcpyAsync(to.data_ptr(), of.data_ptr(), of.nbytes, runtime.memcpyDefault, stream)
