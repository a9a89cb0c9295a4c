// Which decode function serves which opcode.
//
// A key is the beginning of an opcode in whole dot-separated words: "add", "cp.async", "cp.async.bulk.tensor". The
// longest key that matches wins. To add instructions, write a register_<family>(OpcodeTable&) in its own file and call
// it from OpcodeTable::instance() (opcode_table.cpp).
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "decoder.h"

namespace ptx_emulator {

using DecodeFunction = void (*)(DecodeContext& context);

class OpcodeTable {
  public:
    static const OpcodeTable& instance();
    void add(const std::string& key, DecodeFunction decode);
    // nullptr: unknown opcode.
    DecodeFunction find(const std::vector<std::string>& modifiers) const;

  private:
    std::unordered_map<std::string, DecodeFunction> functions_;
};

void register_integer(OpcodeTable& table);
void register_float(OpcodeTable& table);
void register_convert(OpcodeTable& table);
void register_logic(OpcodeTable& table);
void register_compare(OpcodeTable& table);
void register_move(OpcodeTable& table);
void register_control(OpcodeTable& table);
void register_memory(OpcodeTable& table);
void register_atomic(OpcodeTable& table);
void register_warp_collectives(OpcodeTable& table);
void register_barrier(OpcodeTable& table);
void register_copy(OpcodeTable& table);
void register_matrix(OpcodeTable& table);
void register_mbarrier(OpcodeTable& table);
void register_cluster(OpcodeTable& table);
void register_bulk(OpcodeTable& table);
void register_tensor_copy(OpcodeTable& table);
void register_wgmma(OpcodeTable& table);
void register_tcgen05(OpcodeTable& table);
void register_tcgen05_mma(OpcodeTable& table);
void register_launch_control(OpcodeTable& table);

}  // namespace ptx_emulator
