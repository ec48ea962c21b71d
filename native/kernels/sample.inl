// The sampler's passes over blocks of 64 logits: maxima, masses, counts, and Gumbel noise from Philox4x32-10
// (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The same bits from every instruction set.
// Knows blocks of one row; which of them to visit is for sampler.cpp to decide.
#pragma once

namespace {

using headrace::BlockNoise;
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

// -ln(u) for u = (2 (word >> 8) + 1) / 2^25: an exponential variable. The odd integer takes 25 bits, one more than a
// float32 has, so what rounding takes from it is handed on to f, which holds it exactly: near u = 1 nothing is lost.
HR_INLINE VF exponential_of(VI word) {
    VI n = shl<1>(shr<8>(word)) + seti(1);
    VF rounded = to_float(n);
    VF lost = to_float(n - round_int(rounded));
    VI e = exponent_of(rounded);
    VF f = fma(lost, from_bits(shl<23>(seti(127) - e)), mantissa_less_one(rounded, e));
    return zero() - log_parts(f, e - seti(25));
}

// Gumbel noise from an exponential variable.
HR_INLINE VF noise_of(VF exponential) {
    VI e = exponent_of(exponential);
    return zero() - log_parts(mantissa_less_one(exponential, e), e);
}

// What a block of 64 ids can reach at most is compared with what others have reached: this covers the rounding of both.
constexpr float kBoundSlack = 1e-3f;
constexpr float kLargestNoise = 21.49f;  // 31 ln 2 = 21.488: of u = 1 - 2^-25, the least of 64

// Sixteen counters (a, position, choice, kind), key = seed; their four words each.
struct Words {
    VI a, b, c, d;
};
HR_INLINE Words philox(VI counter, int32_t kind, const GumbelSearch& s) {
    const VI m0 = seti(static_cast<int32_t>(0xD2511F53u)), m1 = seti(static_cast<int32_t>(0xCD9E8D57u));
    uint32_t k0 = static_cast<uint32_t>(s.seed), k1 = static_cast<uint32_t>(s.seed >> 32);
    VI a = counter, b = seti(static_cast<int32_t>(s.position)), c = seti(static_cast<int32_t>(s.choice)),
       d = seti(kind);
    for (int round = 0; round < 10; round++) {
        VI high0 = mul_high(a, m0), low0 = a * m0, high1 = mul_high(c, m1), low1 = c * m1;
        a = xor3(high1, b, seti(static_cast<int32_t>(k0)));
        b = low1;
        c = xor3(high0, d, seti(static_cast<int32_t>(k1)));
        d = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {a, b, c, d};
}

constexpr int32_t kOfIds = 0, kOfBlocks = 1;  // kinds of counters

// The words of 64 consecutive ids, the first a multiple of 64: id i has word i % 4 of counter i / 4.
HR_INLINE Words words_of_ids(int32_t first_id, const GumbelSearch& s) {
    static const int32_t order[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    Words w = philox(load_int(order) + seti(first_id / 4), kOfIds, s);
    transpose4(w.a, w.b, w.c, w.d);  // lane 4 q + i held counter 4 i + q: now each vector holds 16 ids in order
    return w;
}

// ---- passes -------------------------------------------------------------------------------------------------------

static void block_max(const float* x, int blocks, float* max_out) {
    for (int b = 0; b < blocks; b++, x += kBlock) {
        VF most = set1(-kSampleInf), bad = zero();
        for (int j = 0; j < kBlockVectors; j++) {
            VF v = load(x + 16 * j);
            most = max(v, most);
            bad = fma(max(set1(-3.4028235e38f), v), zero(), bad);  // NaN from NaN and +inf; -inf becomes finite first
        }
        max_out[b] = any_nan(bad) ? __builtin_nanf("") : largest(most);
    }
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

static uint32_t blocks_in_reach(const float* max, int32_t first_block, float floor, const GumbelSearch& s,
                                BlockNoise& noise) {
    static const int32_t count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    VF top = load(max), z = (top - set1(s.top)) * set1(s.inverse), needed = set1(s.best - kBoundSlack);
    uint32_t lanes = lanes_ge(top, set1(floor)) & lanes_ge(z + set1(kLargestNoise), needed);
    if (!lanes) return 0;
    Words w = philox(load_int(count) + seti(first_block), kOfBlocks, s);
    VF least = exponential_of(w.a) * set1(1.0f / kBlock);
    store(noise.least, least);
    store_int(noise.which, shr<26>(w.b));
    return lanes & lanes_ge(z + noise_of(least), needed);
}

static void block_gumbel(const float* x, int32_t first_id, Floor floor, float least, int32_t which, GumbelSearch& s) {
    const Words w = words_of_ids(first_id, s);
    const VI words[kBlockVectors] = {w.a, w.b, w.c, w.d};
    for (int j = 0; j < kBlockVectors; j++) {
        const uint32_t leads = which / 16 == j ? 1u << which % 16 : 0;
        VF base = set1(least), v = load(x + 16 * j);
        VF noise = noise_of(keep_lanes(base, leads, base + exponential_of(words[j])));
        VF z = (v - set1(s.top)) / set1(s.temperature) + noise;
        float score[16];
        store(score, z);
        for (uint32_t lanes = lanes_ge(z, set1(s.best)) & lanes_reaching(v, floor); lanes; lanes &= lanes - 1) {
            const int i = __builtin_ctz(lanes);
            const int32_t id = first_id + 16 * j + i;
            if (score[i] > s.best || (score[i] == s.best && id < s.best_id)) s.best = score[i], s.best_id = id;
        }
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
    t.blocks_in_reach = blocks_in_reach;
    t.block_gumbel = block_gumbel;
    t.block_mask = block_mask;
}

}  // namespace
