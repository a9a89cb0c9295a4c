// atom and red (PTX ISA 9.7.13.5 to 9.7.13.7): lanes act one after another, in lane order.
#include <cstring>

#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "memory.h"
#include "numeric.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

enum class Operation : uint32_t {
    kAdd,
    kMinimum,
    kMaximum,
    kAnd,
    kOr,
    kXor,
    kExchange,
    kCompareSwap,
    kIncrement,
    kDecrement
};
enum class Type : uint32_t { kUnsigned, kSigned, kFloat, kF16, kBf16, kF16x2, kBf16x2 };

struct AtomicData : InstructionData {
    Operation operation = Operation::kAdd;
    Type type = Type::kUnsigned;
    uint32_t bytes = 4;
    MemoryOrder order = MemoryOrder::kRelaxed;
    bool returns = false;
};

template <class T>
T apply_integer(Operation operation, T old, T operand, T replacement) {
    switch (operation) {
        case Operation::kAdd:
            return static_cast<T>(old + operand);
        case Operation::kMinimum:
            return old < operand ? old : operand;
        case Operation::kMaximum:
            return old > operand ? old : operand;
        case Operation::kAnd:
            return old & operand;
        case Operation::kOr:
            return old | operand;
        case Operation::kXor:
            return old ^ operand;
        case Operation::kExchange:
            return operand;
        case Operation::kCompareSwap:
            return old == operand ? replacement : old;
        case Operation::kIncrement:
            return old >= operand ? T{0} : static_cast<T>(old + 1);
        case Operation::kDecrement:
            return old == 0 || old > operand ? operand : static_cast<T>(old - 1);
    }
    return old;
}

// fp32 atomics on global memory flush subnormals on some GPUs only; here they are kept.
template <class T>
T apply_float(Operation operation, T old, T operand) {
    switch (operation) {
        case Operation::kMinimum:
            return old < operand || operand != operand ? old : operand;
        case Operation::kMaximum:
            return old > operand || operand != operand ? old : operand;
        default:
            return old + operand;
    }
}

uint64_t apply_half(Type type, Operation operation, uint64_t old, uint64_t operand) {
    const bool bf16 = type == Type::kBf16 || type == Type::kBf16x2;
    const int count = type == Type::kF16 || type == Type::kBf16 ? 1 : 2;
    uint64_t result = 0;
    for (int k = 0; k < count; ++k) {
        const auto a = static_cast<uint16_t>(old >> (16 * k)), b = static_cast<uint16_t>(operand >> (16 * k));
        const uint16_t value = bf16 ? float_to_bf16(apply_float(operation, bf16_to_float(a), bf16_to_float(b)))
                                    : float_to_f16(apply_float(operation, f16_to_float(a), f16_to_float(b)));
        result |= uint64_t{value} << (16 * k);
    }
    return result;
}

uint64_t apply(const AtomicData& data, uint64_t old, uint64_t operand, uint64_t replacement) {
    switch (data.type) {
        case Type::kUnsigned:
            if (data.bytes == 2) {
                return apply_integer<uint16_t>(data.operation, static_cast<uint16_t>(old),
                                               static_cast<uint16_t>(operand), static_cast<uint16_t>(replacement));
            }
            if (data.bytes == 4) {
                return apply_integer<uint32_t>(data.operation, static_cast<uint32_t>(old),
                                               static_cast<uint32_t>(operand), static_cast<uint32_t>(replacement));
            }
            return apply_integer<uint64_t>(data.operation, old, operand, replacement);
        case Type::kSigned:
            if (data.bytes == 4) {
                return static_cast<uint32_t>(apply_integer<int32_t>(data.operation, static_cast<int32_t>(old),
                                                                    static_cast<int32_t>(operand), 0));
            }
            return static_cast<uint64_t>(
                apply_integer<int64_t>(data.operation, static_cast<int64_t>(old), static_cast<int64_t>(operand), 0));
        case Type::kFloat:
            if (data.bytes == 4) {
                return bit_cast<uint32_t>(apply_float(data.operation, bit_cast<float>(static_cast<uint32_t>(old)),
                                                      bit_cast<float>(static_cast<uint32_t>(operand))));
            }
            return bit_cast<uint64_t>(apply_float(data.operation, bit_cast<double>(old), bit_cast<double>(operand)));
        default:
            return apply_half(data.type, data.operation, old, operand);
    }
}

// list[0]: operands, list[1]: results; more than one for the vector forms
Step atomic(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const AtomicData&>(*i.data);
    Checker& checker = warp.machine.checker;
    const uint32_t count = i.list_size[0];
    const bool rounds = data.operation == Operation::kAdd && data.type >= Type::kFloat;
    const AccessKind kind = rounds ? AccessKind::kFloatAdd : AccessKind::kAtomic;
    bool changed = false;
    uint64_t addresses[kWarpSize];
    for_lanes(mask, [&](uint32_t lane) { addresses[lane] = lane_address(warp, i, i.a, lane); });
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to =
            resolve(warp, i.space, addresses[lane], lane, data.bytes * count, data.bytes * count);
        if (to.space == Space::kLocal) raise(Fault::kIllegalAddress, "an atomic on local memory");
        const auto location = reinterpret_cast<uint64_t>(to.data);
        if (checker.enabled()) {
            checker.ordered_access(warp, location, data.order, true, true);
            if (to.owner) {
                checker.shared_access(warp, lane, *to.owner, to.offset, data.bytes * count, kind);
            } else {
                checker.global_access(warp, lane, location, data.bytes * count, kind);
            }
        }
        if (!to.owner) warp.machine.before_global_write(to.data, data.bytes * count, rounds);
        for (uint32_t k = 0; k < count; ++k) {
            uint64_t old = 0, operand = 0, replacement = 0;
            std::memcpy(&old, to.data + k * data.bytes, data.bytes);
            std::memcpy(&operand, warp.lanes<uint8_t>(i.list[0][k]) + lane * data.bytes, data.bytes);
            if (data.operation == Operation::kCompareSwap) {
                std::memcpy(&replacement, warp.lanes<uint8_t>(i.c) + lane * data.bytes, data.bytes);
            }
            const uint64_t value = apply(data, old, operand, replacement);
            changed |= value != old;
            std::memcpy(to.data + k * data.bytes, &value, data.bytes);
            if (data.returns) std::memcpy(warp.lanes<uint8_t>(i.list[1][k]) + lane * data.bytes, &old, data.bytes);
        }
        if (to.owner) to.owner->shared.written_by_generic(to.offset, data.bytes * count);
    });
    if (changed) warp.machine.progressed();
    return Step::kNext;
}

void decode_atomic(DecodeContext& c) {
    const bool returns = c.syntax.modifiers[0] == "atom";
    c.allow(
        1,
        "relaxed acquire release acq_rel cta cluster gpu sys global shared shared::cta shared::cluster add min max and "
        "or "
        "xor exch cas inc dec noftz L2::cache_hint v2 v4 v8 b16 b32 b64 u32 u64 s32 s64 f16 f16x2 bf16 bf16x2 f32 f64");
    auto data = std::make_shared<AtomicData>();
    data->returns = returns;
    static const std::pair<const char*, Operation> operations[] = {
        {"add", Operation::kAdd},       {"min", Operation::kMinimum},     {"max", Operation::kMaximum},
        {"and", Operation::kAnd},       {"or", Operation::kOr},           {"xor", Operation::kXor},
        {"exch", Operation::kExchange}, {"cas", Operation::kCompareSwap}, {"inc", Operation::kIncrement},
        {"dec", Operation::kDecrement},
    };
    bool found = false;
    for (const auto& [name, operation] : operations) {
        if (!c.has(name)) continue;
        data->operation = operation;
        found = true;
    }
    if (!found) c.fail("unknown atomic operation");
    const std::string& type = c.type();
    data->bytes = static_cast<uint32_t>(c.type_size());
    data->type = type == "f16"      ? Type::kF16
                 : type == "bf16"   ? Type::kBf16
                 : type == "f16x2"  ? Type::kF16x2
                 : type == "bf16x2" ? Type::kBf16x2
                 : type[0] == 'f'   ? Type::kFloat
                 : type[0] == 's'   ? Type::kSigned
                                    : Type::kUnsigned;
    data->order = c.has("acq_rel")   ? MemoryOrder::kAcquireRelease
                  : c.has("acquire") ? MemoryOrder::kAcquire
                  : c.has("release") ? MemoryOrder::kRelease
                                     : MemoryOrder::kRelaxed;
    if (data->order != MemoryOrder::kRelaxed) {
        auto unordered = std::make_shared<AtomicData>(*data);
        unordered->order = MemoryOrder::kRelaxed;
        c.set_role(kRoleSynchronization);
        c.info.unordered = std::move(unordered);
    }
    const bool shared = c.has("shared") || c.has("shared::cta") || c.has("shared::cluster");
    const size_t memory = returns ? 1 : 0;
    c.out.a = c.address(c.operand(memory), shared            ? Space::kShared
                                           : c.has("global") ? Space::kGlobal
                                                             : Space::kGeneric);
    c.read_list(0, c.operand(memory + 1), data->bytes);
    if (data->operation == Operation::kCompareSwap) c.out.c = c.read(memory + 2, data->bytes);
    if (returns) c.write_list(1, c.operand(0), data->bytes);
    c.out.data = std::move(data);
    c.out.handler = atomic;
}

}  // namespace

void register_atomic(OpcodeTable& table) {
    table.add("atom", decode_atomic);
    table.add("red", decode_atomic);
}

}  // namespace ptx_emulator
