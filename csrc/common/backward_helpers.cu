// The small kernels around a backward: one warp's lanes walk the columns of a row in 16-byte steps, several rows at a
// time where rows are short. All are bound by memory: the first reads O and dO once, the second the fp32 dQ.
#include "common/backward_helpers.h"

#include "common/dq_scratch.cuh"
#include "core/launch.cuh"
#include "core/numeric.cuh"
#include "core/programmatic_launch.cuh"
#include "core/sequence.cuh"
#include "ptx/griddepcontrol.cuh"

namespace flash_ext {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

bool is_packed(const ForwardParams& attention) {
    return attention.cu_seqlens_q != nullptr;
}

int64_t sequence_heads(const ForwardParams& attention) {
    return is_packed(attention) ? attention.heads_q : static_cast<int64_t>(attention.batch) * attention.heads_q;
}

// The tile of query rows that a CTA works on.
struct QueryTile {
    TileRows rows;
    int64_t sequence_head;  // batch * heads_q + head, or head when packed
    int32_t batch;          // of the tensors: 0 when packed
    int32_t head;
    int32_t slot;
    int64_t number;  // sequence_head * slots + slot
};

struct HelperArguments {
    BackwardParams params;
    BackwardScratch scratch;
    int64_t sequence_heads;
    int64_t slots;
    ScratchShape shape;
};

// False: nothing to do for this CTA.
__device__ __forceinline__ bool find_query_tile(const HelperArguments& arguments, QueryTile& tile) {
    const ForwardParams& attention = arguments.params.attention;
    const uint64_t position = static_cast<uint64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    if (position >= static_cast<uint64_t>(arguments.sequence_heads) * arguments.slots) return false;
    tile.sequence_head = static_cast<int64_t>(position / arguments.slots);
    tile.slot = static_cast<int32_t>(position - tile.sequence_head * arguments.slots);
    tile.number = static_cast<int64_t>(position);
    const bool packed = attention.cu_seqlens_q != nullptr;
    tile.batch = packed ? 0 : static_cast<int32_t>(tile.sequence_head / attention.heads_q);
    tile.head = static_cast<int32_t>(tile.sequence_head - static_cast<int64_t>(tile.batch) * attention.heads_q);
    tile.rows = find_tile(attention.cu_seqlens_q, attention.seqused_q, attention.seqlen_q, attention.batch, tile.batch,
                          tile.slot, arguments.shape.block_m);
    return true;
}

// Lanes that share a row of `columns` elements, 8 elements each: a power of two.
__device__ __forceinline__ int lanes_per_row(int columns) {
    int lanes = 1;
    while (lanes * 8 < columns) lanes *= 2;
    return lanes;
}

__device__ __forceinline__ float2 unpack(uint32_t pair, DataType type) {
    if (type == DataType::kFloat16) {
        return {ptx::cvt_f32_f16(static_cast<uint16_t>(pair)), ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> 16))};
    }
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

__device__ __forceinline__ float dot_pair(uint32_t a, uint32_t b, DataType type) {
    const float2 x = unpack(a, type), y = unpack(b, type);
    return fmaf(x.x, y.x, x.y * y.y);
}

__device__ __forceinline__ float lanes_sum(float value, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

// Sum over the CTA in a fixed order, for thread 0.
__device__ __forceinline__ float cta_sum(float value) {
    __shared__ float partial[kWarps];
    value = lanes_sum(value, 32);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();  // all warps' sums are there
    if (threadIdx.x != 0) return 0.f;
    float sum = 0.f;
    for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp];
    return sum;
}

__global__ void __launch_bounds__(kThreads)
    backward_preprocess_kernel(const __grid_constant__ HelperArguments arguments) {
    ptx::griddepcontrol_launch_dependents();
    QueryTile tile;
    if (!find_query_tile(arguments, tile)) return;
    const BackwardParams& params = arguments.params;
    const ForwardParams& attention = params.attention;
    const int lane = threadIdx.x % 32;
    const int lanes = lanes_per_row(attention.head_dim_v), lane_in_row = lane % lanes;
    const int rows_per_pass = kThreads / lanes;
    const int rows = min(tile.rows.sequence.used - tile.rows.begin, arguments.shape.block_m);  // slack is not read
    const int first = tile.rows.sequence.start + tile.rows.begin;
    const int64_t first_row = tile.sequence_head * attention.seqlen_q + first;
    const char* out =
        static_cast<const char*>(attention.out.data) + row_offset(attention.out, tile.batch, first, tile.head) * 2;
    const char* dout =
        static_cast<const char*>(params.dout.data) + row_offset(params.dout, tile.batch, first, tile.head) * 2;
    const float* dlse = params.dlse == nullptr
                            ? nullptr
                            : params.dlse + tile.batch * params.dlse_stride_batch +
                                  tile.head * params.dlse_stride_head + first * params.dlse_stride_row;
    const bool has_sink = attention.sinks != nullptr;
    const float sink = has_sink ? load_as_float(attention.sinks, attention.sinks_dtype, tile.head) : 0.f;

    const bool tiled = arguments.shape.tile_columns != 0;
    float* const tile_terms =
        reinterpret_cast<float*>(arguments.scratch.row_terms + tile.number * arguments.shape.block_m);

    float dsink = 0.f;
    constexpr int kAtOnce = 2;  // rows of a thread whose loads are under way together
    for (int base = 0; base < rows; base += kAtOnce * rows_per_pass) {  // uniform: lanes_sum needs the whole warp
        uint4 x[kAtOnce], y[kAtOnce];
        float lse[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = base + i * rows_per_pass + threadIdx.x / lanes;
            x[i] = y[i] = uint4{};
            if (row >= rows) continue;
            lse[i] = attention.lse[first_row + row];
            if (lane_in_row * 8 >= attention.head_dim_v) continue;
            x[i] = *reinterpret_cast<const uint4*>(out + row * attention.out.stride_row * 2 + lane_in_row * 16);
            y[i] = *reinterpret_cast<const uint4*>(dout + row * params.dout.stride_row * 2 + lane_in_row * 16);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = base + i * rows_per_pass + threadIdx.x / lanes;
            const float sum =
                lanes_sum(dot_pair(x[i].x, y[i].x, attention.dtype) + dot_pair(x[i].y, y[i].y, attention.dtype) +
                              dot_pair(x[i].z, y[i].z, attention.dtype) + dot_pair(x[i].w, y[i].w, attention.dtype),
                          lanes);
            if (row >= rows || lane_in_row != 0) continue;
            const bool is_empty = lse[i] == minus_infinity();  // no key and no sink: the gradient of lse is ignored
            const float delta = is_empty ? 0.f : sum - (dlse == nullptr ? 0.f : dlse[row * params.dlse_stride_row]);
            const float2 terms{is_empty ? -minus_infinity() : lse[i] * kLog2E, delta};
            if (tiled) {
                tile_terms[row] = terms.x;
                tile_terms[arguments.shape.block_m + row] = terms.y;
            } else {
                arguments.scratch.row_terms[first_row + row] = terms;
            }
            if (has_sink && !is_empty) dsink -= exp2f((sink - lse[i]) * kLog2E) * delta;
        }
    }
    // dq of this tile's rows; of slack too, it costs nothing more.
    const int all_rows = max(min(tile.rows.sequence.length - tile.rows.begin, arguments.shape.block_m), 0);
    if (tiled && all_rows > 0) {
        for (int row = max(rows, 0) + threadIdx.x; row < arguments.shape.block_m; row += kThreads) {
            tile_terms[row] = -minus_infinity();
            tile_terms[arguments.shape.block_m + row] = 0.f;
        }
        const int elements = arguments.shape.block_m * arguments.shape.tile_columns;
        float* dq = arguments.scratch.dq + tile.number * elements;
        // Without states whoever has the first turn stores, but not where every turn has come from the start.
        const bool stores_first = arguments.scratch.stores_first &&
                                  (arguments.scratch.states != nullptr || arguments.scratch.turns[tile.number] == 0);
        if (!stores_first) {
            for (int i = threadIdx.x * 4; i < elements; i += kThreads * 4) {
                *reinterpret_cast<float4*>(dq + i) = float4{0.f, 0.f, 0.f, 0.f};
            }
        }
    }
    if (arguments.scratch.states != nullptr) {
        // Of empty slots, too: with cu_seqlens_q that does not ascend a key tile may find rows there, and shall not
        // wait for whoever seems to have claimed them.
        const int parts = arguments.shape.parts();
        if (threadIdx.x < parts) {
            arguments.scratch.states[tile.number * parts + threadIdx.x] = static_cast<int32_t>(PartState::kUntouched);
        }
    }
    const int chunks = tiled ? 0 : attention.head_dim / 4;
    for (int i = threadIdx.x; i < all_rows * chunks; i += kThreads) {
        const int row = i % all_rows, chunk = i / all_rows;
        *reinterpret_cast<float4*>(arguments.scratch.dq + dq_scratch_offset(first_row + row, attention.head_dim) +
                                   chunk * kDqChunk) = float4{0.f, 0.f, 0.f, 0.f};
    }

    if (has_sink) {
        dsink = cta_sum(dsink);
        const int64_t tiles = arguments.slots * (arguments.sequence_heads / attention.heads_q);  // per head
        if (threadIdx.x == 0) {
            arguments.scratch.dsinks[tile.head * tiles + tile.batch * arguments.slots + tile.slot] = dsink;
        }
    }
}

// Two neighbours of dq from sums of dS K.
__device__ __forceinline__ uint32_t scaled_pair(const ForwardParams& attention, float low, float high) {
    low *= attention.softmax_scale;
    high *= attention.softmax_scale;
    return attention.dtype == DataType::kFloat16 ? pack<DataType::kFloat16>(low, high)
                                                 : pack<DataType::kBFloat16>(low, high);
}

__global__ void __launch_bounds__(kThreads)
    backward_postprocess_kernel(const __grid_constant__ HelperArguments arguments) {
    ptx::griddepcontrol_wait();
    QueryTile tile;
    if (!find_query_tile(arguments, tile)) return;
    const BackwardParams& params = arguments.params;
    const ForwardParams& attention = params.attention;
    const int rows = min(tile.rows.sequence.length - tile.rows.begin, arguments.shape.block_m);
    const int rows_used = min(tile.rows.sequence.used - tile.rows.begin, arguments.shape.block_m);
    const int first = tile.rows.sequence.start + tile.rows.begin;
    const int64_t first_row = tile.sequence_head * attention.seqlen_q + first;
    char* dq = static_cast<char*>(params.dq.data) + row_offset(params.dq, tile.batch, first, tile.head) * 2;
    // Consecutive threads take consecutive 16-byte parts of a row.
    const int parts = attention.head_dim / 8;
    for (int i = threadIdx.x; i < rows * parts; i += kThreads) {
        const int row = i / parts, part = i % parts;
        uint4 packed{0u, 0u, 0u, 0u};
        if (row < rows_used) {
            const float* sum =
                arguments.scratch.dq + dq_scratch_offset(first_row + row, attention.head_dim) + part * 2 * kDqChunk;
            const float4 even = *reinterpret_cast<const float4*>(sum);
            const float4 odd = *reinterpret_cast<const float4*>(sum + kDqChunk);
            packed = {scaled_pair(attention, even.x, odd.x), scaled_pair(attention, even.y, odd.y),
                      scaled_pair(attention, even.z, odd.z), scaled_pair(attention, even.w, odd.w)};
        }
        *reinterpret_cast<uint4*>(dq + row * params.dq.stride_row * 2 + part * 16) = packed;
    }
}

// The same from tiles.
__global__ void __launch_bounds__(kThreads)
    backward_postprocess_tiles_kernel(const __grid_constant__ HelperArguments arguments) {
    ptx::griddepcontrol_wait();
    QueryTile tile;
    if (!find_query_tile(arguments, tile)) return;
    const BackwardParams& params = arguments.params;
    const ForwardParams& attention = params.attention;
    const ScratchShape& shape = arguments.shape;
    const int rows = min(tile.rows.sequence.length - tile.rows.begin, shape.block_m);
    const int rows_used = min(tile.rows.sequence.used - tile.rows.begin, shape.block_m);
    if (rows <= 0) return;
    const int first = tile.rows.sequence.start + tile.rows.begin;
    char* dq = static_cast<char*>(params.dq.data) + row_offset(params.dq, tile.batch, first, tile.head) * 2;
    const float* sums = arguments.scratch.dq + tile.number * shape.block_m * shape.tile_columns;
    // Where no key saw any of the rows nobody has stored: all parts are stored or none.
    bool has_sums = true;
    if (arguments.scratch.stores_first) {
        has_sums = arguments.scratch.states != nullptr ? arguments.scratch.states[tile.number * shape.parts()] ==
                                                             static_cast<int32_t>(PartState::kStored)
                                                       : arguments.scratch.turns[tile.number] != 0;
    }
    // A thread takes 8 columns of rows `row` and `row + 8`, which a quad held; its neighbours take the next columns.
    const int groups = attention.head_dim / 8;
    for (int i = threadIdx.x; i < shape.block_m / 2 * groups; i += kThreads) {
        const int column = i % groups * 8, quad = i / groups % 32, part_row = i / groups / 32 * 64;
        const int row = part_row + quad / 8 * 16 + quad % 8;
        const float* part =
            sums + part_row * shape.tile_columns + column / shape.part_columns * 64 * shape.part_columns;
        const float4* lanes = reinterpret_cast<const float4*>(part) + column % shape.part_columns / 8 * 128 + quad * 4;
        float4 values[4] = {};
        if (row < rows_used && has_sums) {
#pragma unroll
            for (int lane = 0; lane < 4; ++lane) values[lane] = lanes[lane];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int here = row + half * 8;
            if (here >= rows) continue;
            uint4 packed{0u, 0u, 0u, 0u};
            if (here < rows_used) {
                packed = half == 0 ? uint4{scaled_pair(attention, values[0].x, values[0].y),
                                           scaled_pair(attention, values[1].x, values[1].y),
                                           scaled_pair(attention, values[2].x, values[2].y),
                                           scaled_pair(attention, values[3].x, values[3].y)}
                                   : uint4{scaled_pair(attention, values[0].z, values[0].w),
                                           scaled_pair(attention, values[1].z, values[1].w),
                                           scaled_pair(attention, values[2].z, values[2].w),
                                           scaled_pair(attention, values[3].z, values[3].w)};
            }
            *reinterpret_cast<uint4*>(dq + here * params.dq.stride_row * 2 + column * 2) = packed;
        }
    }
}

// The same from tiles in parts of 32 rows.
__global__ void __launch_bounds__(kThreads)
    backward_postprocess_lanes_kernel(const __grid_constant__ HelperArguments arguments) {
    ptx::griddepcontrol_wait();
    QueryTile tile;
    if (!find_query_tile(arguments, tile)) return;
    const BackwardParams& params = arguments.params;
    const ForwardParams& attention = params.attention;
    const ScratchShape& shape = arguments.shape;
    const int rows = min(tile.rows.sequence.length - tile.rows.begin, shape.block_m);
    const int rows_used = min(tile.rows.sequence.used - tile.rows.begin, shape.block_m);
    if (rows <= 0) return;
    const int first = tile.rows.sequence.start + tile.rows.begin;
    char* dq = static_cast<char*>(params.dq.data) + row_offset(params.dq, tile.batch, first, tile.head) * 2;
    const float* sums = arguments.scratch.dq + tile.number * shape.block_m * shape.tile_columns;
    // 4 neighbours take 32 columns of a row, a warp those of 8 rows: lines of 128 bytes there, 64 bytes of a row here.
    const int groups = (attention.head_dim + 31) / 32;
    for (int i = threadIdx.x; i < shape.block_m * 4 * groups; i += kThreads) {
        const int row = i / 4 % shape.block_m, column = i / 4 / shape.block_m * 32 + i % 4 * 8;
        if (row >= rows || column >= attention.head_dim) continue;
        uint4 packed{0u, 0u, 0u, 0u};
        if (row < rows_used) {
            const int part = row / 32 * (shape.tile_columns / shape.part_columns) + column / shape.part_columns;
            const float4* lane = reinterpret_cast<const float4*>(sums + part * 32 * shape.part_columns) +
                                 column % shape.part_columns / 4 * 32 + row % 32;
            const float4 low = lane[0], high = lane[32];
            packed = {scaled_pair(attention, low.x, low.y), scaled_pair(attention, low.z, low.w),
                      scaled_pair(attention, high.x, high.y), scaled_pair(attention, high.z, high.w)};
        }
        *reinterpret_cast<uint4*>(dq + row * params.dq.stride_row * 2 + column * 2) = packed;
    }
}

// One CTA per query head.
__global__ void __launch_bounds__(kThreads) backward_sinks_kernel(const __grid_constant__ HelperArguments arguments) {
    const ForwardParams& attention = arguments.params.attention;
    const int64_t tiles = arguments.slots * (arguments.sequence_heads / attention.heads_q);
    const float* partial = arguments.scratch.dsinks + blockIdx.x * tiles;
    float sum = 0.f;
    for (int64_t i = threadIdx.x; i < tiles; i += kThreads) sum += partial[i];
    sum = cta_sum(sum);
    if (threadIdx.x != 0) return;
    void* dsinks = arguments.params.dsinks;
    if (attention.sinks_dtype == DataType::kFloat32) {
        static_cast<float*>(dsinks)[blockIdx.x] = sum;
    } else {
        static_cast<uint16_t*>(dsinks)[blockIdx.x] =
            static_cast<uint16_t>(attention.sinks_dtype == DataType::kFloat16 ? pack<DataType::kFloat16>(sum, 0.f)
                                                                              : pack<DataType::kBFloat16>(sum, 0.f));
    }
}

constexpr int kTurnsPerThread = 8;

// Clears ticket and turns. Where cu_seqlens_k does not ascend, a slot among those of a sequence's key tiles may be
// found to be another sequence's: that key tile has no CTA and never ends its turn. Then every turn has come from the
// start, for the rows are wrong anyway, and nobody may wait for ever.
__global__ void __launch_bounds__(kThreads)
    backward_first_turns_kernel(const __grid_constant__ HelperArguments arguments) {
    const ForwardParams& attention = arguments.params.attention;
    const int32_t total = attention.seqlen_k;
    int is_descending = 0;
    for (int i = threadIdx.x; i < attention.batch; i += kThreads) {
        is_descending |= clamp(attention.cu_seqlens_k[i], 0, total) > clamp(attention.cu_seqlens_k[i + 1], 0, total);
    }
    const int32_t first = __syncthreads_or(is_descending) ? kEveryTurn : 0;
    const int64_t tiles = arguments.sequence_heads * arguments.slots;
    int64_t tile = static_cast<int64_t>(blockIdx.x) * kTurnsPerThread * kThreads + threadIdx.x;
    if (tile == 0) *arguments.scratch.ticket = 0;
    for (int i = 0; i < kTurnsPerThread && tile < tiles; ++i, tile += kThreads) arguments.scratch.turns[tile] = first;
}

HelperArguments helper_arguments(const BackwardParams& params, const BackwardScratch& scratch,
                                 const ScratchShape& shape) {
    return {params, scratch, sequence_heads(params.attention), backward_query_slots(params.attention, shape.block_m),
            shape};
}

cudaError_t launch(const void* kernel, dim3 grid, HelperArguments& arguments, cudaStream_t stream,
                   bool programmatic = false) {
    void* kernel_arguments[] = {&arguments};
    return launch_kernel(kernel, grid, kThreads, 0, stream, kernel_arguments, programmatic);
}

// Cuts the workspace; with base 0 it only counts.
struct ScratchLayout {
    int64_t dq, row_terms, dsinks, ticket, turns, states, size;
};

ScratchLayout scratch_layout(const BackwardParams& params, const ScratchShape& shape) {
    const ForwardParams& attention = params.attention;
    const int64_t rows = sequence_heads(attention) * attention.seqlen_q;
    const int64_t tiles = sequence_heads(attention) * backward_query_slots(attention, shape.block_m);
    ScratchLayout layout{};
    const auto take = [&](int64_t bytes) {
        const int64_t start = layout.size;
        layout.size += (bytes + 255) / 256 * 256;
        return start;
    };
    const bool tiled = shape.tile_columns != 0;
    layout.dq = take(tiled ? tiles * shape.block_m * shape.tile_columns * 4
                           : dq_scratch_elements(rows, attention.head_dim) * 4);
    layout.row_terms = take((tiled ? tiles * shape.block_m : rows) * 8);
    layout.dsinks = take(attention.sinks != nullptr ? tiles * 4 : 0);
    // turns right behind the ticket: one memset serves both.
    layout.ticket = take(attention.deterministic ? 256 + tiles * 4 : 0);
    layout.turns = layout.ticket + 256;
    layout.states = take(shape.can_store_first && !attention.deterministic ? tiles * shape.parts() * 4 : 0);
    return layout;
}

}  // namespace

int64_t backward_query_slots(const ForwardParams& attention, int block_m) {
    return is_packed(attention) ? varlen_slots(attention.seqlen_q, attention.batch, block_m)
                                : (static_cast<int64_t>(attention.seqlen_q) + block_m - 1) / block_m;
}

int64_t backward_scratch_size(const BackwardParams& params, const ScratchShape& shape) {
    return scratch_layout(params, shape).size;
}

BackwardScratch backward_scratch(const BackwardParams& params, const ScratchShape& shape, void* workspace,
                                 bool stores_first) {
    const ScratchLayout layout = scratch_layout(params, shape);
    char* base = static_cast<char*>(workspace);
    BackwardScratch scratch{};
    scratch.stores_first = stores_first;
    scratch.dq = reinterpret_cast<float*>(base + layout.dq);
    scratch.row_terms = reinterpret_cast<float2*>(base + layout.row_terms);
    scratch.dsinks = reinterpret_cast<float*>(base + layout.dsinks);
    if (params.attention.deterministic) {
        scratch.ticket = reinterpret_cast<unsigned long long*>(base + layout.ticket);
        scratch.turns = reinterpret_cast<int32_t*>(base + layout.turns);
    } else if (stores_first) {
        scratch.states = reinterpret_cast<int32_t*>(base + layout.states);
    }
    return scratch;
}

cudaError_t launch_backward_preprocess(const BackwardParams& params, const BackwardScratch& scratch,
                                       const ScratchShape& shape, cudaStream_t stream) {
    HelperArguments arguments = helper_arguments(params, scratch, shape);
    const int64_t tiles = arguments.sequence_heads * arguments.slots;
    if (tiles == 0) return cudaSuccess;
    if (scratch.turns != nullptr) {
        constexpr int64_t kTurns = kTurnsPerThread * kThreads;
        const cudaError_t error =
            params.attention.cu_seqlens_k != nullptr
                ? launch(reinterpret_cast<const void*>(&backward_first_turns_kernel),
                         dim3(static_cast<unsigned>((tiles + kTurns - 1) / kTurns)), arguments, stream)
                : cudaMemsetAsync(scratch.ticket, 0, 256 + static_cast<size_t>(tiles) * 4, stream);
        if (error != cudaSuccess) return error;
    }
    return launch(reinterpret_cast<const void*>(&backward_preprocess_kernel), linear_grid(tiles), arguments, stream);
}

cudaError_t launch_backward_postprocess(const BackwardParams& params, const BackwardScratch& scratch,
                                        const ScratchShape& shape, cudaStream_t stream, bool programmatic) {
    HelperArguments arguments = helper_arguments(params, scratch, shape);
    const int64_t tiles = arguments.sequence_heads * arguments.slots;
    if (tiles > 0) {
        const cudaError_t error =
            launch(shape.tile_columns == 0 ? reinterpret_cast<const void*>(&backward_postprocess_kernel)
                   : shape.part_rows == 32 ? reinterpret_cast<const void*>(&backward_postprocess_lanes_kernel)
                                           : reinterpret_cast<const void*>(&backward_postprocess_tiles_kernel),
                   linear_grid(tiles), arguments, stream, programmatic);
        if (error != cudaSuccess) return error;
    }
    if (params.dsinks == nullptr || params.attention.heads_q == 0) return cudaSuccess;
    return launch(reinterpret_cast<const void*>(&backward_sinks_kernel), dim3(params.attention.heads_q), arguments,
                  stream);
}

}  // namespace flash_ext
