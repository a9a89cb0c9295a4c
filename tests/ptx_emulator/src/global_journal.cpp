#include "global_journal.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "errors.h"
#include "numeric.h"

namespace ptx_emulator {

GlobalJournal::Page& GlobalJournal::page(uint64_t number) {
    if (number != last_number_) {
        std::unique_ptr<Page>& slot = pages_[number];
        if (!slot) slot = std::make_unique<Page>();
        last_ = slot.get();
        last_number_ = number;
    }
    return *last_;
}

void GlobalJournal::before_write(uint64_t address, uint32_t bytes, bool rounded_sum) {
    while (bytes > 0) {
        const auto first = static_cast<uint32_t>(address % kGranule);
        const uint32_t count = std::min(bytes, kGranule - first);
        const auto mask = static_cast<uint16_t>(((1u << count) - 1) << first);
        Page& p = page(address / kPageBytes);
        const auto in_page = static_cast<uint32_t>(address % kPageBytes);
        uint16_t& written = p.written[in_page / kGranule];
        const auto fresh = static_cast<uint16_t>(mask & ~written);
        if (fresh == mask) {
            std::memcpy(p.before + in_page, reinterpret_cast<const void*>(address), count);
        } else if (fresh) {
            for (uint32_t b = 0; b < count; ++b) {
                if (fresh >> (first + b) & 1) p.before[in_page + b] = reinterpret_cast<const uint8_t*>(address)[b];
            }
        }
        written |= mask;
        if (rounded_sum) p.summed[in_page / kGranule] |= mask;
        address += count;
        bytes -= count;
    }
}

// Calls f(offset in the page, bytes) for each run of written bytes, whole granules at once.
template <class F>
static void for_written(const uint16_t* written, uint32_t granules, F f) {
    for (uint32_t g = 0; g < granules; ++g) {
        if (written[g] == 0xffff) {
            f(16 * g, 16);
            continue;
        }
        for (uint32_t rest = written[g]; rest; rest &= rest - 1) f(16 * g + __builtin_ctz(rest), 1);
    }
}

void GlobalJournal::undo() {
    for (auto& [number, p] : pages_) {
        auto* memory = reinterpret_cast<uint8_t*>(number * kPageBytes);
        for_written(p->written, kPageBytes / kGranule, [&, page = p.get()](uint32_t at, uint32_t bytes) {
            std::memcpy(page->after + at, memory + at, bytes);
            std::memcpy(memory + at, page->before + at, bytes);
        });
    }
}

void GlobalJournal::redo() const {
    for (const auto& [number, p] : pages_) {
        auto* memory = reinterpret_cast<uint8_t*>(number * kPageBytes);
        for_written(p->written, kPageBytes / kGranule, [&, page = p.get()](uint32_t at, uint32_t bytes) {
            std::memcpy(memory + at, page->after + at, bytes);
        });
    }
}

std::string GlobalJournal::difference(uint64_t address, const Page* a, const Page* b) {
    // What a byte is after a launch that may not have written it; the memory itself is as it was before both.
    auto value = [&](const Page* p, uint32_t at) {
        const bool written = p && p->written[at / kGranule] >> at % kGranule & 1;
        return written ? p->after[at] : *reinterpret_cast<const uint8_t*>(address + at);
    };
    auto word = [&](const Page* p, uint32_t at) {
        uint32_t bits = 0;
        for (uint32_t b = 0; b < 4; ++b) bits |= uint32_t{value(p, at / 4 * 4 + b)} << (8 * b);
        return bit_cast<float>(bits);
    };
    auto summed = [&](uint32_t at) {
        return ((a ? a->summed[at / kGranule] : 0) | (b ? b->summed[at / kGranule] : 0)) >> at % kGranule & 1;
    };
    auto written = [&](uint32_t at) {
        return ((a ? a->written[at / kGranule] : 0) | (b ? b->written[at / kGranule] : 0)) >> at % kGranule & 1;
    };
    float largest = -1;  // of the sums on this page; -1: not yet known
    for (uint32_t at = 0; at < kPageBytes; ++at) {
        if (at % kGranule == 0) {
            const uint32_t g = at / kGranule;
            const bool same = a && b && a->written[g] == 0xffff && b->written[g] == 0xffff &&
                              std::memcmp(a->after + at, b->after + at, kGranule) == 0;
            if (same || !((a ? a->written[g] : 0) | (b ? b->written[g] : 0))) {
                at += kGranule - 1;
                continue;
            }
        }
        if (!written(at) || value(a, at) == value(b, at)) continue;
        const float x = word(a, at), y = word(b, at);
        if (summed(at)) {
            if (largest < 0) {
                largest = 0;
                for (uint32_t k = 0; k < kPageBytes; k += 4) {
                    if (summed(k) && std::isfinite(word(a, k))) largest = std::max(largest, std::fabs(word(a, k)));
                }
            }
            if (std::fabs(x - y) <= kSumTolerance * largest || (std::isnan(x) && std::isnan(y))) continue;
        }
        return format("global address 0x%llx: 0x%08x (%g) and 0x%08x (%g)",
                      static_cast<unsigned long long>(address + at / 4 * 4), bit_cast<uint32_t>(x),
                      static_cast<double>(x), bit_cast<uint32_t>(y), static_cast<double>(y));
    }
    return {};
}

std::string GlobalJournal::difference(const GlobalJournal& other) const {
    for (const auto& [number, p] : pages_) {
        const auto it = other.pages_.find(number);
        std::string text =
            difference(number * kPageBytes, p.get(), it == other.pages_.end() ? nullptr : it->second.get());
        if (!text.empty()) return text;
    }
    for (const auto& [number, p] : other.pages_) {
        if (pages_.count(number)) continue;
        std::string text = difference(number * kPageBytes, nullptr, p.get());
        if (!text.empty()) return text;
    }
    return {};
}

}  // namespace ptx_emulator
