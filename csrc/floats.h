// The C interface of the float kernels: everything of a model's step that is not a linear layer, and whole steps.
//
// Numbers are float32, strides count floats. Results of a token depend on neither the other tokens nor the threads.

#pragma once

#include "hardpoint.h"

// One layer's attention and its cache. A block of the cache holds, for each key/value head, a section of keys and
// a section of values:
//   keys     [head_size][block_size]
//   values   [block_size][head_size]
// and with int8 each section ends with a float32 factor for each token.
struct HpAttention {
    int32_t heads, kv_heads, head_size, block_size;
    int32_t store;
    int32_t window;       // tokens a query sees, itself included; 0: all
    int32_t causal;       // 0: all keys of the request are seen
    int32_t shares;       // keys and values are another layer's: nothing is written
    float scale;
    float soft_cap;       // 0: none
    const float* slopes;  // [heads] of ALiBi, or null
    const float* sinks;   // [heads] a score that takes part in the softmax and has no value, or null
    uint8_t* cache;
    int64_t block_stride; // bytes
};

// The requests of a step.
struct HpBatch {
    int64_t requests;
    const int32_t* starts;    // [requests + 1] where their tokens begin
    const int32_t* lengths;   // [requests] tokens of each, this step's included
    const int32_t* blocks;    // [requests][blocks_stride] their cache blocks
    int64_t blocks_stride;
    const int64_t* slots;     // [tokens] where keys and values are written; -1: nowhere
};

// x / rms(x) * (weight + added).
struct HpNorm {
    const float* weight;  // or null: 1
    float added;          // to the weight
    float eps;
    int64_t size;
};

// Pairs of elements turned by the angles of a position: (i, i + half) with neox, else (2i, 2i + 1).
struct HpRotary {
    const float* table;  // [positions][rotary_dim] cosines, then sines
    int32_t rotary_dim, head_size, neox;
};

// out = norm(x); with a residual, of x + residual, which takes the residual's place.
HP_API void hp_rms_norm(const HpNorm* norm, const float* x, int64_t x_stride, float* residual, int64_t residual_stride,
                        float* out, int64_t out_stride, int64_t tokens);

// (x - mean) / deviation * weight + bias; bias may be null.
HP_API void hp_layer_norm(const HpNorm* norm, const float* bias, const float* x, int64_t x_stride, float* out,
                          int64_t out_stride, int64_t tokens);

// Turn the heads of queries and keys in place; k may be null. The caller has checked the positions.
HP_API void hp_rotate(const HpRotary* rotary, const int64_t* positions, float* q, int64_t q_stride, int64_t q_heads,
                      float* k, int64_t k_stride, int64_t k_heads, int64_t tokens);

// out[t, :size] = activation(x[t, :size]) * x[t, size:]. kind 0: SiLU, 1: GELU, 2: GELU by tanh, 3: the first half
// times SiLU of the second.
HP_API void hp_activate(int32_t kind, const float* x, int64_t x_stride, int64_t size, float* out, int64_t out_stride,
                        int64_t tokens);

// Write a step's keys and values, [tokens][kv_heads][head_size], to the cache, then attend: all requests at once.
// k and v may be null: nothing is written.
HP_API void hp_attention(const HpAttention* layer, const HpBatch* batch, const float* q, int64_t q_stride,
                         const float* k, int64_t k_stride, const float* v, int64_t v_stride, float* out,
                         int64_t out_stride);

// How a row of logits becomes a token. A seeded row races with the numbers of its stream, another is drawn by `number`,
// which is in [0, 1).
struct HpDraw {
    double number;
    uint64_t stream;
    int64_t top_k;  // the vocabulary: off
    float temperature, top_p, min_p;
    int32_t greedy, seeded, reserved;
};

// tokens[i] = the token of logits[i, :vocab]; -1 for a row with NaN, -2 for one without a logit above -infinity.
HP_API void hp_draw(const HpDraw* rows, const float* logits, int64_t stride, int64_t vocab, int64_t count,
                    int64_t* tokens);

// sums[i] = log(sum(exp(logits[i, :vocab]))).
HP_API void hp_log_sums(const float* logits, int64_t stride, int64_t vocab, int64_t count, float* sums);

// One operation of a program. Which fields it reads:
//   EMBED      what: HpLinear of the embeddings; out. factor: multiplied with
//   LINEAR     what: HpLinear; in, out, bias
//   NORM       what: HpNorm; in, out; second: residual, or null; number: heads that are normed by themselves
//   LAYER_NORM what: HpNorm; in, out, bias
//   ROTATE     what: HpRotary; in: queries, number heads; second: keys, size heads, or null
//   ATTEND     what: HpAttention; in: queries; second, third: keys and values; number: whose batch; out
//   ACTIVATE   number: which; in [2 * size]; out [size]
//   ADD        out = in + factor * second, [size]
//   SCALE      out = factor * in, [size]
// An `out` of null is the step's.
enum HpKind : int32_t { EMBED, LINEAR, NORM, LAYER_NORM, ROTATE, ATTEND, ACTIVATE, ADD, SCALE };

struct HpOp {
    int32_t kind, number;
    const void* what;
    float* in;
    int64_t in_stride;
    float* second;
    int64_t second_stride;
    float* third;
    int64_t third_stride;
    float* out;
    int64_t out_stride;
    const float* bias;
    int64_t size;
    float factor;
};

// Operations over buffers that hold `panel` tokens.
struct HpProgram {
    const HpOp* ops;
    int64_t count;
    int64_t panel;
};

struct HpStep {
    int64_t tokens;
    const int32_t* ids;        // [tokens]
    const int64_t* positions;  // [tokens]
    const HpBatch* batches;    // one for each KV cache group
    float* out;
    int64_t out_stride;
};

// Run a program for a step, panel by panel; -1, before anything is computed, for an id that is not a token.
HP_API int32_t hp_run(const HpProgram* program, const HpStep* step);
