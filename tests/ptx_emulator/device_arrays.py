"""Arrays and tensor maps that look like device memory to the unit kernels."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from ptx_emulator.harness import UnitKernels

FLOAT32, BFLOAT16 = 7, 9  # CUtensorMapDataType
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # bytes: CUtensorMapSwizzle
CHUNKS_OF_32 = -128  # 128 bytes in chunks of 32, which products cannot read

Array = npt.NDArray[np.generic]


def aligned_bytes(count: int, alignment: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that start at a multiple of ``alignment``."""
    raw = np.zeros(count + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + count]


def aligned_array(values: Array) -> Array:
    """A copy that starts at a multiple of 256 bytes, as device memory does."""
    copy = aligned_bytes(values.nbytes, 256).view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def tensor_map(
    kernels: UnitKernels, tensor: Array, data_type: int, box: tuple[int, int], swizzle: int = 0
) -> npt.NDArray[np.uint8] | int:
    """Encode a map over a row-major matrix.

    Parameters
    ----------
    kernels : UnitKernels
        Has ``flash_ext_test_tensor_map`` (``kernels/launch.cuh``).
    tensor : array, shape (rows, columns)
        Only its address, shape and pitch matter.
    data_type : int
        CUtensorMapDataType.
    box : (int, int)
        Elements along the columns, along the rows.
    swizzle : int
        Width in bytes, 0 for none; or ``CHUNKS_OF_32``.

    Returns
    -------
    array of 128 bytes, 64-byte aligned, or the CUresult if the map was refused.
    """
    encoded = aligned_bytes(128, 64)
    rows, columns = tensor.shape
    code: int = kernels.library.flash_ext_test_tensor_map(
        ctypes.c_void_p(encoded.ctypes.data),
        data_type,
        ctypes.c_void_p(tensor.ctypes.data),
        (ctypes.c_uint64 * 2)(columns, rows),
        ctypes.c_uint64(tensor.strides[0]),
        (ctypes.c_uint32 * 2)(*box),
        {**SWIZZLES, CHUNKS_OF_32: 4}[swizzle],
    )
    return encoded if code == 0 else code
