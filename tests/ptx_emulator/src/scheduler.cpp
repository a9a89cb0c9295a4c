// Which warp runs next, and when asynchronous operations take effect: the part of Machine that differs by schedule.
#include <algorithm>

#include "errors.h"
#include "machine.h"

namespace ptx_emulator {

namespace {
// How long warps may run without any effect before an asynchronous operation is done that would have come later.
constexpr int kIdleRounds = 4, kIdleTurns = 64;
}  // namespace

std::vector<Warp*> Machine::resident_warps() const {
    std::vector<Warp*> warps;
    for (const auto& cluster : clusters) {
        for (const auto& cta : cluster->ctas) {
            for (const auto& warp : cta->warps) {
                if (!warp->done()) warps.push_back(warp.get());
            }
        }
    }
    return warps;
}

bool Machine::run_warp(Warp& warp, uint32_t budget) {
    const uint64_t before = progress;
    const uint64_t instructions_before = warp.instructions;
    current_warp = &warp;
    const Warp::Outcome outcome = warp.run(budget);
    current_warp = nullptr;
    statistics.warp_instructions += warp.instructions - instructions_before;
    if (progress != before || outcome != Warp::Outcome::kBlocked) {
        if (outcome == Warp::Outcome::kBlocked) warp.blocked_at = progress;
        return true;
    }
    warp.blocked_at = progress;
    return false;
}

// A warp that spins (on global memory, say) executes instructions for ever without any effect.
void Machine::check_stall() {
    if (progress != stall_progress_) {
        stall_progress_ = progress;
        stall_since_ = statistics.warp_instructions;
    } else if (statistics.warp_instructions - stall_since_ > options.stall_limit) {
        raise(Fault::kDeadlock, "no progress in %llu instructions\n%s",
              static_cast<unsigned long long>(options.stall_limit), deadlock_report().c_str());
    }
}

// Without one of its instructions a kernel is run to see whether anything notices; the first finding says so.
bool Machine::has_seen_enough() const {
    return options.remove >= 0 && !checker.reports().empty();
}

void Machine::run_in_turn() {
    const bool is_random = options.schedule == Schedule::kRandom;
    // Rounds in a row in which warps ran without any effect: they spin, perhaps on what an asynchronous operation will
    // bring about.
    int idle_rounds = 0;
    while (!clusters.empty() && !has_seen_enough()) {
        const uint64_t before = progress;
        const std::vector<Warp*> warps = resident_warps();
        bool moved = false;
        const size_t first = is_random && !warps.empty() ? random.below(static_cast<uint32_t>(warps.size())) : 0;
        for (size_t i = 0; i < warps.size(); ++i) {
            Warp& warp = *warps[(first + i) % warps.size()];
            if (warp.done() || warp.blocked_at == progress) continue;
            moved |= run_warp(warp, is_random ? 1 + random.below(400) : 4000);
        }
        if (options.schedule == Schedule::kEager) {
            while (async.run_some()) {
                moved = true;
                progressed();
            }
        } else if (is_random && random.below(4) == 0 && async.run_some()) {
            moved = true;
            progressed();
        }
        idle_rounds = progress == before ? idle_rounds + 1 : 0;
        if (!moved) {
            if (!async.run_some()) raise(Fault::kDeadlock, "deadlock\n%s", deadlock_report().c_str());
            progressed();
        } else if (idle_rounds >= kIdleRounds && async.run_some()) {
            progressed();
        }
        retire();
        check_stall();
    }
}

// Probabilistic concurrency testing: the agent of highest priority runs; priorities change at random points. The async
// engine is one agent among the warps.
void Machine::run_by_priority() {
    constexpr double kChange = 0.02;
    double engine_priority = random.uniform();
    int idle_turns = 0;
    std::vector<std::pair<const Warp*, double>> priorities;
    auto priority_of = [&](const Warp* warp) -> double& {
        for (auto& [known, value] : priorities) {
            if (known == warp) return value;
        }
        priorities.emplace_back(warp, random.uniform());
        return priorities.back().second;
    };
    size_t known_clusters = 0;
    std::vector<Warp*> warps;
    while (!clusters.empty() && !has_seen_enough()) {
        if (statistics.ctas != known_clusters) {
            known_clusters = statistics.ctas;
            warps = resident_warps();
            priorities.clear();  // pointers of ended warps may be reused
        }
        Warp* best = nullptr;
        for (Warp* warp : warps) {
            if (warp->done() || warp->blocked_at == progress) continue;
            if (!best || priority_of(warp) > priority_of(best)) best = warp;
        }
        const bool engine_turn = !best || engine_priority > priority_of(best) || idle_turns >= kIdleTurns;
        if (engine_turn && async.run_some()) {
            idle_turns = 0;
            progressed();
            if (random.uniform() < 0.3) engine_priority = random.uniform();
            continue;
        }
        if (!best) raise(Fault::kDeadlock, "deadlock\n%s", deadlock_report().c_str());
        const uint64_t before = progress;
        run_warp(*best, 1 + random.below(2000));
        idle_turns = progress == before ? idle_turns + 1 : 0;
        if (random.uniform() < kChange) priority_of(best) = random.uniform() * 0.5;
        if (best->done()) {
            const size_t before = clusters.size();
            const uint32_t started = statistics.ctas;
            retire();
            if (clusters.size() != before || statistics.ctas != started) known_clusters = 0;
        } else if (warps.size() > 1 && stall_progress_ == progress) {
            // A spinning warp goes behind all others, or two that spin could keep the rest from running for ever.
            double lowest = 0;
            for (Warp* warp : warps) lowest = std::min(lowest, priority_of(warp));
            priority_of(best) = lowest - random.uniform();
        }
        check_stall();
    }
}

std::string Machine::deadlock_report() const {
    std::string text;
    int lines = 0;
    for (const auto& cluster : clusters) {
        for (const auto& cta : cluster->ctas) {
            for (const auto& warp : cta->warps) {
                for (const LaneGroup& group : warp->groups) {
                    if (++lines > 40) continue;
                    text += format("  CTA (%u,%u,%u) warp %u lanes %08x at %s", cta->id.x, cta->id.y, cta->id.z,
                                   warp->index, group.mask, program.where(group.pc).c_str());
                    // A wait that has failed stands before the branch back to it.
                    for (uint32_t pc : {group.pc, group.pc - 1}) {
                        if (pc >= program.info.size() || !program.info[pc].describe_wait) continue;
                        text += "\n      " + program.info[pc].describe_wait(*warp, program.code[pc]);
                        break;
                    }
                    text += "\n";
                }
            }
        }
    }
    if (lines > 40) text += format("  and %d more\n", lines - 40);
    for (const AsyncQueue* queue : async.queues()) {
        for (const AsyncOperation& operation : queue->pending()) {
            if (!operation.what.empty()) text += "  pending: " + operation.what + "\n";
        }
    }
    return text;
}

}  // namespace ptx_emulator
