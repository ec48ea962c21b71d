// What is done to one row at a time: norm, preparation of a linear's input, activations, rope, exp. Sums run in 16
// lanes joined by one tree; everything else is lane by lane, so a row's tail is computed exactly like its middle.
#pragma once

namespace {
namespace rows {

using headrace::ActivationBuffers;
using headrace::Activations;

HR_INLINE VF load_part(const float* p, int n) { return n >= 16 ? load(p) : load_some(p, n, 0.0f); }
HR_INLINE void store_part(float* p, VF a, int n) {
    if (n >= 16)
        store(p, a);
    else
        store_some(p, a, n);
}

// out[i] = f(x[i]); y may be x.
template <class F>
HR_INLINE void each(const float* x, int n, float* out, F f) {
    for (int i = 0; i < n; i += 16) store_part(out + i, f(load_part(x + i, n - i)), n - i);
}

template <class F>
HR_INLINE void each_pair(const float* x, const float* y, int n, float* out, F f) {
    for (int i = 0; i < n; i += 16) store_part(out + i, f(load_part(x + i, n - i), load_part(y + i, n - i)), n - i);
}

// --- norm --------------------------------------------------------------------------------------------------

// 1 / the root of the mean square
HR_INLINE VF inverse_size(const float* x, int n, float eps) {
    VF squares = zero();
    for (int i = 0; i < n; i += 16) {
        const VF v = load_part(x + i, n - i);
        squares = fma(v, v, squares);
    }
    const float mean = sum_lanes(squares) / (float)n;
    // Values whose squares overflow must not become zeros in silence: NaN shows in the row's status.
    return set1(mean <= 3.4028235e38f ? 1.0f / __builtin_sqrtf(mean + eps) : __builtin_nanf(""));
}

static void norm(const float* x, const float* weight, int n, float eps, float* out) {
    const VF r = inverse_size(x, n, eps);
    each_pair(x, weight, n, out, [r](VF v, VF w) { return v * r * w; });
}

// --- preparation of a linear's input -----------------------------------------------------------------------

// NaN where a value is NaN or infinite, else a zero.
HR_INLINE VF taint(VF x) { return x * zero(); }

// A block's scale and its inverse. Values below 2^-120 count as zero: the inverse of their scale would overflow. A NaN
// scale makes what was not finite visible in every output; its quants are zeros.
struct Scale {
    float d, inverse;
};
HR_INLINE Scale scale_of(float amax, VF tainted) {
    if (any_nan(tainted)) return {__builtin_nanf(""), 0.0f};
    if (amax < 0x1p-120f) return {0.0f, 0.0f};
    return {amax / 127.0f, 127.0f / amax};
}
HR_INLINE VI quantize(VF x, Scale s) { return s.inverse > 0.0f ? round_int(x * set1(s.inverse)) : zeroi(); }

// get(i): 16 values from the i-th on, zeros beyond the n-th
template <class Get>
HR_INLINE void quantize32(Get get, int n, int row, int column, const Activations& to) {
    int8_t* q = (int8_t*)to.q32 + (size_t)row * to.q_stride + column;
    const size_t at = (size_t)row * to.blocks_stride + column / 32;
    float *d = (float*)to.d32 + at, *s = (float*)to.s32 + at;
    int32_t *sums = (int32_t*)to.sum32 + at, *halves = (int32_t*)to.sum16 + 2 * at;
    for (int b = 0; 32 * b < n; b++) {
        const VF x0 = get(32 * b), x1 = n - 32 * b > 16 ? get(32 * b + 16) : zero();
        const Scale scale = scale_of(largest(max(abs(x0), abs(x1))), taint(x0) + taint(x1));
        const VI q0 = quantize(x0, scale), q1 = quantize(x1, scale);
        store_s8(q + 32 * b, q0);
        store_s8(q + 32 * b + 16, q1);
        d[b] = scale.d;
        halves[2 * b] = sum_ints(q0);
        halves[2 * b + 1] = sum_ints(q1);
        sums[b] = halves[2 * b] + halves[2 * b + 1];
        s[b] = scale.d * (float)sums[b];
    }
}

// To nearest, ties to even; NaN stays one.
HR_INLINE VI to_bf16(VF x) {
    const VI u = bits(x);
    const VI near = shr<16>(u + seti(0x7fff) + (shr<16>(u) & seti(1)));
    return select_nan(x, shr<16>(u) | seti(64), near);
}

template <class Get>
HR_INLINE void round_bf16(Get get, int n, int row, int column, const Activations& to) {
    uint16_t* out = (uint16_t*)to.bf16 + (size_t)row * to.bf16_stride + column;
    int i = 0;
    for (; i + 16 <= n; i += 16) store_u16(out + i, to_bf16(get(i)));
    if (i == n) return;
    uint16_t rest[16];
    store_u16(rest, to_bf16(get(i)));
    for (int k = i; k < (n + 1) / 2 * 2; k++) out[k] = rest[k - i];
}

template <class Get>
HR_INLINE void prepare_what(Get get, int n, int row, int column, const ActivationBuffers& to) {
    if (to.f32) {
        float* out = to.f32 + (size_t)row * to.view.f32_stride + column;
        for (int i = 0; i < n; i += 16) store_part(out + i, get(i), n - i);
    }
    if (to.want_q32) quantize32(get, n, row, column, to.view);
    if (to.want_bf16) round_bf16(get, n, row, column, to.view);
}

static void prepare(const float* x, int n, int row, int column, const ActivationBuffers& to) {
    prepare_what([=](int i) __attribute__((always_inline)) { return load_part(x + i, n - i); }, n, row, column, to);
}

static void norm_into(const float* x, const float* weight, int n, float eps, int row, const ActivationBuffers& to) {
    const VF r = inverse_size(x, n, eps);
    const auto get = [=](int i) __attribute__((always_inline)) {
        return load_part(x + i, n - i) * r * load_part(weight + i, n - i);
    };
    prepare_what(get, n, row, 0, to);
}

// --- activations -------------------------------------------------------------------------------------------

// x / (1 + exp(-k)): x times the logistic of k
HR_INLINE VF times_logistic(VF x, VF k) { return x / (set1(1.0f) + exp(zero() - k)); }

HR_INLINE VF silu(VF x) { return times_logistic(x, x); }

// x/2 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), and (1 + tanh(u)) / 2 is the logistic of 2u
HR_INLINE VF gelu_tanh(VF x) {
    const VF inner = fma(x * x * x, set1(0.044715f), x);
    return times_logistic(x, inner * set1(1.5957691216f));
}

// x/2 erfc(-x / sqrt 2). erfc of a positive number: Abramowitz and Stegun 7.1.26, absolute error 1.5e-7
HR_INLINE VF gelu_erf(VF x) {
    const VF z = abs(x) * set1(0.70710678119f);
    const VF t = set1(1.0f) / fma(z, set1(0.3275911f), set1(1.0f));
    VF p = set1(1.061405429f);
    p = fma(p, t, set1(-1.453152027f));
    p = fma(p, t, set1(1.421413741f));
    p = fma(p, t, set1(-0.284496736f));
    p = fma(p, t, set1(0.254829592f));
    const VF tail = p * t * exp(zero() - z * z) * set1(0.5f);
    return x * select_less(x, zero(), tail, set1(1.0f) - tail);
}

static void glu(const float* gate, const float* up, int n, int activation, float* out) {
    if (activation == 0) each_pair(gate, up, n, out, [](VF g, VF u) { return silu(g) * u; });
    if (activation == 1) each_pair(gate, up, n, out, [](VF g, VF u) { return gelu_tanh(g) * u; });
    if (activation == 2) each_pair(gate, up, n, out, [](VF g, VF u) { return gelu_erf(g) * u; });
}

// Near zero an odd polynomial (coefficients: Cephes, tanhf), further out (1 - e) / (1 + e) with e = exp(-2|x|).
HR_INLINE VF tanh(VF x) {
    const VF s = x * x, size = abs(x);
    VF p = set1(-5.70498872745e-3f);
    p = fma(p, s, set1(2.06390887954e-2f));
    p = fma(p, s, set1(-5.37397155531e-2f));
    p = fma(p, s, set1(1.33314422036e-1f));
    p = fma(p, s, set1(-3.33332819422e-1f));
    const VF near = fma(p * s, x, x);
    const VF e = exp(size * set1(-2.0f));
    const VF far = (set1(1.0f) - e) / (set1(1.0f) + e);
    const VF signed_far = from_bits(bits(far) | (bits(x) & seti(INT32_MIN)));
    return select_less(size, set1(0.625f), near, signed_far);
}

static void softcap(const float* x, float cap, int n, float* out) {
    each(x, n, out, [cap](VF v) { return tanh(v / set1(cap)) * set1(cap); });
}

static void add(const float* x, const float* y, int n, float* out) {
    each_pair(x, y, n, out, [](VF a, VF b) { return a + b; });
}

static void add_rows(float* out, size_t stride, int rows, int columns, const float* bias, const float* more,
                     size_t more_stride) {
    for (int r = 0; r < rows; r++, out += stride, more += more_stride)
        for (int i = 0; i < columns; i += 16) {
            const int n = columns - i;
            VF x = load_part(out + i, n);
            if (bias) x = x + load_part(bias + i, n);
            if (more) x = x + load_part(more + i, n);
            store_part(out + i, x, n);
        }
}

static void scale(const float* x, float factor, int n, float* out) {
    each(x, n, out, [factor](VF v) { return v * set1(factor); });
}

static void exp_each(const float* x, int n, float* out) {
    each(x, n, out, [](VF v) { return exp(v); });
}

// --- rope --------------------------------------------------------------------------------------------------

static void rope(float* x, int heads, int head_dim, int rotary, const float* cos, const float* sin) {
    const int half = rotary / 2;
    for (int h = 0; h < heads; h++, x += head_dim)
        for (int i = 0; i < half; i += 16) {
            const int n = half - i;
            const VF a = load_part(x + i, n), b = load_part(x + half + i, n);
            const VF c = load_part(cos + i, n), s = load_part(sin + i, n);
            store_part(x + i, fnma(b, s, a * c), n);
            store_part(x + half + i, fma(a, s, b * c), n);
        }
}

}  // namespace rows

static void fill_rows(headrace::KernelTable& t) {
    t.norm = rows::norm;
    t.prepare = rows::prepare;
    t.norm_into = rows::norm_into;
    t.glu = rows::glu;
    t.add = rows::add;
    t.add_rows = rows::add_rows;
    t.scale = rows::scale;
    t.softcap = rows::softcap;
    t.rope = rows::rope;
    t.exp = rows::exp_each;
}

}  // namespace
