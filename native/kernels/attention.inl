// Attention for one split of 256 positions: scores, softmax and the weighted sum of values, over f16 and bf16 pages
// (attention_int8.inl: over int8 pages).
// Owes the same bits for a query row whoever shares its tile: lanes are keys for scores (one fma chain in ascending d)
// and columns for values (one fma chain in ascending position); what a row does not see
// changes none of its bits.
#pragma once
#include "../attention.h"

namespace {

using headrace::AttendSplit;
using headrace::kMaxHeadDim;
using headrace::kPageTokens;
using headrace::kSplitTokens;
using headrace::kTileRows;
using headrace::KvFormat;

constexpr int kBlocksAhead = 2;  // keys, or values, of a page that are asked for ahead, into the second cache

// Rows, vectors of columns, and pages of keys that are worked on at once.
#if defined(HEADRACE_AVX512)
constexpr int kRows = 6, kColumns = 4, kPages = 2;
#elif defined(HEADRACE_AVX2) || defined(HEADRACE_NEON)
constexpr int kRows = 2, kColumns = 2, kPages = 1;
#else
constexpr int kRows = 1, kColumns = 1, kPages = 1;
#endif

HR_INLINE int least(int a, int b) { return a < b ? a : b; }
HR_INLINE int most(int a, int b) { return a > b ? a : b; }

// float32 to IEEE half: to nearest, ties to even, whatever the rounding and denormal modes; a NaN stays one.
HR_INLINE uint16_t to_half(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    const uint32_t sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a >= 0x47800000) return (uint16_t)(sign | (a > 0x7f800000 ? 0x7e00 : 0x7c00));  // 65536 and beyond, NaN
    if (a >= 0x38800000)
        return (uint16_t)(sign | ((a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13));  // may round to inf
    if (a < 0x33000000) return (uint16_t)sign;                                         // at most half of the smallest
    const uint32_t m = (a & 0x7fffff) | 0x800000, shift = 126 - (a >> 23), half = 1u << (shift - 1);
    return (uint16_t)(sign | ((m + half - 1 + ((m >> shift) & 1)) >> shift));
}

// float32 to bf16: to nearest, ties to even; a NaN stays one.
HR_INLINE uint16_t to_brain(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

// Keys and values in two bytes: how they are read, and how a float32 is rounded to them.
struct HalfKv {
    static constexpr KvFormat kFormat = KvFormat::F16;
    HR_INLINE VF load(const uint16_t* p) { return load_half(p); }
    HR_INLINE uint16_t round(float x) { return to_half(x); }
};
struct BrainKv {
    static constexpr KvFormat kFormat = KvFormat::BF16;
    HR_INLINE VF load(const uint16_t* p) { return load_bf16(p); }
    HR_INLINE uint16_t round(float x) { return to_brain(x); }
};

// A split's keys and values as the stream that its rows read: K of each page, then V of each, then what comes next.
struct Stream {
    const AttendSplit& work;
    size_t key_bytes;
    int first, pages;  // of the sequence's table
    const uint8_t* keys(int i) const { return work.cache + size_t(work.pages[first + i]) * work.page_stride; }
    const uint8_t* values(int i) const { return keys(i) + key_bytes; }
    const uint8_t* block(int i) const {
        if (i < pages) return keys(i);
        if (i < 2 * pages) return values(i - pages);
        const uint8_t* next = work.next.page[i - 2 * pages];
        return next ? next : keys(0);
    }
};

// f(R) for R = rows, 1 to `Most`, as a constant
template <int Most, class G>
HR_INLINE void with_rows(int rows, G f) {
    if constexpr (Most > 1)
        if (rows < Most) return with_rows<Most - 1>(rows, f);
    f.template operator()<Most>();
}

// Calls f(first row, rows) for `rows` in blocks of nearly equal size, at most `most`.
template <class F>
HR_INLINE void in_blocks(int rows, int most, F f) {
    const int n = (rows + most - 1) / most;
    for (int i = 0; i < n; i++) f(rows * i / n, rows * (i + 1) / n - rows * i / n);
}

// scores[r][0 .. 32 P - 1] = q_r . K of P pages
template <class Kv, int R, int P>
static void score_pages(const Stream& in, int page, bool fetch, int row, float* scores) {
    VF s[R][2 * P];
    const float* x[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        x[r] = in.work.q[row + r];
#pragma GCC unroll 4
        for (int i = 0; i < 2 * P; i++) s[r][i] = zero();
    }
    const uint16_t *keys[P], *ahead[P];
    for (int p = 0; p < P; p++) {
        keys[p] = (const uint16_t*)in.keys(page + p);
        ahead[p] = (const uint16_t*)in.block(page + p + (fetch ? kBlocksAhead : 0));
    }
    for (int d = 0; d < in.work.head_dim; d++) {
        VF k[2 * P];
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) {
            k[2 * p] = Kv::load(keys[p] + kPageTokens * d);
            k[2 * p + 1] = Kv::load(keys[p] + kPageTokens * d + 16);
            prefetch_far(ahead[p] + kPageTokens * d);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const VF y = set1(x[r][d]);
#pragma GCC unroll 4
            for (int i = 0; i < 2 * P; i++) s[r][i] = fma(y, k[i], s[r][i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * P; i++) store(scores + r * kSplitTokens + 16 * i, s[r][i]);
}

template <class Kv, int R>
static void score_rows(const Stream& in, int page, int pages, bool fetch, int row, float* scores) {
    if constexpr (kPages == 2)
        if (pages == 2) return score_pages<Kv, R, 2>(in, page, fetch, row, scores);
    for (int p = 0; p < pages; p++) score_pages<Kv, R, 1>(in, page + p, fetch, row, scores + p * kPageTokens);
}

HR_INLINE VF capped(VF x, float cap) {  // cap * tanh(x / cap), tanh(y) = 1 - 2 / (exp(2 y) + 1)
    const VF e = exp(x * set1(2.0f / cap));
    return set1(cap) * (set1(1.0f) - set1(2.0f) / (e + set1(1.0f)));
}

// exp(x) of x <= 0, in fewer steps and with the same bits.
HR_INLINE VF exp_down(VF x) {
    const VF c = ::max(set1(-87.33654f), x);
    const VI n = round_int(c * set1(1.44269504f));
    return select_less(x, set1(-87.33654f), zero(), exp_near(c, n) * from_bits(shl<23>(n + seti(127))));
}

// Scores of positions lo .. hi - 1 (relative to the split) become weights. Element i belongs to lane i mod 16; those
// outside weigh exactly 0.
static void soften(float* s, int lo, int hi, float scale, float softcap, float* max, float* sum) {
    static constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const VF none = set1(-__builtin_inff()), lanes = load(kLanes);
    const int from = lo / 16 * 16;
    VF most = none;
    for (int t = from; t < hi; t += 16) {
        VF x = load(s + t) * set1(scale);
        if (softcap != 0) x = capped(x, softcap);
        if (t < lo) x = select_less(lanes, set1(float(lo - t)), none, x);
        if (t + 16 > hi) x = select_less(lanes, set1(float(hi - t)), x, none);
        store(s + t, x);
        most = ::max(x, most);
    }
    const float top = max_lanes(most);
    VF total = zero();
    for (int t = from; t < hi; t += 16) {
        const VF e = exp_down(load(s + t) - set1(top));
        total = total + e;
        store(s + t, e);
    }
    *max = top;
    *sum = sum_lanes(total);
}

// out[r][16 C columns from `column` on] += sum over positions from .. to - 1 of weights[r][position] * V
template <class Kv, int R, int C>
static void weigh(const Stream& in, int column, const float* weights, int from, int to, float* const* out) {
    const int width = headrace::value_width(in.work.head_dim);
    VF o[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) o[r][c] = load(out[r] + column + 16 * c);
    for (int t = from; t < to;) {
        const int page = t / kPageTokens, end = least(to, (page + 1) * kPageTokens);
        const size_t skip = size_t(t % kPageTokens) * width + column;
        const uint16_t* v = (const uint16_t*)in.values(page - in.first) + skip;
        const uint16_t* ahead = (const uint16_t*)in.block(in.pages + page - in.first + kBlocksAhead) + skip;
        const float* p = weights + t % kSplitTokens;
        for (; t < end; t++, v += width, ahead += width, p++) {
            VF x[C];
            for (int c = 0; c < C; c++) x[c] = Kv::load(v + 16 * c);
            for (int c = 0; c < C; c += 2) prefetch_far(ahead + 16 * c);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const VF y = set1(p[r * kSplitTokens]);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) o[r][c] = fma(y, x[c], o[r][c]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(out[r] + column + 16 * c, o[r][c]);
}

template <class Kv, int R>
static void weigh_rows(const Stream& in, const float* weights, int from, int to, float* const* out) {
    const int width = headrace::value_width(in.work.head_dim);
    int column = 0;
    if constexpr (kColumns >= 4)
        for (; column + 64 <= width; column += 64) weigh<Kv, R, 4>(in, column, weights, from, to, out);
    if constexpr (kColumns >= 2)
        for (; column + 32 <= width; column += 32) weigh<Kv, R, 2>(in, column, weights, from, to, out);
    for (; column < width; column += 16) weigh<Kv, R, 1>(in, column, weights, from, to, out);
}

// The weighted sums of n rows, none of which sees nothing: each stretch of positions for the rows that see it.
template <class Kv>
static void weigh_block(const Stream& in, int n, const int* lo, const int* hi, const float* weights,
                        float* const* out) {
    const int width = headrace::value_width(in.work.head_dim);
    for (int r = 0; r < n; r++)
        for (int i = 0; i < width; i++) out[r][i] = 0;
    for (int a = 0, b = 0, t = lo[0]; a < n;) {  // rows a .. b - 1 see position t
        while (b < n && lo[b] <= t) b++;
        const int to = b < n ? least(hi[a], lo[b]) : hi[a];
        with_rows<kRows>(b - a, [&]<int R>() __attribute__((always_inline)) {
            weigh_rows<Kv, R>(in, weights + a * kSplitTokens, t, to, out + a);
        });
        t = to;
        while (a < b && hi[a] <= t) a++;
        if (a == b && b < n) t = lo[b];
    }
}

// The rows of a split as far as they see anything of it, in runs of such.
template <class AttendRows>
HR_INLINE void each_run(const AttendSplit& w, AttendRows attend_rows) {
    const int start = w.split * kSplitTokens, end = start + kSplitTokens;
    int lo[kTileRows], hi[kTileRows];
    for (int r = 0; r < w.rows; r++) {
        lo[r] = most(w.lo[r], start);
        hi[r] = least(w.hi[r], end);
    }
    for (int row = 0; row < w.rows;) {
        int n = 0;
        while (row + n < w.rows && lo[row + n] < hi[row + n]) n++;
        if (n) attend_rows(row, n, lo + row, hi + row);
        row += most(n, 1);
    }
}

HR_INLINE Stream stream_of(const AttendSplit& w, KvFormat format, int lo, int hi) {
    const int first = lo / kPageTokens, last = (hi + kPageTokens - 1) / kPageTokens;
    return {w, headrace::key_bytes(w.head_dim, format), first, last - first};
}

// n rows of the work from `row` on, none of which sees nothing; lo, hi: what each sees of the split.
template <class Kv>
static void attend_rows(const AttendSplit& w, int row, int n, const int* lo, const int* hi) {
    alignas(64) float scores[kTileRows * kSplitTokens];
    const int start = w.split * kSplitTokens, width = headrace::value_width(w.head_dim);
    const Stream in = stream_of(w, Kv::kFormat, lo[0], hi[n - 1]);
    for (int p = 0; p < in.pages; p += kPages)
        in_blocks(n, kRows, [&](int r, int rows) {
            with_rows<kRows>(rows, [&]<int R>() __attribute__((always_inline)) {
                score_rows<Kv, R>(in, p, least(kPages, in.pages - p), r == 0, row + r,
                                  scores + r * kSplitTokens + ((in.first + p) * kPageTokens - start));
            });
        });
    for (int r = 0; r < n; r++) {
        float* out = w.out[row + r];
        soften(scores + r * kSplitTokens, lo[r] - start, hi[r] - start, w.scale, w.softcap, out + width,
               out + width + 1);
    }
    in_blocks(n, kRows, [&](int r, int rows) {
        weigh_block<Kv>(in, rows, lo + r, hi + r, scores + r * kSplitTokens, w.out + row + r);
    });
}

template <class Kv>
static void attend_split(const AttendSplit& w) {
    each_run(w, [&](int row, int n, const int* lo, const int* hi) { attend_rows<Kv>(w, row, n, lo, hi); });
}

// Adds a later split's result to what the earlier ones gave, both as AttendSplit::out has them; n: columns, a multiple
// of 16.
static void attend_merge(float* all, const float* part, int n) {
    float top[16], a[16], b[16];
    const VF m = ::max(set1(all[n]), set1(part[n]));
    store(top, m);
    const VF old = exp(set1(all[n]) - m), now = exp(set1(part[n]) - m);
    store(a, old);
    store(b, now);
    for (int i = 0; i < n; i += 16) store(all + i, fma(load(part + i), now, load(all + i) * old));
    all[n + 1] = __builtin_fmaf(part[n + 1], b[0], all[n + 1] * a[0]);
    all[n] = top[0];
}

static void attend_finish(const float* all, int head_dim, float* out) {
    const VF sum = set1(all[headrace::value_width(head_dim) + 1]);
    int i = 0;
    for (; i + 16 <= head_dim; i += 16) store(out + i, load(all + i) / sum);
    if (i < head_dim) store_some(out + i, load(all + i) / sum, head_dim - i);
}

template <class Kv>
static void write_kv(const float* k, const float* v, int head_dim, int slot, uint8_t* page) {
    uint16_t* keys = (uint16_t*)page + slot;
    uint16_t* values =
        (uint16_t*)(page + headrace::key_bytes(head_dim, Kv::kFormat)) + size_t(slot) * headrace::value_width(head_dim);
    for (int i = 0; i < head_dim; i++) {
        keys[i * kPageTokens] = Kv::round(k[i]);
        values[i] = Kv::round(v[i]);
    }
}

}  // namespace

#include "attention_int8.inl"

namespace {

static void fill_attention(headrace::KernelTable& t) {
    const auto f16 = static_cast<int>(KvFormat::F16), bf16 = static_cast<int>(KvFormat::BF16),
               int8 = static_cast<int>(KvFormat::Int8);
    t.attend_split[f16] = attend_split<HalfKv>;
    t.attend_split[bf16] = attend_split<BrainKv>;
    t.attend_split[int8] = quant::attend_split;
    t.quantize_query = quant::quantize_query;
    t.attend_merge = attend_merge;
    t.attend_finish = attend_finish;
    t.write_kv[f16] = write_kv<HalfKv>;
    t.write_kv[bf16] = write_kv<BrainKv>;
    t.write_kv[int8] = quant::write_kv;
}

}  // namespace
