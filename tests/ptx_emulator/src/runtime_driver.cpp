// Driver entry points that are asked for by name: cuTensorMapEncodeTiled, with the rules of the driver API's reference.
#include <cuda.h>

#include <cstring>

#include "runtime.h"
#include "tensor_map.h"

namespace ptx_emulator {

namespace {

uint32_t element_bytes(CUtensorMapDataType type) {
    switch (type) {
        case CU_TENSOR_MAP_DATA_TYPE_UINT8:
            return 1;
        case CU_TENSOR_MAP_DATA_TYPE_UINT16:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
        case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
            return 2;
        case CU_TENSOR_MAP_DATA_TYPE_UINT32:
        case CU_TENSOR_MAP_DATA_TYPE_INT32:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
            return 4;
        case CU_TENSOR_MAP_DATA_TYPE_UINT64:
        case CU_TENSOR_MAP_DATA_TYPE_INT64:
        case CU_TENSOR_MAP_DATA_TYPE_FLOAT64:
            return 8;
        default:
            raise(Fault::kUnsupported, "tensor map of data type %d", static_cast<int>(type));
    }
}

void encode_tiled(TensorMap& map, CUtensorMapDataType type, uint32_t rank, void* base, const cuuint64_t* dims,
                  const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
                  CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapFloatOOBfill fill) {
    const auto invalid = Fault::kInvalidConfiguration;
    if (rank < 1 || rank > 5) raise(invalid, "tensor map of rank %u", rank);
    if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) raise(Fault::kUnsupported, "interleaved tensor map");
    if (!base) raise(invalid, "tensor map without an address");
    if (reinterpret_cast<uintptr_t>(base) % 16) raise(invalid, "tensor map: base %p is not 16-byte aligned", base);
    map.magic = kTensorMapMagic;
    map.base = reinterpret_cast<uint64_t>(base);
    map.rank = static_cast<uint8_t>(rank);
    map.data_type = static_cast<uint8_t>(type);
    map.element_bytes = static_cast<uint8_t>(element_bytes(type));
    map.nan_fill = fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
    if (swizzle > CU_TENSOR_MAP_SWIZZLE_128B_ATOM_32B)
        raise(Fault::kUnsupported, "tensor map swizzle %d", static_cast<int>(swizzle));
    map.swizzle = static_cast<Swizzle>(swizzle);
    for (uint32_t i = 0; i < rank; ++i) {
        if (dims[i] == 0 || dims[i] > (uint64_t{1} << 32)) {
            raise(invalid, "tensor map: dimension %u is %llu", i, static_cast<unsigned long long>(dims[i]));
        }
        if (box[i] == 0 || box[i] > 256) raise(invalid, "tensor map: box dimension %u is %u", i, box[i]);
        if (element_strides[i] != 1) raise(Fault::kUnsupported, "tensor map: element stride %u", element_strides[i]);
        map.dim[i] = dims[i];
        map.box[i] = static_cast<uint16_t>(box[i]);
        if (i == 0) continue;
        if (strides[i - 1] % 16 || strides[i - 1] >= (uint64_t{1} << 40)) {
            raise(invalid, "tensor map: stride %u is %llu bytes, not a multiple of 16 below 2^40", i,
                  static_cast<unsigned long long>(strides[i - 1]));
        }
        map.stride[i - 1] = strides[i - 1];
    }
    const uint32_t inner = box[0] * map.element_bytes;
    const uint32_t limit = map.swizzle == Swizzle::kNone           ? 0
                           : swizzle >= CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                                   : 16u << static_cast<uint32_t>(map.swizzle);
    if (inner % 16) raise(invalid, "tensor map: the box is %u bytes wide, not a multiple of 16", inner);
    if (limit && inner > limit)
        raise(invalid, "tensor map: the box is %u bytes wide, its swizzle spans %u", inner, limit);
}

CUresult encode_entry_point(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                            const cuuint64_t* dims, const cuuint64_t* strides, const cuuint32_t* box,
                            const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                            CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    TensorMap map{};
    const cudaError_t error = guarded([&] {
        if (reinterpret_cast<uintptr_t>(out) % 64)
            raise(Fault::kInvalidConfiguration, "tensor map at %p: not 64-byte aligned", static_cast<void*>(out));
        encode_tiled(map, type, rank, base, dims, strides, box, element_strides, interleave, swizzle, fill);
    });
    if (error != cudaSuccess) return CUDA_ERROR_INVALID_VALUE;
    std::memset(out, 0, sizeof *out);
    std::memcpy(out, &map, sizeof map);
    return CUDA_SUCCESS;
}

CUresult error_string_entry_point(CUresult, const char** text) {
    *text = cudaGetErrorString(cudaPeekAtLastError());
    return CUDA_SUCCESS;
}

}  // namespace

}  // namespace ptx_emulator

using namespace ptx_emulator;

extern "C" {

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
    *function = nullptr;
    if (!std::strcmp(symbol, "cuTensorMapEncodeTiled")) *function = reinterpret_cast<void*>(encode_entry_point);
    if (!std::strcmp(symbol, "cuGetErrorString")) *function = reinterpret_cast<void*>(error_string_entry_point);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return set_last_error(*function ? cudaSuccess : cudaErrorSymbolNotFound);
}

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
    return cudaGetDriverEntryPointByVersion(symbol, function, CUDART_VERSION, flags, result);
}
}
