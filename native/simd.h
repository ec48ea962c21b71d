// Sixteen lanes, three ways: AVX-512 (one register), AVX2 (two), plain arrays. Every operation gives the same bits in
// all of them: only IEEE adds, multiplies, explicit fused multiply-adds, exact integer work and bit moves are offered.
// Included by one translation unit per instruction set, inside an anonymous namespace: nothing here may be shared code
// that the linker could merge (an AVX-512 copy must never serve a machine without it).
#pragma once
#include <cstdint>
#include <cstring>

#if defined(HEADRACE_AVX512) || defined(HEADRACE_AVX2)
#include <immintrin.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 intrinsics set it off (GCC bug 105593)
#endif

#define HR_INLINE static inline __attribute__((always_inline))

namespace {

constexpr int kTreeLanes = 16;

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

#if defined(HEADRACE_AVX512)

struct VF {
    __m512 v;
};  // 16 float32
struct VI {
    __m512i v;
};  // 16 int32
struct VB {
    __m512i v;
};  // 64 bytes

HR_INLINE VF load(const float* p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void store(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE VF set1(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE VF zero() { return {_mm512_setzero_ps()}; }
HR_INLINE VF operator+(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE VF operator-(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE VF operator*(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE VF operator/(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE VF fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a * b + c
HR_INLINE VF fnma(VF a, VF b, VF c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
HR_INLINE VF max(VF a, VF b) { return {_mm512_max_ps(a.v, b.v)}; }                 // b if either is NaN
HR_INLINE VF min(VF a, VF b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE VF abs(VF a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))};
}
HR_INLINE VF sqrt(VF a) { return {_mm512_sqrt_ps(a.v)}; }
HR_INLINE VF to_float(VI a) { return {_mm512_cvtepi32_ps(a.v)}; }
// ties to even
HR_INLINE VI round_int(VF a) { return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
HR_INLINE VI bits(VF a) { return {_mm512_castps_si512(a.v)}; }
HR_INLINE VF from_bits(VI a) { return {_mm512_castsi512_ps(a.v)}; }
HR_INLINE VF load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
HR_INLINE VF load_bf16(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
// 16 pairs of bf16: the first, and the second, of each pair as float32
HR_INLINE VF pair_first(VB a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
HR_INLINE VF pair_second(VB a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32((int)0xffff0000)))};
}

HR_INLINE VI load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void store_int(int32_t* p, VI a) { _mm512_storeu_si512(p, a.v); }
HR_INLINE VI load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
HR_INLINE VI load_s8(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
HR_INLINE VI seti(int32_t x) { return {_mm512_set1_epi32(x)}; }
HR_INLINE VI zeroi() { return {_mm512_setzero_si512()}; }
HR_INLINE VI operator+(VI a, VI b) { return {_mm512_add_epi32(a.v, b.v)}; }
HR_INLINE VI operator-(VI a, VI b) { return {_mm512_sub_epi32(a.v, b.v)}; }
HR_INLINE VI operator*(VI a, VI b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
HR_INLINE VI operator&(VI a, VI b) { return {_mm512_and_si512(a.v, b.v)}; }
HR_INLINE VI operator|(VI a, VI b) { return {_mm512_or_si512(a.v, b.v)}; }
HR_INLINE VI operator^(VI a, VI b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int N>
HR_INLINE VI shl(VI a) {
    return {_mm512_slli_epi32(a.v, N)};
}
// logical
template <int N>
HR_INLINE VI shr(VI a) {
    return {_mm512_srli_epi32(a.v, N)};
}
template <int N>
HR_INLINE VI sar(VI a) {
    return {_mm512_srai_epi32(a.v, N)};
}

HR_INLINE VB load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE VB low_nibbles(VB a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
HR_INLINE VB high_nibbles(VB a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// base | (bits of `plane` shifted by S (left if positive, right if negative) & mask), byte by byte; the mask must hide
// what 16-bit shifts carry across bytes
template <int S>
HR_INLINE VB with_bits(VB base, VB plane, uint8_t mask) {
    __m512i t = S >= 0 ? _mm512_slli_epi16(plane.v, S >= 0 ? S : 0) : _mm512_srli_epi16(plane.v, S < 0 ? -S : 0);
    return {_mm512_ternarylogic_epi32(base.v, t, _mm512_set1_epi8((char)mask), 0xF8)};
}
// acc + sum over the 4 bytes of each lane: unsigned weight byte * signed activation byte; exact
HR_INLINE VI dot4(VI acc, VB w, int32_t a4) { return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(a4))}; }
// acc + sum over the 2 int16 of each lane; exact
HR_INLINE VI dot2(VI acc, VB w, int32_t a2) {
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(w.v, _mm512_set1_epi32(a2)))};
}
// as dot4, for weights of at most 6 bits
HR_INLINE VI dot4_six(VI acc, VB w, int32_t a4) { return dot4(acc, w, a4); }
// as dot4, of w - 128 where kEightsCentred says that this is as cheap; signed bytes of a4 above -128
constexpr bool kEightsCentred = false;
HR_INLINE VI dot4_eight(VI acc, VB w, int32_t a4) { return dot4(acc, w, a4); }
// 32 unsigned bytes as int16
HR_INLINE VB widen_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
// a < b ? yes : no, lane by lane
HR_INLINE VF select_less(VF a, VF b, VF yes, VF no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
HR_INLINE VI select_nan(VF a, VI yes, VI no) {
    return {_mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), no.v, yes.v)};
}
HR_INLINE void store_s8(int8_t* p, VI a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }  // low bytes
// low halves
HR_INLINE void store_u16(uint16_t* p, VI a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
HR_INLINE bool any_nan(VF a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }
HR_INLINE int32_t sum_ints(VI a) { return _mm512_reduce_add_epi32(a.v); }
HR_INLINE float largest(VF a) { return _mm512_reduce_max_ps(a.v); }  // of lanes without NaN
// acc + pairs of bf16 products, the second of each pair first, each a fused multiply-add; exact only while denormals
// are flushed
HR_INLINE VF dot_pairs(VF acc, VB w, uint32_t a2) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32((int32_t)a2))};
}
// into the first cache, or (far) only into the second, which waits for more lines at once
HR_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
HR_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

#elif defined(HEADRACE_AVX2)

struct VF {
    __m256 a, b;
};
struct VI {
    __m256i a, b;
};
struct VB {
    __m256i a, b;
};

#define HR_BOTH(T, op) \
    T { op(x.a, y.a), op(x.b, y.b) }
HR_INLINE VF load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float* p, VF x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
HR_INLINE VF set1(float v) {
    __m256 t = _mm256_set1_ps(v);
    return {t, t};
}
HR_INLINE VF zero() { return set1(0.0f); }
HR_INLINE VF operator+(VF x, VF y) { return HR_BOTH(VF, _mm256_add_ps); }
HR_INLINE VF operator-(VF x, VF y) { return HR_BOTH(VF, _mm256_sub_ps); }
HR_INLINE VF operator*(VF x, VF y) { return HR_BOTH(VF, _mm256_mul_ps); }
HR_INLINE VF operator/(VF x, VF y) { return HR_BOTH(VF, _mm256_div_ps); }
HR_INLINE VF fma(VF x, VF y, VF z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
HR_INLINE VF fnma(VF x, VF y, VF z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
HR_INLINE VF max(VF x, VF y) { return HR_BOTH(VF, _mm256_max_ps); }
HR_INLINE VF min(VF x, VF y) { return HR_BOTH(VF, _mm256_min_ps); }
HR_INLINE VI bits(VF x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
HR_INLINE VF from_bits(VI x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
HR_INLINE VI seti(int32_t v) {
    __m256i t = _mm256_set1_epi32(v);
    return {t, t};
}
HR_INLINE VI zeroi() { return seti(0); }
HR_INLINE VI operator+(VI x, VI y) { return HR_BOTH(VI, _mm256_add_epi32); }
HR_INLINE VI operator-(VI x, VI y) { return HR_BOTH(VI, _mm256_sub_epi32); }
HR_INLINE VI operator*(VI x, VI y) { return HR_BOTH(VI, _mm256_mullo_epi32); }
HR_INLINE VI operator&(VI x, VI y) { return HR_BOTH(VI, _mm256_and_si256); }
HR_INLINE VI operator|(VI x, VI y) { return HR_BOTH(VI, _mm256_or_si256); }
HR_INLINE VI operator^(VI x, VI y) { return HR_BOTH(VI, _mm256_xor_si256); }
template <int N>
HR_INLINE VI shl(VI x) {
    return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
HR_INLINE VI shr(VI x) {
    return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
HR_INLINE VI sar(VI x) {
    return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
HR_INLINE VF abs(VF x) { return from_bits(bits(x) & seti(0x7fffffff)); }
HR_INLINE VF sqrt(VF x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
HR_INLINE VF to_float(VI x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HR_INLINE VI round_int(VF x) {
    return {_mm256_cvtps_epi32(_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)),
            _mm256_cvtps_epi32(_mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
}
HR_INLINE VF load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
HR_INLINE VF load_bf16(const uint16_t* p) {
    return {
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)),
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8))), 16))};
}
HR_INLINE VF pair_first(VB x) { return from_bits(shl<16>(VI{x.a, x.b})); }
HR_INLINE VF pair_second(VB x) { return from_bits(VI{x.a, x.b} & seti((int)0xffff0000)); }
HR_INLINE VI load_int(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
HR_INLINE void store_int(int32_t* p, VI x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
HR_INLINE VI load_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
HR_INLINE VI load_s8(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
HR_INLINE VB load_bytes(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
HR_INLINE VB low_nibbles(VB x) {
    __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
HR_INLINE VB high_nibbles(VB x) {
    __m256i m = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
template <int S>
HR_INLINE __m256i shift16(__m256i t) {
    return S >= 0 ? _mm256_slli_epi16(t, S >= 0 ? S : 0) : _mm256_srli_epi16(t, S < 0 ? -S : 0);
}
template <int S>
HR_INLINE VB with_bits(VB base, VB plane, uint8_t mask) {
    __m256i m = _mm256_set1_epi8((char)mask);
    return {_mm256_or_si256(base.a, _mm256_and_si256(shift16<S>(plane.a), m)),
            _mm256_or_si256(base.b, _mm256_and_si256(shift16<S>(plane.b), m))};
}
// maddubs would saturate for 8-bit weights: widen both sides to int16 by even and odd bytes instead
HR_INLINE __m256i dot4_half(__m256i acc, __m256i w, __m256i a) {
    __m256i we = _mm256_and_si256(w, _mm256_set1_epi16(255)), wo = _mm256_srli_epi16(w, 8);
    __m256i ae = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), ao = _mm256_srai_epi16(a, 8);
    return _mm256_add_epi32(acc, _mm256_add_epi32(_mm256_madd_epi16(we, ae), _mm256_madd_epi16(wo, ao)));
}
HR_INLINE VI dot4(VI acc, VB w, int32_t a4) {
    __m256i a = _mm256_set1_epi32(a4);
    return {dot4_half(acc.a, w.a, a), dot4_half(acc.b, w.b, a)};
}
HR_INLINE VI dot2(VI acc, VB w, int32_t a2) {
    __m256i a = _mm256_set1_epi32(a2);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(w.a, a)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(w.b, a))};
}
HR_INLINE __m256i dot4_six_half(__m256i acc, __m256i w, __m256i a) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
}
HR_INLINE VI dot4_six(VI acc, VB w, int32_t a4) {
    __m256i a = _mm256_set1_epi32(a4);
    return {dot4_six_half(acc.a, w.a, a), dot4_six_half(acc.b, w.b, a)};
}
// |w - 128| * (a with the sign of w - 128): two products are at most 2 * 128 * 127, so nothing saturates
constexpr bool kEightsCentred = true;
HR_INLINE __m256i dot4_eight_half(__m256i acc, __m256i w, __m256i a) {
    const __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
    return dot4_six_half(acc, _mm256_abs_epi8(s), _mm256_sign_epi8(a, s));
}
HR_INLINE VI dot4_eight(VI acc, VB w, int32_t a4) {
    __m256i a = _mm256_set1_epi32(a4);
    return {dot4_eight_half(acc.a, w.a, a), dot4_eight_half(acc.b, w.b, a)};
}
HR_INLINE VB widen_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p + 1))};
}
HR_INLINE VF select_less(VF a, VF b, VF yes, VF no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
}
HR_INLINE VI select_nan(VF a, VI yes, VI no) {
    VF y = from_bits(yes), n = from_bits(no);
    return bits(VF{_mm256_blendv_ps(n.a, y.a, _mm256_cmp_ps(a.a, a.a, _CMP_UNORD_Q)),
                   _mm256_blendv_ps(n.b, y.b, _mm256_cmp_ps(a.b, a.b, _CMP_UNORD_Q))});
}
HR_INLINE bool any_nan(VF x) {
    return _mm256_movemask_ps(
               _mm256_or_ps(_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))) != 0;
}
HR_INLINE __m256i low_halves(VI x) {
    VI m = x & seti(0xffff);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(m.a, m.b), 0xD8);
}
HR_INLINE void store_u16(uint16_t* p, VI x) { _mm256_storeu_si256((__m256i*)p, low_halves(x)); }
HR_INLINE void store_s8(int8_t* p, VI x) {
    __m256i h = low_halves(x & seti(0xff));
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1)));
}
HR_INLINE int32_t sum_ints(VI x) {
    __m256i t = _mm256_add_epi32(x.a, x.b);
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
HR_INLINE float largest(VF x) {
    __m256 t = _mm256_max_ps(x.a, x.b);
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
HR_INLINE VF dot_pairs(VF acc, VB w, uint32_t a2) {
    VF a = from_bits(seti((int32_t)(a2 << 16))), b = from_bits(seti((int32_t)(a2 & 0xffff0000u)));
    return fma(pair_first(w), a, fma(pair_second(w), b, acc));
}
HR_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
HR_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
#undef HR_BOTH

#else  // plain arrays: the oracle, and any machine

struct VF {
    float v[16];
};
struct VI {
    int32_t v[16];
};
struct VB {
    uint8_t v[64];
};

#define HR_EACH(T, expr)                          \
    T r;                                          \
    for (int i = 0; i < 16; i++) r.v[i] = (expr); \
    return r
HR_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, u;
    if (e == 31)
        u = sign | 0x7f800000u | (m << 13) | (m ? 0x400000u : 0);  // NaN comes out quiet, as from the instruction
    else if (e)
        u = sign | ((e + 112) << 23) | (m << 13);
    else {
        float f = (float)m * 0x1p-24f;
        memcpy(&u, &f, 4);
        u |= sign;
    }
    float f;
    memcpy(&f, &u, 4);
    return f;
}
HR_INLINE float float_of(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
HR_INLINE VF load(const float* p) {
    VF r;
    memcpy(r.v, p, 64);
    return r;
}
HR_INLINE void store(float* p, VF a) { memcpy(p, a.v, 64); }
HR_INLINE VF set1(float x) { HR_EACH(VF, x); }
HR_INLINE VF zero() { return set1(0.0f); }
HR_INLINE VF operator+(VF a, VF b) { HR_EACH(VF, a.v[i] + b.v[i]); }
HR_INLINE VF operator-(VF a, VF b) { HR_EACH(VF, a.v[i] - b.v[i]); }
HR_INLINE VF operator*(VF a, VF b) { HR_EACH(VF, a.v[i] * b.v[i]); }
HR_INLINE VF operator/(VF a, VF b) { HR_EACH(VF, a.v[i] / b.v[i]); }
HR_INLINE VF fma(VF a, VF b, VF c) { HR_EACH(VF, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
HR_INLINE VF fnma(VF a, VF b, VF c) { HR_EACH(VF, __builtin_fmaf(-a.v[i], b.v[i], c.v[i])); }
HR_INLINE VF max(VF a, VF b) { HR_EACH(VF, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
HR_INLINE VF min(VF a, VF b) { HR_EACH(VF, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
HR_INLINE VF abs(VF a) { HR_EACH(VF, __builtin_fabsf(a.v[i])); }
HR_INLINE VF sqrt(VF a) { HR_EACH(VF, __builtin_sqrtf(a.v[i])); }
HR_INLINE VF to_float(VI a) { HR_EACH(VF, (float)a.v[i]); }
HR_INLINE VI round_int(VF a) {
    HR_EACH(VI, (a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f) ? (int32_t)__builtin_rintf(a.v[i]) : INT32_MIN);
}
HR_INLINE VI bits(VF a) {
    VI r;
    memcpy(r.v, a.v, 64);
    return r;
}
HR_INLINE VF from_bits(VI a) {
    VF r;
    memcpy(r.v, a.v, 64);
    return r;
}
HR_INLINE VF load_half(const uint16_t* p) { HR_EACH(VF, half_to_float(p[i])); }
HR_INLINE VF load_bf16(const uint16_t* p) { HR_EACH(VF, float_of((uint32_t)p[i] << 16)); }
HR_INLINE VI lanes_of(VB a) {
    VI r;
    memcpy(r.v, a.v, 64);
    return r;
}
HR_INLINE VF pair_first(VB a) {
    VI l = lanes_of(a);
    HR_EACH(VF, float_of((uint32_t)l.v[i] << 16));
}
HR_INLINE VF pair_second(VB a) {
    VI l = lanes_of(a);
    HR_EACH(VF, float_of((uint32_t)l.v[i] & 0xffff0000u));
}
HR_INLINE VI load_int(const int32_t* p) {
    VI r;
    memcpy(r.v, p, 64);
    return r;
}
HR_INLINE void store_int(int32_t* p, VI a) { memcpy(p, a.v, 64); }
HR_INLINE VI load_u8(const uint8_t* p) { HR_EACH(VI, p[i]); }
HR_INLINE VI load_s8(const int8_t* p) { HR_EACH(VI, p[i]); }
HR_INLINE VI seti(int32_t x) { HR_EACH(VI, x); }
HR_INLINE VI zeroi() { return seti(0); }
HR_INLINE VI operator+(VI a, VI b) { HR_EACH(VI, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])); }
HR_INLINE VI operator-(VI a, VI b) { HR_EACH(VI, (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i])); }
HR_INLINE VI operator*(VI a, VI b) { HR_EACH(VI, (int32_t)((uint32_t)a.v[i] * (uint32_t)b.v[i])); }
HR_INLINE VI operator&(VI a, VI b) { HR_EACH(VI, a.v[i] & b.v[i]); }
HR_INLINE VI operator|(VI a, VI b) { HR_EACH(VI, a.v[i] | b.v[i]); }
HR_INLINE VI operator^(VI a, VI b) { HR_EACH(VI, a.v[i] ^ b.v[i]); }
template <int N>
HR_INLINE VI shl(VI a) {
    HR_EACH(VI, (int32_t)((uint32_t)a.v[i] << N));
}
template <int N>
HR_INLINE VI shr(VI a) {
    HR_EACH(VI, (int32_t)((uint32_t)a.v[i] >> N));
}
template <int N>
HR_INLINE VI sar(VI a) {
    HR_EACH(VI, a.v[i] >> N);
}
HR_INLINE VB load_bytes(const void* p) {
    VB r;
    memcpy(r.v, p, 64);
    return r;
}
HR_INLINE VB low_nibbles(VB a) {
    VB r;
    for (int i = 0; i < 64; i++) r.v[i] = a.v[i] & 15;
    return r;
}
HR_INLINE VB high_nibbles(VB a) {
    VB r;
    for (int i = 0; i < 64; i++) r.v[i] = a.v[i] >> 4;
    return r;
}
template <int S>
HR_INLINE VB with_bits(VB base, VB plane, uint8_t mask) {
    VB r;
    for (int i = 0; i < 64; i++)
        r.v[i] =
            base.v[i] | (uint8_t)((S >= 0 ? plane.v[i] << (S >= 0 ? S : 0) : plane.v[i] >> (S < 0 ? -S : 0)) & mask);
    return r;
}
HR_INLINE VI dot4(VI acc, VB w, int32_t a4) {
    int8_t a[4];
    memcpy(a, &a4, 4);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) acc.v[i] += (int32_t)w.v[4 * i + j] * a[j];
    return acc;
}
HR_INLINE VI dot2(VI acc, VB w, int32_t a2) {
    int16_t a[2], b[32];
    memcpy(a, &a2, 4);
    memcpy(b, w.v, 64);
    for (int i = 0; i < 16; i++) acc.v[i] += b[2 * i] * a[0] + b[2 * i + 1] * a[1];
    return acc;
}
HR_INLINE VI dot4_six(VI acc, VB w, int32_t a4) { return dot4(acc, w, a4); }
constexpr bool kEightsCentred = false;
HR_INLINE VI dot4_eight(VI acc, VB w, int32_t a4) { return dot4(acc, w, a4); }
HR_INLINE VB widen_u8(const uint8_t* p) {
    int16_t t[32];
    for (int i = 0; i < 32; i++) t[i] = p[i];
    return load_bytes(t);
}
HR_INLINE VF select_less(VF a, VF b, VF yes, VF no) { HR_EACH(VF, a.v[i] < b.v[i] ? yes.v[i] : no.v[i]); }
HR_INLINE VI select_nan(VF a, VI yes, VI no) { HR_EACH(VI, a.v[i] != a.v[i] ? yes.v[i] : no.v[i]); }
HR_INLINE bool any_nan(VF a) {
    bool found = false;
    for (int i = 0; i < 16; i++) found |= a.v[i] != a.v[i];
    return found;
}
HR_INLINE void store_s8(int8_t* p, VI a) {
    for (int i = 0; i < 16; i++) p[i] = (int8_t)(uint8_t)a.v[i];
}
HR_INLINE void store_u16(uint16_t* p, VI a) {
    for (int i = 0; i < 16; i++) p[i] = (uint16_t)a.v[i];
}
HR_INLINE int32_t sum_ints(VI a) {
    int32_t s = 0;
    for (int i = 0; i < 16; i++) s += a.v[i];
    return s;
}
HR_INLINE float largest(VF a) {
    float m = a.v[0];
    for (int i = 1; i < 16; i++) m = m > a.v[i] ? m : a.v[i];
    return m;
}
HR_INLINE VF dot_pairs(VF acc, VB w, uint32_t a2) {
    return fma(pair_first(w), set1(float_of(a2 << 16)), fma(pair_second(w), set1(float_of(a2 & 0xffff0000u)), acc));
}
HR_INLINE void prefetch(const void*) {}
HR_INLINE void prefetch_far(const void*) {}
#undef HR_EACH

#endif

// Sums and extremes over the 16 lanes by one fixed tree: 16 -> 8 -> 4 -> 2 -> 1.
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

// exp(x): exactly 0 below -87.33654 (so a masked score weighs nothing), +inf above 88.72283; NaN stays. Cody-Waite
// reduction, degree-6 polynomial, all in explicit fma.
HR_INLINE VF exp(VF x) {
    VF c = min(set1(88.72283f), max(set1(-87.33654f), x));  // max/min give their second operand when one is NaN
    VI n = round_int(c * set1(1.44269504f));
    VF k = to_float(n);
    VF r = fnma(k, set1(0.693145752f), c);
    r = fnma(k, set1(1.42860677e-6f), r);
    VF p = set1(1.0f / 720);
    p = fma(p, r, set1(1.0f / 120));
    p = fma(p, r, set1(1.0f / 24));
    p = fma(p, r, set1(1.0f / 6));
    p = fma(p, r, set1(0.5f));
    p = fma(p, r, set1(1.0f));
    p = fma(p, r, set1(1.0f));
    VI half = sar<1>(n);  // 2^n in two factors, so that neither overflows
    VF a = from_bits(shl<23>(half + seti(127))), b = from_bits(shl<23>(n - half + seti(127)));
    VF y = select_less(x, set1(-87.33654f), zero(), p * a * b);
    return select_less(set1(88.72283f), x, set1(__builtin_inff()), y);
}

}  // namespace
