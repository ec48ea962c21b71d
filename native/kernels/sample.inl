// The sampler's passes over blocks of 64 logits: maxima, masses, counts, and Gumbel noise from Philox4x32-10
// (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The same bits from every instruction set.
// Knows blocks of one row; which of them to visit is for sampler.cpp to decide.
#pragma once

namespace {

using headrace::Candidate;
using headrace::Floor;
using headrace::GumbelSearch;

constexpr int kBlock = 64;
constexpr int kBlockVectors = kBlock / 16;

HR_INLINE uint32_t lanes_reaching(VF x, Floor floor) {
    VF value = set1(floor.value);
    return floor.strict ? lanes_gt(x, value) : lanes_ge(x, value);
}

constexpr float kSampleInf = __builtin_huge_valf();

// ---- logarithm and noise ------------------------------------------------------------------------------------------

// ln of a positive normal number = m 2^e, given as f = m - 1 with m in [sqrt(1/2), sqrt(2)), and e: relative error
// below 2e-7 (own fit of (ln(1 + f) - f + f^2 / 2) / f^3; ln 2 in two parts).
HR_INLINE VF log_parts(VF f, VI e) {
    VF q = set1(-0.07634493f);
    q = fma(q, f, set1(0.12761575f));
    q = fma(q, f, set1(-0.13160183f));
    q = fma(q, f, set1(0.14201759f));
    q = fma(q, f, set1(-0.16623357f));
    q = fma(q, f, set1(0.20001227f));
    q = fma(q, f, set1(-0.2500082f));
    q = fma(q, f, set1(0.33333331f));
    VF k = to_float(e);
    VF small = fma(f * f, fma(q, f, set1(-0.5f)), k * set1(1.42860677e-6f));
    return fma(k, set1(0.693145752f), f + small);
}

constexpr int32_t kRootHalf = 0x3f3504f3;  // bits of sqrt(1/2)

HR_INLINE VI exponent_of(VF x) { return sar<23>(bits(x) - seti(kRootHalf)); }
HR_INLINE VF mantissa_less_one(VF x, VI e) { return from_bits(bits(x) - shl<23>(e)) - set1(1.0f); }

// -ln(-ln(u)) for u = (2 (word >> 8) + 1) / 2^25. The odd integer takes 25 bits, one more than a float32 has, so what
// rounding takes from it is handed on to f, which holds it exactly: near u = 1 nothing is lost.
HR_INLINE VF gumbel_of(VI word) {
    VI n = shl<1>(shr<8>(word)) + seti(1);
    VF rounded = to_float(n);
    VF lost = to_float(n - round_int(rounded));
    VI e = exponent_of(rounded);
    VF f = fma(lost, from_bits(shl<23>(seti(127) - e)), mantissa_less_one(rounded, e));
    VF t = zero() - log_parts(f, e - seti(25));
    VI et = exponent_of(t);
    return zero() - log_parts(mantissa_less_one(t, et), et);
}

// At least gumbel_of(word), at most 0.06 more where the noise is large. -ln(-ln(u)) <= -ln(1 - u), and for
// v = 1 - u the bits of v, read as an integer, are 2^23 (127 + log2 v) or a little less.
HR_INLINE VF gumbel_bound(VI word) {
    VF v = to_float(seti((1 << 25) - 1) - shl<1>(shr<8>(word)));
    return fma(to_float(bits(v)), set1(-0.69314718f / 8388608.0f), set1(0.69314718f * 152.0f));
}

// The bound's own rounding, and that of the product that stands for a quotient.
constexpr float kBoundSlack = 1e-3f;

// The words of 64 consecutive ids, the first a multiple of 64: counters (id / 4, position, choice, 0), key = seed.
HR_INLINE void philox_block(int32_t first_id, const GumbelSearch& s, VI w[4]) {
    static const int32_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const VI m0 = seti(static_cast<int32_t>(0xD2511F53u)), m1 = seti(static_cast<int32_t>(0xCD9E8D57u));
    uint32_t k0 = static_cast<uint32_t>(s.seed), k1 = static_cast<uint32_t>(s.seed >> 32);
    VI a = load_int(order) + seti(first_id / 4);
    VI b = seti(static_cast<int32_t>(s.position)), c = seti(static_cast<int32_t>(s.choice)), d = zeroi();
    for (int round = 0; round < 10; round++) {
        VI high0 = mul_high(a, m0), low0 = a * m0, high1 = mul_high(c, m1), low1 = c * m1;
        a = xor3(high1, b, seti(static_cast<int32_t>(k0)));
        b = low1;
        c = xor3(high0, d, seti(static_cast<int32_t>(k1)));
        d = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    transpose4(a, b, c, d);  // lane 4 q + i held counter 4 i + q: now each vector holds 16 ids in order
    w[0] = a, w[1] = b, w[2] = c, w[3] = d;
}

// ---- passes -------------------------------------------------------------------------------------------------------

static int block_max(const float* x, int blocks, float* max_out) {
    VF bad = zero();
    for (int b = 0; b < blocks; b++, x += kBlock) {
        VF most = set1(-kSampleInf);
        for (int j = 0; j < kBlockVectors; j++) {
            VF v = load(x + 16 * j);
            most = max(v, most);
            bad = fma(max(set1(-3.4028235e38f), v), zero(), bad);  // NaN from NaN and +inf; -inf becomes finite first
        }
        max_out[b] = largest(most);
    }
    return lanes_ge(bad, bad) != 0xFFFF;
}

static int block_count(const float* x, Floor floor) {
    int n = 0;
    for (int j = 0; j < kBlockVectors; j++) n += __builtin_popcount(lanes_reaching(load(x + 16 * j), floor));
    return n;
}

static int block_collect(const float* x, int32_t first_id, Floor floor, Candidate* found) {
    int n = 0;
    for (int j = 0; j < kBlockVectors; j++)
        for (uint32_t left = lanes_reaching(load(x + 16 * j), floor); left; left &= left - 1) {
            int i = 16 * j + __builtin_ctz(left);
            found[n++] = {x[i], first_id + i};
        }
    return n;
}

static void block_mass(const float* x, float top, float inverse, Floor floor, float* sums) {
    VF sum = load(sums), t = set1(top), scale = set1(inverse), none = zero();
    for (int j = 0; j < kBlockVectors; j++) {
        VF v = load(x + 16 * j);
        sum = sum + keep_lanes(exp((v - t) * scale), lanes_reaching(v, floor), none);
    }
    store(sums, sum);
}

// Sixteen ids of which some might win.
static void gumbel_lanes(const float* x, int32_t first_id, uint32_t lanes, VI words, GumbelSearch& s) {
    float noise[16];
    store(noise, gumbel_of(words));
    for (; lanes; lanes &= lanes - 1) {
        int i = __builtin_ctz(lanes);
        float score = (x[i] - s.top) / s.temperature + noise[i];
        if (score > s.best || (score == s.best && first_id + i < s.best_id)) {
            s.best = score;
            s.best_id = first_id + i;
        }
    }
}

static void block_gumbel(const float* x, int32_t first_id, Floor floor, GumbelSearch& s) {
    VI words[4];
    philox_block(first_id, s, words);
    VF top = set1(s.top), inverse = set1(s.inverse);
    for (int j = 0; j < kBlockVectors; j++) {
        VF v = load(x + 16 * j);
        VF bound = fma(v - top, inverse, gumbel_bound(words[j]));
        uint32_t lanes = lanes_ge(bound, set1(s.best - kBoundSlack)) & lanes_reaching(v, floor);
        if (lanes) gumbel_lanes(x + 16 * j, first_id + 16 * j, lanes, words[j], s);
    }
}

static void block_mask(float* x, uint64_t allowed) {
    for (int j = 0; j < kBlockVectors; j++) {
        uint32_t kept = static_cast<uint32_t>(allowed >> (16 * j)) & 0xFFFF;
        store(x + 16 * j, keep_lanes(load(x + 16 * j), kept, set1(-kSampleInf)));
    }
}

static void fill_sample(headrace::KernelTable& t) {
    t.block_max = block_max;
    t.block_count = block_count;
    t.block_collect = block_collect;
    t.block_mass = block_mass;
    t.block_gumbel = block_gumbel;
    t.block_mask = block_mask;
}

}  // namespace
