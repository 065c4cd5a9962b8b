#include "pool.h"

#include <chrono>

namespace hardpoint {

namespace {

constexpr auto SPIN = std::chrono::microseconds(100);
constexpr int PAUSES_PER_LOOK = 32;
constexpr int PAUSES_BEFORE_YIELD = 4000;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Pool& Pool::get() {
    static Pool* pool = new Pool;
    return *pool;
}

void Pool::resize(int threads) {
    if (threads < 1) threads = 1;
    if (threads == this->threads()) return;
    stopping_ = true;
    calls_.fetch_add(1);
    calls_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

bool Pool::take_one() {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    do {
        if (static_cast<uint32_t>(seen) == 0) return false;
    } while (!ticket_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    piece_(context_, pieces_ - static_cast<uint32_t>(seen));
    done_.fetch_add(1, std::memory_order_release);
    return true;
}

void Pool::work() {
    using Clock = std::chrono::steady_clock;
    auto idle_since = Clock::now();
    while (!stopping_.load(std::memory_order_relaxed)) {
        if (take_one()) {
            while (take_one()) {}
            idle_since = Clock::now();
        }
        for (int i = 0; i < PAUSES_PER_LOOK && !has_work(); ++i) pause();
        if (has_work() || Clock::now() - idle_since < SPIN) continue;
        // Announce the sleep before looking a last time, so that a caller either sees it or is seen.
        sleepers_.fetch_add(1);
        const uint32_t calls = calls_.load();
        if (!has_work() && !stopping_) calls_.wait(calls);
        sleepers_.fetch_sub(1);
        idle_since = Clock::now();
    }
}

void Pool::run(Piece piece, void* context, int64_t pieces, bool wake) {
    if (workers_.empty() || pieces <= 1) {
        for (int64_t i = 0; i < pieces; ++i) piece(context, i);
        return;
    }
    piece_ = piece;
    context_ = context;
    pieces_ = pieces;
    done_.store(0, std::memory_order_relaxed);
    ticket_.store(static_cast<uint64_t>(++job_) << 32 | static_cast<uint32_t>(pieces));
    if (wake && sleepers_.load() > 0) {
        calls_.fetch_add(1);
        calls_.notify_all();
    }
    while (take_one()) {}
    for (int pauses = 0; done_.load(std::memory_order_acquire) < pieces; ++pauses) {
        if (pauses < PAUSES_BEFORE_YIELD) pause();
        else std::this_thread::yield();
    }
}

}  // namespace hardpoint
