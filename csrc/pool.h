// Threads that share work, and how a kernel hands it to them.
//
// A job is a list of phases. A phase is a number of pieces that may run at the same time; a phase begins when the
// one before is done, so what one phase writes the next may read. There is no barrier that waits for threads: a
// thread takes pieces whenever it is free, and whoever finishes the last ones of a phase opens the next one. A
// thread that was not given a processor in time holds nobody up unless it is in the middle of a piece, so pieces
// should be small (some 10 to 50 us) and there should be several a thread. A phase of one piece is run at once by
// the thread that opens it, without telling the others: small serial work belongs there.
//
// Thread i of n begins with its share of the pieces, those from i / n of them on, and goes on with what the others
// have left. What was written by another core is as far away as memory; so pieces that stand at the same place in
// their phases should work on the same data, which then mostly stays in one core's caches.
//
// A kernel that is to take part in a longer job offers phases (see linear.h) rather than calling `run` itself.
// Results must not depend on how pieces fall to threads.

#pragma once

#include <algorithm>
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

// Tokens cut into even panels of at most `most`. All the cuts of so many tokens have the threads' shares in common,
// so that a thread goes on with the tokens it has just computed; where that would leave it fewer than
// FEWEST_TOKENS, which is too few to read weights for, threads share a panel.
struct Panels {
    static constexpr int64_t FEWEST_TOKENS = 8;
    int64_t tokens, count;

    Panels(int64_t all, int64_t most, int64_t threads) : tokens(all) {
        const int64_t shares = std::max<int64_t>(1, std::min(threads, tokens / FEWEST_TOKENS));
        const int64_t share = (tokens + shares - 1) / shares;
        count = shares * ((share + most - 1) / most);
    }
    int64_t begin(int64_t panel) const { return tokens * panel / count; }
};

class Pool {
public:
    // The one pool. It is never destroyed: its threads may outlive static objects.
    static Pool& get();

    // Threads that compute, the caller of `run` among them. With `cores`, thread i is bound to cores[i], thread 0
    // being whoever calls `run`; new threads else may use the processors the caller may use.
    void resize(int threads, const int32_t* cores = nullptr);
    int threads() const { return static_cast<int>(shares_.size()); }

    // Run phases, the caller taking part; one caller at a time (see `busy`). `wake`: worth waking threads that
    // sleep, which takes some microseconds.
    void run(const Phase* phases, int64_t count, bool wake);

    // To be held around `resize` and `run`, and while what only one caller may use is used.
    std::mutex busy;

private:
    // A thread's share of the phase: pieces from `end - left` to `end`. On a line of its own, as others touch it
    // only when they have nothing left.
    struct alignas(64) Share {
        // The phase's number in the high half, counted over all jobs; pieces nobody has taken in the low half. A
        // piece is taken by lowering it, and what belongs to a phase is changed only when all its pieces are done.
        std::atomic<uint64_t> left{0};
        int64_t end = 0;
    };

    Pool();
    void open(int64_t phase, Lane& lane);
    bool help(Lane& lane);
    void work(Lane& lane);
    // The phase as a lane sees it.
    uint32_t phase_at(const Lane& lane) const { return static_cast<uint32_t>(shares_[lane.thread].left.load() >> 32); }

    std::vector<std::thread> workers_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    std::vector<Share> shares_;
    alignas(64) std::atomic<int64_t> done_{0};
    alignas(64) std::atomic<uint32_t> calls_{0};
    std::atomic<uint32_t> finished_{0};  // the job's number
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    alignas(64) const Phase* phases_ = nullptr;
    int64_t count_ = 0;
    uint32_t first_ = 0, next_ = 1;  // numbers of the job's first phase, and of the next job's
    uint32_t job_ = 0;
    bool wake_ = false;
    int32_t first_core_ = -1;
};

}  // namespace hardpoint
