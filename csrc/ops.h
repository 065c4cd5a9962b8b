// What the float kernels compute with (the structures of hardpoint.h), and what an instruction set implements.

#pragma once

#include <cstdint>
#include <cstring>

#include "floats.h"
#include "halves.h"

namespace hardpoint {

// Keys whose weighted values are summed together. The sums of these runs are joined in their order, whoever
// computed them, so that a row's result depends on neither its neighbours nor the threads.
constexpr int SPAN = 128;

// How keys and values are stored.
enum Store : int32_t { STORE_F32 = 0, STORE_F16 = 1, STORE_BF16 = 2, STORE_INT8 = 3 };

inline int store_bytes(int32_t store) { return store == STORE_F32 ? 4 : store == STORE_INT8 ? 1 : 2; }
inline int64_t section_bytes(const HpAttention& of) {
    const int64_t factors = of.store == STORE_INT8 ? 4 * static_cast<int64_t>(of.block_size) : 0;
    return static_cast<int64_t>(of.block_size) * of.head_size * store_bytes(of.store) + factors;
}

// A softmax in the making: the largest score, the sum of the exponentials, and the weighted sum of the values.
struct Partial {
    float largest, sum;
};

// Rows of one request that share a key/value head: query position by position, and its heads for each.
struct Rows {
    const HpAttention* layer;
    const int32_t* blocks;     // of the request
    const float* q;            // query of the first position and the first of the sharing heads
    int64_t q_stride;          // floats from position to position
    int64_t position;          // of the first query
    int64_t length;            // keys there are
    int32_t kv_head, group;
};

enum Drawn : int64_t { DRAW_NAN = -1, DRAW_NOTHING = -2 };

enum Activation : int32_t { SILU_MUL = 0, GELU_MUL = 1, GELU_TANH_MUL = 2, MUL_SILU = 3 };

// What an instruction set implements. Functions work on one row or tile; who calls shares them among threads.
struct FloatKernels {
    const char* name;
    int most_rows;
    // out = norm(x); with a residual, of x + residual, which is stored in its place.
    void (*rms_norm)(const HpNorm& norm, const float* x, float* residual, float* out);
    void (*layer_norm)(const HpNorm& norm, const float* bias, const float* x, float* out);
    void (*rotate)(const HpRotary& rotary, int64_t position, float* heads, int64_t count);
    void (*activate)(int32_t kind, const float* x, int64_t size, float* out);
    void (*add)(const float* a, const float* b, float factor, int64_t size, float* out);
    // Store one token's keys and values, [kv_heads][head_size] each.
    void (*write)(const HpAttention& layer, int64_t slot, const float* keys, const float* values);
    // Rows `row` to `row + count`, count <= most_rows, over the spans `from` to `to`. Each span's outcome is joined to
    // `partials` [count] and `sums` [count][head_size], or, with `apart`, kept by itself: [spans][most_rows].
    void (*attend)(const Rows& rows, int64_t row, int count, int64_t from, int64_t to, bool apart, Partial* partials,
                   float* sums);
    // Join the outcomes of one more span.
    void (*join)(Partial& to, float* sums, const Partial& span, const float* span_sums, int64_t size);
    // The token of a row of logits, or what hp_draw says of a row without one. `weights` [vocab], `some` [vocab].
    int64_t (*draw)(const HpDraw& how, const float* logits, int64_t vocab, float* weights, uint64_t* some);
    float (*log_sum)(const float* logits, int64_t vocab);
    void (*finish)(const Partial& partial, const float* sums, const float* sink, int64_t size, float* out);
};

extern const FloatKernels generic_floats;
#if defined(__x86_64__)
extern const FloatKernels avx2_floats;
extern const FloatKernels avx512_floats;
#elif defined(__aarch64__)
extern const FloatKernels neon_floats;
#endif

}  // namespace hardpoint
