// Lane-wise evaluation: one function over the 32 lanes of a warp, written so that the compiler vectorises it.
//
// All lanes are computed and the result is blended under the mask; a function must therefore not trap on operands of
// lanes that do not take part (integer division tests its divisor).
#pragma once

#include <cstring>

#include "instruction.h"
#include "warp.h"

namespace ptx_emulator {

template <class T>
inline void store_lanes(T* __restrict destination, const T* __restrict values, LaneMask mask) {
    if (mask == kAllLanes) {
        std::memcpy(destination, values, sizeof(T) * kWarpSize);
    } else {
        for (uint32_t lane = 0; lane < kWarpSize; ++lane) {
            destination[lane] = mask >> lane & 1 ? values[lane] : destination[lane];
        }
    }
}

// dst = F(a)
template <class Result, class A, class F>
Step map1(Warp& warp, const Instruction& i, LaneMask mask) {
    const A* __restrict a = warp.lanes<A>(i.a);
    alignas(64) Result values[kWarpSize];
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) values[lane] = F{}(a[lane]);
    store_lanes(warp.lanes<Result>(i.dst), values, mask);
    return Step::kNext;
}

// dst = F(a, b)
template <class Result, class A, class B, class F>
Step map2(Warp& warp, const Instruction& i, LaneMask mask) {
    const A* __restrict a = warp.lanes<A>(i.a);
    const B* __restrict b = warp.lanes<B>(i.b);
    alignas(64) Result values[kWarpSize];
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) values[lane] = F{}(a[lane], b[lane]);
    store_lanes(warp.lanes<Result>(i.dst), values, mask);
    return Step::kNext;
}

// dst = F(a, b, c)
template <class Result, class A, class B, class C, class F>
Step map3(Warp& warp, const Instruction& i, LaneMask mask) {
    const A* __restrict a = warp.lanes<A>(i.a);
    const B* __restrict b = warp.lanes<B>(i.b);
    const C* __restrict c = warp.lanes<C>(i.c);
    alignas(64) Result values[kWarpSize];
    for (uint32_t lane = 0; lane < kWarpSize; ++lane) values[lane] = F{}(a[lane], b[lane], c[lane]);
    store_lanes(warp.lanes<Result>(i.dst), values, mask);
    return Step::kNext;
}

// Calls f(lane) for each lane of the mask.
template <class F>
inline void for_lanes(LaneMask mask, F f) {
    for (LaneMask rest = mask; rest; rest &= rest - 1) f(static_cast<uint32_t>(__builtin_ctz(rest)));
}

inline uint32_t first_lane(LaneMask mask) {
    return static_cast<uint32_t>(__builtin_ctz(mask));
}

}  // namespace ptx_emulator
