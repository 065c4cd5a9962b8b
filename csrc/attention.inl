// Attention over a paged cache, over whatever lanes_*.h was included before.
//
// A tile is some rows of a request that share a key/value head. It takes the keys span after span; what a row
// does with a key never depends on the other rows of its tile: scores are sums over a head's elements in their
// order, sums of values go key by key, and keys a row does not see are never multiplied for it.

namespace {

using namespace hardpoint;

struct OfFloats {
    using Number = float;
    static Lanes lanes(const float* p) { return load(p); }
    static float one(float x) { return x; }
};
struct OfHalves {
    using Number = uint16_t;
    static Lanes lanes(const uint16_t* p) { return load_half(p); }
    static float one(uint16_t x) { return float_of_half(x); }
};
struct OfBfloats {
    using Number = uint16_t;
    static Lanes lanes(const uint16_t* p) { return load_bfloat(p); }
    static float one(uint16_t x) { return float_of_bfloat(x); }
};
struct OfInt8 {
    using Number = int8_t;
    static Lanes lanes(const int8_t* p) { return load_int8(p); }
    static float one(int8_t x) { return static_cast<float>(x); }
};

template <class Of>
inline Lanes some_lanes(const typename Of::Number* p, int n) {
    if (n == 16) return Of::lanes(p);
    float at[16] = {};
    for (int i = 0; i < n; ++i) at[i] = Of::one(p[i]);
    return load(at);
}

template <class Visit>
inline void with_store(int32_t store, Visit visit) {
    if (store == STORE_F32) visit(OfFloats{});
    else if (store == STORE_F16) visit(OfHalves{});
    else if (store == STORE_BF16) visit(OfBfloats{});
    else visit(OfInt8{});
}

template <int N, class Visit>
inline void with_count(int count, Visit visit) {
    if constexpr (N > 0) {
        if (count == N) visit(std::integral_constant<int, N>{});
        else with_count<N - 1>(count, visit);
    }
}

// The keys `from` to `to` of a request that a row sees.
struct Seen { int64_t from, to; };

inline Seen seen(const Rows& rows, int64_t row) {
    const int64_t position = rows.position + row / rows.group;
    if (!rows.layer->causal) return {0, rows.length};
    const int64_t window = rows.layer->window;
    return {window && position >= window ? position - window + 1 : 0, position + 1};
}

// Where a span's keys and values are.
template <class Of>
struct Pages {
    const Rows& rows;
    int64_t size, block, section;

    explicit Pages(const Rows& of)
        : rows(of), size(of.layer->head_size), block(of.layer->block_size), section(section_bytes(*of.layer)) {}
    const uint8_t* keys(int64_t key) const {
        const int64_t of_block = static_cast<int64_t>(rows.blocks[key / block]) * rows.layer->block_stride;
        return rows.layer->cache + of_block + 2 * rows.kv_head * section;
    }
    const typename Of::Number* key_column(int64_t key) const {
        return reinterpret_cast<const typename Of::Number*>(keys(key)) + key % block;
    }
    const typename Of::Number* value(int64_t key) const {
        return reinterpret_cast<const typename Of::Number*>(keys(key) + section) + key % block * size;
    }
    float factor(int64_t key, int64_t section_at) const {
        const uint8_t* factors = keys(key) + section_at * section + block * size;
        float out;
        std::memcpy(&out, factors + 4 * (key % block), 4);
        return out;
    }
};

// What one stream of keys leaves waiting: lines that are read soon are asked for while others are computed with.
inline void ask_for(const void* p) { __builtin_prefetch(p); }

// Scores of `R` rows with `S` runs of sixteen keys. `values` and `later`, if any: the values of these keys, and the
// keys that come next.
template <class Of, int R, int S>
inline void score(const typename Of::Number* const* keys, const typename Of::Number* const* values,
                  const typename Of::Number* const* later, int64_t block, int64_t size, const float* q, float* scores,
                  int64_t scores_stride) {
    Lanes sums[R][S];
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s) sums[r][s] = splat(0.0f);
    for (int64_t d = 0; d < size; ++d) {
        Lanes column[S];
        for (int s = 0; s < S; ++s) {
            column[s] = Of::lanes(keys[s] + d * block);
            if (values) {
                ask_for(values[s] + d * 16);
                ask_for(later[s] + d * block);
            }
        }
        for (int r = 0; r < R; ++r) {
            const Lanes x = splat(q[r * size + d]);
            for (int s = 0; s < S; ++s) sums[r][s] = fused(column[s], x, sums[r][s]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s) store(scores + r * scores_stride + 16 * s, sums[r][s]);
}

// The same where fewer than sixteen keys are left in a block.
template <class Of, int R>
inline void score_few(const typename Of::Number* keys, int n, int64_t block, int64_t size, const float* q,
                      float* scores, int64_t scores_stride) {
    for (int r = 0; r < R; ++r) {
        Lanes sum = splat(0.0f);
        for (int64_t d = 0; d < size; ++d) sum = fused(some_lanes<Of>(keys + d * block, n), splat(q[r * size + d]), sum);
        store(scores + r * scores_stride, sum);
    }
}

// Scores are stored sixteen at a time, also where fewer are left, and a run may begin before its span.
constexpr int LEAD = 16;
constexpr int SCORES = LEAD + SPAN + 16;

template <class Of, int R>
void score_span(const Pages<Of>& pages, int64_t first, int64_t from, int64_t to, const float* q,
                float (*scores)[SCORES]) {
    constexpr int S = R <= 2 ? 4 : R <= MOST_ROWS / 2 ? 2 : 1;
    // Runs of keys begin at multiples of sixteen of their block.
    int64_t key = from - from % pages.block % 16;
    while (key < to) {
        const typename Of::Number *keys[S], *values[S], *later[S];
        int64_t at = key;
        int whole = 0;
        for (; whole < S && at < to && pages.block - at % pages.block >= 16; ++whole, at += 16) {
            keys[whole] = pages.key_column(at);
            values[whole] = pages.value(at);
            later[whole] = at + 16 * S < pages.rows.length ? pages.key_column(at + 16 * S) : keys[whole];
        }
        // Many rows find most of it in the cache.
        constexpr bool asks = R <= MOST_ROWS / 2;
        float* out = scores[0] + LEAD + (key - first);
        if (whole == S) {
            score<Of, R, S>(keys, asks ? values : nullptr, later, pages.block, pages.size, q, out, SCORES);
            key = at;
        } else if (whole) {
            score<Of, R, 1>(keys, nullptr, nullptr, pages.block, pages.size, q, out, SCORES);
            key += 16;
        } else {
            const int n = static_cast<int>(pages.block - key % pages.block);
            score_few<Of, R>(pages.key_column(key), n, pages.block, pages.size, q, out, SCORES);
            key += n;
        }
    }
}

// Sum the values of the keys `from` to `to` (of the span), V vectors of elements at a time.
template <class Of, int R, int V>
inline void add_values(const Pages<Of>& pages, int64_t first, int64_t from, int64_t to, int64_t element, int lanes,
                       const float (*weights)[SCORES], int row, float* sums) {
    Lanes sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = load_some(sums + r * pages.size + element + 16 * v, lanes);
    int64_t key = from;
    while (key < to) {
        const int64_t stop = std::min(to, key - (first + key) % pages.block + pages.block);
        const typename Of::Number* values = pages.value(first + key) + element;
        for (; key < stop; ++key, values += pages.size) {
            Lanes column[V];
            for (int v = 0; v < V; ++v) column[v] = some_lanes<Of>(values + 16 * v, lanes);
            for (int r = 0; r < R; ++r) {
                const Lanes weight = splat(weights[row + r][LEAD + key]);
                for (int v = 0; v < V; ++v) sum[r][v] = fused(column[v], weight, sum[r][v]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store_some(sums + r * pages.size + element + 16 * v, sum[r][v], lanes);
}

template <class Of, int R>
void add_all_values(const Pages<Of>& pages, int64_t first, int64_t from, int64_t to, const float (*weights)[SCORES],
                    int row, float* sums) {
    if (from >= to) return;
    constexpr int V = R <= MOST_ROWS / 2 ? 2 * VALUE_VECTORS : VALUE_VECTORS;
    int64_t element = 0;
    for (; element + 16 * V <= pages.size; element += 16 * V)
        add_values<Of, R, V>(pages, first, from, to, element, 16, weights, row, sums);
    for (; element < pages.size; element += 16)
        add_values<Of, R, 1>(pages, first, from, to, element, static_cast<int>(std::min<int64_t>(16, pages.size - element)),
                             weights, row, sums);
}

// A row's scores of a span as weights: capped, biased, hidden where not seen, and through the exponential.
template <class Of>
Partial weigh(const Pages<Of>& pages, int64_t row, int64_t first, int64_t from, int64_t to, const float* key_factors,
              const float* value_factors, float* scores) {
    const HpAttention& layer = *pages.rows.layer;
    const int64_t head = pages.rows.kv_head * pages.rows.group + row % pages.rows.group;
    const float position = static_cast<float>(pages.rows.position + row / pages.rows.group);
    const Lanes nothing = splat(-__builtin_inff());
    Lanes most = nothing;
    for (int64_t i = from - from % 16; i < to; i += 16) {
        Lanes s = load(scores + i);
        if (key_factors) s = times(s, load(key_factors + i));
        if (layer.soft_cap != 0.0f)
            s = times(hyperbolic(over(s, splat(layer.soft_cap))), splat(layer.soft_cap));
        if (layer.slopes) {
            float distances[16];
            for (int lane = 0; lane < 16; ++lane) distances[lane] = position - static_cast<float>(first + i + lane);
            s = minus(s, times(load(distances), splat(layer.slopes[head])));
        }
        if (i < from) s = joined(nothing, static_cast<int>(from - i), s);
        if (i + 16 > to) s = joined(s, static_cast<int>(to - i), nothing);
        store(scores + i, s);
        most = larger(most, s);
    }
    const float largest = largest_of(most);
    Lanes sum = splat(0.0f);
    for (int64_t i = from - from % 16; i < to; i += 16) {
        const Lanes weight = exponential(minus(load(scores + i), splat(largest)));
        sum = plus(sum, weight);
        store(scores + i, value_factors ? times(weight, load(value_factors + i)) : weight);
    }
    return {largest, sum_of(sum)};
}

void join(Partial& to, float* sums, const Partial& span, const float* span_sums, int64_t size) {
    if (to.sum == 0.0f && to.largest == -__builtin_inff()) {
        to = span;
        std::memcpy(sums, span_sums, sizeof(float) * size);
        return;
    }
    const float largest = span.largest > to.largest ? span.largest : to.largest;
    const float before = exponential(to.largest - largest), now = exponential(span.largest - largest);
    to.largest = largest;
    to.sum = to.sum * before + span.sum * now;
    const Lanes kept = splat(before), added = splat(now);
    in_sixteens(size, [&](int64_t i, int n) {
        store_some(sums + i, plus(times(load_some(sums + i, n), kept), times(load_some(span_sums + i, n), added)), n);
    });
}

// The factors of a span's keys or values, which only int8 has.
template <class Of>
const float* factors_of(const Pages<Of>& pages, int64_t first, int64_t from, int64_t to, int section, float* factors) {
    if constexpr (!std::is_same_v<Of, OfInt8>) return nullptr;
    std::memset(factors, 0, sizeof(float) * SCORES);
    for (int64_t key = from; key < to; ++key) factors[key - first] = pages.factor(key, section);
    return factors;
}

// Everything about the rows of a tile in one span.
template <class Of, int R>
void attend_span(const Pages<Of>& pages, int64_t row, int64_t first, const float* q, Partial* partials, float* sums) {
    Seen of[R];
    int64_t from = INT64_MAX, to = 0, common_from = 0, common_to = INT64_MAX;
    for (int r = 0; r < R; ++r) {
        const Seen all = seen(pages.rows, row + r);
        of[r] = {std::max(all.from, first), std::min(all.to, first + SPAN)};
        from = std::min(from, of[r].from);
        to = std::max(to, of[r].to);
        common_from = std::max(common_from, of[r].from);
        common_to = std::min(common_to, of[r].to);
    }
    float scores[R][SCORES], key_room[SCORES], value_room[SCORES];
    score_span<Of, R>(pages, first, from, to, q, scores);
    const float* key_factors = factors_of(pages, first, from, to, 0, key_room);
    const float* value_factors = factors_of(pages, first, from, to, 1, value_room);
    std::memset(sums, 0, sizeof(float) * R * pages.size);
    for (int r = 0; r < R; ++r) {
        partials[r] = {-__builtin_inff(), 0.0f};
        if (of[r].from < of[r].to)
            partials[r] = weigh(pages, row + r, first, of[r].from - first, of[r].to - first, key_factors,
                                value_factors, scores[r] + LEAD);
    }
    const bool together = common_from < common_to;
    for (int r = 0; r < R; ++r)
        add_all_values<Of, 1>(pages, first, of[r].from - first, (together ? common_from : of[r].to) - first, scores, r,
                              sums + r * pages.size);
    if (!together) return;
    add_all_values<Of, R>(pages, first, common_from - first, common_to - first, scores, 0, sums);
    for (int r = 0; r < R; ++r)
        add_all_values<Of, 1>(pages, first, common_to - first, of[r].to - first, scores, r, sums + r * pages.size);
}

// The largest head that fits a tile's room.
constexpr int MOST_ELEMENTS = 512;

template <class Of, int R>
void attend_tile(const Rows& rows, int64_t row, int64_t from, int64_t to, bool apart, Partial* partials, float* sums) {
    const Pages<Of> pages(rows);
    const int64_t size = pages.size;
    float q[R * MOST_ELEMENTS], span_sums[R * MOST_ELEMENTS];
    for (int r = 0; r < R; ++r) {
        const float* from_row = rows.q + (row + r) / rows.group * rows.q_stride + (row + r) % rows.group * size;
        for (int64_t d = 0; d < size; ++d) q[r * size + d] = from_row[d] * rows.layer->scale;
    }
    for (int64_t span = from; span < to; ++span) {
        if (apart) {
            const int64_t place = (span - from) * MOST_ROWS;
            attend_span<Of, R>(pages, row, span * SPAN, q, partials + place, sums + place * size);
            continue;
        }
        Partial found[R];
        attend_span<Of, R>(pages, row, span * SPAN, q, found, span_sums);
        for (int r = 0; r < R; ++r)
            if (found[r].largest != -__builtin_inff())
                join(partials[r], sums + r * size, found[r], span_sums + r * size, size);
    }
}

void attend(const Rows& rows, int64_t row, int count, int64_t from, int64_t to, bool apart, Partial* partials,
            float* sums) {
    with_store(rows.layer->store, [&](auto of) {
        with_count<MOST_ROWS>(count, [&](auto number) {
            attend_tile<decltype(of), decltype(number)::value>(rows, row, from, to, apart, partials, sums);
        });
    });
}

void finish(const Partial& partial, const float* sums, const float* sink, int64_t size, float* out) {
    float sum = partial.sum, factor = 1.0f;
    if (sink) {
        const float largest = *sink > partial.largest ? *sink : partial.largest;
        factor = exponential(partial.largest - largest);
        sum = sum * factor + exponential(*sink - largest);
    }
    const Lanes by = splat(factor / sum);
    in_sixteens(size, [&](int64_t i, int n) { store_some(out + i, times(load_some(sums + i, n), by), n); });
}

// One head of a token as int8; returns the factor.
float rounded_head(const float* x, int64_t size, int8_t* out, int64_t stride) {
    uint32_t most = 0;
    for (int64_t d = 0; d < size; ++d) {
        uint32_t bits;
        std::memcpy(&bits, x + d, 4);
        most = std::max(most, bits & 0x7fffffff);
    }
    // What is not finite makes the whole head so; what is too small to divide by is zero.
    const float factor = most >= 0x7f800000 ? __builtin_nanf("") : float_of_bits(most) / 127.0f;
    const bool plain = factor > 1e-37f;
    for (int64_t d = 0; d < size; ++d)
        out[d * stride] = static_cast<int8_t>(plain ? __builtin_rintf(x[d] / factor) : 0.0f);
    return plain || factor != factor ? factor : 0.0f;
}

void write_int8(const HpAttention& layer, uint8_t* keys, int64_t offset, const float* k, const float* v) {
    const int64_t size = layer.head_size, block = layer.block_size, section = section_bytes(layer);
    uint8_t* values = keys + section;
    const float key_factor = rounded_head(k, size, reinterpret_cast<int8_t*>(keys) + offset, block);
    const float value_factor = rounded_head(v, size, reinterpret_cast<int8_t*>(values) + offset * size, 1);
    std::memcpy(keys + block * size + 4 * offset, &key_factor, 4);
    std::memcpy(values + block * size + 4 * offset, &value_factor, 4);
}

template <class Number, class Convert>
void write_head(const HpAttention& layer, uint8_t* keys, int64_t offset, const float* k, const float* v,
                Convert convert) {
    const int64_t size = layer.head_size, block = layer.block_size;
    Number* columns = reinterpret_cast<Number*>(keys) + offset;
    Number* row = reinterpret_cast<Number*>(keys + section_bytes(layer)) + offset * size;
    for (int64_t d = 0; d < size; d += 16) {
        const int n = static_cast<int>(std::min<int64_t>(16, size - d));
        Number room[16];
        convert(load_some(k + d, n), room);
        for (int i = 0; i < n; ++i) columns[(d + i) * block] = room[i];
        convert(load_some(v + d, n), room);
        std::memcpy(row + d, room, sizeof(Number) * n);
    }
}

void write(const HpAttention& layer, int64_t slot, const float* keys, const float* values) {
    const int64_t offset = slot % layer.block_size;
    uint8_t* head = layer.cache + slot / layer.block_size * layer.block_stride;
    for (int32_t h = 0; h < layer.kv_heads; ++h, head += 2 * section_bytes(layer)) {
        const float *k = keys + h * layer.head_size, *v = values + h * layer.head_size;
        if (layer.store == STORE_INT8) write_int8(layer, head, offset, k, v);
        else if (layer.store == STORE_F32)
            write_head<float>(layer, head, offset, k, v, [](const Lanes& a, float* to) { store(to, a); });
        else if (layer.store == STORE_F16)
            write_head<uint16_t>(layer, head, offset, k, v, [](const Lanes& a, uint16_t* to) { store_half(to, a); });
        else
            write_head<uint16_t>(layer, head, offset, k, v, [](const Lanes& a, uint16_t* to) {
                float at[16];
                store(at, a);
                for (int i = 0; i < 16; ++i) to[i] = bfloat_of_float(at[i]);
            });
    }
}

}  // namespace
