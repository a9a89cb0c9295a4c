#include "mbarrier.h"

#include <cstring>

#include "errors.h"
#include "machine.h"

namespace ptx_emulator {

namespace {

constexpr uint32_t kMaxCount = (1u << 20) - 1;         // PTX ISA 9.7.13.15.2
constexpr int64_t kMaxBytes = (int64_t{1} << 20) - 1;  // of the tx-count, either sign

std::string name_of(const Cta& owner, uint32_t offset) {
    return format("the mbarrier at shared offset 0x%x of CTA rank %u", offset, owner.rank);
}

}  // namespace

uint64_t MemoryBarriers::token(const MemoryBarrier& barrier) {
    return (barrier.phase & 1) << 63 | static_cast<uint64_t>(barrier.bytes + kMaxBytes + 1) << 40 |
           uint64_t{barrier.expected} << 20 | barrier.pending;
}

static void draw(Cta& owner, uint32_t offset, const MemoryBarrier& barrier) {
    const uint64_t picture = MemoryBarriers::token(barrier);
    owner.shared.write_by_async(offset, &picture, sizeof picture);
}

void MemoryBarriers::initialise(Warp& by, Cta& owner, uint32_t offset, uint32_t count) {
    if (count == 0 || count > kMaxCount) raise(Fault::kIllegalInstruction, "mbarrier.init with a count of %u", count);
    MemoryBarrier& barrier = barriers_[offset];
    const Component stream = barrier.stream;
    const bool known = barrier.initialiser != nullptr;
    barrier = MemoryBarrier{};
    barrier.expected = barrier.pending = count;
    barrier.initialiser = &by;
    Checker& checker = owner.machine.checker;
    barrier.stream = known || !checker.enabled()
                         ? stream
                         : checker.new_component(owner.cluster, "writes that complete on " + name_of(owner, offset));
    draw(owner, offset, barrier);
    owner.machine.progressed();
}

void MemoryBarriers::invalidate(Cta& owner, uint32_t offset) {
    at(owner, offset);
    barriers_.erase(offset);
    const uint64_t nothing = ~uint64_t{0};
    owner.shared.write_by_async(offset, &nothing, sizeof nothing);
}

MemoryBarrier& MemoryBarriers::at(Cta& owner, uint32_t offset) {
    const auto it = barriers_.find(offset);
    if (it == barriers_.end()) {
        raise(Fault::kIllegalInstruction, "there is no initialised mbarrier at shared offset 0x%x of CTA rank %u",
              offset, owner.rank);
    }
    const uint64_t expected = token(it->second);
    if (std::memcmp(owner.shared.generic(offset), &expected, sizeof expected) != 0) {
        raise(Fault::kIllegalInstruction, "%s was overwritten", name_of(owner, offset).c_str());
    }
    return it->second;
}

void MemoryBarriers::settle(Cta& owner, uint32_t offset, MemoryBarrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        ++barrier.phase;
        barrier.pending = barrier.expected;
        owner.machine.checker.join(barrier.completed, barrier.arriving);
        barrier.latest = std::move(barrier.arriving);
        barrier.arriving = SyncClock{};
    }
    draw(owner, offset, barrier);
    owner.machine.progressed();
}

void MemoryBarriers::arrive(Cta& owner, uint32_t offset, uint32_t count, const SyncClock& past) {
    MemoryBarrier& barrier = at(owner, offset);
    if (count > barrier.pending) {
        raise(Fault::kIllegalInstruction, "%u arrivals at %s, whose phase %llu waits for %u", count,
              name_of(owner, offset).c_str(), static_cast<unsigned long long>(barrier.phase), barrier.pending);
    }
    owner.machine.checker.join(barrier.arriving, past);
    barrier.pending -= count;
    settle(owner, offset, barrier);
}

void MemoryBarriers::drop(Cta& owner, uint32_t offset, uint32_t count) {
    MemoryBarrier& barrier = at(owner, offset);
    if (count > barrier.expected) raise(Fault::kIllegalInstruction, "mbarrier.arrive_drop of %u arrivals", count);
    barrier.expected -= count;
    draw(owner, offset, barrier);
}

void MemoryBarriers::expect_bytes(Cta& owner, uint32_t offset, uint32_t bytes) {
    MemoryBarrier& barrier = at(owner, offset);
    barrier.bytes += bytes;
    if (barrier.bytes > kMaxBytes) {
        raise(Fault::kIllegalInstruction, "%lld bytes announced at %s, at most %lld can be",
              static_cast<long long>(barrier.bytes), name_of(owner, offset).c_str(), static_cast<long long>(kMaxBytes));
    }
    draw(owner, offset, barrier);
    owner.machine.progressed();
}

void MemoryBarriers::complete_bytes(Cta& owner, uint32_t offset, uint32_t bytes, const SyncClock& past) {
    MemoryBarrier& barrier = at(owner, offset);
    owner.machine.checker.join(barrier.arriving, past);
    barrier.bytes -= bytes;
    if (barrier.bytes < -kMaxBytes) {
        raise(Fault::kIllegalInstruction, "%lld bytes more than announced were written on %s",
              static_cast<long long>(-barrier.bytes), name_of(owner, offset).c_str());
    }
    settle(owner, offset, barrier);
}

void MemoryBarriers::add_pending(Cta& owner, uint32_t offset, uint32_t count) {
    MemoryBarrier& barrier = at(owner, offset);
    barrier.pending += count;
    if (barrier.pending > kMaxCount) raise(Fault::kIllegalInstruction, "too many pending arrivals at an mbarrier");
    draw(owner, offset, barrier);
}

void MemoryBarriers::publish(const Warp& by) {
    for (auto& [offset, barrier] : barriers_) barrier.visible_to_async_proxy |= barrier.initialiser == &by;
}

std::string MemoryBarriers::describe(uint32_t offset) const {
    const auto it = barriers_.find(offset);
    if (it == barriers_.end()) return "not initialised";
    const MemoryBarrier& barrier = it->second;
    return format("in phase %llu (parity %llu), which waits for %u of %u arrivals and %lld bytes",
                  static_cast<unsigned long long>(barrier.phase), static_cast<unsigned long long>(barrier.phase & 1),
                  barrier.pending, barrier.expected, static_cast<long long>(barrier.bytes));
}

}  // namespace ptx_emulator
