// Attention over int8 pages, and what writes them. Keys meet queries of 15 bits, values meet weights of 14 bits with a
// scale for each row and page: integer sums, which are exact, so that only each row's own scales and the order of its
// pages show in its bits.
#pragma once
#include "quants.inl"
#include "rows.inl"

namespace {
namespace quant {

using headrace::kMaxHeadDim;
using headrace::QuantQuery;

// Rows that meet keys at once; and values: as few columns at once as leave room for so many rows.
#if defined(HEADRACE_AVX512)
constexpr int kMostRows = 6, kSums = 12;
#elif defined(HEADRACE_AVX2) || defined(HEADRACE_NEON)
constexpr int kMostRows = 1, kSums = 2;
#else
constexpr int kMostRows = 1, kSums = 1;
#endif
constexpr int kBlocksAhead = 8;  // keys, or values, of a page that are asked for ahead, into the second cache
constexpr int kSplitPages = kSplitTokens / kPageTokens;
constexpr float kLeast = 0x1p-100f;  // smaller ones count as zero: the inverse of their scale would overflow

// scores[r][0 .. 31] = q_r . K of a page, but for the scale of q_r
template <int R>
static void score_page(const Stream& in, int page, bool fetch, int row, float* scores) {
    VI high[R][2], low[R][2];
    const QuantQuery* q[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        q[r] = in.work.quant[row + r];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            high[r][i] = seti(kEightsCentred ? 0 : -128 * q[r]->high_sum);
            low[r][i] = seti(kEightsCentred ? 0 : -128 * q[r]->low_sum);
        }
    }
    const uint8_t *keys = in.keys(page), *ahead = in.block(page + (fetch ? kBlocksAhead : 0));
    const int bytes = headrace::quad_groups(in.work.head_dim) * 4;
    for (int d = 0; d < bytes; d += 4) {
        VB k[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            k[i] = load_bytes(keys + kPageTokens * d + 64 * i);
            prefetch_far(ahead + kPageTokens * d + 64 * i);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int32_t h = lin::int_at(q[r]->high + d), l = lin::int_at(q[r]->low + d);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                high[r][i] = dot4_carried(high[r][i], k[i], h);
                low[r][i] = dot4_carried(low[r][i], k[i], l);
            }
        }
    }
    prefetch_far(ahead + kPageTokens * bytes);
    const uint16_t* scales = (const uint16_t*)(keys + kPageTokens * bytes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++)
            store(scores + r * kSplitTokens + 16 * i,
                  to_float(shl<7>(high[r][i]) + low[r][i]) * load_half(scales + 16 * i));
}

// A row's weights of a split's values, by page: d * (128 * high + low), 0 to 127 each. They include the values' scales.
struct Weights {
    alignas(64) int8_t high[kSplitTokens];
    alignas(64) int8_t low[kSplitTokens];
    float d[kSplitPages];
};

// What weighs exactly 0 counts as nothing, whatever its value's scale is.
HR_INLINE VF weight_of(const float* p, const uint16_t* scales) {
    const VF x = load(p);
    return select_less(zero(), x, x * load_half(scales), zero());
}

HR_INLINE void store_weights(VF x, float inverse, int8_t* high, int8_t* low) {
    const VI n = round_int(x * set1(inverse));
    store_s8(high, shr<7>(n));
    store_s8(low, n & seti(127));
}

// p [32]: what the softmax gave, 0 where the row sees nothing.
HR_INLINE void quantize_weights(const float* p, const uint16_t* scales, int page, Weights& to) {
    const VF x0 = weight_of(p, scales), x1 = weight_of(p + 16, scales + 16);
    const bool broken = any_nan(x0 + x1);
    const float top = broken ? 0.0f : largest(::max(x0, x1)), most = 128 * 128 - 1;
    const float inverse = top < kLeast ? 0.0f : most / top;
    to.d[page] = broken ? __builtin_nanf("") : top < kLeast ? 0.0f : top / most;
    const VF none = zero();
    int8_t *high = to.high + page * kPageTokens, *low = to.low + page * kPageTokens;
    store_weights(broken ? none : x0, inverse, high, low);
    store_weights(broken ? none : x1, inverse, high + 16, low + 16);
}

// out[r][16 C columns from `column` on] += the page's values times weights[r]
template <int R, int C>
HR_INLINE void weigh(const Stream& in, int page, int column, const Weights* weights, float* const* out) {
    VI high[R][C], low[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            high[r][c] = zeroi();
            low[r][c] = zeroi();
        }
    const int width = headrace::value_width(in.work.head_dim), in_split = (in.first + page) % kSplitPages;
    const uint8_t *v = in.values(page) + 4 * column, *ahead = in.block(in.pages + page + kBlocksAhead) + 4 * column;
    for (int t = 0; t < kPageTokens; t += 4, v += 4 * width, ahead += 4 * width) {
        VB x[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            x[c] = load_bytes(v + 64 * c);
            prefetch_far(ahead + 64 * c);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int at = in_split * kPageTokens + t;
            const int32_t h = lin::int_at(weights[r].high + at), l = lin::int_at(weights[r].low + at);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                high[r][c] = dot4_seven(high[r][c], x[c], h);
                low[r][c] = dot4_seven(low[r][c], x[c], l);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float* o = out[r] + column + 16 * c;
            store(o, fma(set1(weights[r].d[in_split]), to_float(shl<7>(high[r][c]) + low[r][c]), load(o)));
        }
}

template <int R>
static void weigh_page(const Stream& in, int page, const Weights* weights, float* const* out) {
    constexpr int kColumns = kSums / R >= 4 ? 4 : kSums / R >= 2 ? 2 : 1;
    const int width = headrace::value_width(in.work.head_dim);
    int column = 0;
    for (; column + 16 * kColumns <= width; column += 16 * kColumns) weigh<R, kColumns>(in, page, column, weights, out);
    for (; column < width; column += 16) weigh<R, 1>(in, page, column, weights, out);
}

// The same for n rows over all pages, each for the rows that see some of it.
static void weigh_block(const Stream& in, int n, const int* lo, const int* hi, const Weights* weights,
                        float* const* out) {
    for (int r = 0; r < n; r++)
        for (int i = 0; i < headrace::value_width(in.work.head_dim); i++) out[r][i] = 0;
    for (int page = 0, a = 0, b = 0; page < in.pages; page++) {
        const int from = (in.first + page) * kPageTokens;
        while (b < n && lo[b] < from + kPageTokens) b++;
        while (a < b && hi[a] <= from) a++;
        if (a < b)
            with_rows<kMostRows>(
                b - a, [&]<int R>() __attribute__((always_inline)) { weigh_page<R>(in, page, weights + a, out + a); });
    }
}

// A row's scores become weights, in pages that it sees some of; lo, hi: what it sees, relative to the split.
static void soften_row(const Stream& in, float* scores, int lo, int hi, float scale, float* out, Weights& weights) {
    const int width = headrace::value_width(in.work.head_dim);
    soften(scores, lo, hi, scale, in.work.softcap, out + width, out + width + 1);
    const int first = lo / kPageTokens * kPageTokens, end = (hi + kPageTokens - 1) / kPageTokens * kPageTokens;
    if (lo - first >= 16) store(scores + first, zero());
    if (end - hi >= 16) store(scores + end - 16, zero());
    for (int t = first; t < end; t += kPageTokens) {
        const int page = t / kPageTokens;
        const uint8_t* values = in.values(in.work.split * kSplitPages + page - in.first);
        quantize_weights(scores + t, (const uint16_t*)(values + width * kPageTokens), page, weights);
    }
}

// See attend_rows of f16.
static void attend_rows(const AttendSplit& w, int row, int n, const int* lo, const int* hi) {
    alignas(64) float scores[kTileRows * kSplitTokens];
    Weights weights[kTileRows];
    const int start = w.split * kSplitTokens;
    const Stream in = stream_of(w, KvFormat::Int8, lo[0], hi[n - 1]);
    for (int p = 0; p < in.pages; p++)
        in_blocks(n, kMostRows, [&](int r, int rows) {
            with_rows<kMostRows>(rows, [&]<int R>() __attribute__((always_inline)) {
                score_page<R>(in, p, r == 0, row + r, scores + r * kSplitTokens + (in.first + p) * kPageTokens - start);
            });
        });
    for (int r = 0; r < n; r++)
        soften_row(in, scores + r * kSplitTokens, lo[r] - start, hi[r] - start, w.scale * w.quant[row + r]->d,
                   w.out[row + r], weights[r]);
    in_blocks(n, kMostRows,
              [&](int r, int rows) { weigh_block(in, rows, lo + r, hi + r, weights + r, w.out + row + r); });
}

static void attend_split(const AttendSplit& w) {
    each_run(w, [&](int row, int n, const int* lo, const int* hi) { attend_rows(w, row, n, lo, hi); });
}

// --- writing -----------------------------------------------------------------------------------------------------

// The largest size of n values; NaN where one is NaN or infinite.
HR_INLINE float size_of(const float* x, int n) {
    VF most = zero(), tainted = zero();
    for (int i = 0; i < n; i += 16) {
        const VF v = rows::load_part(x + i, n - i);
        most = ::max(abs(v), most);
        tainted = tainted + rows::taint(v);
    }
    return any_nan(tainted) ? __builtin_nanf("") : largest(most);
}

HR_INLINE float from_half(uint16_t h) {
    const uint16_t halves[16] = {h};
    float values[16];
    store(values, load_half(halves));
    return values[0];
}

// Quants of n values and zeros up to a whole vector; returns their scale: the least half from amax / 127 on.
static uint16_t quantize_head(const float* x, int n, int8_t* q) {
    const float amax = size_of(x, n);
    uint16_t scale = 0;
    float inverse = 0;
    if (!(amax < kLeast)) {
        scale = to_half(amax / 127.0f);
        if (from_half(scale) < amax / 127.0f) scale++;
        if (scale < 0x7c00)
            inverse = 1.0f / from_half(scale);
        else
            scale = 0x7e00;
    }
    for (int i = 0; i < n; i += 16)
        store_s8(q + i, inverse > 0 ? round_int(rows::load_part(x + i, n - i) * set1(inverse)) : zeroi());
    return scale;
}

static void write_kv(const float* k, const float* v, int head_dim, int slot, uint8_t* page) {
    alignas(64) int8_t q[kMaxHeadDim];
    const int groups = headrace::quad_groups(head_dim), width = headrace::value_width(head_dim);
    uint8_t* values = page + headrace::key_bytes(head_dim, KvFormat::Int8);
    const uint16_t key_scale = quantize_head(k, head_dim, q);
    for (int g = 0; g < groups; g++) {
        const int32_t centred = lin::int_at(q + 4 * g) ^ (int32_t)0x80808080;
        memcpy(page + (g * kPageTokens + slot) * 4, &centred, 4);
    }
    memcpy(page + groups * kPageTokens * 4 + 2 * slot, &key_scale, 2);
    const uint16_t value_scale = quantize_head(v, head_dim, q);
    int8_t* value = (int8_t*)values + (slot / 4 * 4 * width + slot % 4);
    for (int i = 0; i < width; i++) value[4 * i] = q[i];
    memcpy(values + kPageTokens * width + 2 * slot, &value_scale, 2);
}

static void quantize_query(const float* x, int head_dim, QuantQuery& out) {
    const float amax = size_of(x, head_dim), most = 127 * 128;
    const bool some = amax >= kLeast;  // not NaN
    out.d = amax < kLeast ? 0.0f : amax / most;
    VI highs = zeroi(), lows = zeroi();
    for (int i = 0; i < head_dim; i += 16) {
        const VF v = rows::load_part(x + i, head_dim - i);
        const VI n = some ? round_int(v * set1(most / amax)) : zeroi();
        const VI high = sar<7>(n + seti(64)), low = n - shl<7>(high);
        store_s8(out.high + i, high);
        store_s8(out.low + i, low);
        highs = highs + high;
        lows = lows + low;
    }
    out.high_sum = sum_ints(highs);
    out.low_sum = sum_ints(lows);
}

}  // namespace quant
}  // namespace
