// ldmatrix, stmatrix and mma.sync (PTX ISA 9.7.14.5). Fragments are laid out as the ISA's figures say; sums are formed
// in fp32 in the order of k, which is not the tensor core's (unspecified) order.
#include <cstring>

#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "memory.h"
#include "numeric.h"
#include "opcode_table.h"
#include "vectors.h"

namespace ptx_emulator {

namespace {

// False: not all lanes are there yet. Throws if some are there but predicated off, which .aligned forbids.
bool whole_warp(const Warp& warp, LaneMask mask) {
    if (!warp.converged()) return false;
    if (mask != warp.active()) {
        raise(Fault::kIllegalInstruction, "an .aligned instruction on lanes %08x of %08x", mask, warp.active());
    }
    return true;
}

// Matrix n of the instruction takes its 8 row addresses from lanes 8n to 8n + 7. Of a row of 8 16-bit elements, lane l
// holds elements 2 (l % 4) and the next of row l / 4; transposed, of column l / 4.
template <bool kTranspose>
Step load_matrix(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!whole_warp(warp, mask)) return Step::kBlock;
    const uint32_t count = i.list_size[0];
    Checker& checker = warp.machine.checker;
    const bool check = checker.enabled();
    const Checker::Actor actor = check ? checker.actor(warp, kCollective, AccessKind::kRead) : Checker::Actor{};
    const uint8_t* rows[32];
    Cta* owners[32];
    uint32_t offsets[32];
    for (uint32_t row = 0; row < 8 * count; ++row) {
        const auto address = static_cast<uint32_t>(lane_address(warp, i, i.a, row));
        const MemoryReference from = resolve_shared(warp, address, 16, 16);
        rows[row] = from.data;
        owners[row] = from.owner;
        offsets[row] = from.offset;
        if (check) prefetch_records(from);
    }
    if (check) {
        Repetition repetition(warp.cta.cluster.records);
        for (uint32_t row = 0; row < 8 * count; ++row) {
            checker.shared_access(actor, *owners[row], offsets[row], 16, &repetition);
        }
    }
    for (uint32_t n = 0; n < count; ++n) {
        auto* d = warp.lanes<uint32_t>(i.list[0][n]);
        const uint8_t* const* matrix = rows + 8 * n;
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
            if (kTranspose) {
                uint16_t low, high;
                std::memcpy(&low, matrix[lane % 4 * 2] + lane / 4 * 2, 2);
                std::memcpy(&high, matrix[lane % 4 * 2 + 1] + lane / 4 * 2, 2);
                d[lane] = uint32_t{high} << 16 | low;
            } else {
                std::memcpy(&d[lane], matrix[lane / 4] + lane % 4 * 4, 4);
            }
        }
    }
    return Step::kNext;
}

template <bool kTranspose>
Step store_matrix(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!whole_warp(warp, mask)) return Step::kBlock;
    const uint32_t count = i.list_size[0];
    for (uint32_t n = 0; n < count; ++n) {
        const auto* source = warp.lanes<uint32_t>(i.list[0][n]);
        for (uint32_t row = 0; row < 8; ++row) {
            const auto address = static_cast<uint32_t>(lane_address(warp, i, i.a, 8 * n + row));
            const MemoryReference to = resolve_shared(warp, address, 16, 16);
            warp.machine.checker.shared_access(warp, kCollective, *to.owner, to.offset, 16, AccessKind::kWrite);
            for (uint32_t column = 0; column < 8; ++column) {
                const uint32_t lane = kTranspose ? column * 4 + row / 2 : row * 4 + column / 2;
                const uint32_t half = kTranspose ? row % 2 : column % 2;
                const auto value = static_cast<uint16_t>(source[lane] >> (16 * half));
                std::memcpy(to.data + column * 2, &value, 2);
            }
            to.owner->shared.written_by_generic(to.offset, 16);
        }
    }
    warp.machine.progressed();
    return Step::kNext;
}

void decode_matrix_move(DecodeContext& c, bool loads) {
    c.allow(1, "sync aligned m8n8 x1 x2 x4 trans shared shared::cta b16");
    c.out.a = c.address(c.operand(loads ? 1 : 0), Space::kShared);
    const size_t count = c.has("x4") ? 4 : c.has("x2") ? 2 : 1;
    if (loads) {
        c.write_list(0, c.operand(0), 4);
        c.out.handler = c.has("trans") ? load_matrix<true> : load_matrix<false>;
    } else {
        c.read_list(0, c.operand(1), 4);
        c.out.handler = c.has("trans") ? store_matrix<true> : store_matrix<false>;
    }
    if (c.out.list_size[0] != count) c.fail("wrong number of registers");
}

void decode_ldmatrix(DecodeContext& c) {
    decode_matrix_move(c, true);
}
void decode_stmatrix(DecodeContext& c) {
    decode_matrix_move(c, false);
}

// D (16 x 8) = A (16 x K, row) B (K x 8, column) + C, K = 8 or 16, fp32 accumulators.
// list: 0 D, 1 A, 2 B, 3 C
template <bool kBf16, int kDepth>
Step multiply(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!whole_warp(warp, mask)) return Step::kBlock;
    // Lanes 4g to 4g + 3 hold row g of A, and row g + 8; 8 elements of K per register. Of B they hold column g.
    alignas(64) float a[16][kDepth];
    for (int r = 0; r < kDepth / 4; ++r) {
        const auto* registers = warp.lanes<uint32_t>(i.list[1][r]);
        for (int g = 0; g < 8; ++g) {
            const Float8 values = widen<kBf16>(registers + 4 * g);
            std::memcpy(&a[g + (r & 1) * 8][(r >> 1) * 8], &values, sizeof values);
        }
    }
    Float8 b[kDepth];  // row k: the 8 columns
    for (int r = 0; r < kDepth / 8; ++r) {
        const auto* registers = warp.lanes<uint32_t>(i.list[2][r]);
        for (int g = 0; g < 8; ++g) b[8 * r + g] = widen<kBf16>(registers + 4 * g);
        transpose(b + 8 * r);
    }
    // Registers 2h and 2h + 1 of those lanes hold the even and the odd columns of row g + 8h of C and D.
    for (int h = 0; h < 2; ++h) {
        const float *even_c = warp.lanes<float>(i.list[3][2 * h]), *odd_c = warp.lanes<float>(i.list[3][2 * h + 1]);
        alignas(64) float even[32], odd[32];
        Float8 sums[8] = {};
        for (int k = 0; k < kDepth; ++k) {
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) sums[g] += a[g + 8 * h][k] * b[k];
        }
        for (int g = 0; g < 8; ++g) {
            const Float8 sum = sums[g];
            Float4 c0, c1;
            std::memcpy(&c0, even_c + 4 * g, sizeof c0);
            std::memcpy(&c1, odd_c + 4 * g, sizeof c1);
            const Float4 d0 = c0 + __builtin_shufflevector(sum, sum, 0, 2, 4, 6);
            const Float4 d1 = c1 + __builtin_shufflevector(sum, sum, 1, 3, 5, 7);
            std::memcpy(even + 4 * g, &d0, sizeof d0);
            std::memcpy(odd + 4 * g, &d1, sizeof d1);
        }
        std::memcpy(warp.lanes<float>(i.list[0][2 * h]), even, sizeof even);
        std::memcpy(warp.lanes<float>(i.list[0][2 * h + 1]), odd, sizeof odd);
    }
    return Step::kNext;
}

void decode_mma(DecodeContext& c) {
    const std::string& opcode = c.syntax.opcode;
    const bool bf16 = c.has("bf16");
    const int depth = c.has("m16n8k16") ? 16 : c.has("m16n8k8") ? 8 : 0;
    const std::string type = bf16 ? "bf16" : "f16";
    const std::string expected =
        format("mma.sync.aligned.m16n8k%d.row.col.f32.%s.%s.f32", depth, type.c_str(), type.c_str());
    if (opcode != expected) c.fail("only m16n8k16 and m16n8k8 of f16 and bf16 with f32 accumulators are supported");
    c.write_list(0, c.operand(0), 4);
    c.read_list(1, c.operand(1), 4);
    c.read_list(2, c.operand(2), 4);
    c.read_list(3, c.operand(3), 4);
    if (c.out.list_size[0] != 4 || c.out.list_size[1] != depth / 4 || c.out.list_size[2] != depth / 8 ||
        c.out.list_size[3] != 4) {
        c.fail("wrong number of registers");
    }
    c.out.handler = depth == 16 ? (bf16 ? multiply<true, 16> : multiply<false, 16>)
                                : (bf16 ? multiply<true, 8> : multiply<false, 8>);
}

}  // namespace

void register_matrix(OpcodeTable& table) {
    table.add("ldmatrix", decode_ldmatrix);
    table.add("stmatrix", decode_stmatrix);
    table.add("mma", decode_mma);
}

}  // namespace ptx_emulator
