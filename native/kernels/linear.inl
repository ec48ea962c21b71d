// out = x . weight, for packed weights (layouts: ../formats.cpp). Owes one float32 chain an output, over blocks (float
// formats: inputs) in ascending order, so that no bit depends on the number of rows, on panels done together or on the
// instruction set.
//
//   32 values a block:   isum = sum of wq * aq, exact
//                        acc = fma(isum - zero * asum, dw * da, acc); zero: of the format, in Q4_Z of the block
//                        affine formats: acc = fma(mw, sa, acc)
//   256 values a block:  its eight runs of 32 as above, dw = d * scale, mw = -least * offset
//                        (Q6_K: isum = scale0 * isum of the first half + scale1 * isum of the second, dw = d)
//   f32, f16:            acc = fma(w, x, acc); bf16 as well, where the input is left in float32
//   bf16 times bf16:     inputs in pairs, the second of a pair first: acc = fma(w1, x1, acc), then fma(w0, x0, acc),
//                        denormals as zero. This is what VDPBF16PS computes: equal in 9.6 million random cases, Zen 4.
#pragma once
#include "quants.inl"

namespace {
namespace lin {

using headrace::Activations;

// The rows of `in` from `row0` on times `panels` panels, `panel_bytes` apart.
using TileFn = void (*)(const uint8_t* w, size_t panel_bytes, int panels, int columns, const Activations& in, int row0,
                        float* out, int stride);

struct Tile {
    int rows;
    TileFn run;
};

constexpr int kAhead = 7 << 10;  // bytes of float weights asked for before they are needed

// Asks for a run's share of the block that is to come, for M rows.
template <class F, int M>
HR_INLINE void prefetch_run(const uint8_t* block, int run) {
    constexpr Reach reach = M <= kFewRows ? F::Q::kFew : F::Q::kMany;
    constexpr int kShare = F::kBytes / F::kRuns;
    const uint8_t* w = block + run * kShare + reach.bytes;
    HR_UNROLL
    for (int i = 0; i < (kShare + kLine - 1) / kLine; i++) {
        if constexpr (reach.far)
            prefetch_far(w + kLine * i);
        else
            prefetch(w + kLine * i);
    }
}

// The quant 2^shift stands for zero; kNoZero: quants are meant as they are.
constexpr int kNoZero = -1, kEightsZero = kEightsCentred ? kNoZero : 7;

// --- block formats: how the 32 values of a run weigh, given the two halves of their dot products -------------

// One row's activations of a run.
struct Run {
    const float *d, *s;          // scale; scale * sum
    const int32_t *sum, *sum16;  // of the run, of its halves
};

// 32 values a block: a scale, perhaps an offset.
template <class Quants, int ZeroShift, bool IsAffine>
struct Block32 {
    using Q = Quants;
    static constexpr bool kHalves = false;  // are the two halves of a run told apart?
    static constexpr int kRuns = 1, kBytes = Q::kBytes + (IsAffine ? 64 : 32);
    VF d, offset;
    HR_MEMBER Block32(const uint8_t* tile, int)
        : d(load_half((const uint16_t*)(tile + Q::kBytes))),
          offset(IsAffine ? load_half((const uint16_t*)(tile + Q::kBytes + 32)) : zero()) {}
    HR_MEMBER VF add(VF acc, VI first, VI second, Run a) const {
        VI sum = first + second;
        if constexpr (ZeroShift != kNoZero) sum = sum - shl<ZeroShift>(seti(*a.sum));
        acc = fma(to_float(sum), d * set1(*a.d), acc);
        if constexpr (IsAffine) acc = fma(offset, set1(*a.s), acc);
        return acc;
    }
};

// Q4_Z: a scale, and the quant that stands for zero.
struct Block32Zero {
    using Q = Nibbles;
    static constexpr bool kHalves = false;
    static constexpr int kRuns = 1, kBytes = Q::kBytes + 32 + 16;
    VF d;
    VI zero_quant;
    HR_MEMBER Block32Zero(const uint8_t* tile, int)
        : d(load_half((const uint16_t*)(tile + Q::kBytes))), zero_quant(load_u8(tile + Q::kBytes + 32)) {}
    HR_MEMBER VF add(VF acc, VI first, VI second, Run a) const {
        const VI sum = first + second - zero_quant * seti(*a.sum);
        return fma(to_float(sum), d * set1(*a.d), acc);
    }
};

// Q4_K, Q5_K: an unsigned scale and an offset for each run, times two factors of the block.
template <class Quants>
struct Block256Affine {
    using Q = Quants;
    static constexpr bool kHalves = false;
    static constexpr int kRuns = 8, kScales = 8 * Q::kBytes, kBytes = kScales + 256 + 64;
    VF d, offset;
    HR_MEMBER Block256Affine(const uint8_t* tile, int run)
        : d(load_half((const uint16_t*)(tile + kScales + 288)) * to_float(load_u8(tile + kScales + 16 * run))),
          offset(load_half((const uint16_t*)(tile + kScales + 256)) *
                 to_float(load_u8(tile + kScales + 128 + 16 * run))) {}
    HR_MEMBER VF add(VF acc, VI first, VI second, Run a) const {
        acc = fma(to_float(first + second), d * set1(*a.d), acc);
        return fnma(offset, set1(*a.s), acc);
    }
};

// Q6_K: a signed scale for each half of a run; the quant 32 stands for zero.
struct Block256Signed {
    using Q = Sixes;
    static constexpr bool kHalves = true;
    static constexpr int kRuns = 8, kScales = 8 * Q::kBytes, kBytes = kScales + 256 + 32;
    VF d;
    VI one, two;
    HR_MEMBER Block256Signed(const uint8_t* tile, int run)
        : d(load_half((const uint16_t*)(tile + kScales + 256))),
          one(load_s8((const int8_t*)tile + kScales + 32 * run)),
          two(load_s8((const int8_t*)tile + kScales + 32 * run + 16)) {}
    HR_MEMBER VF add(VF acc, VI first, VI second, Run a) const {
        const VI sum = (first - shl<5>(seti(a.sum16[0]))) * one + (second - shl<5>(seti(a.sum16[1]))) * two;
        return fma(to_float(sum), d * set1(*a.d), acc);
    }
};

template <class F, int M>
void tile_quants(const uint8_t* w, size_t panel_bytes, int panels, int columns, const Activations& in, int row0,
                 float* out, int stride) {
    using Q = typename F::Q;
    const int8_t* q = in.q32 + (size_t)row0 * in.q_stride;
    const int bs = in.blocks_stride, blocks = columns / (32 * F::kRuns);
    const size_t at = (size_t)row0 * bs;
    const Run all{in.d32 + at, in.s32 + at, in.sum32 + at, in.sum16 + 2 * at};
    for (int p = 0; p < panels; p++, w += panel_bytes, out += 16) {
        VF acc[M];
        HR_UNROLL
        for (int m = 0; m < M; m++) acc[m] = zero();
        const uint8_t* t = w;
        for (int b = 0; b < blocks; b++, t += F::kBytes) {
            for (int s = 0; s < F::kRuns; s++) {
                const uint8_t* lines = t + s * Q::kBytes;
                const int r = b * F::kRuns + s;
                prefetch_run<F, M>(t, s);
                const F block(t, s);
                const auto add = [&](int m, VI first, VI second) __attribute__((always_inline)) {
                    const int i = m * bs + r;
                    acc[m] = block.add(acc[m], first, second, {all.d + i, all.s + i, all.sum + i, all.sum16 + 2 * i});
                };
#if defined(HEADRACE_AVX512)
                const Lines l = lines_of<Q>(lines);
                HR_UNROLL
                for (int m = 0; m < M; m++) {
                    const int8_t* a = q + (size_t)m * in.q_stride + 32 * r;
                    add(m, dot_half<Q>(l.q, a, zeroi()), dot_half<Q>(l.q + 4, a + 16, zeroi()));
                }
#else
                VI first[M], second[M];
                dot_lines<Q, 0, F::kHalves ? 4 : 8, M>(lines, q + 32 * r, in.q_stride, first);
                if constexpr (F::kHalves) dot_lines<Q, 4, 8, M>(lines, q + 32 * r, in.q_stride, second);
                HR_UNROLL
                for (int m = 0; m < M; m++) add(m, first[m], F::kHalves ? second[m] : zeroi());
#endif
            }
        }
        HR_UNROLL
        for (int m = 0; m < M; m++) store(out + (size_t)m * stride, acc[m]);
    }
}

// --- floats: P panels at once, so that P * M chains are in flight ------------------------------------------

struct Single {
    static constexpr int kStep = 64;  // bytes of a panel a step
    HR_INLINE int steps(int columns) { return columns; }
    HR_INLINE const float* row(const Activations& in, int r) { return in.f32 + (size_t)r * in.f32_stride; }
    HR_INLINE size_t stride(const Activations& in) { return in.f32_stride; }
    using W = VF;
    static constexpr bool kWide = true;
    HR_INLINE W weight(const uint8_t* w) { return load((const float*)w); }
    HR_INLINE VF step(VF acc, W w, float x) { return fma(w, set1(x), acc); }
};

struct Half : Single {
    static constexpr int kStep = 32;
    HR_INLINE VF weight(const uint8_t* w) { return load_half((const uint16_t*)w); }
};

// bf16 weights and float32 inputs: exact products, at half the rate.
struct BrainExact {
    static constexpr int kStep = 64;
    HR_INLINE int steps(int columns) { return (columns + 1) / 2; }
    struct Two {
        float v[2];
    };
    HR_INLINE const Two* row(const Activations& in, int r) { return (const Two*)(in.f32 + (size_t)r * in.f32_stride); }
    HR_INLINE size_t stride(const Activations& in) { return in.f32_stride / 2; }
    using W = VB;
    static constexpr bool kWide = false;
    HR_INLINE W weight(const uint8_t* w) { return load_bytes(w); }
    HR_INLINE VF step(VF acc, W w, const Two& x) {
        return fma(pair_second(w), set1(x.v[1]), fma(pair_first(w), set1(x.v[0]), acc));
    }
};

struct Brain {
    struct Pair {
        uint16_t v[2];
    };
    static constexpr int kStep = 64;
    HR_INLINE int steps(int columns) { return (columns + 1) / 2; }
    HR_INLINE const Pair* row(const Activations& in, int r) {
        return (const Pair*)(in.bf16 + (size_t)r * in.bf16_stride);
    }
    HR_INLINE size_t stride(const Activations& in) { return in.bf16_stride / 2; }
    using W = VB;
    static constexpr bool kWide = false;  // two operations a step: addresses cost less than they would elsewhere
    HR_INLINE W weight(const uint8_t* w) { return load_bytes(w); }
    HR_INLINE VF step(VF acc, W w, Pair x) { return dot_pairs(acc, w, (uint32_t)int_at(&x)); }
};

template <class F, int P, int M>
HR_INLINE void float_panels(const uint8_t* w, size_t panel_bytes, int columns, const Activations& in, int row0,
                            float* out, int stride) {
    const auto* x = F::row(in, row0);
    const size_t xs = F::stride(in);
    VF acc[P][M];
    HR_UNROLL
    for (int p = 0; p < P; p++) HR_UNROLL
    for (int m = 0; m < M; m++) acc[p][m] = zero();
    for (int k = 0, n = F::steps(columns); k < n; k++, w += F::kStep) HR_UNROLL
    for (int p = 0; p < P; p++) {
        prefetch(w + p * panel_bytes + kAhead / 4);
        const typename F::W v = F::weight(w + p * panel_bytes);
        HR_UNROLL
        for (int m = 0; m < M; m++) acc[p][m] = F::step(acc[p][m], v, x[m * xs + k]);
    }
    HR_UNROLL
    for (int p = 0; p < P; p++) HR_UNROLL
    for (int m = 0; m < M; m++) store(out + (size_t)m * stride + 16 * p, acc[p][m]);
}

// Many rows: eight steps of weights stay in registers while each row goes through them, so that a row's address is
// found once.
template <class F, int M>
HR_INLINE void float_panel(const uint8_t* w, int columns, const Activations& in, int row0, float* out, int stride) {
    constexpr int kSteps = 8;
    const auto* x = F::row(in, row0);
    const size_t xs = F::stride(in);
    VF acc[M];
    HR_UNROLL
    for (int m = 0; m < M; m++) acc[m] = zero();
    int k = 0;
    const int n = F::steps(columns);
    for (; k + kSteps <= n; k += kSteps) {
        typename F::W v[kSteps];
        HR_UNROLL
        for (int i = 0; i < kSteps; i++) {
            prefetch(w + (k + i) * F::kStep + kAhead / 2);
            v[i] = F::weight(w + (k + i) * F::kStep);
        }
        HR_UNROLL
        for (int m = 0; m < M; m++) {
            const auto* xm = x + m * xs + k;
            HR_UNROLL
            for (int i = 0; i < kSteps; i++) acc[m] = F::step(acc[m], v[i], xm[i]);
        }
    }
    for (; k < n; k++) {
        const typename F::W v = F::weight(w + k * F::kStep);
        HR_UNROLL
        for (int m = 0; m < M; m++) acc[m] = F::step(acc[m], v, x[m * xs + k]);
    }
    HR_UNROLL
    for (int m = 0; m < M; m++) store(out + (size_t)m * stride, acc[m]);
}

template <class F, int M>
void tile_float(const uint8_t* w, size_t panel_bytes, int panels, int columns, const Activations& in, int row0,
                float* out, int stride) {
    const FlushDenormals flush;
    int p = 0;
    if constexpr (M <= 5 || !F::kWide) {
        constexpr int P = M <= 5 ? 4 : M <= 8 ? 2 : 1;
        for (; p + P <= panels; p += P)
            float_panels<F, P, M>(w + p * panel_bytes, panel_bytes, columns, in, row0, out + 16 * p, stride);
        for (; p < panels; p++)
            float_panels<F, 1, M>(w + p * panel_bytes, panel_bytes, columns, in, row0, out + 16 * p, stride);
    } else {
        for (; p < panels; p++) float_panel<F, M>(w + p * panel_bytes, columns, in, row0, out + 16 * p, stride);
    }
}

// --- all rows of a call ------------------------------------------------------------------------------------

// The tile sizes of an instruction set, largest first; each table ends with one row.
#if defined(HEADRACE_AVX512)
#define HR_TILES(fn, F)                                                                                              \
    {                                                                                                                \
        {16, fn<F, 16>}, {12, fn<F, 12>}, {8, fn<F, 8>}, {6, fn<F, 6>}, {5, fn<F, 5>}, {4, fn<F, 4>}, {3, fn<F, 3>}, \
            {2, fn<F, 2>}, {                                                                                         \
            1, fn<F, 1>                                                                                              \
        }                                                                                                            \
    }
#elif defined(HEADRACE_AVX2) || defined(HEADRACE_NEON)
#define HR_TILES(fn, F)                                              \
    {                                                                \
        {4, fn<F, 4>}, {3, fn<F, 3>}, {2, fn<F, 2>}, { 1, fn<F, 1> } \
    }
#else
#define HR_TILES(fn, F) \
    {                   \
        {               \
            1, fn<F, 1> \
        }               \
    }
#endif

template <class F>
struct RowsQuants {
    static constexpr Tile kTiles[] = HR_TILES(tile_quants, F);
    static constexpr int kGroup = 1;
};
template <class F>
struct RowsFloat {
    static constexpr Tile kTiles[] = HR_TILES(tile_float, F);
    static constexpr int kGroup = 4;
};

// Panels outside, tiles of rows inside: a panel comes from memory once and from the cache for every further tile.
template <class Rows>
void linear(const uint8_t* packed, size_t bytes, int panels, int columns, const Activations& in, int row0, int rows,
            float* out, int stride) {
    for (int p = 0; p < panels; p += Rows::kGroup) {
        const int group = panels - p < Rows::kGroup ? panels - p : Rows::kGroup;
        const Tile* tile = Rows::kTiles;
        for (int r = 0; r < rows; r += tile->rows) {
            while (tile->rows > rows - r) tile++;
            tile->run(packed + p * bytes, bytes, group, columns, in, row0 + r, out + (size_t)r * stride + 16 * p,
                      stride);
        }
    }
}

// f<block format, its name>() for each format with quants
template <class Call>
void each_quantised(Call f) {
    using F = headrace::Format;
    f.template operator()<Block32<Nibbles, 3, false>, F::Q4_0>();
    f.template operator()<Block32<Nibbles, kNoZero, true>, F::Q4_1>();
    f.template operator()<Block32<Fives, 4, false>, F::Q5_0>();
    f.template operator()<Block32<Fives, kNoZero, true>, F::Q5_1>();
    f.template operator()<Block32<Eights, kEightsZero, false>, F::Q8_0>();
    f.template operator()<Block256Affine<Nibbles>, F::Q4_K>();
    f.template operator()<Block256Affine<Fives>, F::Q5_K>();
    f.template operator()<Block256Signed, F::Q6_K>();
    f.template operator()<Block32Zero, F::Q4_Z>();
}

}  // namespace lin

#if !defined(HEADRACE_AMX)  // which takes AVX-512's table and replaces what it does better
static void fill_linear(headrace::KernelTable& t) {
    using namespace lin;
    using F = headrace::Format;
    t.linear[(int)F::F32] = linear<RowsFloat<Single>>;
    t.linear[(int)F::F16] = linear<RowsFloat<Half>>;
    t.linear[(int)F::BF16] = linear<RowsFloat<Brain>>;
    t.linear_bf16_exact = linear<RowsFloat<BrainExact>>;
    each_quantised([&]<class Block, F Which>() { t.linear[(int)Which] = linear<RowsQuants<Block>>; });
}
#endif

}  // namespace
