// The C interface of the CPU kernels. Plain buffers by pointer; nothing here knows of Python or torch.
//
// Weights are kept quantised, repacked once. Sixteen rows make a group; a group is stored block by block,
// a block being 32 columns of its 16 rows:
//
//   codes     unsigned, 64 * bits bytes. "Quad" q (0-7) of a block is columns 4q to 4q+3; as a vector of
//             64 bytes it holds, for row r and column c of the quad, byte 4r + c.
//             4 bits  four vectors; vector i has quad i in its low, quad i + 4 in its high nibbles
//             2 bits  two vectors; vector i has quads 4i to 4i+3, lowest bits first
//             1 bit   one vector; bit q of a byte belongs to quad q
//             8 bits  eight vectors
//             3 bits are stored as 2 + 1, 5 as 4 + 1 and 6 as 4 + 2, lower bits first.
//   scales    Q4_0 to Q8_0: 16 float16, then for Q4_1 and Q5_1 16 float16 minima.
//             K-quants: int8 for each run of 16 or 32 columns, [runs][16]; with minima as many again.
//             Before every eighth block of a K-quant stand 16 float16 factors of the scales, with minima
//             16 more of the minima.
//
// F32, F16 and BF16 are stored as [group][column][16 rows]. Rows are filled up with zeros to whole groups. They may
// also stay as they are, row after row, so that others can go on reading and writing them (`plain`).
//
// The number of a quantised weight is scale * (code - zero point), or scale * code + minimum. Activations are
// rounded to 16 bits in blocks of 32 columns, and multiplied as two bytes or as one 16-bit number, whatever is
// faster. Products are summed exactly in integers within a run of columns and in float32, run after run, over the
// columns. A row's result does not depend on how many tokens there are, nor on how the work is shared among
// threads. A token with a number that is not finite has NaN results where weights are quantised; other tokens are
// not touched.
//
// For many tokens a group whose codes lie in more than one place is unpacked first, into a byte for each code and
// float32 scales, which stay in a core's cache while all the tokens of a piece of work are multiplied with them.

#pragma once

#include <cstdint>

#if defined(_WIN32)
#define HP_API extern "C" __declspec(dllexport)
#else
#define HP_API extern "C" __attribute__((visibility("default")))
#endif

// One stored matrix. `type` is the number GGUF files use. With `plain`, which is for F32, F16 and BF16 only, it is
// not packed: rows stand one after another.
struct HpMatrix {
    int32_t type;
    int32_t plain;
    int64_t rows;
    const uint8_t* packed;
};

// Matrices with the same input, whose outputs stand side by side.
struct HpLinear {
    int64_t columns;
    int64_t count;
    const HpMatrix* matrices;
};

// The version of this interface; a loader refuses another.
HP_API int32_t hp_abi();

// The instruction sets this processor can use, best first, split by commas.
HP_API const char* hp_isas();

// The instruction set in use.
HP_API const char* hp_isa();

// Choose one by name; -1 when this processor lacks it.
HP_API int32_t hp_use_isa(const char* name);

// Threads that compute, the caller among them. With `cores` (null for none) thread i is bound to cores[i],
// thread 0 being whoever calls next.
HP_API void hp_set_threads(int32_t threads, const int32_t* cores);
HP_API int32_t hp_threads();

// Bytes a matrix takes when packed; -1 for a type that is not known or columns that are not whole blocks.
HP_API int64_t hp_packed_bytes(int32_t type, int64_t rows, int64_t columns);

// Pack rows of GGUF blocks. Row i is at source + (order ? order[i] : i) * row_bytes. -1 as above.
HP_API int32_t hp_pack(int32_t type, const uint8_t* source, int64_t row_bytes, const int64_t* order, int64_t rows,
                       int64_t columns, uint8_t* packed);

// out[i, :] = row ids[i] in float32; -1 when an id is not a row.
HP_API int32_t hp_lookup(const HpMatrix* matrix, int64_t columns, const int64_t* ids, int64_t count, float* out);

// The same as hp_linear for one plain matrix.
HP_API void hp_plain_linear(int32_t type, const uint8_t* weights, int64_t rows, int64_t columns, const float* x,
                            int64_t x_stride, int64_t tokens, float* out, int64_t out_stride, const float* bias);

// Whether there are products of bfloat16 numbers with the instruction set in use on this processor.
HP_API int32_t hp_bfloat_products();

// The same as hp_plain_linear where all numbers are bfloat16; -1 where there are no such products. Each product is
// exact, pairs of them are summed in float32 by the processor, and results are rounded once. Numbers too small to be
// normal count as zero.
HP_API int32_t hp_bfloat_linear(const uint16_t* weights, int64_t rows, int64_t columns, const uint16_t* x,
                                int64_t x_stride, int64_t tokens, uint16_t* out, int64_t out_stride,
                                const uint16_t* bias);

// out[t, :] = weights * x[t, :] (+ bias). Strides count floats. bias may be null.
HP_API void hp_linear(const HpLinear* layer, const float* x, int64_t x_stride, int64_t tokens, float* out,
                      int64_t out_stride, const float* bias);
