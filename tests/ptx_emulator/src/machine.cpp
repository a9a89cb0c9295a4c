#include "machine.h"

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace ptx_emulator {

static uint32_t align_up(uint32_t value, uint32_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

Machine::Machine(const Program& p, const LaunchConfig& c, const DeviceModel& d, const Options& o)
    : program(p),
      config(c),
      device(d),
      options(o),
      random(o.seed),
      async(o.schedule, random),
      checker(o.check, *this),
      forms(o.forms_file.empty() ? nullptr : &Forms::instance()) {
    dynamic_offset_ = align_up(program.static_shared, std::max(program.dynamic_alignment, 16u));
    // The driver reserves the first 1 KB of a CTA's shared memory, so dynamic memory starts at a multiple of 1024 when
    // there is no static memory; kernels that want more alignment than they ask for must find it themselves.
    shared_bytes_ = config.dynamic_shared ? dynamic_offset_ + config.dynamic_shared : program.static_shared;
    parameter_storage_.assign(program.parameter_bytes + 256, 0);
    parameters_ = parameter_storage_.data();
    parameters_ += (128 - reinterpret_cast<uintptr_t>(parameters_) % 128) % 128;
    std::memcpy(parameters_, config.parameters.data(),
                std::min<size_t>(config.parameters.size(), program.parameter_bytes));
    validate();
    const auto cluster_ctas = static_cast<uint32_t>(config.cluster.count());
    const auto threads = static_cast<uint32_t>(config.block.count());
    const uint32_t resident_ctas = device.occupancy(threads, shared_bytes_) * device.sm_count;
    resident_limit_ = std::max(1u, resident_ctas / cluster_ctas);
    total_clusters_ = config.grid.count() / cluster_ctas;
    slots_.assign(resident_limit_, false);
}

void Machine::validate() const {
    const uint64_t threads = config.block.count();
    if (threads == 0 || threads > 1024 || config.block.x > 1024 || config.block.y > 1024 || config.block.z > 64) {
        raise(Fault::kInvalidConfiguration, "a block of %u x %u x %u threads", config.block.x, config.block.y,
              config.block.z);
    }
    if (config.grid.count() == 0 || config.grid.x > 2147483647u || config.grid.y > 65535 || config.grid.z > 65535) {
        raise(Fault::kInvalidConfiguration, "a grid of %u x %u x %u CTAs", config.grid.x, config.grid.y, config.grid.z);
    }
    const Dim3& cluster = config.cluster;
    if (cluster.count() == 0 || cluster.count() > 16 || config.grid.x % cluster.x || config.grid.y % cluster.y ||
        config.grid.z % cluster.z) {
        raise(Fault::kInvalidConfiguration, "a grid of %u x %u x %u in clusters of %u x %u x %u", config.grid.x,
              config.grid.y, config.grid.z, cluster.x, cluster.y, cluster.z);
    }
    if (cluster.count() > 1 && device.major < 9) {
        raise(Fault::kInvalidConfiguration, "clusters need compute capability 9.0, the model is %d.%d", device.major,
              device.minor);
    }
    if (program.required_cluster[0] &&
        (program.required_cluster[0] != cluster.x || program.required_cluster[1] != cluster.y ||
         program.required_cluster[2] != cluster.z)) {
        raise(Fault::kInvalidConfiguration, "the kernel requires clusters of %u x %u x %u", program.required_cluster[0],
              program.required_cluster[1], program.required_cluster[2]);
    }
    const uint64_t limit = uint64_t{program.max_threads[0]} * program.max_threads[1] * program.max_threads[2];
    if (limit && threads > limit) {
        raise(Fault::kInvalidConfiguration, "%llu threads per CTA, the kernel was compiled for at most %llu",
              static_cast<unsigned long long>(threads), static_cast<unsigned long long>(limit));
    }
    const uint32_t* required = program.required_threads;
    if (required[0] &&
        (config.block.x != required[0] || config.block.y != required[1] || config.block.z != required[2])) {
        raise(Fault::kInvalidConfiguration, "a block of %u x %u x %u threads, the kernel requires %u x %u x %u",
              config.block.x, config.block.y, config.block.z, required[0], required[1], required[2]);
    }
    if (program.static_shared > 48 * 1024) {
        raise(Fault::kInvalidConfiguration, "%u bytes of static shared memory", program.static_shared);
    }
    if (device.occupancy(static_cast<uint32_t>(threads), shared_bytes_) == 0) {
        raise(Fault::kInvalidConfiguration, "%u bytes of shared memory and %llu threads do not fit on an SM of %d.%d",
              shared_bytes_, static_cast<unsigned long long>(threads), device.major, device.minor);
    }
}

Dim3 Machine::first_cta_of(uint64_t cluster) const {
    const Dim3 shape{config.grid.x / config.cluster.x, config.grid.y / config.cluster.y,
                     config.grid.z / config.cluster.z};
    return {static_cast<uint32_t>(cluster % shape.x) * config.cluster.x,
            static_cast<uint32_t>(cluster / shape.x % shape.y) * config.cluster.y,
            static_cast<uint32_t>(cluster / shape.x / shape.y) * config.cluster.z};
}

bool Machine::cancel_next_cluster(Dim3* first_cta) {
    if (next_cluster_ == total_clusters_) return false;
    *first_cta = first_cta_of(next_cluster_++);
    return true;
}

void Machine::fill() {
    while (next_cluster_ < total_clusters_ && clusters.size() < resident_limit_) {
        const auto slot = static_cast<uint32_t>(std::find(slots_.begin(), slots_.end(), false) - slots_.begin());
        slots_[slot] = true;
        const uint64_t i = next_cluster_++;
        clusters.push_back(std::make_unique<Cluster>(*this, static_cast<uint32_t>(i), first_cta_of(i), slot));
        statistics.ctas += static_cast<uint32_t>(config.cluster.count());
        progressed();
    }
    statistics.resident_ctas =
        std::max(statistics.resident_ctas, static_cast<uint32_t>(clusters.size() * config.cluster.count()));
}

void Machine::retire() {
    for (auto it = clusters.begin(); it != clusters.end();) {
        if (!(*it)->done()) {
            ++it;
            continue;
        }
        if (!(*it)->bulk_copies.empty() && checker.enabled()) {
            raise(Fault::kIllegalInstruction, "a cluster ends with bulk copies into its shared memory outstanding: %s",
                  (*it)->bulk_copies.pending().front().what.c_str());
        }
        for (const auto& cta : (*it)->ctas) {
            if (cta->tensor_pipe.queue.empty() || !checker.enabled()) continue;
            raise(Fault::kIllegalInstruction, "a cluster ends with tensor core operations outstanding: %s",
                  cta->tensor_pipe.queue.pending().front().what.c_str());
        }
        slots_[(*it)->slot] = false;
        for (auto& cta : (*it)->ctas) {
            for (auto& warp : cta->warps) retired_instructions_ += warp->instructions;
        }
        it = clusters.erase(it);
    }
    fill();
}

std::string Machine::schedule_text() const {
    return format("\n  schedule %s, seed %llu", name_of(options.schedule),
                  static_cast<unsigned long long>(options.seed));
}

void Machine::run() {
    try {
        fill();
        if (options.schedule == Schedule::kPct) {
            run_by_priority();
        } else {
            run_in_turn();
        }
        statistics.warp_instructions = retired_instructions_;
    } catch (const EmulationError& error) {
        std::string text = error.what();
        if (const Warp* warp = current_warp) {
            const Dim3& id = warp->cta.id;
            text += format("\n  in kernel %s\n  CTA (%u,%u,%u) warp %u at %s", program.name.c_str(), id.x, id.y, id.z,
                           warp->index, program.where(warp->pc()).c_str());
        } else {
            text += "\n  in kernel " + program.name;
        }
        text += schedule_text();
        for (const std::string& finding : checker.reports()) text += "\n" + finding;
        throw EmulationError(error.fault(), text);
    }
    if (checker.reports().empty()) return;
    std::string text = format("the happens-before checker found %zu hazards in kernel %s", checker.reports().size(),
                              program.name.c_str());
    text += schedule_text();
    for (const std::string& finding : checker.reports()) text += "\n" + finding;
    throw EmulationError(Fault::kHazard, text);
}

}  // namespace ptx_emulator
