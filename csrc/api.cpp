#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "formats.h"
#include "hardpoint.h"
#include "pack.h"
#include "pool.h"

namespace hardpoint {

namespace {

constexpr int32_t ABI = 1;

// Multiplications a piece of work should have at least, and a job for which sleeping threads are woken.
constexpr int64_t PIECE_PRODUCTS = 1 << 17;
constexpr int64_t WAKE_PRODUCTS = 1 << 20;
// Pieces a thread should get, so that one that is held up leaves the rest to the others.
constexpr int64_t PIECES_PER_THREAD = 8;
// Tokens computed with before the next rows are read: their activations stay in a core's cache.
constexpr int64_t PANEL_TOKENS = 64;

std::vector<const Kernels*> usable() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vnni");
    if (avx512) found.push_back(&avx512_kernels);
    if (avx2) found.push_back(&avx2_kernels);
#endif
    found.push_back(&generic_kernels);
    return found;
}

struct State {
    // One caller at a time: the pool and the workspace are shared.
    std::mutex busy;
    std::vector<const Kernels*> isas = usable();
    const Kernels* kernels = isas.front();
    std::string isa_names;
    std::vector<Activations> workspace;
    State() {
        for (const Kernels* isa : isas) isa_names += (isa_names.empty() ? "" : ",") + std::string(isa->name);
    }
};

// Never destroyed, as the pool.
State& state() {
    static State* made = new State;
    return *made;
}

template <class Body>
void in_parallel(int64_t pieces, bool wake, Body& body) {
    Pool::get().run([](void* context, int64_t piece) { (*static_cast<Body*>(context))(piece); }, &body, pieces, wake);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a job is cut: runs of groups by panels of tokens.
struct Cut {
    int64_t groups_each, runs, panels;
    int64_t pieces() const { return runs * panels; }
};

Cut cut(int64_t groups, int64_t columns, int64_t tokens, int64_t threads) {
    const int64_t panels = ceil_div(tokens, PANEL_TOKENS);
    const int64_t products = std::max<int64_t>(1, GROUP * columns * std::min(tokens, PANEL_TOKENS));
    const int64_t enough = std::max<int64_t>(1, PIECE_PRODUCTS / products);
    const int64_t fair = std::max<int64_t>(1, groups * panels / (threads * PIECES_PER_THREAD));
    const int64_t each = std::min(groups, std::max(enough, fair));
    return {each, ceil_div(groups, each), panels};
}

struct Job {
    const HpLinear& layer;
    const Kernels& kernels;
    const float* x;
    int64_t x_stride, tokens;
    const Activations* rounded;
    float* out;
    int64_t out_stride;
    const float* bias;
    std::vector<Cut> cuts;

    void operator()(int64_t piece) const {
        int64_t first_row = 0;
        for (int64_t i = 0; i < layer.count; ++i) {
            if (piece < cuts[i].pieces()) return compute(layer.matrices[i], cuts[i], piece, first_row);
            piece -= cuts[i].pieces();
            first_row += layer.matrices[i].rows;
        }
    }

    void compute(const HpMatrix& matrix, const Cut& by, int64_t piece, int64_t first_row) const {
        const int64_t token = piece / by.runs * PANEL_TOKENS, count = std::min(PANEL_TOKENS, tokens - token);
        const int64_t groups = ceil_div(matrix.rows, GROUP), first = piece % by.runs * by.groups_each;
        const int64_t size = packed_group_bytes(matrix.type, layer.columns), blocks = layer.columns / BLOCK;
        for (int64_t g = first; g < std::min(groups, first + by.groups_each); ++g) {
            const int rows = static_cast<int>(std::min<int64_t>(GROUP, matrix.rows - g * GROUP));
            const int64_t row = first_row + g * GROUP;
            float* to = out + token * out_stride + row;
            const float* added = bias ? bias + row : nullptr;
            const uint8_t* group = matrix.packed + g * size;
            if (float_bytes(matrix.type))
                kernels.floating(matrix.type, group, layer.columns, x + token * x_stride, x_stride, count, to,
                                 out_stride, rows, added);
            else
                kernels.quantized(matrix.type, group, blocks, rounded + token * blocks, count, to, out_stride, rows,
                                  added);
        }
    }
};

const Activations* round_all(State& with, const float* x, int64_t x_stride, int64_t tokens, int64_t columns) {
    const int64_t blocks = columns / BLOCK;
    if (static_cast<int64_t>(with.workspace.size()) < tokens * blocks) with.workspace.resize(tokens * blocks);
    Activations* rounded = with.workspace.data();
    const int64_t each = std::max<int64_t>(1, (1 << 14) / columns);
    auto round = [&](int64_t piece) {
        for (int64_t t = piece * each; t < std::min(tokens, (piece + 1) * each); ++t)
            with.kernels->quantize(x + t * x_stride, blocks, rounded + t * blocks);
    };
    in_parallel(ceil_div(tokens, each), false, round);
    return rounded;
}

}  // namespace

}  // namespace hardpoint

using namespace hardpoint;

int32_t hp_abi() { return ABI; }

const char* hp_isas() { return state().isa_names.c_str(); }

const char* hp_isa() { return state().kernels->name; }

int32_t hp_use_isa(const char* name) {
    State& with = state();
    const std::lock_guard lock(with.busy);
    for (const Kernels* isa : with.isas) {
        if (std::string_view(isa->name) == name) {
            with.kernels = isa;
            return 0;
        }
    }
    return -1;
}

void hp_set_threads(int32_t threads) {
    const std::lock_guard lock(state().busy);
    Pool::get().resize(threads);
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
    const std::lock_guard lock(state().busy);
    auto pack = [&](int64_t group) {
        const uint8_t* from[GROUP];
        const int64_t first = group * GROUP;
        const int count = static_cast<int>(std::min<int64_t>(GROUP, rows - first));
        for (int i = 0; i < count; ++i) from[i] = source + (order ? order[first + i] : first + i) * row_bytes;
        pack_group(type, from, count, columns, packed + group * size);
    };
    in_parallel(ceil_div(rows, GROUP), true, pack);
    return 0;
}

int32_t hp_lookup(const HpMatrix* matrix, int64_t columns, const int64_t* ids, int64_t count, float* out) {
    for (int64_t i = 0; i < count; ++i)
        if (ids[i] < 0 || ids[i] >= matrix->rows) return -1;
    for (int64_t i = 0; i < count; ++i) unpack_row(matrix->type, matrix->packed, columns, ids[i], out + i * columns);
    return 0;
}

void hp_linear(const HpLinear* layer, const float* x, int64_t x_stride, int64_t tokens, float* out, int64_t out_stride,
               const float* bias) {
    if (tokens <= 0) return;
    State& with = state();
    const std::lock_guard lock(with.busy);
    Job job{*layer, *with.kernels, x, x_stride, tokens, nullptr, out, out_stride, bias, {}};
    int64_t pieces = 0, rows = 0;
    bool rounds = false;
    for (int64_t i = 0; i < layer->count; ++i) {
        const HpMatrix& matrix = layer->matrices[i];
        rounds = rounds || !float_bytes(matrix.type);
        job.cuts.push_back(cut(ceil_div(matrix.rows, GROUP), layer->columns, tokens, Pool::get().threads()));
        pieces += job.cuts.back().pieces();
        rows += matrix.rows;
    }
    if (rounds) job.rounded = round_all(with, x, x_stride, tokens, layer->columns);
    in_parallel(pieces, rows * layer->columns * tokens >= WAKE_PRODUCTS, job);
}
