// Copies of boxes of tensors (TMA): cp.async.bulk.tensor, cp.reduce.async.bulk.tensor (PTX ISA 9.7.9.27.1), tiled mode.
#include <cstring>

#include "address_operand.h"
#include "bulk_transfer.h"
#include "errors.h"
#include "lanes.h"
#include "opcode_table.h"
#include "tensor_box.h"

namespace ptx_emulator {

namespace {

struct TensorData : InstructionData {
    AddressOperand map, shared, barrier;
    uint32_t rank = 0;
    uint32_t coordinates[5] = {};  // registers
    uint32_t ctas = kNoRegister;   // multicast mask
    bool pair = false;             // .cta_group::2: the barrier may be that of the other CTA of the pair
    std::string reduction;         // empty: a copy
};

const TensorMap& tensor_map(Warp& warp, const TensorData& data, uint32_t lane) {
    const uint64_t address = data.map.at(warp, lane);
    const MemoryReference memory = resolve(warp, Space::kGlobal, address, lane, 128, 64);
    const auto& map = *reinterpret_cast<const TensorMap*>(memory.data);
    if (map.magic != kTensorMapMagic) {
        raise(Fault::kIllegalAddress, "there is no tensor map at 0x%llx", static_cast<unsigned long long>(address));
    }
    if (map.rank != data.rank) {
        raise(Fault::kIllegalInstruction, "a copy in %u dimensions with a tensor map of %u", data.rank, map.rank);
    }
    return map;
}

// The box in pieces of at most 16 bytes, which is what a swizzle keeps together.
std::vector<BulkPiece> box_pieces(const Warp& warp, const TensorData& data, const TensorMap& map, uint32_t lane,
                                  uint32_t shared_offset, bool with_fill) {
    int32_t origin[5] = {};
    for (uint32_t d = 0; d < data.rank; ++d) origin[d] = warp.lanes<int32_t>(data.coordinates[d])[lane];
    const uint32_t width = row_bytes(map), chunk = map.swizzle == Swizzle::kNone ? 1024 : 16;
    std::vector<BulkPiece> pieces;
    auto add = [&](uint64_t address, uint32_t begin, uint32_t end) {  // bytes of the row, in the box
        while (begin < end) {
            const uint32_t next = std::min(end, begin / chunk * chunk + chunk);
            pieces.push_back({address, swizzle_address(shared_offset + begin, map.swizzle), next - begin});
            if (address) address += next - begin;
            begin = next;
        }
    };
    for_box_rows(map, origin, [&](const BoxRow& row) {
        const uint32_t first = row.offset + row.first * map.element_bytes;
        const uint32_t last = first + row.count * map.element_bytes;
        if (row.count) add(row.address, first, last);
        if (!with_fill) return;
        add(0, row.offset, row.count ? first : row.offset);
        add(0, row.count ? last : row.offset, row.offset + width);
    });
    return pieces;
}

void note_form(Warp& warp, const TensorMap& map, const std::vector<BulkPiece>& pieces, const char* what) {
    if (!warp.machine.forms) return;
    const uint32_t width = 16u << static_cast<uint32_t>(map.swizzle);
    const std::string swizzle = map.swizzle == Swizzle::kNone ? "no swizzle" : format("swizzle %u", width);
    warp.machine.forms->note(
        format("tensor %s, %ud, %u-byte elements, %s", what, map.rank, map.element_bytes, swizzle.c_str()));
    uint32_t inside = 0;
    for (const BulkPiece& piece : pieces) inside += piece.address ? piece.bytes : 0;
    if (inside < box_bytes(map)) warp.machine.forms->note(format("tensor %s, partly outside of the tensor", what));
}

// What CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA puts outside of the tensor.
uint32_t fill_of(const TensorMap& map) {
    return !map.nan_fill ? 0 : map.element_bytes == 2 ? 0x7fffu : 0x7fffffffu;
}

Step tensor_load(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const TensorData&>(*i.data);
    for_lanes(mask, [&](uint32_t lane) {
        const TensorMap& map = tensor_map(warp, data, lane);
        const uint32_t bytes = box_bytes(map);
        const MemoryReference to = resolve_shared(warp, data.shared.shared_at(warp, lane), bytes, 128);
        const uint32_t barrier_address = data.barrier.shared_at(warp, lane);
        const std::vector<BulkPiece> pieces = box_pieces(warp, data, map, lane, to.offset, true);
        note_form(warp, map, pieces, "load");
        const uint32_t fill = fill_of(map);
        const uint32_t barrier_rank = barrier_address >> kSharedRankShift;
        if (data.ctas == kNoRegister) {
            if (barrier_rank != to.owner->rank && !(data.pair && (barrier_rank ^ 1) == to.owner->rank)) {
                raise(Fault::kIllegalInstruction, "the destination is in CTA rank %u, the mbarrier in rank %u",
                      to.owner->rank, barrier_rank);
            }
            warp.count_size(bytes, 1);
            load_pieces(warp, lane, *to.owner, pieces, bytes, bulk_barrier(warp, lane, barrier_address), fill,
                        map.element_bytes);
            return;
        }
        const uint32_t ctas = warp.lanes<uint16_t>(data.ctas)[lane];
        if (ctas >> warp.cta.cluster.ctas.size()) {
            raise(Fault::kIllegalInstruction, "multicast to CTAs 0x%x of a cluster of %zu", ctas,
                  warp.cta.cluster.ctas.size());
        }
        warp.count_size(bytes, static_cast<uint32_t>(__builtin_popcount(ctas)));
        for (auto& cta : warp.cta.cluster.ctas) {
            if (!(ctas >> cta->rank & 1)) continue;
            require_running(warp, *cta);
            // Of a pair, the parity of the barrier's CTA says which of the two is signalled.
            const uint32_t rank = data.pair ? (cta->rank & ~1u) | (barrier_rank & 1) : cta->rank;
            const uint32_t address = (barrier_address & kSharedOffsetMask) | rank << kSharedRankShift;
            load_pieces(warp, lane, *cta, pieces, bytes, bulk_barrier(warp, lane, address), fill, map.element_bytes);
        }
    });
    return Step::kNext;
}

// CUTLASS's sm90 epilogue lets a whole warp issue a store: the lanes write the same bytes to the same place.
Step tensor_store(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const TensorData&>(*i.data);
    std::vector<BulkPiece> first;
    for_lanes(mask, [&](uint32_t lane) {
        const TensorMap& map = tensor_map(warp, data, lane);
        const MemoryReference from = resolve_shared(warp, data.shared.shared_at(warp, lane), box_bytes(map), 128);
        if (from.owner != &warp.cta) raise(Fault::kIllegalAddress, "the source of a tensor store is in another CTA");
        warp.count_size(box_bytes(map), 1);
        Reduction reduction;
        if (!data.reduction.empty()) {
            reduction = tensor_reduction_of(data.reduction.c_str(), map.data_type);
            if (!reduction) {
                raise(Fault::kUnsupported, "tensor reduction .%s of data type %u", data.reduction.c_str(),
                      map.data_type);
            }
        }
        const std::vector<BulkPiece> pieces = box_pieces(warp, data, map, lane, from.offset, false);
        note_form(warp, map, pieces, data.reduction.empty() ? "store" : "reduction");
        const bool repeated = !reduction && pieces == first;
        if (first.empty()) first = pieces;
        store_pieces(warp, lane, warp.cta, pieces, reduction, repeated);
    });
    return Step::kNext;
}

void decode_tensor(DecodeContext& c) {
    c.allow(1,
            "reduce async bulk tensor 1d 2d 3d 4d 5d shared::cluster shared::cta global tile "
            "mbarrier::complete_tx::bytes bulk_group multicast::cluster cta_group::1 cta_group::2 L2::cache_hint add "
            "min max and or xor");
    c.set_role(kRoleAsyncProxy);
    auto data = std::make_shared<TensorData>();
    const bool loads = c.has("mbarrier::complete_tx::bytes");
    if (!loads && !c.has("bulk_group")) c.fail("expected .bulk_group or .mbarrier::complete_tx::bytes");
    for (const std::string& word : c.syntax.modifiers) {
        if (word.size() == 2 && word[1] == 'd') data->rank = static_cast<uint32_t>(word[0] - '0');
    }
    const SyntaxOperand& tensor = c.operand(loads ? 1 : 0);
    if (tensor.kind != SyntaxOperand::Kind::kAddress || tensor.parts.size() != 2) c.fail("expected [map, {...}]");
    data->map = decode_address(c, tensor, 8);
    if (tensor.parts[1].parts.size() != data->rank) c.fail("wrong number of coordinates");
    for (uint32_t d = 0; d < data->rank; ++d) data->coordinates[d] = c.read(tensor.parts[1].parts[d], 4);
    data->shared = decode_address(c, c.operand(loads ? 0 : 1), 4);
    data->pair = c.has("cta_group::2");
    if (loads) {
        data->barrier = decode_address(c, c.operand(2), 4);
        if (c.has("multicast::cluster")) data->ctas = c.read(3, 2);
    }
    if (c.syntax.modifiers[1] == "reduce") {
        for (const char* operation : {"add", "min", "max", "and", "or", "xor"}) {
            if (c.has(operation)) data->reduction = operation;
        }
        if (data->reduction.empty()) c.fail("unknown reduction");
    }
    c.out.data = std::move(data);
    c.out.handler = loads ? tensor_load : tensor_store;
}

Step nothing(Warp&, const Instruction&, LaneMask) {
    return Step::kNext;
}

void decode_tensor_prefetch(DecodeContext& c) {
    c.out.handler = nothing;
}

}  // namespace

void register_tensor_copy(OpcodeTable& table) {
    table.add("cp.async.bulk.tensor", decode_tensor);
    table.add("cp.reduce.async.bulk.tensor", decode_tensor);
    table.add("cp.async.bulk.prefetch.tensor", decode_tensor_prefetch);
    table.add("prefetch.tensormap", decode_tensor_prefetch);
    table.add("prefetch.const.tensormap", decode_tensor_prefetch);
    table.add("prefetch.param.tensormap", decode_tensor_prefetch);
}

}  // namespace ptx_emulator
