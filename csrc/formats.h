// The storage types: sizes and how codes become numbers.

#pragma once

#include <cstdint>
#include <cstring>

namespace hardpoint {

constexpr int GROUP = 16;   // rows stored together
constexpr int BLOCK = 32;   // columns that share a scale of the activations
constexpr int SUPER = 8;    // blocks of a K-quant that share its factors

enum Type : int32_t {
    F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
    Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30,
};

// bits of a code; columns of a run with one scale; what is taken off a code; whether there are minima
template <int Bits, int Run, int Zero, bool Minima, bool K>
struct Format {
    static constexpr int bits = Bits, run = Run, zero = Zero, runs = BLOCK / Run;
    static constexpr bool minima = Minima, is_k = K, is_panel = false;
    static constexpr int code_bytes = 64 * Bits;
    static constexpr int scale_bytes = K ? runs * GROUP : 2 * GROUP;
    static constexpr int block_bytes = code_bytes + scale_bytes * (Minima ? 2 : 1);
    static constexpr int header_bytes = K ? 2 * GROUP * (Minima ? 2 : 1) : 0;
    static constexpr int64_t group_bytes(int64_t blocks) {
        return blocks * block_bytes + (K ? blocks / SUPER * header_bytes : 0);
    }
    // Where block `b` of a group begins, and the factors it shares.
    static constexpr int64_t block_at(int64_t b) {
        return K ? (b / SUPER + 1) * header_bytes + b * block_bytes : b * block_bytes;
    }
    static constexpr int64_t header_at(int64_t b) {
        return b / SUPER * (header_bytes + SUPER * block_bytes);
    }
};

using Q4_0Format = Format<4, 32, 8, false, false>;
using Q4_1Format = Format<4, 32, 0, true, false>;
using Q5_0Format = Format<5, 32, 16, false, false>;
using Q5_1Format = Format<5, 32, 0, true, false>;
using Q8_0Format = Format<8, 32, 128, false, false>;
using Q2_KFormat = Format<2, 16, 0, true, true>;
using Q3_KFormat = Format<3, 16, 4, false, true>;
using Q4_KFormat = Format<4, 32, 0, true, true>;
using Q5_KFormat = Format<5, 32, 0, true, true>;
using Q6_KFormat = Format<6, 16, 32, false, true>;

// A group unpacked for many tokens: a byte for each code, in quads as in hardpoint.h, then for each run 16 float32
// scales and 16 minima.
template <int Run, int Zero, bool Minima>
struct Expanded {
    static constexpr int bits = 8, run = Run, zero = Zero, runs = BLOCK / Run;
    static constexpr bool minima = Minima, is_k = false, is_panel = true;
    static constexpr int code_bytes = 2 * GROUP * GROUP, scale_bytes = 4 * GROUP * runs;
    static constexpr int block_bytes = code_bytes + scale_bytes * (Minima ? 2 : 1);
    static constexpr int64_t block_at(int64_t b) { return b * block_bytes; }
};

// Bytes that are enough for any panel.
constexpr int64_t panel_bytes(int64_t blocks) { return blocks * Expanded<16, 0, true>::block_bytes; }

// Call `visit(Format{})` with the format of a quantised type; false for other types.
template <class Visit>
bool with_format(int32_t type, Visit visit) {
    switch (type) {
        case Q4_0: visit(Q4_0Format{}); return true;
        case Q4_1: visit(Q4_1Format{}); return true;
        case Q5_0: visit(Q5_0Format{}); return true;
        case Q5_1: visit(Q5_1Format{}); return true;
        case Q8_0: visit(Q8_0Format{}); return true;
        case Q2_K: visit(Q2_KFormat{}); return true;
        case Q3_K: visit(Q3_KFormat{}); return true;
        case Q4_K: visit(Q4_KFormat{}); return true;
        case Q5_K: visit(Q5_KFormat{}); return true;
        case Q6_K: visit(Q6_KFormat{}); return true;
        default: return false;
    }
}

// Bytes of a number of a type that is not quantised; 0 for one that is.
inline int float_bytes(int32_t type) { return type == F32 ? 4 : type == F16 || type == BF16 ? 2 : 0; }

// Thirty-two activations of one token, rounded to 16 bits: scale * code each. How the codes are stored is the
// instruction set's own affair. What a zero point is multiplied by stands there negated.
struct Rounded {
    uint8_t codes[2 * BLOCK];
    float scale;
    int32_t minus_sum, minus_half_sums[2];
    float total, half_totals[2];  // of the activations as rounded
    int32_t unused;
};
static_assert(sizeof(Rounded) == 96);

// The largest code: a block's largest number has it. As 256 * coarse + fine, both parts are bytes.
constexpr int32_t LARGEST_CODE = 127 * 256;

// Where results of one group for some tokens go: token t's `rows` numbers (at most 16) at to + t * stride. They
// are added to what stands there with `add`, and `bias`, if there is one, is added to them.
struct Output {
    float* to;
    int64_t stride;
    int rows;
    const float* bias;
    bool add;
};

// What an instruction set implements.
struct Kernels {
    const char* name;
    // Round one token's columns.
    void (*quantize)(const float* x, int64_t blocks, Rounded* out);
    // One group for `tokens` tokens. `panel` has room for panel_bytes(blocks), aligned to 64.
    void (*quantized)(int32_t type, const uint8_t* group, int64_t blocks, const Rounded* x, int64_t tokens,
                      void* panel, const Output& out);
    void (*floating)(int32_t type, const uint8_t* group, int64_t columns, const float* x, int64_t x_stride,
                     int64_t tokens, const Output& out);
    // The same for rows that stand one after another.
    void (*plain)(int32_t type, const uint8_t* rows, int64_t columns, const float* x, int64_t x_stride,
                  int64_t tokens, const Output& out);
};

// The instruction set in use.
const Kernels& kernels();

extern const Kernels generic_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

}  // namespace hardpoint
