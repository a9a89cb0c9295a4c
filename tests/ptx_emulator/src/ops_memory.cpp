// ld, st, and what only hints or orders (PTX ISA 9.7.9.8 to 9.7.9.18): prefetch, createpolicy, discard.
#include <algorithm>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "machine.h"
#include "memory.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

// Which of a ld's or st's modifiers order other accesses.
MemoryOrder order_of(const DecodeContext& c) {
    if (c.has("acquire")) return MemoryOrder::kAcquire;
    if (c.has("release")) return MemoryOrder::kRelease;
    if (c.has("relaxed") || c.has("volatile") || c.has("mmio")) return MemoryOrder::kRelaxed;
    return MemoryOrder::kWeak;
}

struct AccessData : InstructionData {
    MemoryOrder order = MemoryOrder::kWeak;
    bool sign_extend = false;
    uint32_t register_bytes = 0;
};

// For how many clocks shared memory is busy with the accesses of a warp's lanes: it has 32 banks of 4 bytes, hands out
// words of one bank one by one, and returns one register of the warp a clock, or two where neighbours (lanes n and n ^
// 1, or n and n ^ 2) all want the same.
uint32_t shared_clocks(const uint32_t (&offsets)[kWarpSize], LaneMask lanes, uint32_t bytes, bool writes) {
    std::vector<uint32_t> words[32];  // by bank
    bool pairs[2] = {true, true};
    size_t most = 0;
    for_lanes(lanes, [&](uint32_t lane) {
        for (uint32_t word = offsets[lane] / 4; word <= (offsets[lane] + bytes - 1) / 4; ++word) {
            std::vector<uint32_t>& bank = words[word % 32];
            if (std::find(bank.begin(), bank.end(), word) == bank.end()) bank.push_back(word);
            most = std::max(most, bank.size());
        }
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t neighbour = lane ^ (1u << i);
            if (lanes >> neighbour & 1 && offsets[neighbour] != offsets[lane]) pairs[i] = false;
        }
    });
    const uint32_t registers = (bytes + 3) / 4, at_once = pairs[0] || pairs[1] ? 2 : 1;
    const uint32_t returns = writes ? 1 : (registers + at_once - 1) / at_once;
    return std::max(static_cast<uint32_t>(most), returns);
}

// Tells the checker of the accesses of an instruction, lane by lane, and counts what they ask of shared memory.
class Notes {
  public:
    Notes(Warp& warp, bool writes, MemoryOrder order)
        : warp_(warp),
          checker_(warp.machine.checker),
          enabled_(checker_.enabled()),
          counts_(warp.machine.counts != nullptr),
          writes_(writes),
          order_(order) {
        if (!enabled_) return;
        // Ordered accesses are morally strong: they do not race among themselves.
        const bool weak = order == MemoryOrder::kWeak;
        actor_ = checker_.actor(warp, 0,
                                writes ? (weak ? AccessKind::kWrite : AccessKind::kAtomic)
                                       : (weak ? AccessKind::kRead : AccessKind::kStrongRead));
    }

    ~Notes() {
        if (shared_lanes_) warp_.count_size(shared_clocks(shared_offsets_, shared_lanes_, bytes_, writes_), 1);
    }
    Notes(const Notes&) = delete;
    Notes& operator=(const Notes&) = delete;

    void note(uint32_t lane, const MemoryReference& reference, uint32_t bytes) {
        if (counts_ && reference.space == Space::kShared) {
            shared_lanes_ |= LaneMask{1} << lane;
            shared_offsets_[lane] = reference.offset;
            bytes_ = bytes;
        }
        if (!enabled_ || (reference.space != Space::kShared && reference.space != Space::kGlobal)) return;
        actor_.lane = lane;
        const auto address = reinterpret_cast<uint64_t>(reference.data);
        if (order_ != MemoryOrder::kWeak && !writes_) {
            checker_.ordered_access(warp_, address, order_, true, false);
            checker_.renew(actor_);
        }
        if (reference.space == Space::kShared) {
            checker_.shared_access(actor_, *reference.owner, reference.offset, bytes);
        } else {
            checker_.global_access(actor_, address, bytes);
        }
        if (order_ != MemoryOrder::kWeak && writes_) {
            checker_.ordered_access(warp_, address, order_, false, true);
            checker_.renew(actor_);
        }
    }

  private:
    Warp& warp_;
    Checker& checker_;
    const bool enabled_, counts_, writes_;
    const MemoryOrder order_;
    Checker::Actor actor_{};
    LaneMask shared_lanes_ = 0;
    uint32_t shared_offsets_[kWarpSize];
    uint32_t bytes_ = 0;  // of a lane
};

// Memory elements as wide as the registers: T each, V of them.
template <class T, int V>
Step load(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const AccessData&>(*i.data);
    T* registers[V];
    for (int v = 0; v < V; ++v) registers[v] = warp.lanes<T>(i.list[0][v]);
    Notes notes(warp, false, data.order);
    uint64_t addresses[kWarpSize];  // before a destination overwrites the address register
    for_lanes(mask, [&](uint32_t lane) { addresses[lane] = lane_address(warp, i, i.a, lane); });
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference from = resolve(warp, i.space, addresses[lane], lane, sizeof(T) * V, sizeof(T) * V);
        notes.note(lane, from, sizeof(T) * V);
        T values[V];
        std::memcpy(values, from.data, sizeof values);
        for (int v = 0; v < V; ++v) registers[v][lane] = values[v];
    });
    return Step::kNext;
}

template <class T, int V>
Step store(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const AccessData&>(*i.data);
    const T* registers[V];
    for (int v = 0; v < V; ++v) registers[v] = warp.lanes<T>(i.list[0][v]);
    Notes notes(warp, true, data.order);
    bool shared = false;
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to =
            resolve(warp, i.space, lane_address(warp, i, i.a, lane), lane, sizeof(T) * V, sizeof(T) * V);
        notes.note(lane, to, sizeof(T) * V);
        T values[V];
        for (int v = 0; v < V; ++v) values[v] = registers[v][lane];
        if (to.space == Space::kGlobal) warp.machine.before_global_write(to.data, sizeof values);
        std::memcpy(to.data, values, sizeof values);
        if (to.owner) {
            to.owner->shared.written_by_generic(to.offset, sizeof(T) * V);
            shared = true;
        }
    });
    if (shared || i.space != Space::kLocal) warp.machine.progressed();
    return Step::kNext;
}

// Memory elements narrower than their registers: ld.u8 into 16 or 32 bits, st.b8 from them.
Step load_narrow(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const AccessData&>(*i.data);
    const uint32_t count = i.list_size[0], bytes = i.bytes;
    Notes notes(warp, false, data.order);
    uint64_t addresses[kWarpSize];
    for_lanes(mask, [&](uint32_t lane) { addresses[lane] = lane_address(warp, i, i.a, lane); });
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference from = resolve(warp, i.space, addresses[lane], lane, bytes * count, bytes * count);
        notes.note(lane, from, bytes * count);
        for (uint32_t v = 0; v < count; ++v) {
            uint64_t value = 0;
            std::memcpy(&value, from.data + v * bytes, bytes);
            if (data.sign_extend) {
                const uint32_t shift = 64 - 8 * bytes;
                value = static_cast<uint64_t>(static_cast<int64_t>(value << shift) >> shift);
            }
            std::memcpy(warp.lanes<uint8_t>(i.list[0][v]) + lane * data.register_bytes, &value, data.register_bytes);
        }
    });
    return Step::kNext;
}

Step store_narrow(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const AccessData&>(*i.data);
    const uint32_t count = i.list_size[0], bytes = i.bytes;
    Notes notes(warp, true, data.order);
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to =
            resolve(warp, i.space, lane_address(warp, i, i.a, lane), lane, bytes * count, bytes * count);
        notes.note(lane, to, bytes * count);
        if (to.space == Space::kGlobal) warp.machine.before_global_write(to.data, bytes * count);
        for (uint32_t v = 0; v < count; ++v) {
            std::memcpy(to.data + v * bytes, warp.lanes<uint8_t>(i.list[0][v]) + lane * data.register_bytes, bytes);
        }
        if (to.owner) to.owner->shared.written_by_generic(to.offset, bytes * count);
    });
    warp.machine.progressed();
    return Step::kNext;
}

template <class T>
Handler by_count(bool loads, size_t count) {
    switch (count) {
        case 1:
            return loads ? load<T, 1> : store<T, 1>;
        case 2:
            return loads ? load<T, 2> : store<T, 2>;
        case 4:
            return loads ? load<T, 4> : store<T, 4>;
        case 8:
            return loads ? load<T, 8> : store<T, 8>;
        default:
            return nullptr;
    }
}

Space space_of(const DecodeContext& c) {
    for (const std::string& word : c.syntax.modifiers) {
        if (word == "global") return Space::kGlobal;
        if (word.compare(0, 6, "shared") == 0) return Space::kShared;
        if (word == "local") return Space::kLocal;
        if (word.compare(0, 5, "param") == 0) return Space::kParam;
        if (word == "const") return Space::kConst;
    }
    return Space::kGeneric;
}

constexpr const char* kAccessModifiers =
    "weak volatile relaxed acquire release mmio cta cluster gpu sys global shared shared::cta shared::cluster local "
    "param param::entry param::func const ca cg cs lu cv wb wt nc L1::evict_normal L1::evict_unchanged L1::evict_first "
    "L1::evict_last L1::no_allocate L2::evict_normal L2::evict_first L2::evict_last L2::cache_hint L2::64B L2::128B "
    "L2::256B v2 v4 v8 b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64";

void decode_access(DecodeContext& c, bool loads) {
    c.allow(1, kAccessModifiers);
    const SyntaxOperand& memory = c.operand(loads ? 1 : 0);
    const SyntaxOperand& value = c.operand(loads ? 0 : 1);
    const int bytes = c.type_size();
    Space space = space_of(c);
    // The parameters of a call sequence live in local memory.
    if (space == Space::kParam && !memory.parts.empty() && memory.parts[0].kind == SyntaxOperand::Kind::kSymbol &&
        c.is_local(memory.parts[0].name)) {
        space = Space::kLocal;
    }
    c.out.a = c.address(memory, space);
    const std::vector<SyntaxOperand> single{value};
    const auto& elements = value.kind == SyntaxOperand::Kind::kVector ? value.parts : single;
    auto data = std::make_shared<AccessData>();
    data->order = order_of(c);
    data->sign_extend = c.type()[0] == 's';
    data->register_bytes = static_cast<uint32_t>(bytes);
    for (const SyntaxOperand& element : elements) {
        if (element.kind != SyntaxOperand::Kind::kRegister) continue;
        uint32_t width = 0;
        loads ? c.write_wide(element, &width) : c.read_wide(element, bytes, &width);
        if (width < static_cast<uint32_t>(bytes)) c.fail("the register is narrower than the memory element");
        data->register_bytes = width;
    }
    if (loads) {
        c.write_list(0, value, data->register_bytes);
    } else {
        c.read_list(0, value, data->register_bytes);
    }
    c.out.bytes = static_cast<uint8_t>(bytes);
    if (data->register_bytes != static_cast<uint32_t>(bytes) || bytes == 1) {
        c.out.handler = loads ? load_narrow : store_narrow;
    } else {
        c.out.handler = bytes == 2             ? by_count<uint16_t>(loads, elements.size())
                        : bytes == 4           ? by_count<uint32_t>(loads, elements.size())
                        : bytes == 8           ? by_count<uint64_t>(loads, elements.size())
                        : elements.size() == 1 ? (loads ? load<Word128, 1> : store<Word128, 1>)
                                               : nullptr;
    }
    if (data->order == MemoryOrder::kAcquire || data->order == MemoryOrder::kRelease) {
        auto unordered = std::make_shared<AccessData>(*data);
        unordered->order = MemoryOrder::kRelaxed;
        c.set_role(kRoleSynchronization);
        c.info.unordered = std::move(unordered);
    }
    c.out.data = std::move(data);
}

void decode_ld(DecodeContext& c) {
    decode_access(c, true);
}
void decode_st(DecodeContext& c) {
    decode_access(c, false);
}

Step nothing(Warp&, const Instruction&, LaneMask) {
    return Step::kNext;
}

void decode_hint(DecodeContext& c) {
    c.out.handler = nothing;
}

// A cache policy is an opaque number here.
Step create_policy(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) { warp.lanes<uint64_t>(i.dst)[lane] = 0; });
    return Step::kNext;
}

void decode_createpolicy(DecodeContext& c) {
    c.out.dst = c.write(0, 8);
    c.out.handler = create_policy;
}

}  // namespace

void register_memory(OpcodeTable& table) {
    table.add("ld", decode_ld);
    table.add("ldu", decode_ld);
    table.add("st", decode_st);
    table.add("prefetch", decode_hint);
    table.add("prefetchu", decode_hint);
    table.add("applypriority", decode_hint);
    table.add("createpolicy", decode_createpolicy);
}

}  // namespace ptx_emulator
