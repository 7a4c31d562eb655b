"""Tensor maps, by which TMA copies boxes of a matrix to or from shared memory.

Knows the driver's encoding; it needs no GPU to be current, but the driver's library.
"""

import functools

import torch

from dakrun.geometry import ATOM_COLS


@functools.lru_cache(maxsize=4096)
def atoms_map(
    address: int, dtype: torch.dtype, shape: tuple[int, int], box_rows: int, box_atoms: int
) -> tuple[int, ...]:
    """The 16 words of a map of a contiguous [rows, cols] matrix of 16-bit elements.

    A box is `box_atoms` x `box_rows` x 64 columns with a 128-byte swizzle, out of
    [cols / 64][rows][64]; where `box_atoms` is 1, columns may be ragged and the map is
    [1][rows][cols]. What a box has beyond the matrix is zero.
    Raises RuntimeError where the driver refuses: addresses and rows are multiples of 16 bytes.
    """
    rows, cols = shape
    size = dtype.itemsize
    dims = (cols, rows, 1) if box_atoms == 1 else (ATOM_COLS, rows, cols // ATOM_COLS)
    strides = (cols * size, rows * cols * size if box_atoms == 1 else ATOM_COLS * size)
    return _encoded(address, dtype, dims, strides, (ATOM_COLS, box_rows, box_atoms))


@functools.lru_cache(maxsize=4096)
def boxes_map(
    address: int, dtype: torch.dtype, shape: tuple[int, int], box: tuple[int, int]
) -> tuple[int, ...]:
    """The 16 words of a map of a contiguous [rows, cols] matrix of 16-bit elements.

    A `box` is of so many rows and columns, 16 or 32, with a swizzle of the bytes of its rows.
    Raises RuntimeError where the driver refuses: addresses and rows are multiples of 16 bytes.
    """
    rows, cols = shape
    return _encoded(address, dtype, (cols, rows), (cols * dtype.itemsize,), box[::-1])


def _encoded(
    address: int,
    dtype: torch.dtype,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
) -> tuple[int, ...]:
    """Dimensions go from the innermost on, whose elements follow each other."""
    from cuda.bindings import driver

    kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    kind = {
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[dtype]
    swizzle = {
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[box[0] * dtype.itemsize]
    status, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        len(dims),
        address,
        [driver.cuuint64_t(dim) for dim in dims],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(count) for count in box],
        [driver.cuuint32_t(1)] * len(dims),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"no tensor map for {dims} at {address:#x}: {status.name}")
    return tuple(int(word) for word in encoded.opaque)
