// Threads that share a job's pieces.
//
// A worker that was not given a processor in time takes no piece, and nobody waits for it: the caller does the
// rest itself. Idle workers spin for a moment, then sleep.

#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace hardpoint {

using Piece = void (*)(void* context, int64_t piece);

class Pool {
public:
    // The one pool. It is never destroyed: its threads may outlive static objects.
    static Pool& get();

    void resize(int threads);
    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Run all pieces, the caller taking part. `wake`: worth waking threads that sleep.
    void run(Piece piece, void* context, int64_t pieces, bool wake);

private:
    bool take_one();
    void work();
    bool has_work() const { return static_cast<uint32_t>(ticket_.load()) != 0; }

    std::vector<std::thread> workers_;
    // The job's number in the high half, pieces nobody has taken in the low half. A piece is taken by lowering
    // it, and what belongs to a job is changed only when all pieces of the one before are done.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> calls_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    Piece piece_ = nullptr;
    void* context_ = nullptr;
    int64_t pieces_ = 0;
    uint32_t job_ = 0;
};

}  // namespace hardpoint
