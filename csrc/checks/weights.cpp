// Stored weights and how they are packed, against decoders that read the blocks of a file as they are documented.

#include "check.h"

#include "../halves.h"

namespace check {

namespace {

double half_at(const uint8_t* p) {
    uint16_t bits;
    std::memcpy(&bits, p, 2);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double size = exponent == 31 ? (fraction ? std::nan("") : INFINITE)
                        : exponent     ? std::ldexp(1024 + fraction, exponent - 25)
                                       : std::ldexp(fraction, -24);
    return bits >> 15 ? -size : size;
}

float float_at(const uint8_t* p) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
}

double bfloat_at(const uint8_t* p) {
    const uint8_t all[4] = {0, 0, p[0], p[1]};
    return float_at(all);
}

// Blocks of 32: a scale, perhaps a minimum, perhaps fifth bits, then nibbles or bytes.
void decode_32(const std::string& name, const uint8_t* p, double* out) {
    const bool minima = name == "Q4_1" || name == "Q5_1", fifth = name == "Q5_0" || name == "Q5_1";
    const double scale = half_at(p), minimum = minima ? half_at(p + 2) : 0.0;
    p += minima ? 4 : 2;
    const uint8_t* bits = p;
    if (fifth) p += 4;
    for (int i = 0; i < 32; ++i) {
        if (name == "Q8_0") {
            out[i] = scale * static_cast<int8_t>(p[i]);
            continue;
        }
        int code = i < 16 ? p[i] & 15 : p[i - 16] >> 4;
        if (fifth) code |= (bits[i / 8] >> i % 8 & 1) << 4;
        out[i] = scale * (minima ? code : code - (fifth ? 16 : 8)) + minimum;
    }
}

// Number `i` of 256 has two bits at byte 32 * (i / 128) + i % 32.
int two_bits(const uint8_t* p, int i) { return p[32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3; }

void decode_q2_k(const uint8_t* p, double* out) {
    for (int i = 0; i < 256; ++i) {
        const int scales = p[i / 16];
        out[i] = half_at(p + 80) * (scales & 15) * two_bits(p + 16, i) - half_at(p + 82) * (scales >> 4);
    }
}

void decode_q3_k(const uint8_t* p, double* out) {
    for (int i = 0; i < 256; ++i) {
        const int run = i / 16;
        const int low = run < 8 ? p[96 + run] & 15 : p[96 + run - 8] >> 4;
        const int high = p[104 + run % 4] >> 2 * (run / 4) & 3;
        const int code = two_bits(p + 32, i) - (p[i % 32] >> i / 32 & 1 ? 0 : 4);
        out[i] = half_at(p + 108) * ((low | high << 4) - 32) * code;
    }
}

void decode_q45_k(const uint8_t* p, bool five, double* out) {
    const uint8_t *packed = p + 4, *nibbles = p + (five ? 48 : 16);
    for (int i = 0; i < 256; ++i) {
        const int part = i / 32;
        int scale = packed[part % 4] & 63, minimum = packed[part % 4 + 4] & 63;
        if (part >= 4) {
            scale = (packed[part + 4] & 15) | packed[part - 4] >> 6 << 4;
            minimum = packed[part + 4] >> 4 | packed[part] >> 6 << 4;
        }
        int code = nibbles[32 * (part / 2) + i % 32] >> 4 * (part % 2) & 15;
        if (five) code |= (p[16 + i % 32] >> part & 1) << 4;
        out[i] = half_at(p) * scale * code - half_at(p + 2) * minimum;
    }
}

void decode_q6_k(const uint8_t* p, double* out) {
    for (int i = 0; i < 256; ++i) {
        const int within = i % 128;
        const int low = p[64 * (i / 128) + within % 64] >> 4 * (within / 64) & 15;
        const int code = (low | two_bits(p + 128, i) << 4) - 32;
        out[i] = half_at(p + 208) * static_cast<int8_t>(p[192 + i / 16]) * code;
    }
}

void decode_block(const Kind& kind, const uint8_t* p, double* out) {
    const std::string name = kind.name;
    if (name == "F32") *out = float_at(p);
    else if (name == "F16") *out = half_at(p);
    else if (name == "BF16") *out = bfloat_at(p);
    else if (name == "Q2_K") decode_q2_k(p, out);
    else if (name == "Q3_K") decode_q3_k(p, out);
    else if (name == "Q4_K" || name == "Q5_K") decode_q45_k(p, name == "Q5_K", out);
    else if (name == "Q6_K") decode_q6_k(p, out);
    else decode_32(name, p, out);
}

// Rows that are looked up must be the file's, also where they were packed in another order.
void check_kind(const Kind& of, int64_t rows, int64_t columns) {
    const std::string where = "packing " + std::string(of.name);
    const int64_t row_bytes = columns / of.columns * of.bytes;
    const auto stored = blocks_of(of, rows * columns);
    std::vector<int64_t> order(rows);
    for (int64_t i = 0; i < rows; ++i) order[i] = (i * 7 + 3) % rows;
    for (const int threads : {1, 3}) {
        hp_set_threads(threads, nullptr);
        std::vector<uint8_t> bytes(hp_packed_bytes(of.type, rows, columns));
        if (hp_pack(of.type, stored.data(), row_bytes, order.data(), rows, columns, bytes.data()))
            return report(where, "is refused");
        const HpMatrix matrix{of.type, 0, rows, bytes.data()};
        Floats found(rows * columns);
        std::vector<int64_t> ids(rows);
        for (int64_t i = 0; i < rows; ++i) ids[i] = rows - 1 - i;
        hp_lookup(&matrix, columns, ids.data(), rows, found.data());
        Doubles expected, tolerance;
        for (const int64_t id : ids) {
            const Doubles row = decoded(of, stored.data() + order[id] * row_bytes, columns);
            expected.insert(expected.end(), row.begin(), row.end());
        }
        // Numbers are sums of two products at most, each rounded twice.
        for (const double number : expected) tolerance.push_back(3e-7 * std::fabs(number) + 1e-5 * (of.columns == 256));
        compare(where, found, expected, of.columns == 1 ? Doubles(expected.size(), 0.0) : tolerance);
    }
}

void check_refusals() {
    const HpMatrix matrix{0, 1, 2, nullptr};
    for (const int64_t id : {-1, 2})
        if (hp_lookup(&matrix, 4, &id, 1, nullptr) != -1) report("lookup", "takes an id that is not a row");
    if (hp_packed_bytes(99, 1, 32) != -1 || hp_pack(99, nullptr, 0, nullptr, 1, 32, nullptr) != -1)
        report("packing", "takes a type that nobody knows");
    if (hp_packed_bytes(2, 1, 33) != -1 || hp_packed_bytes(12, 1, 128) != -1 || hp_packed_bytes(2, 1, 0) != -1 ||
        hp_packed_bytes(2, -1, 32) != -1)
        report("packing", "takes what is no matrix of whole blocks");
    if (hp_use_isa("none") != -1) report("instruction sets", "one that nobody knows is taken");
}

void check_halves() {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const auto half = static_cast<uint16_t>(bits);
        uint8_t at[2];
        std::memcpy(at, &half, 2);
        const double expected[2] = {half_at(at), bfloat_at(at)};
        const float found[2] = {float_of_half(half), float_of_bfloat(half)};
        for (int i = 0; i < 2; ++i)
            if (std::isnan(expected[i]) ? !std::isnan(found[i]) : found[i] != expected[i])
                return report("halves", std::to_string(bits) + " is read wrongly");
    }
}

}  // namespace

const std::vector<Kind>& kinds() {
    static const std::vector<Kind> all = {
        {0, "F32", 1, 4, {}}, {1, "F16", 1, 2, {0}}, {30, "BF16", 1, 2, {}}, {2, "Q4_0", 32, 18, {0}},
        {3, "Q4_1", 32, 20, {0, 2}}, {6, "Q5_0", 32, 22, {0}}, {7, "Q5_1", 32, 24, {0, 2}}, {8, "Q8_0", 32, 34, {0}},
        {10, "Q2_K", 256, 84, {80, 82}}, {11, "Q3_K", 256, 110, {108}}, {12, "Q4_K", 256, 144, {0, 2}},
        {13, "Q5_K", 256, 176, {0, 2}}, {14, "Q6_K", 256, 210, {208}},
    };
    return all;
}

const Kind& kind(const char* name) {
    for (const Kind& of : kinds())
        if (std::string(name) == of.name) return of;
    return kinds().front();
}

std::vector<uint8_t> blocks_of(const Kind& kind, int64_t numbers) {
    std::vector<uint8_t> all(numbers / kind.columns * kind.bytes);
    for (auto& byte : all) byte = static_cast<uint8_t>(generator()());
    for (size_t block = 0; block < all.size(); block += kind.bytes) {
        // Exponents around one: 0x2c00 is 1/16, 0x3d80 the same as bfloat16.
        for (const int half : kind.halves) all[block + half + 1] = 0x2c | (all[block + half + 1] & 0x80);
        if (kind.type == 0) all[block + 3] = 0x3d | (all[block + 3] & 0x80);
        if (kind.type == 30) all[block + 1] = 0x3d | (all[block + 1] & 0x80);
    }
    return all;
}

Doubles decoded(const Kind& kind, const uint8_t* blocks, int64_t columns) {
    Doubles out(columns);
    for (int64_t at = 0; at < columns; at += kind.columns, blocks += kind.bytes) decode_block(kind, blocks, &out[at]);
    return out;
}

Weights plain(const Kind& kind, int64_t rows, int64_t columns) {
    Weights out{blocks_of(kind, rows * columns), {}, {}};
    const int64_t row_bytes = columns / kind.columns * kind.bytes;
    for (int64_t row = 0; row < rows; ++row) {
        const Doubles numbers = decoded(kind, out.bytes.data() + row * row_bytes, columns);
        out.numbers.insert(out.numbers.end(), numbers.begin(), numbers.end());
    }
    out.matrix = {kind.type, 1, rows, out.bytes.data()};
    return out;
}

Weights packed(const Kind& kind, int64_t rows, int64_t columns) {
    const Weights stored = plain(kind, rows, columns);
    Weights out{std::vector<uint8_t>(hp_packed_bytes(kind.type, rows, columns)), {}, stored.numbers};
    hp_pack(kind.type, stored.bytes.data(), columns / kind.columns * kind.bytes, nullptr, rows, columns,
            out.bytes.data());
    out.matrix = {kind.type, 0, rows, out.bytes.data()};
    return out;
}

void check_pack() {
    check_halves();
    check_refusals();
    for (const Kind& of : kinds()) {
        const int64_t whole = of.columns == 256 ? 256 : 32;
        check_kind(of, 1, whole);
        check_kind(of, 35, 2 * whole);
    }
}

}  // namespace check
