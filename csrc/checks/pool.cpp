// The threads that share work: every piece once, phases in their order, whoever calls.

#include <atomic>
#include <memory>

#include "../pool.h"
#include "check.h"

namespace check {

namespace {

using hardpoint::Lane;
using hardpoint::Phase;
using hardpoint::Pool;

// A job whose phases see what the phases before have left, in as many pieces as `sizes` say.
void check_job(const std::vector<int64_t>& sizes, bool wake) {
    struct Step {
        const Step* before;
        std::unique_ptr<std::atomic<int>[]> done;
        int64_t pieces;
        std::atomic<int>* wrong;
    };
    std::atomic<int> wrong{0};
    std::vector<Step> steps;
    std::vector<Phase> phases;
    steps.reserve(sizes.size());
    for (const int64_t pieces : sizes)
        steps.push_back({steps.empty() ? nullptr : &steps.back(), std::make_unique<std::atomic<int>[]>(pieces), pieces, &wrong});
    for (const Step& step : steps) {
        phases.push_back({[](const void* context, int64_t piece, Lane& lane) {
            const Step& mine = *static_cast<const Step*>(context);
            auto* room = static_cast<uint8_t*>(lane.scratch(100 + piece));
            if (reinterpret_cast<uintptr_t>(room) % 64) ++*mine.wrong;
            std::memset(room, static_cast<int>(piece), 100 + piece);
            for (int64_t i = 0; mine.before && i < mine.before->pieces; ++i) *mine.wrong += mine.before->done[i] != 1;
            ++mine.done[piece];
            *mine.wrong += room[99 + piece] != static_cast<uint8_t>(piece);
        }, &step, step.pieces});
    }
    {
        const std::lock_guard lock(Pool::get().busy);
        Pool::get().run(phases.data(), static_cast<int64_t>(phases.size()), wake);
    }
    for (const Step& step : steps)
        for (int64_t i = 0; i < step.pieces; ++i) wrong += step.done[i] != 1;
    if (wrong) report("threads", "a piece is left out, done twice or done too early");
}

}  // namespace

void check_pool() {
    for (const int32_t threads : {1, 2, 4, 3, 1}) {
        hp_set_threads(threads, nullptr);
        if (hp_threads() != threads) report("threads", "are not as many as asked for");
        for (const bool wake : {false, true}) {
            check_job({}, wake);
            check_job({0, 1, 0}, wake);
            check_job({1, 40, 0, 1, 1, 7, 100}, wake);
        }
    }
    // Several callers, one after another as they come.
    hp_set_threads(2, nullptr);
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i)
        callers.emplace_back([] { for (int job = 0; job < 20; ++job) check_job({3, 1, 30}, job % 2 == 0); });
    for (auto& caller : callers) caller.join();
    const int32_t cores[] = {0, 0};
    hp_set_threads(2, cores);
    std::thread([] { check_job({20, 20}, true); }).join();
    hp_set_threads(1, nullptr);
}

}  // namespace check
