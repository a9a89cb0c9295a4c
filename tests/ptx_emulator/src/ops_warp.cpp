// Exchange within a warp (PTX ISA 9.7.9.6, 9.7.13.9 and after): shfl, vote, match, redux, activemask, elect.
//
// A .sync instruction with a member mask waits until all live members stand at it.
#include <algorithm>

#include "errors.h"
#include "lanes.h"
#include "machine.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

// The members that take part, or 0 if some have not arrived yet.
LaneMask members(const Warp& warp, uint32_t mask_register, LaneMask mask) {
    const LaneMask wanted = warp.lanes<uint32_t>(mask_register)[first_lane(mask)];
    const LaneMask alive = wanted & warp.live();
    if ((mask & ~wanted) != 0)
        raise(Fault::kIllegalInstruction, "lanes %08x are not in the member mask %08x", mask & ~wanted, wanted);
    return (mask & alive) == alive ? alive : 0;
}

std::string describe_members(const Warp& warp, const Instruction&) {
    return format("waits for the other lanes of the member mask; live lanes are %08x", warp.live());
}

enum class Shuffle : uint32_t { kButterfly, kIndex, kUp, kDown };

template <Shuffle kMode>
Step shuffle(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!members(warp, i.d, mask)) return Step::kBlock;
    const auto* a = warp.lanes<uint32_t>(i.a);
    const auto* b = warp.lanes<uint32_t>(i.b);
    const auto* c = warp.lanes<uint32_t>(i.c);
    alignas(64) uint32_t values[kWarpSize] = {};
    LaneMask valid = 0;
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
        const uint32_t clamp = c[lane] & 31, segment = c[lane] >> 8 & 31, delta = b[lane] & 31;
        const uint32_t last = (lane & segment) | (clamp & ~segment), first = lane & segment;
        int source = static_cast<int>(lane);
        bool inside = true;
        switch (kMode) {
            case Shuffle::kButterfly:
                source = static_cast<int>(lane ^ delta);
                inside = source <= static_cast<int>(last);
                break;
            case Shuffle::kIndex:
                source = static_cast<int>(first | (delta & ~segment));
                inside = source <= static_cast<int>(last);
                break;
            case Shuffle::kUp:
                source -= static_cast<int>(delta);
                inside = source >= static_cast<int>(last);
                break;
            case Shuffle::kDown:
                source += static_cast<int>(delta);
                inside = source <= static_cast<int>(last);
                break;
        }
        const uint32_t from = inside ? static_cast<uint32_t>(source) & 31 : lane;
        // What a lane that does not take part holds is undefined.
        values[lane] = mask & lane_bit(from) ? a[from] : 0xffffffffu;
        valid |= inside ? lane_bit(lane) : 0;
    }
    store_lanes(warp.lanes<uint32_t>(i.dst), values, mask);
    if (i.dst2 != kNoRegister) warp.set_predicate(i.dst2, valid, mask);
    return Step::kNext;
}

void decode_shfl(DecodeContext& c) {
    c.allow(1, "sync bfly idx up down b32");
    if (!c.has("sync")) c.fail("shfl without .sync does not exist from sm_70 on");
    const SyntaxOperand& destination = c.operand(0);
    if (destination.kind == SyntaxOperand::Kind::kPair) {
        c.out.dst = c.write(destination.parts[0], 4);
        c.out.dst2 = c.write_predicate(destination.parts[1]);
    } else {
        c.out.dst = c.write(destination, 4);
    }
    c.out.a = c.read(1, 4);
    c.out.b = c.read(2, 4);
    c.out.c = c.read(3, 4);
    c.out.d = c.read(4, 4);
    c.info.describe_wait = describe_members;
    c.out.handler = c.has("bfly")  ? shuffle<Shuffle::kButterfly>
                    : c.has("idx") ? shuffle<Shuffle::kIndex>
                    : c.has("up")  ? shuffle<Shuffle::kUp>
                                   : shuffle<Shuffle::kDown>;
}

enum class Vote : uint32_t { kAny, kAll, kUniform, kBallot };

template <Vote kMode>
Step vote(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!members(warp, i.d, mask)) return Step::kBlock;
    const LaneMask p = (i.negate_predicate ? ~warp.predicate(i.a) : warp.predicate(i.a)) & mask;
    if (kMode == Vote::kBallot) {
        for_lanes(mask, [&](uint32_t lane) { warp.lanes<uint32_t>(i.dst)[lane] = p; });
    } else {
        const bool result = kMode == Vote::kAny ? p != 0 : kMode == Vote::kAll ? p == mask : p == 0 || p == mask;
        warp.set_predicate(i.dst, result ? kAllLanes : 0, mask);
    }
    return Step::kNext;
}

void decode_vote(DecodeContext& c) {
    c.allow(1, "sync any all uni ballot pred b32");
    const bool ballot = c.has("ballot");
    c.out.dst = ballot ? c.write(0, 4) : c.write_predicate(c.operand(0));
    c.out.a = c.read_predicate(c.operand(1), &c.out.negate_predicate);
    c.out.d = c.read(2, 4);
    c.info.describe_wait = describe_members;
    c.out.handler = ballot         ? vote<Vote::kBallot>
                    : c.has("any") ? vote<Vote::kAny>
                    : c.has("all") ? vote<Vote::kAll>
                                   : vote<Vote::kUniform>;
}

// match.any: the lanes with the same value; match.all: all members if all agree. x: all
template <class T>
Step match(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!members(warp, i.d, mask)) return Step::kBlock;
    const T* a = warp.lanes<T>(i.a);
    alignas(64) uint32_t values[kWarpSize] = {};
    for_lanes(mask, [&](uint32_t lane) {
        for_lanes(mask, [&](uint32_t other) { values[lane] |= a[other] == a[lane] ? lane_bit(other) : 0; });
    });
    if (i.x) {
        const bool all = values[first_lane(mask)] == mask;
        for_lanes(mask, [&](uint32_t lane) { values[lane] = all ? mask : 0; });
        if (i.dst2 != kNoRegister) warp.set_predicate(i.dst2, all ? kAllLanes : 0, mask);
    }
    store_lanes(warp.lanes<uint32_t>(i.dst), values, mask);
    return Step::kNext;
}

void decode_match(DecodeContext& c) {
    c.allow(1, "sync any all b32 b64");
    const SyntaxOperand& destination = c.operand(0);
    if (destination.kind == SyntaxOperand::Kind::kPair) {
        c.out.dst = c.write(destination.parts[0], 4);
        c.out.dst2 = c.write_predicate(destination.parts[1]);
    } else {
        c.out.dst = c.write(destination, 4);
    }
    const int bytes = c.type_size();
    c.out.a = c.read(1, bytes);
    c.out.d = c.read(2, 4);
    c.out.x = c.has("all");
    c.info.describe_wait = describe_members;
    c.out.handler = bytes == 4 ? match<uint32_t> : match<uint64_t>;
}

enum class Reduction : uint32_t { kAdd, kMinimum, kMaximum, kAnd, kOr, kXor };

template <class T, Reduction kOperation>
Step reduce(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!members(warp, i.d, mask)) return Step::kBlock;
    const T* a = warp.lanes<T>(i.a);
    T result = a[first_lane(mask)];
    for_lanes(mask & (mask - 1), [&](uint32_t lane) {
        switch (kOperation) {
            case Reduction::kAdd:
                result = static_cast<T>(static_cast<uint32_t>(result) + static_cast<uint32_t>(a[lane]));
                break;
            case Reduction::kMinimum:
                result = std::min(result, a[lane]);
                break;
            case Reduction::kMaximum:
                result = std::max(result, a[lane]);
                break;
            case Reduction::kAnd:
                result = static_cast<T>(result & a[lane]);
                break;
            case Reduction::kOr:
                result = static_cast<T>(result | a[lane]);
                break;
            case Reduction::kXor:
                result = static_cast<T>(result ^ a[lane]);
                break;
        }
    });
    for_lanes(mask, [&](uint32_t lane) { warp.lanes<T>(i.dst)[lane] = result; });
    return Step::kNext;
}

void decode_redux(DecodeContext& c) {
    c.allow(1, "sync add min max and or xor u32 s32 b32");
    c.out.dst = c.write(0, 4);
    c.out.a = c.read(1, 4);
    c.out.d = c.read(2, 4);
    c.info.describe_wait = describe_members;
    const bool is_signed = c.type() == "s32";
    using U = uint32_t;
    using S = int32_t;
    if (c.has("add")) c.out.handler = reduce<U, Reduction::kAdd>;
    if (c.has("min")) c.out.handler = is_signed ? reduce<S, Reduction::kMinimum> : reduce<U, Reduction::kMinimum>;
    if (c.has("max")) c.out.handler = is_signed ? reduce<S, Reduction::kMaximum> : reduce<U, Reduction::kMaximum>;
    if (c.has("and")) c.out.handler = reduce<U, Reduction::kAnd>;
    if (c.has("or")) c.out.handler = reduce<U, Reduction::kOr>;
    if (c.has("xor")) c.out.handler = reduce<U, Reduction::kXor>;
}

Step active_mask(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) { warp.lanes<uint32_t>(i.dst)[lane] = mask; });
    return Step::kNext;
}

void decode_activemask(DecodeContext& c) {
    c.out.dst = c.write(0, 4);
    c.out.handler = active_mask;
}

// elect.sync d|p, membermask: the lowest member leads.
Step elect(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!members(warp, i.d, mask)) return Step::kBlock;
    const uint32_t leader = first_lane(mask);
    warp.set_predicate(i.dst2, lane_bit(leader), mask);
    for_lanes(mask, [&](uint32_t lane) { warp.lanes<uint32_t>(i.dst)[lane] = leader; });
    return Step::kNext;
}

void decode_elect(DecodeContext& c) {
    c.allow(1, "sync");
    const SyntaxOperand& destination = c.operand(0);
    if (destination.kind != SyntaxOperand::Kind::kPair) c.fail("expected d|p");
    c.out.dst = c.write(destination.parts[0], 4);
    c.out.dst2 = c.write_predicate(destination.parts[1]);
    c.out.d = c.read(1, 4);
    c.info.describe_wait = describe_members;
    c.out.handler = elect;
}

// bar.warp.sync: the only one of these that orders memory accesses of the lanes.
Step warp_barrier(Warp& warp, const Instruction& i, LaneMask mask) {
    if (!members(warp, i.d, mask)) return Step::kBlock;
    warp.machine.checker.warp_sync(warp);
    return Step::kNext;
}

void decode_warp_barrier(DecodeContext& c) {
    c.allow(1, "warp sync");
    c.out.d = c.read(0, 4);
    c.info.describe_wait = describe_members;
    c.set_role(kRoleSynchronization);
    c.out.handler = warp_barrier;
}

}  // namespace

void register_warp_collectives(OpcodeTable& table) {
    table.add("shfl", decode_shfl);
    table.add("vote", decode_vote);
    table.add("match", decode_match);
    table.add("redux", decode_redux);
    table.add("activemask", decode_activemask);
    table.add("elect", decode_elect);
    table.add("bar.warp", decode_warp_barrier);
}

}  // namespace ptx_emulator
