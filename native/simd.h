// Sixteen lanes, four ways, one file each under simd/: AVX-512 (one register), AVX2 (two), NEON (four), plain arrays.
// Every operation gives the same bits in all of them: only IEEE adds, multiplies, explicit fused multiply-adds, exact
// integer work and bit moves are offered. Included by one translation unit per instruction set, inside an anonymous
// namespace: nothing here may be shared code that the linker could merge (an AVX-512 copy must never serve a machine
// without it).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 intrinsics set it off (GCC bug 105593)
#endif

#define HR_INLINE static inline __attribute__((always_inline))

namespace {

// While it lives, denormal inputs and results count as zero, which is how bf16 dot instructions compute.
#if defined(__x86_64__)
struct FlushDenormals {
    static constexpr unsigned kBits = 0x8040;  // FTZ, DAZ
    unsigned before = __builtin_ia32_stmxcsr();
    FlushDenormals() {
        if ((before & kBits) != kBits) __builtin_ia32_ldmxcsr(before | kBits);
    }
    ~FlushDenormals() {
        if ((before & kBits) != kBits) __builtin_ia32_ldmxcsr(before);
    }
};
#elif defined(__aarch64__)
struct FlushDenormals {
    static constexpr uint64_t kBit = 1ull << 24;  // FPCR.FZ
    uint64_t before;
    FlushDenormals() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(before));
        __asm__ volatile("msr fpcr, %0" ::"r"(before | kBit));
    }
    ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" ::"r"(before)); }
};
#else
struct FlushDenormals {
    FlushDenormals() {}
    ~FlushDenormals() {}
};
#endif

}  // namespace

#if defined(HEADRACE_AVX512)
#include "simd/avx512.h"
#elif defined(HEADRACE_AVX2)
#include "simd/avx2.h"
#elif defined(HEADRACE_NEON)
#include "simd/neon.h"
#else
#include "simd/scalar.h"
#endif

namespace {

// Sums and extremes over the 16 lanes by one fixed tree: 16 -> 8 -> 4 -> 2 -> 1.
#if defined(HEADRACE_AVX512) || defined(HEADRACE_AVX2)
HR_INLINE float sum_lanes(VF a) {
    const __m256 e = halves(a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
HR_INLINE float max_lanes(VF a) {
    const __m256 e = halves(a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
#else
HR_INLINE float sum_lanes(VF a) {
    float t[16];
    store(t, a);
    for (int n = 8; n; n >>= 1)
        for (int i = 0; i < n; i++) t[i] = t[i] + t[i + n];
    return t[0];
}
HR_INLINE float max_lanes(VF a) {
    float t[16];
    store(t, a);
    for (int n = 8; n; n >>= 1)
        for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
    return t[0];
}
#endif
// Loads n < 16 values, the rest `fill`; stores the first n.
HR_INLINE VF load_some(const float* p, int n, float fill) {
    float t[16];
    for (int i = 0; i < 16; i++) t[i] = i < n ? p[i] : fill;
    return load(t);
}
HR_INLINE void store_some(float* p, VF a, int n) {
    float t[16];
    store(t, a);
    for (int i = 0; i < n; i++) p[i] = t[i];
}

// exp(x) / 2^n for n = x / log 2, rounded: Cody-Waite reduction, degree-6 polynomial, all in explicit fma.
HR_INLINE VF exp_near(VF x, VI n) {
    VF k = to_float(n);
    VF r = fnma(k, set1(0.693145752f), x);
    r = fnma(k, set1(1.42860677e-6f), r);
    VF p = set1(1.0f / 720);
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    return fma(p, r, set1(1.0f));
}

// exp(x): exactly 0 below -87.33654 (so a masked score weighs nothing), +inf above 88.72283; NaN stays.
HR_INLINE VF exp(VF x) {
    VF c = min(set1(88.72283f), max(set1(-87.33654f), x));  // max/min give their second operand when one is NaN
    VI n = round_int(c * set1(1.44269504f));
    VF p = exp_near(c, n);
    VI half = sar<1>(n);  // 2^n in two factors, so that neither overflows
    VF a = from_bits(shl<23>(half + seti(127))), b = from_bits(shl<23>(n - half + seti(127)));
    VF y = select_less(x, set1(-87.33654f), zero(), p * a * b);
    return select_less(set1(88.72283f), x, set1(__builtin_inff()), y);
}

}  // namespace
