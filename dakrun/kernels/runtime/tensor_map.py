"""Tensor maps (CUtensorMap): descriptors with which TMA copies boxes of a matrix.

Needs the driver library, but no current GPU.
"""

import functools

import torch

from dakrun.geometry import ATOM_COLS


@functools.lru_cache(maxsize=4096)
def atoms_map(
    address: int, dtype: torch.dtype, shape: tuple[int, int], box_rows: int, box_atoms: int
) -> tuple[int, ...]:
    """Encode the map (16 words) of a contiguous [rows, cols] matrix of 16-bit elements.

    The map sees the matrix as [cols / 64][rows][64]; a box is [box_atoms][box_rows][64] of that,
    with a 128-byte swizzle. With `box_atoms` 1 it sees [1][rows][cols] instead, and `cols` need not
    be a multiple of 64.
    Elements outside the matrix load as zero.
    Raises RuntimeError if the driver refuses: address and row size must be multiples of 16 bytes.
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
    """Encode the map (16 words) of a contiguous [rows, cols] matrix of 16-bit elements.

    A `box` is (rows, columns) with 16 or 32 columns, swizzled over the bytes of a row.
    Raises RuntimeError if the driver refuses: address and row size must be multiples of 16 bytes.
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
    """Encode a map. Dimensions are listed innermost first; the innermost is contiguous."""
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
