#include "matrix_operand.h"

#include <algorithm>
#include <cstring>

#include "errors.h"
#include "machine.h"
#include "numeric.h"
#include "tensor_box.h"
#include "vectors.h"

namespace ptx_emulator {

namespace {

void check_start(const MatrixDescriptor& d, uint64_t bits) {
    // The pattern repeats every 8 rows of W bytes and must begin at a multiple of that; a start may lie inside of its
    // first row, which is how one steps along K.
    const uint32_t width = 16u << static_cast<uint32_t>(d.swizzle);
    if (d.swizzle != Swizzle::kNone && d.start % (8 * width) >= width) {
        raise(Fault::kIllegalInstruction,
              "matrix descriptor 0x%llx: start 0x%x, but a swizzle of %u bytes repeats every %u bytes and the base "
              "offset is 0",
              static_cast<unsigned long long>(bits), d.start, width, 8 * width);
    }
}

MatrixDescriptor common_fields(uint64_t bits) {
    MatrixDescriptor d;
    d.start = static_cast<uint32_t>(bits & 0x3fff) << 4;
    d.leading = static_cast<uint32_t>(bits >> 16 & 0x3fff) << 4;
    d.stride = static_cast<uint32_t>(bits >> 32 & 0x3fff) << 4;
    if (bits >> 49 & 7) {
        raise(Fault::kUnsupported, "matrix descriptor 0x%llx: a base offset", static_cast<unsigned long long>(bits));
    }
    return d;
}

}  // namespace

MatrixDescriptor wgmma_descriptor(uint64_t bits) {
    MatrixDescriptor d = common_fields(bits);
    constexpr uint64_t kReserved =
        (uint64_t{3} << 14) | (uint64_t{3} << 30) | (uint64_t{7} << 46) | (uint64_t{0x3ff} << 52);
    if (bits & kReserved) {
        raise(Fault::kIllegalInstruction, "matrix descriptor 0x%llx: reserved bits are set",
              static_cast<unsigned long long>(bits));
    }
    constexpr Swizzle kModes[] = {Swizzle::kNone, Swizzle::k128, Swizzle::k64, Swizzle::k32};
    d.swizzle = kModes[bits >> 62];
    check_start(d, bits);
    return d;
}

MatrixDescriptor tcgen05_descriptor(uint64_t bits) {
    MatrixDescriptor d = common_fields(bits);
    if ((bits >> 46 & 7) != 1) {
        raise(Fault::kIllegalInstruction, "matrix descriptor 0x%llx: bits 46 to 48 must be 1",
              static_cast<unsigned long long>(bits));
    }
    if (bits >> 52 & 1) raise(Fault::kUnsupported, "matrix descriptor with an absolute leading dimension");
    constexpr uint64_t kReserved = (uint64_t{3} << 14) | (uint64_t{3} << 30) | (uint64_t{0xff} << 53);
    if (bits & kReserved) {
        raise(Fault::kIllegalInstruction, "matrix descriptor 0x%llx: reserved bits are set",
              static_cast<unsigned long long>(bits));
    }
    switch (bits >> 61) {
        case 0:
            d.swizzle = Swizzle::kNone;
            break;
        case 2:
            d.swizzle = Swizzle::k128;
            break;
        case 4:
            d.swizzle = Swizzle::k64;
            break;
        case 6:
            d.swizzle = Swizzle::k32;
            break;
        default:
            raise(Fault::kUnsupported, "matrix descriptor 0x%llx: swizzle mode %llu",
                  static_cast<unsigned long long>(bits), static_cast<unsigned long long>(bits >> 61));
    }
    check_start(d, bits);
    return d;
}

const char* name_of(ElementType type) {
    static const char* const names[] = {"f16", "bf16", "e4m3", "e5m2", "tf32"};
    return names[static_cast<int>(type)];
}

float widen_element(ElementType type, const uint8_t* data) {
    uint16_t half;
    uint32_t word;
    switch (type) {
        case ElementType::kF16:
            std::memcpy(&half, data, 2);
            return f16_to_float(half);
        case ElementType::kBf16:
            std::memcpy(&half, data, 2);
            return bf16_to_float(half);
        case ElementType::kE4m3:
            return e4m3_to_float(*data);
        case ElementType::kE5m2:
            return e5m2_to_float(*data);
        case ElementType::kTf32:
            std::memcpy(&word, data, 4);
            return bit_cast<float>(word & 0xffffe000u);
    }
    return 0;
}

void widen_chunk(ElementType type, const uint8_t* data, float* values) {
    const uint32_t size = element_size(type), count = 16 / size;
    for (uint32_t e = 0; e < count; ++e) values[e] = widen_element(type, data + e * size);
}

template <class F>
void MatrixOperand::for_chunks(F f) const {
    const MatrixDescriptor& d = descriptor;
    const uint32_t size = element_size(type), t = 16 / size;
    const uint32_t width = 16u << static_cast<uint32_t>(d.swizzle);
    const bool plain = d.swizzle == Swizzle::kNone;
    auto at = [&](uint32_t offset) { return swizzle_address((d.start + offset) & 0x3ffff, d.swizzle); };
    if (!mn_major) {
        for (uint32_t row = first; row < first + count; ++row) {
            const uint32_t base = row % 8 * width + row / 8 * d.stride;
            for (uint32_t chunk = 0; chunk < 2; ++chunk) {
                f(at(base + chunk * (plain ? d.leading : 16)), row, chunk * t);
            }
        }
        return;
    }
    const uint32_t span = width / size;  // elements of a row of the pattern
    for (uint32_t row = first; row < first + count; row += t) {
        for (uint32_t k = 0; k < depth(); ++k) {
            const uint32_t offset = plain
                                        ? row / t * d.stride + k % 8 * 16 + k / 8 * d.leading
                                        : row % span * size + row / span * d.leading + k % 8 * width + k / 8 * d.stride;
            f(at(offset), row, k);
        }
    }
}

std::string MatrixOperand::form() const {
    const uint32_t width = 16u << static_cast<uint32_t>(descriptor.swizzle);
    std::string text = mn_major ? "MN-major" : "K-major";
    text += descriptor.swizzle == Swizzle::kNone ? ", no swizzle" : format(", swizzle %u", width);
    if (!mn_major && count > 8) text += ", stride";
    if (mn_major && count > width / element_size(type)) text += ", several panels";
    if (descriptor.start % width) text += ", begins inside a row of the pattern";
    return text;
}

void MatrixOperand::load(Cta& cta, float* values) const {
    const uint32_t k_count = depth();
    const uint32_t t = 16 / element_size(type);
    const uint8_t* const shared = cta.shared.async(0);
    Float8 block[8];  // MN-major elements of 16 bits: 8 k, of 8 rows each
    for_chunks([&](uint32_t offset, uint32_t row, uint32_t k) {
        if (offset + 16 > cta.shared.size()) {
            raise(Fault::kIllegalAddress, "a matrix descriptor reaches shared offset 0x%x, of %u bytes", offset,
                  cta.shared.size());
        }
        float* to = values + (row - first) * k_count + k;
        if (t == 8) {
            const bool bf16 = type == ElementType::kBf16;
            const Float8 chunk = bf16 ? widen<true>(shared + offset) : widen<false>(shared + offset);
            if (!mn_major) {
                std::memcpy(to, &chunk, sizeof chunk);
                return;
            }
            block[k % 8] = chunk;
            if (k % 8 != 7) return;
            transpose(block);
            for (uint32_t e = 0; e < 8; ++e) std::memcpy(to - 7 + e * k_count, &block[e], sizeof block[e]);
            return;
        }
        float chunk[16];
        widen_chunk(type, shared + offset, chunk);
        if (mn_major) {
            for (uint32_t e = 0; e < t; ++e) to[e * k_count] = chunk[e];
        } else {
            std::memcpy(to, chunk, t * sizeof(float));
        }
    });
}

void MatrixOperand::record(Checker& checker, const AsyncAgent& agent, Cta& cta) const {
    if (!checker.enabled()) return;
    static thread_local std::vector<uint32_t> offsets;
    offsets.clear();
    for_chunks([&](uint32_t offset, uint32_t, uint32_t) {
        if (offset + 16 > cta.shared.size()) {
            raise(Fault::kIllegalAddress, "a matrix descriptor reaches shared offset 0x%x, of %u bytes", offset,
                  cta.shared.size());
        }
        offsets.push_back(offset);
    });
    checker.shared_reads(Checker::actor(agent, kWarpSize, AccessKind::kRead), cta, offsets);
}

namespace {

// 4 rows of 8 kVectors columns at a time, which stay in registers. columns: [k][8 columns side by side]
template <uint32_t kVectors, uint32_t kDepth>
void multiply_columns(const float* a, const Float8 (&columns)[kDepth][2], float* d, uint32_t m, uint32_t pitch,
                      bool accumulate) {
    constexpr uint32_t kSums = 4 * kVectors;
    for (uint32_t i = 0; i < m; i += 4) {
        const float* rows = a + size_t{i} * kDepth;
        float* to = d + size_t{i} * pitch;
        auto place = [&](uint32_t e) { return to + size_t{e / kVectors} * pitch + e % kVectors * 8; };
        Float8 sums[kSums] = {};
        if (accumulate) {
#pragma GCC unroll 8
            for (uint32_t e = 0; e < kSums; ++e) std::memcpy(&sums[e], place(e), sizeof(Float8));
        }
        for (uint32_t l = 0; l < kDepth; ++l) {
#pragma GCC unroll 8
            for (uint32_t e = 0; e < kSums; ++e) sums[e] += rows[e / kVectors * kDepth + l] * columns[l][e % kVectors];
        }
#pragma GCC unroll 8
        for (uint32_t e = 0; e < kSums; ++e) std::memcpy(place(e), &sums[e], sizeof(Float8));
    }
}

template <uint32_t kDepth>
void multiply_accumulate(const float* a, const float* b, float* d, uint32_t m, uint32_t n, uint32_t pitch,
                         bool accumulate) {
    Float8 columns[kDepth][2], block[8];
    for (uint32_t j = 0; j < n; j += 16) {
        const uint32_t vectors = n - j >= 16 ? 2 : 1;
        for (uint32_t v = 0; v < vectors; ++v) {
            for (uint32_t l = 0; l < kDepth; l += 8) {
                for (uint32_t column = 0; column < 8; ++column) {
                    std::memcpy(&block[column], b + size_t{j + 8 * v + column} * kDepth + l, sizeof(Float8));
                }
                transpose(block);
                for (uint32_t e = 0; e < 8; ++e) columns[l + e][v] = block[e];
            }
        }
        if (vectors == 2) {
            multiply_columns<2>(a, columns, d + j, m, pitch, accumulate);
        } else {
            multiply_columns<1>(a, columns, d + j, m, pitch, accumulate);
        }
    }
}

}  // namespace

void multiply_accumulate(const float* a, const float* b, float* d, uint32_t m, uint32_t n, uint32_t k, uint32_t pitch,
                         bool accumulate) {
    switch (k) {
        case 8:
            return multiply_accumulate<8>(a, b, d, m, n, pitch, accumulate);
        case 16:
            return multiply_accumulate<16>(a, b, d, m, n, pitch, accumulate);
        case 32:
            return multiply_accumulate<32>(a, b, d, m, n, pitch, accumulate);
        default:
            raise(Fault::kUnsupported, "a product of depth %u", k);
    }
}

}  // namespace ptx_emulator
