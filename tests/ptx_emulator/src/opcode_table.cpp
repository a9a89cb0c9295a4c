#include "opcode_table.h"

namespace ptx_emulator {

const OpcodeTable& OpcodeTable::instance() {
    static const OpcodeTable table = [] {
        OpcodeTable t;
        register_integer(t);
        register_float(t);
        register_convert(t);
        register_logic(t);
        register_compare(t);
        register_move(t);
        register_control(t);
        register_memory(t);
        register_atomic(t);
        register_warp_collectives(t);
        register_barrier(t);
        register_copy(t);
        register_matrix(t);
        register_mbarrier(t);
        register_cluster(t);
        register_bulk(t);
        register_tensor_copy(t);
        register_wgmma(t);
        register_tcgen05(t);
        register_tcgen05_mma(t);
        register_launch_control(t);
        return t;
    }();
    return table;
}

void OpcodeTable::add(const std::string& key, DecodeFunction decode) {
    functions_[key] = decode;
}

DecodeFunction OpcodeTable::find(const std::vector<std::string>& modifiers) const {
    std::string key;
    DecodeFunction best = nullptr;
    for (const std::string& word : modifiers) {
        key += key.empty() ? word : "." + word;
        const auto it = functions_.find(key);
        if (it != functions_.end()) best = it->second;
    }
    return best;
}

}  // namespace ptx_emulator
