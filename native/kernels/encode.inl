// Floats into blocks, rounded plainly: steps that span a run's values, and the nearest quants. headrace.quant.blocks
// and headrace.quant.encode are the definition, bit for bit wherever a block's steps and offsets are finite; a value
// that is not makes one that is not either. Zeros are made positive where which of two is taken would depend on the
// order.
#pragma once

namespace {
namespace enc {

using headrace::Format;

constexpr float kLeast = 0x1p-126f;  // a step below counts as zero: its inverse might overflow

HR_INLINE float inverse(float step) { return __builtin_fabsf(step) >= kLeast ? 1.0f / step : 0.0f; }

// NaN if a value is no finite number, else what changes no sum
HR_INLINE float taint(VF a, VF b) { return any_nan(rows::taint(a) + rows::taint(b)) ? __builtin_nanf("") : -0.0f; }

HR_INLINE VF within(VF x, float least, float most) { return ::min(::max(x, set1(least)), set1(most)); }

HR_INLINE float greatest(VF a) { return largest(a) + 0.0f; }
HR_INLINE float smallest(VF a) { return 0.0f - largest(zero() - a); }

HR_INLINE void put_half(uint8_t* to, float x) {
    const uint16_t half = to_half(x);
    memcpy(to, &half, 2);
}
// As the block will have it.
HR_INLINE float put_rounded(uint8_t* to, float x) {
    put_half(to, x);
    uint16_t half;
    memcpy(&half, to, 2);
    return quant::from_half(half);
}

// 32 quants: the low nibbles are the first 16's
HR_INLINE void put_nibbles(uint8_t* to, VI first, VI second) {
    store_s8((int8_t*)to, (first & seti(15)) | shl<4>(second & seti(15)));
}
HR_INLINE void put_fifth_bits(uint8_t* to, VI first, VI second) {
    const uint32_t bits = lanes_ge(to_float(first), set1(16)) | lanes_ge(to_float(second), set1(16)) << 16;
    memcpy(to, &bits, 4);
}

// --- a run of 32 with its own step ---------------------------------------------------------------------------------

// Of two vectors the first value of largest size, with its sign.
HR_INLINE float largest_first(VF a, VF b, const float* x) {
    const VF top = set1(largest(::max(abs(a), abs(b))));
    const uint32_t there = lanes_ge(abs(a), top) | lanes_ge(abs(b), top) << 16;
    return there ? x[__builtin_ctz(there)] : 0.0f;
}

// Quants 0 .. 2 Half - 1 stand for -Half .. Half - 1; the value of largest size becomes -Half.
template <int Half>
static void symmetric(const float* x, int blocks, uint8_t* out) {
    constexpr int kFifths = Half > 8 ? 4 : 0;
    for (int i = 0; i < blocks; i++, x += 32, out += 18 + kFifths) {
        const VF a = load(x), b = load(x + 16);
        const float step = (largest_first(a, b, x) + taint(a, b)) / -(float)Half;
        const VF by = set1(inverse(step)), middle = set1(Half + 0.5f);
        const VI first = trunc_int(within(a * by + middle, 0, 2 * Half - 1));
        const VI second = trunc_int(within(b * by + middle, 0, 2 * Half - 1));
        put_half(out, step);
        if (kFifths) put_fifth_bits(out + 2, first, second);
        put_nibbles(out + 2 + kFifths, first, second);
    }
}

static void q4_1(const float* x, int blocks, uint8_t* out) {
    for (int i = 0; i < blocks; i++, x += 32, out += 20) {
        const VF a = load(x), b = load(x + 16);
        const float low = smallest(::min(a, b)) + taint(a, b), step = (greatest(::max(a, b)) - low) / 15.0f;
        const VF from = set1(low), by = set1(inverse(step)), half = set1(0.5f);
        put_half(out, step), put_half(out + 2, low);
        put_nibbles(out + 4, trunc_int(within((a - from) * by + half, 0, 15)),
                    trunc_int(within((b - from) * by + half, 0, 15)));
    }
}

// Halves away from zero.
HR_INLINE VI rounded_away(VF x) {
    const VI size = trunc_int(within(abs(x) + set1(0.5f), 0, 127)), sign = sar<31>(bits(x));
    return (size ^ sign) - sign;
}

static void q8_0(const float* x, int blocks, uint8_t* out) {
    for (int i = 0; i < blocks; i++, x += 32, out += 34) {
        const VF a = load(x), b = load(x + 16);
        const float step = (largest(::max(abs(a), abs(b))) + taint(a, b)) / 127.0f;
        const VF by = set1(inverse(step));
        put_half(out, step);
        store_s8((int8_t*)out + 2, rounded_away(a * by));
        store_s8((int8_t*)out + 18, rounded_away(b * by));
    }
}

// --- runs within blocks of 256, whose own steps are quants -----------------------------------------------------------

// Eight six-bit scales and offsets as the 12 bytes of `blocks.unpack_sixes`.
HR_INLINE void put_sixes(uint8_t* to, const int32_t* scales, const int32_t* offsets) {
    for (int i = 0; i < 4; i++) {
        to[i] = (uint8_t)(scales[i] | scales[4 + i] >> 4 << 6);
        to[4 + i] = (uint8_t)(offsets[i] | offsets[4 + i] >> 4 << 6);
        to[8 + i] = (uint8_t)((scales[4 + i] & 15) | (offsets[4 + i] & 15) << 4);
    }
}

// Multiples of `unit`, 0 to 63, near the first eight values.
HR_INLINE void multiples(const float* values, float unit, int32_t* out) {
    store_int(out, round_int(within(load(values) * set1(inverse(unit)), 0, 63)));
}

static void q4_k(const float* x, int blocks, uint8_t* out) {
    for (int i = 0; i < blocks; i++, x += 256, out += 144) {
        float steps[16] = {}, lows[16] = {}, tainted = 0;
        for (int r = 0; r < 8; r++) {
            const VF a = load(x + 32 * r), b = load(x + 32 * r + 16);
            const float low = smallest(::min(::min(a, b), zero()));
            steps[r] = (greatest(::max(a, b)) - low) / 15.0f, lows[r] = 0.0f - low;
            tainted += taint(a, b);
        }
        const float d = put_rounded(out, (largest(load(steps)) + tainted) / 63.0f);
        const float m = put_rounded(out + 2, (largest(load(lows)) + tainted) / 63.0f);
        int32_t scales[16], offsets[16];
        multiples(steps, d, scales), multiples(lows, m, offsets);
        put_sixes(out + 4, scales, offsets);
        const auto quants = [&](int run, int from) __attribute__((always_inline)) {
            const VF shifted = load(x + 32 * run + from) + set1(m * (float)offsets[run]);
            return round_int(within(shifted * set1(inverse(d * (float)scales[run])), 0, 15));
        };
        for (int pair = 0; pair < 4; pair++)
            for (int from = 0; from < 32; from += 16)
                put_nibbles(out + 16 + 32 * pair + from, quants(2 * pair, from), quants(2 * pair + 1, from));
    }
}

// The value of largest size with its sign; of two, the positive one.
HR_INLINE float outermost(VF a) {
    const float low = smallest(a), high = greatest(a);
    return -low > high ? low : high;
}

static void q6_k(const float* x, int blocks, uint8_t* out) {
    for (int i = 0; i < blocks; i++, x += 256, out += 210) {
        float tops[16], tainted = 0;
        for (int r = 0; r < 16; r++) {
            const VF a = load(x + 16 * r);
            tops[r] = outermost(a), tainted += taint(a, zero());
        }
        const VF steps = load(tops) / set1(-32);
        const float d = put_rounded(out + 208, (outermost(steps) + tainted) / -128.0f);
        int32_t scales[16];
        const VI multiples = round_int(within(steps * set1(inverse(d)), -128, 127));
        store_int(scales, multiples), store_s8((int8_t*)out + 192, multiples);
        const auto quants = [&](int run) __attribute__((always_inline)) {
            const VF by = set1(inverse(d * (float)scales[run]));
            return round_int(within(load(x + 16 * run) * by, -32, 31)) + seti(32);
        };
        for (int half = 0; half < 2; half++)
            for (int from = 0; from < 2; from++) {  // runs of 16: four stretches of 32 values share bytes
                const int run = 8 * half + from;
                const VI a = quants(run), b = quants(run + 2), c = quants(run + 4), e = quants(run + 6);
                const VI high = shr<4>(a) | shl<2>(shr<4>(b)) | shl<4>(shr<4>(c)) | shl<6>(shr<4>(e));
                put_nibbles(out + 64 * half + 16 * from, a, c);
                put_nibbles(out + 64 * half + 32 + 16 * from, b, e);
                store_s8((int8_t*)out + 128 + 32 * half + 16 * from, high);
            }
    }
}

// --- what is encoded -----------------------------------------------------------------------------------------------

static void widen(Format from, const uint8_t* src, int n, float* out) {
    if (from == Format::F32) memcpy(out, src, 4 * (size_t)n);
    if (from == Format::F16)
        for (int i = 0; i < n; i += 16) store(out + i, load_half((const uint16_t*)src + i));
    if (from == Format::BF16)
        for (int i = 0; i < n; i++) {
            uint16_t upper;
            memcpy(&upper, src + 2 * i, 2);
            const uint32_t bits = (uint32_t)upper << 16;
            memcpy(out + i, &bits, 4);
        }
}

}  // namespace enc

static void fill_encode(headrace::KernelTable& t) {
    const auto set = [&t](headrace::Format format, auto encode) { t.encode[static_cast<int>(format)] = encode; };
    set(headrace::Format::Q4_0, enc::symmetric<8>);
    set(headrace::Format::Q5_0, enc::symmetric<16>);
    set(headrace::Format::Q4_1, enc::q4_1);
    set(headrace::Format::Q8_0, enc::q8_0);
    set(headrace::Format::Q4_K, enc::q4_k);
    set(headrace::Format::Q6_K, enc::q6_k);
    t.widen = enc::widen;
}

}  // namespace
