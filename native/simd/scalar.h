// Sixteen lanes as plain arrays: the oracle, and any machine. Included by ../simd.h, which says what is owed.
#pragma once

namespace {

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
HR_INLINE VI trunc_int(VF a) { HR_EACH(VI, (int32_t)a.v[i]); }
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
HR_INLINE VF load_bf16(const uint16_t* p) {
    VI r;
    for (int i = 0; i < 16; i++) r.v[i] = (int32_t)((uint32_t)p[i] << 16);
    return from_bits(r);
}
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
HR_INLINE VI dot4_six(VI acc, VB w, int32_t a4) {
    int8_t a[4];
    memcpy(a, &a4, 4);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) acc.v[i] += (int32_t)w.v[4 * i + j] * a[j];
    return acc;
}
constexpr bool kEightsCentred = false;
HR_INLINE VI dot4_eight(VI acc, VB w, int32_t a4) { return dot4_six(acc, w, a4); }
HR_INLINE VI dot4_carried(VI acc, VB w, int32_t a4) { return dot4_eight(acc, w, a4); }
HR_INLINE VI dot4_seven(VI acc, VB w, int32_t a4) {
    int8_t a[4];
    memcpy(a, &a4, 4);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) acc.v[i] += (int32_t)(int8_t)w.v[4 * i + j] * a[j];
    return acc;
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

HR_INLINE uint32_t lanes_ge(VF a, VF b) {
    uint32_t r = 0;
    for (int i = 0; i < 16; i++) r |= static_cast<uint32_t>(a.v[i] >= b.v[i]) << i;
    return r;
}
HR_INLINE uint32_t lanes_gt(VF a, VF b) {
    uint32_t r = 0;
    for (int i = 0; i < 16; i++) r |= static_cast<uint32_t>(a.v[i] > b.v[i]) << i;
    return r;
}
HR_INLINE VF keep_lanes(VF a, uint32_t kept, VF other) {
    for (int i = 0; i < 16; i++) a.v[i] = kept >> i & 1 ? a.v[i] : other.v[i];
    return a;
}
HR_INLINE VI xor3(VI a, VI b, VI c) { return a ^ b ^ c; }
HR_INLINE VI mul_high(VI a, VI b) {
    for (int i = 0; i < 16; i++) {
        uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(a.v[i])) * static_cast<uint32_t>(b.v[i]);
        a.v[i] = static_cast<int32_t>(product >> 32);
    }
    return a;
}
HR_INLINE void transpose4(VI& a, VI& b, VI& c, VI& d) {
    VI* all[4] = {&a, &b, &c, &d};
    VI old[4] = {a, b, c, d};
    for (int q = 0; q < 16; q += 4)
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) all[i]->v[q + j] = old[j].v[q + i];
}

#undef HR_EACH

}  // namespace
