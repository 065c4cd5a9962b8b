#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include "formats.h"
#include "hardpoint.h"
#include "linear.h"
#include "pack.h"
#include "pool.h"

namespace hardpoint {

namespace {

constexpr int32_t ABI = 4;

#if defined(__aarch64__)
bool has_dot_products() {
#if defined(__linux__)
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return true;  // every Apple processor of this architecture has them
#endif
}
#endif

std::vector<const Kernels*> usable() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    // Whatever has AVX2 has F16C, which not every compiler knows to ask for.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if !defined(HARDPOINT_NO_AVX512)
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    if (avx512) found.push_back(&avx512_kernels);
#endif
    if (avx2) found.push_back(&avx2_kernels);
#elif defined(__aarch64__)
    if (has_dot_products()) found.push_back(&neon_kernels);
#endif
    found.push_back(&generic_kernels);
    return found;
}

struct State {
    std::vector<const Kernels*> isas = usable();
    const Kernels* kernels = isas.front();
    std::string isa_names;
    // Of the caller that holds Pool::busy.
    Lane rounded{0};
    State() {
        for (const Kernels* isa : isas) isa_names += (isa_names.empty() ? "" : ",") + std::string(isa->name);
    }
};

// Never destroyed, as the pool.
State& state() {
    static State* made = new State;
    return *made;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

const Kernels& kernels() { return *state().kernels; }

}  // namespace hardpoint

using namespace hardpoint;

int32_t hp_abi() { return ABI; }

const char* hp_isas() { return state().isa_names.c_str(); }

const char* hp_isa() { return state().kernels->name; }

int32_t hp_use_isa(const char* name) {
    State& with = state();
    const std::lock_guard lock(Pool::get().busy);
    for (const Kernels* isa : with.isas) {
        if (std::string_view(isa->name) == name) {
            with.kernels = isa;
            return 0;
        }
    }
    return -1;
}

void hp_set_threads(int32_t threads, const int32_t* cores) {
    const std::lock_guard lock(Pool::get().busy);
    Pool::get().resize(threads, cores);
}

int32_t hp_threads() { return Pool::get().threads(); }

int64_t hp_packed_bytes(int32_t type, int64_t rows, int64_t columns) {
    const int64_t group = packed_group_bytes(type, columns);
    return group < 0 || rows < 0 ? -1 : ceil_div(rows, GROUP) * group;
}

int32_t hp_pack(int32_t type, const uint8_t* source, int64_t row_bytes, const int64_t* order, int64_t rows,
                int64_t columns, uint8_t* packed) {
    const int64_t size = packed_group_bytes(type, columns);
    if (size < 0) return -1;
    const auto pack = [&](int64_t group, Lane&) {
        const uint8_t* from[GROUP];
        const int64_t first = group * GROUP;
        const int count = static_cast<int>(std::min<int64_t>(GROUP, rows - first));
        for (int i = 0; i < count; ++i) from[i] = source + (order ? order[first + i] : first + i) * row_bytes;
        pack_group(type, from, count, columns, packed + group * size);
    };
    const Phase phase = phase_of(pack, ceil_div(rows, GROUP));
    const std::lock_guard lock(Pool::get().busy);
    Pool::get().run(&phase, 1, true);
    return 0;
}

int32_t hp_lookup(const HpMatrix* matrix, int64_t columns, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= matrix->rows) return -1;
    for (int64_t i = 0; i < count; ++i) read_row(*matrix, columns, ids[i], out + i * columns);
    return 0;
}

void hp_plain_linear(int32_t type, const uint8_t* weights, int64_t rows, int64_t columns, const float* x,
                     int64_t x_stride, int64_t tokens, float* out, int64_t out_stride, const float* bias) {
    const HpMatrix matrix{type, 1, rows, weights};
    const HpLinear layer{columns, 1, &matrix};
    hp_linear(&layer, x, x_stride, tokens, out, out_stride, bias);
}

void hp_linear(const HpLinear* layer, const float* x, int64_t x_stride, int64_t tokens, float* out, int64_t out_stride,
               const float* bias) {
    if (tokens <= 0) return;
    const std::lock_guard lock(Pool::get().busy);
    LinearJob job{layer, x, x_stride, nullptr, tokens, out, out_stride, bias, false};
    const int64_t columns = layer->columns, each = std::max<int64_t>(1, (1 << 14) / columns);
    uint8_t* rounded = nullptr;
    const auto round = [&](int64_t piece, Lane&) {
        const int64_t first = piece * each;
        round_tokens(x + first * x_stride, x_stride, columns, first, std::min(each, tokens - first), rounded);
    };
    Phase phases[2] = {phase_of(round, 0), linear_phase(job)};
    if (linear_rounds(*layer)) {
        rounded = static_cast<uint8_t*>(state().rounded.scratch(rounded_bytes(columns, tokens)));
        job.rounded = rounded;
        phases[0].pieces = ceil_div(tokens, each);
    }
    Pool::get().run(phases, 2, linear_products(job) >= LINEAR_WAKE);
}
