#include "pack.h"

#include "formats.h"
#include "halves.h"

namespace hardpoint {

namespace {

// One block of 32 columns of one row, taken apart.
struct Unpacked {
    uint8_t codes[BLOCK];
    uint16_t factor, minimum_factor;   // float16
    int8_t scales[2], minima[2];       // K-quants: per run
};

inline uint16_t half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return half;
}

// Nibbles of 16 bytes: all low halves, then all high halves.
inline void take_nibbles(const uint8_t* p, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) {
        codes[i] = p[i] & 15;
        codes[i + 16] = p[i] >> 4;
    }
}

inline void add_fifth_bits(const uint8_t* p, uint8_t* codes) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    for (int i = 0; i < BLOCK; ++i) codes[i] |= (bits >> i & 1) << 4;
}

void take_legacy(int32_t type, const uint8_t* stored, Unpacked& out) {
    out.factor = half_at(stored);
    out.minimum_factor = half_at(stored + 2);
    switch (type) {
        case Q4_0: take_nibbles(stored + 2, out.codes); break;
        case Q4_1: take_nibbles(stored + 4, out.codes); break;
        case Q5_0: take_nibbles(stored + 6, out.codes); add_fifth_bits(stored + 2, out.codes); break;
        case Q5_1: take_nibbles(stored + 8, out.codes); add_fifth_bits(stored + 4, out.codes); break;
        default:
            for (int i = 0; i < BLOCK; ++i) out.codes[i] = stored[2 + i] ^ 0x80;
    }
}

// Two bits each: of every 32 bytes first all lowest pairs, then the next. `part` is which 32 of 256.
inline void take_pairs(const uint8_t* p, int part, uint8_t* codes) {
    for (int i = 0; i < BLOCK; ++i) codes[i] = p[32 * (part / 4) + i] >> 2 * (part % 4) & 3;
}

void take_q2_k(const uint8_t* stored, int part, Unpacked& out) {
    take_pairs(stored + 16, part, out.codes);
    out.factor = half_at(stored + 80);
    out.minimum_factor = half_at(stored + 82);
    for (int run = 0; run < 2; ++run) {
        out.scales[run] = stored[2 * part + run] & 15;
        out.minima[run] = stored[2 * part + run] >> 4;
    }
}

void take_q3_k(const uint8_t* stored, int part, Unpacked& out) {
    take_pairs(stored + 32, part, out.codes);
    for (int i = 0; i < BLOCK; ++i) out.codes[i] |= (stored[i] >> part & 1) << 2;
    out.factor = half_at(stored + 108);
    const uint8_t* packed = stored + 96;
    for (int run = 0; run < 2; ++run) {
        const int at = 2 * part + run;
        const int low = at < 8 ? packed[at] & 15 : packed[at - 8] >> 4;
        const int high = packed[8 + at % 4] >> 2 * (at / 4) & 3;
        out.scales[run] = static_cast<int8_t>((low | high << 4) - 32);
    }
}

// Q4_K and Q5_K: eight 6-bit scales and minima in twelve bytes.
void take_scale_and_minimum(const uint8_t* packed, int part, Unpacked& out) {
    if (part < 4) {
        out.scales[0] = packed[part] & 63;
        out.minima[0] = packed[part + 4] & 63;
    } else {
        out.scales[0] = (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
        out.minima[0] = packed[part + 4] >> 4 | packed[part] >> 6 << 4;
    }
}

void take_q45_k(int32_t type, const uint8_t* stored, int part, Unpacked& out) {
    const uint8_t* nibbles = stored + (type == Q4_K ? 16 : 48) + 32 * (part / 2);
    for (int i = 0; i < BLOCK; ++i) {
        out.codes[i] = nibbles[i] >> 4 * (part % 2) & 15;
        if (type == Q5_K) out.codes[i] |= (stored[16 + i] >> part & 1) << 4;
    }
    out.factor = half_at(stored);
    out.minimum_factor = half_at(stored + 2);
    take_scale_and_minimum(stored + 4, part, out);
}

void take_q6_k(const uint8_t* stored, int part, Unpacked& out) {
    take_pairs(stored + 128, part, out.codes);
    // Of every 64 bytes all low halves, then all high halves.
    const uint8_t* nibbles = stored + 64 * (part / 4) + 32 * (part % 2);
    for (int i = 0; i < BLOCK; ++i)
        out.codes[i] = static_cast<uint8_t>(out.codes[i] << 4 | (nibbles[i] >> 4 * (part / 2 % 2) & 15));
    out.factor = half_at(stored + 208);
    for (int run = 0; run < 2; ++run) out.scales[run] = static_cast<int8_t>(stored[192 + 2 * part + run]);
}

void take(int32_t type, const uint8_t* row, int64_t b, Unpacked& out) {
    const int bytes = stored_bytes(type);
    if (stored_columns(type) == BLOCK) return take_legacy(type, row + b * bytes, out);
    const uint8_t* stored = row + b / SUPER * bytes;
    const int part = static_cast<int>(b % SUPER);
    switch (type) {
        case Q2_K: return take_q2_k(stored, part, out);
        case Q3_K: return take_q3_k(stored, part, out);
        case Q6_K: return take_q6_k(stored, part, out);
        default: return take_q45_k(type, stored, part, out);
    }
}

// Put one row's codes into a zeroed block, four at a time: no code reaches into its neighbour's byte.
template <class F>
void put_codes(const uint8_t* codes, int row, uint8_t* block) {
    const auto add = [&](int vector, uint32_t four) {
        uint8_t* at = block + 64 * vector + 4 * row;
        uint32_t there;
        std::memcpy(&there, at, 4);
        there |= four;
        std::memcpy(at, &there, 4);
    };
    for (int quad = 0; quad < BLOCK / 4; ++quad) {
        uint32_t four;
        std::memcpy(&four, codes + 4 * quad, 4);
        if constexpr (F::bits == 8) {
            add(quad, four);
        } else if constexpr (F::bits <= 3) {
            add(quad / 4, (four & 0x03030303) << 2 * (quad % 4));
            if constexpr (F::bits == 3) add(2, (four >> 2 & 0x01010101) << quad);
        } else {
            add(quad % 4, (four & 0x0f0f0f0f) << 4 * (quad / 4));
            if constexpr (F::bits == 5) add(4, (four >> 4 & 0x01010101) << quad);
            if constexpr (F::bits == 6) add(4 + quad / 4, (four >> 4 & 0x03030303) << 2 * (quad % 4));
        }
    }
}

template <class F>
int code_at(const uint8_t* block, int row, int column) {
    const int quad = column / 4, lane = 4 * row + column % 4;
    if constexpr (F::bits == 8) return block[64 * quad + lane];
    if constexpr (F::bits <= 3) {
        const int low = block[64 * (quad / 4) + lane] >> 2 * (quad % 4) & 3;
        return F::bits == 2 ? low : low | (block[128 + lane] >> quad & 1) << 2;
    }
    const int low = block[64 * (quad % 4) + lane] >> 4 * (quad / 4) & 15;
    if constexpr (F::bits == 5) return low | (block[256 + lane] >> quad & 1) << 4;
    if constexpr (F::bits == 6) return low | (block[256 + 64 * (quad / 4) + lane] >> 2 * (quad % 4) & 3) << 4;
    return low;
}

inline void put_half(uint8_t* at, int row, uint16_t half) { std::memcpy(at + 2 * row, &half, 2); }

template <class F>
void put_block(const Unpacked& from, int row, int64_t b, uint8_t* group) {
    uint8_t* block = group + F::block_at(b);
    uint8_t* scales = block + F::code_bytes;
    put_codes<F>(from.codes, row, block);
    // Without K the factors stand beside the codes, with it once for eight blocks.
    uint8_t* factors = F::is_k ? group + F::header_at(b) : scales;
    put_half(factors, row, from.factor);
    if constexpr (F::minima) put_half(factors + 2 * GROUP, row, from.minimum_factor);
    if constexpr (F::is_k) {
        for (int run = 0; run < F::runs; ++run) {
            scales[GROUP * run + row] = static_cast<uint8_t>(from.scales[run]);
            if constexpr (F::minima) scales[F::scale_bytes + GROUP * run + row] = static_cast<uint8_t>(from.minima[run]);
        }
    }
}

// The same products and sums as the decoders in Python, in the same order.
template <class F>
void unpack_block(const uint8_t* group, int row, int64_t b, float* out) {
    const uint8_t* block = group + F::block_at(b);
    const uint8_t* scales = block + F::code_bytes;
    const uint8_t* factors = F::is_k ? group + F::header_at(b) : scales;
    const float factor = float_of_half(half_at(factors + 2 * row));
    const float minimum_factor = F::minima ? float_of_half(half_at(factors + 2 * GROUP + 2 * row)) : 0.0f;
    for (int i = 0; i < BLOCK; ++i) {
        const int run = i / F::run;
        const float code = static_cast<float>(code_at<F>(block, row, i) - F::zero);
        if constexpr (!F::is_k) {
            out[i] = code * factor;
            if constexpr (F::minima) out[i] += minimum_factor;
        } else {
            out[i] = code * (factor * static_cast<float>(static_cast<int8_t>(scales[GROUP * run + row])));
            if constexpr (F::minima)
                out[i] -= minimum_factor * static_cast<float>(static_cast<int8_t>(scales[F::scale_bytes + GROUP * run + row]));
        }
    }
}

}  // namespace

int stored_columns(int32_t type) {
    if (float_bytes(type)) return 1;
    int columns = 0;
    with_format(type, [&](auto format) { columns = format.is_k ? BLOCK * SUPER : BLOCK; });
    return columns;
}

int stored_bytes(int32_t type) {
    switch (type) {
        case F32: return 4;
        case F16: case BF16: return 2;
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q2_K: return 84;
        case Q3_K: return 110;
        case Q4_K: return 144;
        case Q5_K: return 176;
        case Q6_K: return 210;
        default: return 0;
    }
}

int64_t packed_group_bytes(int32_t type, int64_t columns) {
    const int whole = stored_columns(type);
    if (whole == 0 || columns <= 0 || columns % whole) return -1;
    if (const int bytes = float_bytes(type)) return columns * GROUP * bytes;
    int64_t size = -1;
    with_format(type, [&](auto format) { size = format.group_bytes(columns / BLOCK); });
    return size;
}

void pack_group(int32_t type, const uint8_t* const* rows, int count, int64_t columns, uint8_t* group) {
    std::memset(group, 0, packed_group_bytes(type, columns));
    if (const int bytes = float_bytes(type)) {
        for (int row = 0; row < count; ++row)
            for (int64_t k = 0; k < columns; ++k)
                std::memcpy(group + (k * GROUP + row) * bytes, rows[row] + k * bytes, bytes);
        return;
    }
    with_format(type, [&](auto format) {
        for (int64_t b = 0; b < columns / BLOCK; ++b) {
            for (int row = 0; row < count; ++row) {
                Unpacked block{};
                take(type, rows[row], b, block);
                put_block<decltype(format)>(block, row, b, group);
            }
        }
    });
}

void read_row(const HpMatrix& matrix, int64_t columns, int64_t row, float* out) {
    const int32_t type = matrix.type;
    const uint8_t* group = matrix.packed + row / GROUP * packed_group_bytes(type, columns);
    const int lane = static_cast<int>(row % GROUP);
    if (const int bytes = float_bytes(type)) {
        const uint8_t* first = group + (matrix.plain ? lane * columns : lane) * bytes;
        const int64_t step = (matrix.plain ? 1 : GROUP) * bytes;
        for (int64_t k = 0; k < columns; ++k) {
            const uint8_t* at = first + k * step;
            if (type == F32) std::memcpy(out + k, at, 4);
            else out[k] = type == F16 ? float_of_half(half_at(at)) : float_of_bfloat(half_at(at));
        }
        return;
    }
    with_format(type, [&](auto format) {
        for (int64_t b = 0; b < columns / BLOCK; ++b) unpack_block<decltype(format)>(group, lane, b, out + b * BLOCK);
    });
}

}  // namespace hardpoint
