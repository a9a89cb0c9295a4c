// Which keys a row sees. With i and j the positions in the sequence and shift = seqlen_k - seqlen_q, row i sees the
// keys j with i + shift - left <= j <= i + shift + right, within the sequence. Causal attention is right = 0.
#pragma once

#include <stdint.h>

#include "params.h"

namespace flash_ext {

// The bounds of a call. Made on the host, where a bound that no sequence of the call can reach becomes none.
struct MaskBounds {
    int32_t left;   // -1: unbounded
    int32_t right;  // -1: unbounded
};

inline MaskBounds mask_bounds(const ForwardParams& params) {
    int32_t left = params.window_left, right = params.window_right;
    if (left >= params.seqlen_k) left = -1;
    if (right >= params.seqlen_q) right = -1;
    if (params.causal) right = 0;
    return {left < 0 ? -1 : left, right < 0 ? -1 : right};
}

// Keys [begin, end); empty if end <= begin.
struct KeyRange {
    int32_t begin;
    int32_t end;
};

struct Mask {
    MaskBounds bounds;
    int32_t shift;     // seqlen_k - seqlen_q of the sequence
    int32_t seqlen_k;  // keys that count

    __device__ __forceinline__ KeyRange visible(int32_t row) const {
        // Nothing leaves 32 bits: row + shift lies in [-seqlen_q, seqlen_k + a tile), padding rows included.
        const int32_t diagonal = row + shift;
        KeyRange keys{0, seqlen_k};
        if (bounds.left >= 0) keys.begin = diagonal > bounds.left ? diagonal - bounds.left : 0;
        if (bounds.right >= 0 && diagonal < seqlen_k - 1 - bounds.right) keys.end = max(diagonal + bounds.right + 1, 0);
        return keys;
    }
    // The mask seen from the keys: visible(key) are the rows that see it, of seqlen_q.
    __device__ __forceinline__ Mask transposed(int32_t seqlen_q) const {
        return {{bounds.right, bounds.left}, -shift, seqlen_q};
    }
    // Keys that a row in [row_begin, row_end) sees: no key outside is seen by any of them.
    __device__ __forceinline__ KeyRange visible_to_any(int32_t row_begin, int32_t row_end) const {
        return {visible(row_begin).begin, visible(row_end - 1).end};
    }
    // Keys that all rows in [row_begin, row_end) see.
    __device__ __forceinline__ KeyRange visible_to_all(int32_t row_begin, int32_t row_end) const {
        return {visible(row_end - 1).begin, visible(row_begin).end};
    }
};

// The blocks of kBlock keys that a tile of rows walks, from the last to the first:
//   [full_end, end)          cut by the right bound or the end of the keys: masked
//   [full_begin, full_end)   seen whole by every row: no mask
//   [begin, full_begin)      cut by the left bound: masked
struct KeyBlocks {
    int32_t begin;
    int32_t full_begin;
    int32_t full_end;
    int32_t end;
};

__device__ __forceinline__ KeyBlocks key_blocks(const Mask& mask, int32_t row_begin, int32_t row_end, int block) {
    const KeyRange any = mask.visible_to_any(row_begin, row_end);
    if (row_end <= row_begin || any.end <= any.begin) return {0, 0, 0, 0};
    const KeyRange all = mask.visible_to_all(row_begin, row_end);
    KeyBlocks blocks;
    blocks.begin = any.begin / block;
    blocks.end = (any.end - 1) / block + 1;
    blocks.full_end = max(min(all.end / block, blocks.end), blocks.begin);
    const int32_t first_full = all.begin / block + (all.begin % block != 0);
    blocks.full_begin = max(min(first_full, blocks.full_end), blocks.begin);
    return blocks;
}

// Bits [0, count), all for count >= 32.
__device__ __forceinline__ uint32_t low_bits(int count) {
    return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
}

}  // namespace flash_ext
