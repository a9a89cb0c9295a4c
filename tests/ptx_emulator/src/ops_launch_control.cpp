// clusterlaunchcontrol: a running cluster takes over the work of one that has not started (PTX ISA 9.7.13.17).
//
// The response is opaque by the ISA; here it is whether a cluster was cancelled, and %ctaid of its first CTA.
#include <cstring>

#include "address_operand.h"
#include "bulk_transfer.h"
#include "errors.h"
#include "lanes.h"
#include "opcode_table.h"

namespace ptx_emulator {

namespace {

struct Response {
    uint32_t cancelled, x, y, z;
};
static_assert(sizeof(Response) == sizeof(Word128), "it travels in a .b128");

struct TryCancelData : InstructionData {
    AddressOperand response, barrier;
    bool multicast = false;
};

// The response is written, and 16 bytes are counted on the mbarrier, in this CTA or at the same place in all of its
// cluster.
Step try_cancel(Warp& warp, const Instruction& i, LaneMask mask) {
    const auto& data = static_cast<const TryCancelData&>(*i.data);
    Checker& checker = warp.machine.checker;
    for_lanes(mask, [&](uint32_t lane) {
        const MemoryReference to = resolve_shared(warp, data.response.shared_at(warp, lane), sizeof(Response), 16);
        const uint32_t barrier_address = data.barrier.shared_at(warp, lane);
        struct Receiver {
            Cta* cta;
            SyncClock past;
        };
        std::vector<Receiver> receivers;
        uint32_t barrier_offset = 0;
        for (auto& cta : warp.cta.cluster.ctas) {
            if (!data.multicast && cta.get() != to.owner) continue;
            require_running(warp, *cta);
            const uint32_t address = (barrier_address & kSharedOffsetMask) | cta->rank << kSharedRankShift;
            barrier_offset = bulk_barrier(warp, lane, address).offset;
            const MemoryBarrier& barrier = cta->memory_barriers.at(*cta, barrier_offset);
            const AsyncAgent agent =
                checker.agent(warp, barrier.stream, static_cast<uint32_t>(barrier.phase) + 1, true);
            checker.shared_access(agent, lane, *cta, to.offset, sizeof(Response), AccessKind::kWrite);
            receivers.push_back({cta.get(), checker.past(agent)});
        }
        Machine& machine = warp.machine;
        machine.async.submit(
            warp.cta.cluster.bulk_copies,
            [&machine, receivers = std::move(receivers), offset = to.offset, barrier_offset] {
                Response response{};
                Dim3 first;
                if (machine.cancel_next_cluster(&first)) response = {1, first.x, first.y, first.z};
                for (const Receiver& receiver : receivers) {
                    receiver.cta->shared.write_by_async(offset, reinterpret_cast<const uint8_t*>(&response),
                                                        sizeof response);
                    receiver.cta->memory_barriers.complete_bytes(*receiver.cta, barrier_offset, sizeof response,
                                                                 receiver.past);
                }
            },
            {}, "clusterlaunchcontrol.try_cancel: " + warp.program.where(warp.pc()));
    });
    return Step::kNext;
}

void decode_try_cancel(DecodeContext& c) {
    c.allow(1, "try_cancel async shared::cta mbarrier::complete_tx::bytes multicast::cluster::all b128");
    c.set_role(kRoleAsyncProxy);
    auto data = std::make_shared<TryCancelData>();
    data->response = decode_address(c, c.operand(0), 4);
    data->barrier = decode_address(c, c.operand(1), 4);
    data->multicast = c.has("multicast::cluster::all");
    c.out.data = std::move(data);
    c.out.handler = try_cancel;
}

Response response_of(const Warp& warp, const Instruction& i, uint32_t lane) {
    Response response;
    std::memcpy(&response, &warp.lanes<Word128>(i.a)[lane], sizeof response);
    return response;
}

Step is_cancelled(Warp& warp, const Instruction& i, LaneMask mask) {
    LaneMask values = 0;
    for_lanes(mask, [&](uint32_t lane) { values |= LaneMask{response_of(warp, i, lane).cancelled & 1} << lane; });
    warp.set_predicate(i.dst, values, mask);
    return Step::kNext;
}

// x: the dimension, list[0]: where it goes; or all of them and a fourth word
Step first_cta(Warp& warp, const Instruction& i, LaneMask mask) {
    for_lanes(mask, [&](uint32_t lane) {
        const Response response = response_of(warp, i, lane);
        if (!response.cancelled) {
            raise(Fault::kIllegalInstruction,
                  "clusterlaunchcontrol: the first CTA of a cluster that was not cancelled");
        }
        const uint32_t place[4] = {response.x, response.y, response.z, 0};
        for (uint32_t d = 0; d < i.list_size[0]; ++d) warp.lanes<uint32_t>(i.list[0][d])[lane] = place[i.x + d];
    });
    return Step::kNext;
}

void decode_query_cancel(DecodeContext& c) {
    c.allow(1,
            "query_cancel is_canceled get_first_ctaid get_first_ctaid::x get_first_ctaid::y get_first_ctaid::z pred v4 "
            "b32 b128");
    if (c.has("is_canceled")) {
        c.out.dst = c.write_predicate(c.operand(0));
        c.out.handler = is_cancelled;
    } else {
        c.write_list(0, c.operand(0), 4);
        c.out.x = c.has("get_first_ctaid::y") ? 1 : c.has("get_first_ctaid::z") ? 2 : 0;
        if (c.out.list_size[0] != (c.has("v4") ? 4 : 1)) c.fail("wrong number of registers");
        c.out.handler = first_cta;
    }
    c.out.a = c.read(1, sizeof(Word128));
}

}  // namespace

void register_launch_control(OpcodeTable& table) {
    table.add("clusterlaunchcontrol.try_cancel", decode_try_cancel);
    table.add("clusterlaunchcontrol.query_cancel", decode_query_cancel);
}

}  // namespace ptx_emulator
