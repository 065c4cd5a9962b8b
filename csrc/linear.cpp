#include "linear.h"

#include <algorithm>

#include "formats.h"
#include "pack.h"

namespace hardpoint {

namespace {

// Multiplications a piece of work should have at least.
constexpr int64_t PIECE_PRODUCTS = 1 << 17;
// Pieces a thread should get, so that one that is held up leaves the rest to the others.
constexpr int64_t PIECES_PER_THREAD = 8;
// Tokens computed with before the next rows are read: their activations stay in a core's cache.
constexpr int64_t PANEL_TOKENS = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Panels panels_of(const LinearJob& job) { return {job.tokens, PANEL_TOKENS, Pool::get().threads()}; }

// Groups of a matrix that are computed with a panel in one piece.
int64_t groups_each(const LinearJob& job, const HpMatrix& matrix, const Panels& panels) {
    const int64_t groups = ceil_div(matrix.rows, GROUP), tokens = ceil_div(job.tokens, panels.count);
    const int64_t products = std::max<int64_t>(1, GROUP * job.layer->columns * tokens);
    const int64_t enough = std::max<int64_t>(1, PIECE_PRODUCTS / products);
    const int64_t fair = std::max<int64_t>(1, groups * panels.count / (Pool::get().threads() * PIECES_PER_THREAD));
    return std::min(groups, std::max(enough, fair));
}

// Pieces a panel is computed in.
int64_t runs_of(const LinearJob& job, const Panels& panels) {
    int64_t runs = 0;
    for (int64_t i = 0; i < job.layer->count; ++i) {
        const HpMatrix& matrix = job.layer->matrices[i];
        runs += ceil_div(ceil_div(matrix.rows, GROUP), groups_each(job, matrix, panels));
    }
    return runs;
}

// Groups `first` to `last` of a matrix for tokens `token` to `end`.
void compute(const LinearJob& job, const HpMatrix& matrix, int64_t first, int64_t last, int64_t first_row,
             int64_t token, int64_t end, Lane& lane) {
    const int64_t columns = job.layer->columns, blocks = columns / BLOCK, count = end - token;
    const int64_t size = packed_group_bytes(matrix.type, columns);
    const auto* rounded = reinterpret_cast<const Rounded*>(job.rounded);
    if (rounded) rounded += token * blocks;
    void* panel = lane.scratch(panel_bytes(blocks));
    for (int64_t g = first; g < last; ++g) {
        const int rows = static_cast<int>(std::min<int64_t>(GROUP, matrix.rows - g * GROUP));
        const int64_t row = first_row + g * GROUP;
        const Output out{job.out + token * job.out_stride + row, job.out_stride, rows,
                         job.bias ? job.bias + row : nullptr, job.add};
        const uint8_t* group = matrix.packed + g * size;
        if (float_bytes(matrix.type)) {
            const auto product = matrix.plain ? kernels().plain : kernels().floating;
            product(matrix.type, group, columns, job.x + token * job.x_stride, job.x_stride, count, out);
        }
        else
            kernels().quantized(matrix.type, group, blocks, rounded, count, panel, out);
    }
}

// Panel after panel, so that a thread's share is a few tokens and all rows rather than all tokens.
void run_piece(const void* context, int64_t piece, Lane& lane) {
    const LinearJob& job = *static_cast<const LinearJob*>(context);
    const Panels panels = panels_of(job);
    const int64_t runs = runs_of(job, panels), panel = piece / runs;
    int64_t run = piece % runs, row = 0;
    for (int64_t i = 0; i < job.layer->count; ++i) {
        const HpMatrix& matrix = job.layer->matrices[i];
        const int64_t groups = ceil_div(matrix.rows, GROUP), each = groups_each(job, matrix, panels);
        const int64_t here = ceil_div(groups, each);
        if (run < here)
            return compute(job, matrix, run * each, std::min(groups, (run + 1) * each), row, panels.begin(panel),
                           panels.begin(panel + 1), lane);
        run -= here;
        row += matrix.rows;
    }
}

}  // namespace

bool linear_rounds(const HpLinear& layer) {
    return std::any_of(layer.matrices, layer.matrices + layer.count,
                       [](const HpMatrix& matrix) { return !float_bytes(matrix.type); });
}

int64_t rounded_bytes(int64_t columns, int64_t tokens) {
    return columns / BLOCK * tokens * static_cast<int64_t>(sizeof(Rounded));
}

void round_tokens(const float* x, int64_t x_stride, int64_t columns, int64_t first, int64_t count, uint8_t* rounded) {
    const int64_t blocks = columns / BLOCK;
    auto* out = reinterpret_cast<Rounded*>(rounded) + first * blocks;
    for (int64_t t = 0; t < count; ++t) kernels().quantize(x + t * x_stride, blocks, out + t * blocks);
}

Phase linear_phase(const LinearJob& job) {
    const Panels panels = panels_of(job);
    return {run_piece, &job, panels.count * runs_of(job, panels)};
}

int64_t linear_products(const LinearJob& job) {
    int64_t rows = 0;
    for (int64_t i = 0; i < job.layer->count; ++i) rows += job.layer->matrices[i].rows;
    return rows * job.layer->columns * job.tokens;
}

}  // namespace hardpoint
