#include "pool.h"

#include <chrono>
#include <memory>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

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

// Bind the calling thread to one core; where that is not possible it stays free.
void bind([[maybe_unused]] int32_t core) {
#if defined(__linux__)
    if (core < 0 || core >= CPU_SETSIZE) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#endif
}

}  // namespace

void* Lane::scratch(int64_t bytes) {
    if (bytes > size_) {
        std::free(memory_);
        size_ = (bytes + 4095) / 4096 * 4096;
        memory_ = std::aligned_alloc(64, size_);
        if (!memory_) std::abort();
    }
    return memory_;
}

Pool& Pool::get() {
    static Pool* pool = new Pool;
    return *pool;
}

Pool::Pool() : shares_(1) { lanes_.push_back(std::make_unique<Lane>(0)); }

void Pool::resize(int threads, const int32_t* cores) {
    if (threads < 1) threads = 1;
    if (threads == this->threads() && !cores) return;
    stopping_ = true;
    calls_.fetch_add(1);
    calls_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    lanes_.resize(1);
    shares_ = std::vector<Share>(threads);
    stopping_ = false;
    for (int i = 1; i < threads; ++i) {
        lanes_.push_back(std::make_unique<Lane>(i));
        workers_.emplace_back([this, lane = lanes_.back().get(), core = cores ? cores[i] : -1] {
            bind(core);
            work(*lane);
        });
    }
    first_core_ = cores ? cores[0] : -1;
}

// Open a phase of the job, or end the job. What has one piece is done here and now.
void Pool::open(int64_t phase, Lane& lane) {
    for (; phase < count_ && phases_[phase].pieces <= 1; ++phase)
        if (phases_[phase].pieces == 1) phases_[phase].run(phases_[phase].context, 0, lane);
    if (phase == count_) return finished_.store(job_, std::memory_order_release);
    done_.store(0, std::memory_order_relaxed);
    const uint64_t number = static_cast<uint32_t>(first_ + phase);
    const int64_t pieces = phases_[phase].pieces, shares = threads();
    // Once the last share is open, this job may end and another begin.
    const bool wake = wake_;
    for (int64_t i = 0; i < shares; ++i) {
        const int64_t from = pieces * i / shares, to = pieces * (i + 1) / shares;
        shares_[i].end = to;
        shares_[i].left.store(number << 32 | static_cast<uint32_t>(to - from), std::memory_order_release);
    }
    // Whoever goes to sleep now either sees the phase or is seen.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (wake && sleepers_.load() > 0) {
        calls_.fetch_add(1);
        calls_.notify_all();
    }
}

// Run pieces until none is left; whether there were any. All are of one phase: it cannot end before those of this
// thread are counted.
bool Pool::help(Lane& lane) {
    const int shares = threads();
    int64_t ran = 0, index = 0;
    for (int i = 0; i < shares; ++i) {
        Share& share = shares_[(lane.thread + i) % shares];
        uint64_t seen = share.left.load(std::memory_order_acquire);
        while (static_cast<uint32_t>(seen) != 0) {
            if (!share.left.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire))
                continue;
            index = static_cast<uint32_t>(static_cast<uint32_t>(seen >> 32) - first_);
            phases_[index].run(phases_[index].context, share.end - static_cast<uint32_t>(seen), lane);
            ++ran;
            seen = share.left.load(std::memory_order_acquire);
        }
    }
    if (!ran) return false;
    const int64_t pieces = phases_[index].pieces;
    if (done_.fetch_add(ran, std::memory_order_acq_rel) + ran == pieces) open(index + 1, lane);
    return true;
}

void Pool::work(Lane& lane) {
    using Clock = std::chrono::steady_clock;
    auto idle_since = Clock::now();
    while (!stopping_.load(std::memory_order_relaxed)) {
        uint32_t phase = phase_at(lane);
        if (help(lane)) {
            do phase = phase_at(lane);
            while (help(lane));
            idle_since = Clock::now();
        }
        const auto unchanged = [&] { return phase_at(lane) == phase && !stopping_.load(std::memory_order_relaxed); };
        for (int i = 0; i < PAUSES_PER_LOOK && unchanged(); ++i) pause();
        if (!unchanged() || Clock::now() - idle_since < SPIN) continue;
        // Announce the sleep before looking a last time, so that a caller either sees it or is seen.
        sleepers_.fetch_add(1);
        const uint32_t calls = calls_.load();
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (unchanged()) calls_.wait(calls);
        sleepers_.fetch_sub(1);
        idle_since = Clock::now();
    }
}

void Pool::run(const Phase* phases, int64_t count, bool wake) {
    static thread_local int32_t bound = -1;
    if (first_core_ != bound) bind(bound = first_core_);
    Lane& lane = *lanes_.front();
    if (workers_.empty()) {
        for (int64_t i = 0; i < count; ++i)
            for (int64_t piece = 0; piece < phases[i].pieces; ++piece) phases[i].run(phases[i].context, piece, lane);
        return;
    }
    phases_ = phases;
    count_ = count;
    first_ = next_;
    next_ += static_cast<uint32_t>(count);
    const uint32_t job = ++job_;
    wake_ = wake;
    open(0, lane);
    int pauses = 0;
    while (finished_.load(std::memory_order_acquire) != job) {
        const uint32_t phase = phase_at(lane);
        if (help(lane)) {
            pauses = 0;
            continue;
        }
        while (phase_at(lane) == phase && finished_.load(std::memory_order_acquire) != job) {
            if (++pauses < PAUSES_BEFORE_YIELD) pause();
            else std::this_thread::yield();
        }
    }
}

}  // namespace hardpoint
