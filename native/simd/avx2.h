// Sixteen lanes in two AVX2 registers (with FMA and F16C). Included by ../simd.h, which says what is owed.
#pragma once
#include <immintrin.h>

namespace {

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
HR_INLINE VI trunc_int(VF x) { return {_mm256_cvttps_epi32(x.a), _mm256_cvttps_epi32(x.b)}; }
HR_INLINE VF load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
HR_INLINE VF load_bf16(const uint16_t* p) {
    const __m128i *a = (const __m128i*)p, *b = (const __m128i*)(p + 8);
    return from_bits(shl<16>(VI{_mm256_cvtepu16_epi32(_mm_loadu_si128(a)), _mm256_cvtepu16_epi32(_mm_loadu_si128(b))}));
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
HR_INLINE __m256i dot4_six_half(__m256i acc, __m256i w, __m256i a) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1)));
}
// A sum that is made now and not put off: compilers that make all products first run out of registers (a third to a
// half of the time of a tile of four rows, GCC 12).
template <class V>
HR_INLINE V in_turn(V x) {
    __asm__ volatile("" : "+x"(x.a), "+x"(x.b));
    return x;
}
// Sums of products of two bytes, as int16: half the work of dot4_six while they are small enough
struct VP {
    __m256i a, b;
};
HR_INLINE VP no_pairs() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
HR_INLINE VP add_pairs(VP acc, VB w, int32_t a4) {
    const __m256i a = _mm256_set1_epi32(a4);
    acc.a = _mm256_add_epi16(acc.a, _mm256_maddubs_epi16(w.a, a));
    acc.b = _mm256_add_epi16(acc.b, _mm256_maddubs_epi16(w.b, a));
    return in_turn(acc);
}
HR_INLINE VI sums_of(VP p) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(p.a, one), _mm256_madd_epi16(p.b, one)};
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
    return in_turn(VI{dot4_eight_half(acc.a, w.a, a), dot4_eight_half(acc.b, w.b, a)});
}
HR_INLINE VI dot4_carried(VI acc, VB w, int32_t a4) { return dot4_eight(acc, w, a4); }
HR_INLINE VI dot4_seven(VI acc, VB w, int32_t a4) {
    __m256i a = _mm256_set1_epi32(a4);
    return in_turn(VI{dot4_six_half(acc.a, a, w.a), dot4_six_half(acc.b, a, w.b)});
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
// f(lanes 0 to 7, lanes 8 to 15)
template <class F>
HR_INLINE __m256 halves(VF x, F f) {
    return f(x.a, x.b);
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

template <int Compare>
HR_INLINE uint32_t lanes_compared(VF x, VF y) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, Compare)) |
                                 _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, Compare)) << 8);
}
HR_INLINE uint32_t lanes_ge(VF a, VF b) { return lanes_compared<_CMP_GE_OQ>(a, b); }
HR_INLINE uint32_t lanes_gt(VF a, VF b) { return lanes_compared<_CMP_GT_OQ>(a, b); }
HR_INLINE __m256 keep_half(__m256 x, uint32_t kept, __m256 other) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i on = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(kept)), bit), bit);
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(on));
}
HR_INLINE VF keep_lanes(VF x, uint32_t kept, VF other) {
    return {keep_half(x.a, kept, other.a), keep_half(x.b, kept >> 8, other.b)};
}
HR_INLINE __m256i mul_high_half(__m256i a, __m256i b) {
    __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
    return _mm256_blend_epi32(even, _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b), 0xAA);
}
HR_INLINE VI xor3(VI a, VI b, VI c) { return a ^ b ^ c; }
HR_INLINE VI mul_high(VI x, VI y) { return {mul_high_half(x.a, y.a), mul_high_half(x.b, y.b)}; }
HR_INLINE void transpose4_half(__m256i& a, __m256i& b, __m256i& c, __m256i& d) {
    __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
    __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
    a = _mm256_unpacklo_epi64(ab0, cd0), b = _mm256_unpackhi_epi64(ab0, cd0);
    c = _mm256_unpacklo_epi64(ab1, cd1), d = _mm256_unpackhi_epi64(ab1, cd1);
}
HR_INLINE void transpose4(VI& a, VI& b, VI& c, VI& d) {
    transpose4_half(a.a, b.a, c.a, d.a);
    transpose4_half(a.b, b.b, c.b, d.b);
}

#undef HR_BOTH

}  // namespace
