// An address operand of an instruction that has several: [register + displacement].
#pragma once

#include "address_space.h"
#include "decoder.h"
#include "errors.h"
#include "memory.h"
#include "warp.h"

namespace ptx_emulator {

struct AddressOperand {
    uint32_t base = 0;  // register offset
    bool is_64 = false;
    int32_t displacement = 0;

    uint64_t at(const Warp& warp, uint32_t lane) const {
        if (is_64) return warp.lanes<uint64_t>(base)[lane] + static_cast<int64_t>(displacement);
        return static_cast<uint32_t>(warp.lanes<uint32_t>(base)[lane] + displacement);
    }
    // A shared::cluster address; a 64-bit one may carry the tag of generic addresses.
    uint32_t shared_at(const Warp& warp, uint32_t lane) const {
        const uint64_t address = at(warp, lane);
        if (address >> 32 && !is_shared_generic(address)) {
            raise(Fault::kIllegalAddress, "address 0x%llx of lane %u is not in shared memory",
                  static_cast<unsigned long long>(address), lane);
        }
        return static_cast<uint32_t>(address);
    }
};

// symbol_bytes: the width of an address given by name, 4 in shared memory.
inline AddressOperand decode_address(DecodeContext& c, const SyntaxOperand& operand, uint32_t symbol_bytes) {
    if (operand.kind != SyntaxOperand::Kind::kAddress || operand.parts.empty()) {
        c.fail("expected an address in brackets");
    }
    AddressOperand address;
    uint32_t bytes = 0;
    address.base = c.read_wide(operand.parts[0], symbol_bytes, &bytes);
    if (bytes != 4 && bytes != 8) c.fail("an address register has 32 or 64 bits");
    address.is_64 = bytes == 8;
    address.displacement = static_cast<int32_t>(operand.displacement);
    return address;
}

}  // namespace ptx_emulator
