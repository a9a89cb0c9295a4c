// One launch: the grid, the device it runs on, the schedule, and the clusters that are resident right now.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "async_engine.h"
#include "checker.h"
#include "cluster.h"
#include "device_model.h"
#include "execution_counts.h"
#include "forms.h"
#include "global_journal.h"
#include "options.h"
#include "program.h"
#include "random.h"

namespace ptx_emulator {

struct LaunchConfig {
    Dim3 grid, block, cluster;
    uint32_t dynamic_shared = 0;      // bytes
    std::vector<uint8_t> parameters;  // laid out as Program::parameters says
};

struct LaunchStatistics {
    uint64_t warp_instructions = 0;
    uint32_t ctas = 0;
    uint32_t resident_ctas = 0;  // at most at once
};

class Machine {
  public:
    Machine(const Program& program, const LaunchConfig& config, const DeviceModel& device, const Options& options);

    // Runs the grid to its end. Throws EmulationError; findings of the checker are thrown at the end, all in one.
    void run();

    // State changed in a way another warp could notice: blocked warps are looked at again.
    void progressed() { ++progress; }
    // To be called before each write to global memory.
    void before_global_write(const void* data, uint32_t bytes, bool rounded_sum = false) {
        if (!journal) return;
        const bool any_order = rounded_sum && !options.deterministic;
        journal->before_write(reinterpret_cast<uint64_t>(data), bytes, any_order);
    }
    const uint8_t* parameters() const { return parameters_; }
    // Offset of extern .shared in a CTA's shared memory, and its whole size.
    uint32_t dynamic_shared_offset() const { return dynamic_offset_; }
    uint32_t shared_bytes() const { return shared_bytes_; }
    std::string deadlock_report() const;
    // clusterlaunchcontrol.try_cancel: takes the place of the next cluster that has not started. False: there is none.
    bool cancel_next_cluster(Dim3* first_cta);

    const Program& program;
    const LaunchConfig config;
    const DeviceModel device;
    const Options options;
    Random random;
    AsyncEngine async;
    Checker checker;
    std::vector<std::unique_ptr<Cluster>> clusters;  // resident
    std::unique_ptr<GlobalJournal> journal;   // of what is written to global memory, if the launch will be undone
    std::unique_ptr<ExecutionCounts> counts;  // if they were asked for
    Forms* const forms;                       // where the forms of products and copies are noted; nullptr: nobody asks
    uint64_t progress = 0;
    const Warp* current_warp = nullptr;  // the one whose instruction runs; nullptr: an asynchronous operation
    LaunchStatistics statistics;

  private:
    void validate() const;
    std::string schedule_text() const;  // for reports
    Dim3 first_cta_of(uint64_t cluster) const;
    void fill();             // starts clusters while there is room
    void retire();           // removes clusters that have ended
    void run_in_turn();      // eager, lazy, random
    void run_by_priority();  // PCT
    // Runs one warp for a while; true: it made progress or used up its budget.
    bool run_warp(Warp& warp, uint32_t budget);
    void check_stall();
    bool has_seen_enough() const;
    std::vector<Warp*> resident_warps() const;

    std::vector<uint8_t> parameter_storage_;
    uint8_t* parameters_ = nullptr;
    uint32_t dynamic_offset_ = 0, shared_bytes_ = 0;
    uint64_t next_cluster_ = 0, total_clusters_ = 0;
    uint32_t resident_limit_ = 1;  // clusters
    uint64_t stall_progress_ = 0, stall_since_ = 0, retired_instructions_ = 0;
    std::vector<bool> slots_;  // of resident clusters, in use or not
};

}  // namespace ptx_emulator
