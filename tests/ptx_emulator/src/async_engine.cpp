#include "async_engine.h"

#include <algorithm>

namespace ptx_emulator {

bool AsyncQueue::can_run() const {
    if (order_ == Order::kFifo) return !pending_.empty() && (!pending_.front().ready || pending_.front().ready());
    return std::any_of(pending_.begin(), pending_.end(),
                       [](const AsyncOperation& operation) { return !operation.ready || operation.ready(); });
}

void AsyncQueue::run_at(size_t index) {
    AsyncOperation operation = std::move(pending_[index]);
    pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(index));
    operation.run();
}

bool AsyncQueue::run_one(Random& random) {
    if (order_ == Order::kFifo) {
        if (!can_run()) return false;
        run_at(0);
        return true;
    }
    if (pending_.empty()) return false;
    const size_t first = random.below(static_cast<uint32_t>(pending_.size()));
    for (size_t i = 0; i < pending_.size(); ++i) {
        const size_t index = (first + i) % pending_.size();
        if (pending_[index].ready && !pending_[index].ready()) continue;
        run_at(index);
        return true;
    }
    return false;
}

bool AsyncQueue::run_through(uint64_t ticket) {
    for (size_t i = 0; i < pending_.size();) {
        if (pending_[i].ticket > ticket) {
            ++i;
            continue;
        }
        if (pending_[i].ready && !pending_[i].ready()) return false;
        run_at(i);
    }
    return true;
}

bool AsyncQueue::has_pending_through(uint64_t ticket) const {
    return std::any_of(pending_.begin(), pending_.end(),
                       [&](const AsyncOperation& operation) { return operation.ticket <= ticket; });
}

void AsyncEngine::detach(AsyncQueue* queue) {
    queues_.erase(std::remove(queues_.begin(), queues_.end(), queue), queues_.end());
}

uint64_t AsyncEngine::submit(AsyncQueue& queue, std::function<void()> run, std::function<bool()> ready,
                             std::string what) {
    const uint64_t ticket = ++queue.issued_;
    queue.pending_.push_back({std::move(run), std::move(ready), std::move(what), ticket});
    if (schedule_ == Schedule::kEager) {
        while (queue.run_one(random_)) ++executed_;
    } else if (schedule_ == Schedule::kRandom && random_.below(4) == 0) {
        executed_ += queue.run_one(random_);
    }
    return ticket;
}

bool AsyncEngine::any_ready() const {
    return std::any_of(queues_.begin(), queues_.end(), [](const AsyncQueue* queue) { return queue->can_run(); });
}

bool AsyncEngine::run_some() {
    if (queues_.empty()) return false;
    const size_t first = random_.below(static_cast<uint32_t>(queues_.size()));
    for (size_t i = 0; i < queues_.size(); ++i) {
        AsyncQueue* queue = queues_[(first + i) % queues_.size()];
        if (queue->run_one(random_)) {
            ++executed_;
            return true;
        }
    }
    return false;
}

}  // namespace ptx_emulator
