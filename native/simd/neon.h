// Sixteen lanes in four NEON registers (Armv8.2 with dot products). Included by ../simd.h, which says what is owed.
// One difference stays: with denormals flushed, a bf16 product sum within 2^-150 below the least normal number becomes
// zero here, where x86 rounds it up first. Compiled and run under emulation only, not timed on hardware.
#pragma once
#include <arm_neon.h>

namespace {

struct VF {
    float32x4_t v[4];
};
struct VI {
    int32x4_t v[4];
};
struct VB {
    uint8x16_t v[4];
};

#define HR_FOUR(T, expr)                                                     \
    T r;                                                                     \
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) { r.v[i] = (expr); } \
    return r

HR_INLINE VF load(const float* p) { HR_FOUR(VF, vld1q_f32(p + 4 * i)); }
HR_INLINE void store(float* p, VF a) {
    for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
HR_INLINE VF set1(float x) { HR_FOUR(VF, vdupq_n_f32(x)); }
HR_INLINE VF zero() { return set1(0.0f); }
HR_INLINE VF operator+(VF a, VF b) { HR_FOUR(VF, vaddq_f32(a.v[i], b.v[i])); }
HR_INLINE VF operator-(VF a, VF b) { HR_FOUR(VF, vsubq_f32(a.v[i], b.v[i])); }
HR_INLINE VF operator*(VF a, VF b) { HR_FOUR(VF, vmulq_f32(a.v[i], b.v[i])); }
HR_INLINE VF operator/(VF a, VF b) { HR_FOUR(VF, vdivq_f32(a.v[i], b.v[i])); }
HR_INLINE VF fma(VF a, VF b, VF c) { HR_FOUR(VF, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
HR_INLINE VF fnma(VF a, VF b, VF c) { HR_FOUR(VF, vfmsq_f32(c.v[i], a.v[i], b.v[i])); }
HR_INLINE VF max(VF a, VF b) { HR_FOUR(VF, vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
HR_INLINE VF min(VF a, VF b) { HR_FOUR(VF, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i])); }
HR_INLINE VF abs(VF a) { HR_FOUR(VF, vabsq_f32(a.v[i])); }
HR_INLINE VF sqrt(VF a) { HR_FOUR(VF, vsqrtq_f32(a.v[i])); }
HR_INLINE VF to_float(VI a) { HR_FOUR(VF, vcvtq_f32_s32(a.v[i])); }
// What no int32 can hold becomes the least of them, as on x86.
HR_INLINE VI round_int(VF a) {
    HR_FOUR(VI, vbslq_s32(vcltq_f32(a.v[i], vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(a.v[i]), vdupq_n_s32(INT32_MIN)));
}
HR_INLINE VI trunc_int(VF a) { HR_FOUR(VI, vcvtq_s32_f32(a.v[i])); }
HR_INLINE VI bits(VF a) { HR_FOUR(VI, vreinterpretq_s32_f32(a.v[i])); }
HR_INLINE VF from_bits(VI a) { HR_FOUR(VF, vreinterpretq_f32_s32(a.v[i])); }
HR_INLINE VF load_half(const uint16_t* p) { HR_FOUR(VF, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
HR_INLINE VF load_bf16(const uint16_t* p) { HR_FOUR(VF, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))); }
HR_INLINE VI lanes_of(VB a) { HR_FOUR(VI, vreinterpretq_s32_u8(a.v[i])); }

HR_INLINE VI load_int(const int32_t* p) { HR_FOUR(VI, vld1q_s32(p + 4 * i)); }
HR_INLINE void store_int(int32_t* p, VI a) {
    for (int i = 0; i < 4; i++) vst1q_s32(p + 4 * i, a.v[i]);
}
HR_INLINE VI load_u8(const uint8_t* p) {
    const uint8x16_t b = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
             vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
HR_INLINE VI load_s8(const int8_t* p) {
    const int8x16_t b = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
             vmovl_s16(vget_high_s16(high))}};
}
HR_INLINE VI seti(int32_t x) { HR_FOUR(VI, vdupq_n_s32(x)); }
HR_INLINE VI zeroi() { return seti(0); }
HR_INLINE VI operator+(VI a, VI b) { HR_FOUR(VI, vaddq_s32(a.v[i], b.v[i])); }
HR_INLINE VI operator-(VI a, VI b) { HR_FOUR(VI, vsubq_s32(a.v[i], b.v[i])); }
HR_INLINE VI operator*(VI a, VI b) { HR_FOUR(VI, vmulq_s32(a.v[i], b.v[i])); }
HR_INLINE VI operator&(VI a, VI b) { HR_FOUR(VI, vandq_s32(a.v[i], b.v[i])); }
HR_INLINE VI operator|(VI a, VI b) { HR_FOUR(VI, vorrq_s32(a.v[i], b.v[i])); }
HR_INLINE VI operator^(VI a, VI b) { HR_FOUR(VI, veorq_s32(a.v[i], b.v[i])); }
template <int N>
HR_INLINE VI shl(VI a) {
    HR_FOUR(VI, vshlq_n_s32(a.v[i], N));
}
template <int N>
HR_INLINE VI shr(VI a) {
    HR_FOUR(VI, vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), N)));
}
template <int N>
HR_INLINE VI sar(VI a) {
    HR_FOUR(VI, vshrq_n_s32(a.v[i], N));
}
HR_INLINE VF pair_first(VB a) { return from_bits(shl<16>(lanes_of(a))); }
HR_INLINE VF pair_second(VB a) { return from_bits(lanes_of(a) & seti((int32_t)0xffff0000)); }

HR_INLINE VB load_bytes(const void* p) { HR_FOUR(VB, vld1q_u8((const uint8_t*)p + 16 * i)); }
HR_INLINE VB low_nibbles(VB a) { HR_FOUR(VB, vandq_u8(a.v[i], vdupq_n_u8(15))); }
HR_INLINE VB high_nibbles(VB a) { HR_FOUR(VB, vshrq_n_u8(a.v[i], 4)); }
template <int S>
HR_INLINE VB with_bits(VB base, VB plane, uint8_t mask) {
    HR_FOUR(VB, vorrq_u8(base.v[i], vandq_u8(vshlq_u8(plane.v[i], vdupq_n_s8(S)), vdupq_n_u8(mask))));
}
HR_INLINE int8x16_t signed_bytes(uint8x16_t w) { return vreinterpretq_s8_u8(w); }
HR_INLINE VI dot4_six(VI acc, VB w, int32_t a4) {
    const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(a4));
    HR_FOUR(VI, vdotq_s32(acc.v[i], signed_bytes(w.v[i]), a));
}
constexpr bool kEightsCentred = true;
HR_INLINE VB centred(VB w) { HR_FOUR(VB, veorq_u8(w.v[i], vdupq_n_u8(0x80))); }
HR_INLINE VI dot4_eight(VI acc, VB w, int32_t a4) { return dot4_six(acc, centred(w), a4); }
HR_INLINE VI dot4_carried(VI acc, VB w, int32_t a4) { return dot4_eight(acc, w, a4); }
HR_INLINE VI dot4_seven(VI acc, VB w, int32_t a4) { return dot4_six(acc, w, a4); }
HR_INLINE VF select_less(VF a, VF b, VF yes, VF no) {
    HR_FOUR(VF, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i]));
}
HR_INLINE VI select_nan(VF a, VI yes, VI no) { HR_FOUR(VI, vbslq_s32(vceqq_f32(a.v[i], a.v[i]), no.v[i], yes.v[i])); }
HR_INLINE uint16x8_t low_halves(int32x4_t a, int32x4_t b) {
    return vcombine_u16(vmovn_u32(vreinterpretq_u32_s32(a)), vmovn_u32(vreinterpretq_u32_s32(b)));
}
HR_INLINE void store_u16(uint16_t* p, VI a) {
    vst1q_u16(p, low_halves(a.v[0], a.v[1]));
    vst1q_u16(p + 8, low_halves(a.v[2], a.v[3]));
}
HR_INLINE void store_s8(int8_t* p, VI a) {
    vst1_u8((uint8_t*)p, vmovn_u16(low_halves(a.v[0], a.v[1])));
    vst1_u8((uint8_t*)p + 8, vmovn_u16(low_halves(a.v[2], a.v[3])));
}
HR_INLINE bool any_nan(VF a) {
    uint32x4_t number = vceqq_f32(a.v[0], a.v[0]);
    for (int i = 1; i < 4; i++) number = vandq_u32(number, vceqq_f32(a.v[i], a.v[i]));
    return vminvq_u32(number) == 0;
}
HR_INLINE int32_t sum_ints(VI a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
HR_INLINE float largest(VF a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]))); }
HR_INLINE VF dot_pairs(VF acc, VB w, uint32_t a2) {
    const VF a = from_bits(seti((int32_t)(a2 << 16))), b = from_bits(seti((int32_t)(a2 & 0xffff0000u)));
    return fma(pair_first(w), a, fma(pair_second(w), b, acc));
}
HR_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
HR_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

HR_INLINE uint32_t lanes_set(const uint32x4_t* on) {
    static const uint32_t bit[4] = {1, 2, 4, 8};
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) r |= vaddvq_u32(vandq_u32(on[i], vld1q_u32(bit))) << 4 * i;
    return r;
}
HR_INLINE uint32_t lanes_ge(VF a, VF b) {
    uint32x4_t on[4];
    for (int i = 0; i < 4; i++) on[i] = vcgeq_f32(a.v[i], b.v[i]);
    return lanes_set(on);
}
HR_INLINE uint32_t lanes_gt(VF a, VF b) {
    uint32x4_t on[4];
    for (int i = 0; i < 4; i++) on[i] = vcgtq_f32(a.v[i], b.v[i]);
    return lanes_set(on);
}
HR_INLINE VF keep_lanes(VF a, uint32_t kept, VF other) {
    static const uint32_t bit[4] = {1, 2, 4, 8};
    HR_FOUR(VF, vbslq_f32(vtstq_u32(vdupq_n_u32(kept >> 4 * i), vld1q_u32(bit)), a.v[i], other.v[i]));
}
HR_INLINE VI xor3(VI a, VI b, VI c) { return a ^ b ^ c; }
HR_INLINE uint32x4_t mul_high_quarter(uint32x4_t a, uint32x4_t b) {
    const uint64x2_t low = vmull_u32(vget_low_u32(a), vget_low_u32(b)), high = vmull_high_u32(a, b);
    return vuzp2q_u32(vreinterpretq_u32_u64(low), vreinterpretq_u32_u64(high));
}
HR_INLINE VI mul_high(VI a, VI b) {
    HR_FOUR(VI, vreinterpretq_s32_u32(mul_high_quarter(vreinterpretq_u32_s32(a.v[i]), vreinterpretq_u32_s32(b.v[i]))));
}
HR_INLINE void transpose4_quarter(int32x4_t& a, int32x4_t& b, int32x4_t& c, int32x4_t& d) {
    const int64x2_t ab0 = vreinterpretq_s64_s32(vzip1q_s32(a, b)), ab1 = vreinterpretq_s64_s32(vzip2q_s32(a, b));
    const int64x2_t cd0 = vreinterpretq_s64_s32(vzip1q_s32(c, d)), cd1 = vreinterpretq_s64_s32(vzip2q_s32(c, d));
    a = vreinterpretq_s32_s64(vzip1q_s64(ab0, cd0)), b = vreinterpretq_s32_s64(vzip2q_s64(ab0, cd0));
    c = vreinterpretq_s32_s64(vzip1q_s64(ab1, cd1)), d = vreinterpretq_s32_s64(vzip2q_s64(ab1, cd1));
}
HR_INLINE void transpose4(VI& a, VI& b, VI& c, VI& d) {
    for (int i = 0; i < 4; i++) transpose4_quarter(a.v[i], b.v[i], c.v[i], d.v[i]);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Products of sixteen rows with two columns of activations, as the matrix instruction leaves them: register i holds
// weight rows 2i and 2i + 1, for each the first column and the second.
struct Both {
    int32x4_t v[8];
};
HR_INLINE Both no_products() {
    Both r;
    for (int i = 0; i < 8; i++) r.v[i] = vdupq_n_s32(0);
    return r;
}
// Two lines (eight inputs) of signed weights times eight activations of each column.
HR_INLINE Both dot8(Both acc, VB line, VB next, const int8_t* first, const int8_t* second) {
    const int8x16_t a = vcombine_s8(vld1_s8(first), vld1_s8(second));
    for (int i = 0; i < 4; i++) {
        const uint32x4_t p = vreinterpretq_u32_u8(line.v[i]), q = vreinterpretq_u32_u8(next.v[i]);
        acc.v[2 * i] = vmmlaq_s32(acc.v[2 * i], vreinterpretq_s8_u32(vzip1q_u32(p, q)), a);
        acc.v[2 * i + 1] = vmmlaq_s32(acc.v[2 * i + 1], vreinterpretq_s8_u32(vzip2q_u32(p, q)), a);
    }
    return acc;
}
HR_INLINE VI first_of(Both b) { HR_FOUR(VI, vuzp1q_s32(b.v[2 * i], b.v[2 * i + 1])); }
HR_INLINE VI second_of(Both b) { HR_FOUR(VI, vuzp2q_s32(b.v[2 * i], b.v[2 * i + 1])); }
#endif

#undef HR_FOUR

}  // namespace
