"""Tensor maps, by which TMA copies boxes of a matrix into shared memory.

Knows the driver's encoding; it needs no GPU to be current, but the driver's library.
"""

import functools

import torch

SWIZZLED_COLS = 64  # 16-bit elements of a swizzled row of 128 bytes


@functools.lru_cache(maxsize=4096)
def tensor_map_2d(
    address: int, dtype: torch.dtype, shape: tuple[int, int], row_stride: int, box: tuple[int, int]
) -> tuple[int, ...]:
    """The 16 words of a map of a [rows, cols] matrix of 16-bit elements, 128-byte swizzle.

    `row_stride` is in elements; `box` is (rows, cols). What a box has beyond the matrix is zero.
    Raises RuntimeError where the driver refuses: addresses and strides are multiples of 16 bytes.
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = {
        torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    }[dtype]
    (rows, cols), (box_rows, box_cols) = shape, box
    status, encoded = driver.cuTensorMapEncodeTiled(
        kind,
        2,
        address,
        [driver.cuuint64_t(cols), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(row_stride * dtype.itemsize)],
        [driver.cuuint32_t(box_cols), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"no tensor map for {shape} at {address:#x}: {status.name}")
    return tuple(int(word) for word in encoded.opaque)
