// Quants as lines of unsigned bytes, and their exact dot products with int8 activations. Knows tiles' quants, not their
// scales.
#pragma once

namespace {
namespace lin {

constexpr int kLine = 64;

#if defined(HEADRACE_AVX512) || defined(HEADRACE_AVX2) || defined(HEADRACE_NEON)
#define HR_UNROLL _Pragma("GCC unroll 16")
#else
#define HR_UNROLL  // arrays of arrays are not kept in registers anyhow
#endif
#define HR_MEMBER inline __attribute__((always_inline))

HR_INLINE int32_t int_at(const void* p) {
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

// How many bytes before they are needed weights are asked for: into the first cache or, far, only into the second,
// which waits for more lines at once. For a few rows, where memory is the limit, and for more. Tried format by format
// with two threads on Zen 4, where they differ by up to 1.4 times.
struct Reach {
    int bytes;
    bool far;
};
constexpr int kFewRows = 3;

// --- quants: line J (inputs 4J .. 4J + 3 of 16 rows) as unsigned bytes -------------------------------------

struct Nibbles {
    static constexpr int kBytes = 4 * kLine, kBits = 4;
    static constexpr Reach kFew{7 << 10, false}, kMany{7 << 10, false};
    template <int J>
    HR_INLINE VB line(const uint8_t* w) {
        if constexpr (J < 4)
            return low_nibbles(load_bytes(w + kLine * J));
        else
            return high_nibbles(load_bytes(w + kLine * (J - 4)));
    }
    HR_INLINE VI dot(VI acc, VB w, int32_t a) { return dot4_six(acc, w, a); }
};

struct Fives {
    static constexpr int kBytes = 5 * kLine, kBits = 5;
    static constexpr Reach kFew{9 << 8, false}, kMany{16 << 10, true};
    template <int J>
    HR_INLINE VB line(const uint8_t* w) {
        return with_bits<4 - J>(Nibbles::line<J>(w), load_bytes(w + 4 * kLine), 0x10);
    }
    HR_INLINE VI dot(VI acc, VB w, int32_t a) { return dot4_six(acc, w, a); }
};

struct Sixes {
    static constexpr int kBytes = 6 * kLine, kBits = 6;
    static constexpr Reach kFew{8 << 10, true}, kMany{8 << 10, true};
    template <int J>
    HR_INLINE VB line(const uint8_t* w) {
        return with_bits<4 - 2 * (J % 4)>(Nibbles::line<J>(w), load_bytes(w + kLine * (4 + J / 4)), 0x30);
    }
    HR_INLINE VI dot(VI acc, VB w, int32_t a) { return dot4_six(acc, w, a); }
};

struct Eights {
    static constexpr int kBytes = 8 * kLine, kBits = 8;
    static constexpr Reach kFew{9 << 8, true}, kMany{16 << 10, true};
    template <int J>
    HR_INLINE VB line(const uint8_t* w) {
        return load_bytes(w + kLine * J);
    }
    HR_INLINE VI dot(VI acc, VB w, int32_t a) { return dot4_eight(acc, w, a); }
};

struct Lines {
    VB q[8];
};

template <class Q>
HR_INLINE Lines lines_of(const uint8_t* w) {
    return {{Q::template line<0>(w), Q::template line<1>(w), Q::template line<2>(w), Q::template line<3>(w),
             Q::template line<4>(w), Q::template line<5>(w), Q::template line<6>(w), Q::template line<7>(w)}};
}

template <class Q>
HR_INLINE VI dot_half(const VB* q, const int8_t* a, VI sum) {
    HR_UNROLL
    for (int j = 0; j < 4; j++) sum = Q::dot(sum, q[j], int_at(a + 4 * j));
    return sum;
}

// --- dot products, line by line, for machines whose registers do not hold all eight lines of a run ------------------

// Of lines From .. To - 1 with M rows. a: the rows' activations of the run, `stride` bytes from one to the next.
template <class Q, int From, int To, int M>
HR_INLINE void add_lines(const uint8_t* w, const int8_t* a, int stride, VI* sums) {
    if constexpr (From < To) {
        const VB q = Q::template line<From>(w);
        HR_UNROLL
        for (int m = 0; m < M; m++) sums[m] = Q::dot(sums[m], q, int_at(a + (size_t)m * stride + 4 * From));
        add_lines<Q, From + 1, To, M>(w, a, stride, sums);
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)

template <class Q, int From, int To, int M>
HR_INLINE void add_line_pairs(const uint8_t* w, const int8_t* a, int stride, Both* sums) {
    if constexpr (From < To) {
        VB line = Q::template line<From>(w), next = Q::template line<From + 1>(w);
        if constexpr (Q::kBits == 8) line = centred(line), next = centred(next);
        HR_UNROLL
        for (int m = 0; m < M; m += 2) {
            const int8_t* first = a + (size_t)m * stride + 4 * From;
            sums[m / 2] = dot8(sums[m / 2], line, next, first, first + stride);
        }
        add_line_pairs<Q, From + 2, To, M>(w, a, stride, sums);
    }
}

#endif

#if defined(HEADRACE_AVX2)

// As many lines as int16 holds the sums of, and then the next ones.
constexpr int lines_of_pairs(int bits) { return 32767 / (2 * 127 * ((1 << bits) - 1)); }

template <class Q, int From, int To, int M>
HR_INLINE void pair_lines(const uint8_t* w, const int8_t* a, int stride, VP* pairs) {
    if constexpr (From < To) {
        const VB q = Q::template line<From>(w);
        HR_UNROLL
        for (int m = 0; m < M; m++) pairs[m] = add_pairs(pairs[m], q, int_at(a + (size_t)m * stride + 4 * From));
        pair_lines<Q, From + 1, To, M>(w, a, stride, pairs);
    }
}

template <class Q, int From, int To, int M>
HR_INLINE void add_paired_lines(const uint8_t* w, const int8_t* a, int stride, VI* sums) {
    if constexpr (From < To) {
        constexpr int kNext = From + lines_of_pairs(Q::kBits), kStop = kNext < To ? kNext : To;
        VP pairs[M];
        HR_UNROLL
        for (int m = 0; m < M; m++) pairs[m] = no_pairs();
        pair_lines<Q, From, kStop, M>(w, a, stride, pairs);
        HR_UNROLL
        for (int m = 0; m < M; m++) sums[m] = sums[m] + sums_of(pairs[m]);
        add_paired_lines<Q, kStop, To, M>(w, a, stride, sums);
    }
}

#endif

template <class Q, int From, int To, int M>
HR_INLINE void dot_lines(const uint8_t* w, const int8_t* a, int stride, VI* sums) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (M % 2 == 0) {
        Both both[M / 2];
        HR_UNROLL
        for (int m = 0; m < M / 2; m++) both[m] = no_products();
        add_line_pairs<Q, From, To, M>(w, a, stride, both);
        HR_UNROLL
        for (int m = 0; m < M; m++) sums[m] = m % 2 ? second_of(both[m / 2]) : first_of(both[m / 2]);
        return;
    }
#endif
    HR_UNROLL
    for (int m = 0; m < M; m++) sums[m] = zeroi();
#if defined(HEADRACE_AVX2)
    if constexpr (Q::kBits < 8) return add_paired_lines<Q, From, To, M>(w, a, stride, sums);
#endif
    add_lines<Q, From, To, M>(w, a, stride, sums);
}

}  // namespace lin
}  // namespace
