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

Pool::Pool() { lanes_.push_back(std::make_unique<Lane>(0)); }

void Pool::resize(int threads, const int32_t* cores) {
    if (threads < 1) threads = 1;
    if (threads == this->threads() && !cores) return;
    stopping_ = true;
    calls_.fetch_add(1);
    calls_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    lanes_.resize(1);
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
    ticket_.store(number << 32 | static_cast<uint32_t>(phases_[phase].pieces));
    if (wake_ && sleepers_.load() > 0) {
        calls_.fetch_add(1);
        calls_.notify_all();
    }
}

bool Pool::take_one(Lane& lane) {
    uint64_t seen = ticket_.load(std::memory_order_acquire);
    do {
        if (static_cast<uint32_t>(seen) == 0) return false;
    } while (!ticket_.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const int64_t index = static_cast<uint32_t>(static_cast<uint32_t>(seen >> 32) - first_);
    const Phase& phase = phases_[index];
    const int64_t pieces = phase.pieces;
    phase.run(phase.context, pieces - static_cast<uint32_t>(seen), lane);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == pieces) open(index + 1, lane);
    return true;
}

void Pool::work(Lane& lane) {
    using Clock = std::chrono::steady_clock;
    auto idle_since = Clock::now();
    while (!stopping_.load(std::memory_order_relaxed)) {
        if (take_one(lane)) {
            while (take_one(lane)) {}
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
    for (int pauses = 0; finished_.load(std::memory_order_acquire) != job;) {
        if (take_one(lane)) pauses = 0;
        else if (++pauses < PAUSES_BEFORE_YIELD) pause();
        else std::this_thread::yield();
    }
}

}  // namespace hardpoint
