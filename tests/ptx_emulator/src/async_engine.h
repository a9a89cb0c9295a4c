// Asynchronous operations: submitted by an instruction, executed when the schedule says so or when somebody waits.
//
// A queue holds the operations that order among themselves in one way: the copies of a warp, the tensor pipe of a CTA,
// the bulk copies of a cluster. The owner of a queue (Warp, Cta, Cluster) has it as a member and attaches it to the
// machine's engine.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "options.h"
#include "random.h"

namespace ptx_emulator {

struct AsyncOperation {
    std::function<void()> run;
    std::function<bool()> ready;  // empty: always. E.g. wgmma: all four warps have issued it
    std::string what;             // for the deadlock report; may be empty
    uint64_t ticket = 0;          // 1, 2, ... per queue
};

class AsyncQueue {
  public:
    enum class Order {
        kFifo,  // one after another: the tensor pipe
        kAny,   // in any order: bulk copies
    };
    // Whether the lazy schedule leaves the operations to whoever waits for the queue (cp.async groups), or runs them
    // when nothing else can go on (TMA: the waiter looks at an mbarrier, not at the queue).
    enum class Trigger { kWait, kIdle };

    AsyncQueue(Order order, Trigger trigger) : order_(order), trigger_(trigger) {}

    bool empty() const { return pending_.empty(); }
    size_t size() const { return pending_.size(); }
    const std::deque<AsyncOperation>& pending() const { return pending_; }
    uint64_t issued() const { return issued_; }  // the ticket of the latest operation
    Trigger trigger() const { return trigger_; }

    bool can_run() const;
    // Runs one operation that is ready, chosen by the order of the queue. False: none was ready.
    bool run_one(Random& random);
    // Runs everything up to and including a ticket. False: one of them is not ready; those before it have run.
    bool run_through(uint64_t ticket);
    bool has_pending_through(uint64_t ticket) const;

  private:
    friend class AsyncEngine;
    void run_at(size_t index);

    Order order_;
    Trigger trigger_;
    uint64_t issued_ = 0;
    std::deque<AsyncOperation> pending_;
};

class AsyncEngine {
  public:
    AsyncEngine(Schedule schedule, Random& random) : schedule_(schedule), random_(random) {}

    void attach(AsyncQueue* queue) { queues_.push_back(queue); }
    void detach(AsyncQueue* queue);
    // Hands an operation over; the eager schedule runs it at once. Returns its ticket.
    uint64_t submit(AsyncQueue& queue, std::function<void()> run, std::function<bool()> ready = {},
                    std::string what = {});
    bool any_ready() const;
    // Runs one ready operation of a random queue; idle: also of those that wait only when nothing else can run.
    bool run_some();
    uint64_t executed() const { return executed_; }
    const std::vector<AsyncQueue*>& queues() const { return queues_; }

  private:
    Schedule schedule_;
    Random& random_;
    std::vector<AsyncQueue*> queues_;
    uint64_t executed_ = 0;
};

}  // namespace ptx_emulator
