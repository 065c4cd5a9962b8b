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

// How a matrix is cut: runs of groups by panels of tokens.
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

Cut cut_of(const LinearJob& job, const HpMatrix& matrix) {
    return cut(ceil_div(matrix.rows, GROUP), job.layer->columns, job.tokens, Pool::get().threads());
}

void compute(const LinearJob& job, const HpMatrix& matrix, const Cut& by, int64_t piece, int64_t first_row,
             Lane& lane) {
    const int64_t columns = job.layer->columns, blocks = columns / BLOCK;
    const int64_t token = piece / by.runs * PANEL_TOKENS, count = std::min(PANEL_TOKENS, job.tokens - token);
    const int64_t groups = ceil_div(matrix.rows, GROUP), first = piece % by.runs * by.groups_each;
    const int64_t size = packed_group_bytes(matrix.type, columns);
    const auto* rounded = reinterpret_cast<const Rounded*>(job.rounded) + token * blocks;
    void* panel = lane.scratch(panel_bytes(blocks));
    for (int64_t g = first; g < std::min(groups, first + by.groups_each); ++g) {
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

void run_piece(const void* context, int64_t piece, Lane& lane) {
    const LinearJob& job = *static_cast<const LinearJob*>(context);
    int64_t row = 0;
    for (int64_t i = 0; i < job.layer->count; ++i) {
        const HpMatrix& matrix = job.layer->matrices[i];
        const Cut by = cut_of(job, matrix);
        if (piece < by.pieces()) return compute(job, matrix, by, piece, row, lane);
        piece -= by.pieces();
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
    int64_t pieces = 0;
    for (int64_t i = 0; i < job.layer->count; ++i) pieces += cut_of(job, job.layer->matrices[i]).pieces();
    return {run_piece, &job, pieces};
}

int64_t linear_products(const LinearJob& job) {
    int64_t rows = 0;
    for (int64_t i = 0; i < job.layer->count; ++i) rows += job.layer->matrices[i].rows;
    return rows * job.layer->columns * job.tokens;
}

}  // namespace hardpoint
