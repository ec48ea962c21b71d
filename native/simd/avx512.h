// Sixteen lanes in one AVX-512 register (F, BW, DQ, VL, VNNI, BF16). Included by ../simd.h, which says what is owed.
#pragma once
#include <immintrin.h>

namespace {

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
HR_INLINE VI trunc_int(VF a) { return {_mm512_cvttps_epi32(a.v)}; }  // towards zero; of what int32 can hold
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
// acc + sum over the 4 bytes of each lane: unsigned weight byte of at most 6 bits * signed activation byte; exact
HR_INLINE VI dot4_six(VI acc, VB w, int32_t a4) { return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(a4))}; }
// the same of any weight byte, of w - 128 where kEightsCentred says that this is as cheap; no activation is -128
constexpr bool kEightsCentred = false;
HR_INLINE VI dot4_eight(VI acc, VB w, int32_t a4) { return dot4_six(acc, w, a4); }
// Sums that a loop carries: GCC 12 keeps those of the intrinsic in memory (a third of attention's time).
HR_INLINE VI dot4_carried(VI acc, __m512i bytes, __m512i signed_bytes) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(bytes), "v"(signed_bytes));
    return acc;
}
HR_INLINE VI dot4_carried(VI acc, VB w, int32_t a4) { return dot4_carried(acc, w.v, _mm512_set1_epi32(a4)); }
// the same of signed weight bytes and activations of 0 to 127
HR_INLINE VI dot4_seven(VI acc, VB w, int32_t a4) { return dot4_carried(acc, _mm512_set1_epi32(a4), w.v); }
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
// f(lanes 0 to 7, lanes 8 to 15)
template <class F>
HR_INLINE __m256 halves(VF a, F f) {
    return f(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}
HR_INLINE float largest(VF a) { return _mm512_reduce_max_ps(a.v); }  // of lanes without NaN
// acc + pairs of bf16 products, the second of each pair first, each a fused multiply-add; exact only while denormals
// are flushed
HR_INLINE VF dot_pairs(VF acc, VB w, uint32_t a2) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.v, (__m512bh)_mm512_set1_epi32((int32_t)a2))};
}
// into the first cache, or (far) only into the second, which waits for more lines at once
HR_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
HR_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }

// Lane by lane: a >= b and a > b as bits 0..15 (false where one is NaN); a where it is kept, else `other`; the high
// words of unsigned products. transpose4: within each four lanes, lane j of vector i <-> lane i of vector j.
HR_INLINE uint32_t lanes_ge(VF a, VF b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
HR_INLINE uint32_t lanes_gt(VF a, VF b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
HR_INLINE VF keep_lanes(VF a, uint32_t kept, VF other) {
    return {_mm512_mask_mov_ps(other.v, static_cast<__mmask16>(kept), a.v)};
}
HR_INLINE VI xor3(VI a, VI b, VI c) { return {_mm512_ternarylogic_epi32(a.v, b.v, c.v, 0x96)}; }
HR_INLINE VI mul_high(VI a, VI b) {
    __m512i even = _mm512_shuffle_epi32(_mm512_mul_epu32(a.v, b.v), _MM_PERM_DDBB);
    __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), b.v);
    return {_mm512_mask_mov_epi32(even, 0xAAAA, odd)};
}
HR_INLINE void transpose4(VI& a, VI& b, VI& c, VI& d) {
    __m512i ab0 = _mm512_unpacklo_epi32(a.v, b.v), ab1 = _mm512_unpackhi_epi32(a.v, b.v);
    __m512i cd0 = _mm512_unpacklo_epi32(c.v, d.v), cd1 = _mm512_unpackhi_epi32(c.v, d.v);
    a.v = _mm512_unpacklo_epi64(ab0, cd0), b.v = _mm512_unpackhi_epi64(ab0, cd0);
    c.v = _mm512_unpacklo_epi64(ab1, cd1), d.v = _mm512_unpackhi_epi64(ab1, cd1);
}

}  // namespace
