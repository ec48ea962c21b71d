// Attention for one split of 256 positions: scores, softmax and the weighted sum of values, in float32 over f16 pages.
// Owes the same bits for a query row whoever shares its tile: lanes are keys for scores (one fma chain in ascending d)
// and columns for values (one fma chain in ascending position); a row never reads a key or value that it does not see.
#pragma once
#include "../attention.h"

namespace {

using headrace::AttendSplit;
using headrace::kMaxHeadDim;
using headrace::kPageTokens;
using headrace::kSplitTokens;
using headrace::kTileRows;

#if defined(HEADRACE_AVX512)
constexpr int kScoreRows = 8, kWideColumns = 4,
              kWideRows = 6;  // rows at once; column vectors at once, up to kWideRows rows
#elif defined(HEADRACE_AVX2)
constexpr int kScoreRows = 2, kWideColumns = 2, kWideRows = 2;
#else
constexpr int kScoreRows = 1, kWideColumns = 1, kWideRows = 1;
#endif

HR_INLINE const uint8_t* page_of(const AttendSplit& w, int page) {
    return w.cache + size_t(w.pages[page]) * w.page_stride;
}

// scores[r][0 .. 31] = q_r . K of a page. q: [d][R]
template <int R>
static void score_page(const uint16_t* keys, const uint16_t* next, int head_dim, const float* q, float* scores) {
    VF a[R], b[R];
    for (int r = 0; r < R; r++) a[r] = b[r] = zero();
    for (int d = 0; d < head_dim; d++, q += R) {
        const VF lo = load_half(keys + kPageTokens * d), hi = load_half(keys + kPageTokens * d + 16);
        prefetch(next + kPageTokens * d);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const VF x = set1(q[r]);
            a[r] = fma(x, lo, a[r]);
            b[r] = fma(x, hi, b[r]);
        }
    }
    for (int r = 0; r < R; r++) {
        store(scores + r * kSplitTokens, a[r]);
        store(scores + r * kSplitTokens + 16, b[r]);
    }
}

template <int R>
static void score_rows(const AttendSplit& w, int row, int first_page, int last_page, float* scores) {
    float q[kMaxHeadDim * R];
    const int base = w.split * (kSplitTokens / kPageTokens);
    for (int d = 0; d < w.head_dim; d++)
        for (int r = 0; r < R; r++) q[d * R + r] = w.q[row + r][d];
    for (int p = first_page; p < last_page; p++) {
        const uint8_t* next = page_of(w, p + 2 < last_page ? p + 2 : p);
        score_page<R>((const uint16_t*)page_of(w, p), (const uint16_t*)next, w.head_dim, q,
                      scores + (p - base) * kPageTokens);
    }
}

using ScoreRows = void (*)(const AttendSplit&, int, int, int, float*);
static constexpr ScoreRows kScore[] = {
    nullptr,       score_rows<1>,
#if defined(HEADRACE_AVX512) || defined(HEADRACE_AVX2)
    score_rows<2>,
#endif
#if defined(HEADRACE_AVX512)
    score_rows<3>, score_rows<4>, score_rows<5>, score_rows<6>, score_rows<7>, score_rows<8>,
#endif
};

HR_INLINE VF capped(VF x, float cap) {  // cap * tanh(x / cap), tanh(y) = 1 - 2 / (exp(2 y) + 1)
    const VF e = exp(x * set1(2.0f / cap));
    return set1(cap) * (set1(1.0f) - set1(2.0f) / (e + set1(1.0f)));
}

// Scores of positions from .. to - 1 (multiples of 16, relative to the split) become weights; those outside lo .. hi -
// 1 become exactly 0. Element i belongs to lane i mod 16.
static void soften(float* s, int from, int to, int lo, int hi, float scale, float softcap, float* max, float* sum) {
    const VF by = set1(scale);
    VF most = set1(-__builtin_inff());
    for (int t = from; t < to; t += 16) {
        VF x = load(s + t) * by;
        if (softcap != 0) x = capped(x, softcap);
        store(s + t, x);
        if (t < lo || t + 16 > hi) {
            for (int i = t; i < t + 16; i++)
                if (i < lo || i >= hi) s[i] = -__builtin_inff();
            x = load(s + t);
        }
        most = ::max(x, most);
    }
    const float top = max_lanes(most);
    VF total = zero();
    for (int t = from; t < to; t += 16) {
        VF e = exp(load(s + t) - set1(top));
        if (t < lo || t + 16 > hi) {
            float each[16];
            store(each, e);
            for (int i = 0; i < 16; i++)
                if (t + i < lo || t + i >= hi) each[i] = 0;
            e = load(each);
        }
        total = total + e;
        store(s + t, e);
    }
    *max = top;
    *sum = sum_lanes(total);
}

// out[r][16 C columns from `column` on] += sum over positions from .. to - 1 of weights[r][position] * V
template <int R, int C>
static void weigh(const AttendSplit& w, int column, const float* weights, int from, int to, float* out) {
    const int width = headrace::value_width(w.head_dim), start = w.split * kSplitTokens;
    const size_t keys = headrace::key_bytes(w.head_dim);
    VF o[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) o[r][c] = load(out + r * width + column + 16 * c);
    for (int t = from; t < to;) {
        const int page = t / kPageTokens, end = to < (page + 1) * kPageTokens ? to : (page + 1) * kPageTokens;
        const uint16_t* v = (const uint16_t*)(page_of(w, page) + keys) + size_t(t % kPageTokens) * width + column;
        const uint8_t* next =
            page_of(w, end + kPageTokens < to ? page + 2 : page) + keys + size_t(t % kPageTokens) * width * 2;
        const float* p = weights + (t - start);
        for (; t < end; t++, v += width, p++, next += 2 * width) {
            VF x[C];
            for (int c = 0; c < C; c++) x[c] = load_half(v + 16 * c);
            if (column == 0)
                for (int i = 0; i < 2 * width; i += 64) prefetch(next + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const VF y = set1(p[r * kSplitTokens]);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) o[r][c] = fma(y, x[c], o[r][c]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * width + column + 16 * c, o[r][c]);
}

template <int R>
static void weigh_rows(const AttendSplit& w, const float* weights, int from, int to, float* out) {
    const int width = headrace::value_width(w.head_dim);
    int column = 0;
    if constexpr (R <= kWideRows && kWideColumns >= 4)
        for (; column + 64 <= width; column += 64) weigh<R, 4>(w, column, weights, from, to, out);
    if constexpr (kWideColumns >= 2)
        for (; column + 32 <= width; column += 32) weigh<R, 2>(w, column, weights, from, to, out);
    for (; column < width; column += 16) weigh<R, 1>(w, column, weights, from, to, out);
}

using WeighRows = void (*)(const AttendSplit&, const float*, int, int, float*);
static constexpr WeighRows kWeigh[] = {
    nullptr,       weigh_rows<1>,
#if defined(HEADRACE_AVX512) || defined(HEADRACE_AVX2)
    weigh_rows<2>,
#endif
#if defined(HEADRACE_AVX512)
    weigh_rows<3>, weigh_rows<4>, weigh_rows<5>, weigh_rows<6>, weigh_rows<7>, weigh_rows<8>,
#endif
};

HR_INLINE int least(int a, int b) { return a < b ? a : b; }
HR_INLINE int most(int a, int b) { return a > b ? a : b; }

// Rows row .. row + n - 1 of the work; lo, hi: what each sees of this split.
static void attend_rows(const AttendSplit& w, int row, int n, const int* lo, const int* hi, float* scores) {
    const int start = w.split * kSplitTokens, width = headrace::value_width(w.head_dim);
    int first = lo[row], last = hi[row], from = lo[row], to = hi[row];  // seen by any row; by all rows
    for (int r = row + 1; r < row + n; r++) {
        first = least(first, lo[r]);
        last = most(last, hi[r]);
        from = most(from, lo[r]);
        to = least(to, hi[r]);
    }
    if (to < from) to = from = last;
    const int first_page = first / kPageTokens, last_page = (last + kPageTokens - 1) / kPageTokens;
    kScore[n](w, row, first_page, last_page, scores);
    for (int r = row; r < row + n; r++)
        soften(scores + (r - row) * kSplitTokens, first_page * kPageTokens - start, last_page * kPageTokens - start,
               lo[r] - start, hi[r] - start, w.scale, w.softcap, w.max + r, w.sum + r);
    float* out = w.out + size_t(row) * width;
    for (int i = 0; i < n * width; i++) out[i] = 0;
    for (int r = 0; r < n; r++)  // before, and after, what all see
        kWeigh[1](w, scores + r * kSplitTokens, lo[row + r], least(from, hi[row + r]), out + r * width);
    kWeigh[n](w, scores, from, to, out);
    for (int r = 0; r < n; r++)
        kWeigh[1](w, scores + r * kSplitTokens, most(to, lo[row + r]), hi[row + r], out + r * width);
}

static void attend_split(const AttendSplit& w) {
    alignas(64) float scores[kScoreRows * kSplitTokens];
    const int start = w.split * kSplitTokens, end = start + kSplitTokens, width = headrace::value_width(w.head_dim);
    int lo[kTileRows], hi[kTileRows];
    for (int r = 0; r < w.rows; r++) {
        lo[r] = most(w.lo[r], start);
        hi[r] = least(w.hi[r], end);
    }
    for (int row = 0; row < w.rows;) {
        if (lo[row] >= hi[row]) {
            w.max[row] = -__builtin_inff();
            w.sum[row] = 0;
            for (int i = 0; i < width; i++) w.out[size_t(row) * width + i] = 0;
            row++;
            continue;
        }
        int n = 1;
        while (n < kScoreRows && row + n < w.rows && lo[row + n] < hi[row + n]) n++;
        attend_rows(w, row, n, lo, hi, scores);
        row += n;
    }
}

// Adds a later split (max, sum, out) to what the earlier ones gave (all_max, all_sum, all); n columns, a multiple
// of 16.
static void attend_merge(float* all, float* all_max, float* all_sum, const float* out, float max, float sum, int n) {
    float top[16], a[16], b[16];
    const VF m = ::max(set1(*all_max), set1(max));
    store(top, m);
    const VF old = exp(set1(*all_max) - m), now = exp(set1(max) - m);
    store(a, old);
    store(b, now);
    for (int i = 0; i < n; i += 16) store(all + i, fma(load(out + i), now, load(all + i) * old));
    *all_sum = __builtin_fmaf(sum, b[0], *all_sum * a[0]);
    *all_max = top[0];
}

static void attend_finish(const float* all, float sum, int n, float* out) {
    int i = 0;
    for (; i + 16 <= n; i += 16) store(out + i, load(all + i) / set1(sum));
    if (i < n) store_some(out + i, load(all + i) / set1(sum), n - i);
}

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

static void write_kv(const float* k, const float* v, int head_dim, int slot, uint8_t* page) {
    uint16_t* keys = (uint16_t*)page + slot;
    uint16_t* values =
        (uint16_t*)(page + headrace::key_bytes(head_dim)) + size_t(slot) * headrace::value_width(head_dim);
    for (int i = 0; i < head_dim; i++) {
        keys[i * kPageTokens] = to_half(k[i]);
        values[i] = to_half(v[i]);
    }
}

static void fill_attention(headrace::KernelTable& t) {
    t.attend_split = attend_split;
    t.attend_merge = attend_merge;
    t.attend_finish = attend_finish;
    t.write_kv = write_kv;
}

}  // namespace
