// Threads that share work, and how a kernel hands it to them.
//
// A job is a list of phases. A phase is a number of pieces that may run at the same time; a phase begins when the
// one before is done, so what one phase writes the next may read. There is no barrier that waits for threads: a
// thread takes the next piece whenever it is free, and whoever finishes the last piece of a phase opens the next
// one. A thread that was not given a processor in time holds nobody up unless it is in the middle of a piece, so
// pieces should be small (some 10 to 50 us) and there should be several a thread. A phase of one piece is run
// at once by the thread that opens it, without telling the others: small serial work belongs there.
//
// A kernel that is to take part in a longer job offers phases (see linear.h) rather than calling `run` itself.
// Results must not depend on how pieces fall to threads.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace hardpoint {

// What a thread has for itself.
class Lane {
public:
    explicit Lane(int number) : thread(number) {}
    ~Lane() { std::free(memory_); }
    Lane(const Lane&) = delete;

    const int thread;  // 0 to Pool::threads() - 1

    // At least so many bytes, aligned to 64; what they hold is undefined, and they are valid until the next call.
    void* scratch(int64_t bytes);

private:
    void* memory_ = nullptr;
    int64_t size_ = 0;
};

struct Phase {
    void (*run)(const void* context, int64_t piece, Lane& lane);
    const void* context;  // must stay until the job is done
    int64_t pieces;
};

// A phase that calls `body(piece, lane)`; `body` must stay until the job is done.
template <class Body>
Phase phase_of(const Body& body, int64_t pieces) {
    return {[](const void* context, int64_t piece, Lane& lane) { (*static_cast<const Body*>(context))(piece, lane); },
            &body, pieces};
}

class Pool {
public:
    // The one pool. It is never destroyed: its threads may outlive static objects.
    static Pool& get();

    // Threads that compute, the caller of `run` among them. With `cores`, thread i is bound to cores[i], thread 0
    // being whoever calls `run`; new threads else may use the processors the caller may use.
    void resize(int threads, const int32_t* cores = nullptr);
    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Run phases, the caller taking part; one caller at a time (see `busy`). `wake`: worth waking threads that
    // sleep, which takes some microseconds.
    void run(const Phase* phases, int64_t count, bool wake);

    // To be held around `resize` and `run`, and while what only one caller may use is used.
    std::mutex busy;

private:
    Pool();
    void open(int64_t phase, Lane& lane);
    bool take_one(Lane& lane);
    void work(Lane& lane);
    bool has_work() const { return static_cast<uint32_t>(ticket_.load()) != 0; }

    std::vector<std::thread> workers_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    // The phase's number in the high half, counted over all jobs; pieces nobody has taken in the low half. A piece
    // is taken by lowering it, and what belongs to a phase is changed only when all its pieces are done.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> calls_{0};
    std::atomic<uint32_t> finished_{0};  // the job's number
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) const Phase* phases_ = nullptr;
    int64_t count_ = 0;
    uint32_t first_ = 0, next_ = 0;  // numbers of the job's first phase, and of the next job's
    uint32_t job_ = 0;
    bool wake_ = false;
    int32_t first_core_ = -1;
};

}  // namespace hardpoint
