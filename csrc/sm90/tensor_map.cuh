// Tensor maps: what TMA needs to know of a tensor. Encoded on the host for every call, passed by value.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>

#include "params.h"
#include "sm90/panel.cuh"

namespace flash_ext::sm90 {

// A tensor as TMA sees it: boxes of 64 columns (a panel) and some rows of one head. A dimension of stride 0 has extent
// 1 there, and coordinate 0.
struct TensorMap {
    CUtensorMap map;     // dimensions: column, row, head, batch
    int32_t batch_step;  // 0: the batches are one and the same; 1
    int32_t head_step;
    int32_t row_step;  // 0: all rows are one and the same, and a box has one row
};

// cuTensorMapEncodeTiled of the driver, found once; nullptr if there is none.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
    static void* encoder = nullptr;
    void* found = __atomic_load_n(&encoder, __ATOMIC_ACQUIRE);
    if (found == nullptr) {
        cudaDriverEntryPointQueryResult result;
        if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
                cudaSuccess ||
            result != cudaDriverEntryPointSuccess) {
            return nullptr;
        }
        __atomic_store_n(&encoder, found, __ATOMIC_RELEASE);
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
}

// The map of a (batch, rows, heads, columns) tensor of a 16-bit type, for boxes of box_rows rows. What lies outside the
// tensor arrives as 0. promotion: how much of a line of memory L2 takes at once.
inline cudaError_t encode(TensorMap* tensor_map, const TensorView& tensor, DataType dtype, int32_t batch, int32_t rows,
                          int32_t heads, int32_t columns, int box_rows,
                          CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    const auto encoder = tensor_map_encoder();
    if (encoder == nullptr) return cudaErrorNotSupported;
    const int64_t extents[3] = {rows, heads, batch};
    const int64_t strides[3] = {tensor.stride_row, tensor.stride_head, tensor.stride_batch};
    int32_t steps[3];
    cuuint64_t dims[4] = {static_cast<cuuint64_t>(columns), 1, 1, 1}, bytes[3];
    for (int i = 0; i < 3; ++i) {
        const bool is_one = extents[i] <= 1 || strides[i] == 0;  // then the stride is never used, but must be legal
        steps[i] = is_one ? 0 : 1;
        dims[i + 1] = is_one ? 1 : static_cast<cuuint64_t>(extents[i]);
        bytes[i] = is_one ? 16 : static_cast<cuuint64_t>(strides[i]) * 2;
    }
    if (rows <= 1) steps[0] = 1;  // rows behind the only one are outside the tensor
    tensor_map->row_step = steps[0];
    tensor_map->head_step = steps[1];
    tensor_map->batch_step = steps[2];
    const cuuint32_t box[4] = {kPanelColumns, static_cast<cuuint32_t>(steps[0] ? box_rows : 1), 1, 1};
    const cuuint32_t element_strides[4] = {1, 1, 1, 1};
    const CUresult result =
        encoder(&tensor_map->map,
                dtype == DataType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                tensor.data, dims, bytes, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace flash_ext::sm90
