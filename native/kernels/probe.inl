// What the multipliers of this instruction set can give: products of registers, with no memory in the way.
// Results only keep the compiler from leaving the work out.
namespace {

#ifdef HEADRACE_AVX512
constexpr int kChains = 12;  // enough to hide the latency, few enough for 32 registers
#else
constexpr int kChains = 4;  // each is two or four registers here
#endif

// Lines of bytes from 0 to 30, different ones so that no chain's products are another's.
struct ProbeLines {
    alignas(64) uint8_t at[kChains][64];
    ProbeLines() {
        for (int c = 0; c < kChains; c++)
            for (int i = 0; i < 64; i++) at[c][i] = static_cast<uint8_t>((7 * i + c) % 31);
    }
};

// Multiply-adds of `rounds` rounds, and what came of them.
template <class Sum, class Multiply>
int64_t probe(int rounds, int each, Sum (&sums)[kChains], Multiply multiply) {
    const ProbeLines lines;
    VB w[kChains];
    for (int c = 0; c < kChains; c++) w[c] = load_bytes(lines.at[c]);
    for (int i = 0; i < rounds; i++)
        for (int c = 0; c < kChains; c++) sums[c] = multiply(sums[c], w[c], i & 127);
    return int64_t(rounds) * kChains * 16 * each;
}

int64_t probe_q32(int rounds, float* result) {
#ifdef HEADRACE_AVX2  // of small quants: see quants.inl
    VP sums[kChains];
    for (VP& s : sums) s = no_pairs();
    const int64_t macs = probe(rounds, 4, sums, [](VP s, VB w, int a) { return add_pairs(s, w, a); });
    for (VP s : sums) *result += static_cast<float>(sum_ints(sums_of(s)));
#else
    VI sums[kChains];
    for (VI& s : sums) s = zeroi();
    const int64_t macs = probe(rounds, 4, sums, [](VI s, VB w, int a) { return dot4_six(s, w, a); });
    for (VI s : sums) *result += static_cast<float>(sum_ints(s));
#endif
    return macs;
}

int64_t probe_bf16(int rounds, float* result) {
    VF sums[kChains];
    for (VF& s : sums) s = zero();
    const int64_t macs = probe(rounds, 2, sums, [](VF s, VB w, int a) { return dot_pairs(s, w, uint32_t(a)); });
    for (VF s : sums) *result += largest(s);
    return macs;
}

int64_t probe_f32(int rounds, float* result) {
    VF sums[kChains], w[kChains];
    for (int c = 0; c < kChains; c++) sums[c] = zero(), w[c] = set1(1.0f / float(c + 3));
    for (int i = 0; i < rounds; i++)
        for (int c = 0; c < kChains; c++) sums[c] = fma(w[c], set1(float(i)), sums[c]);
    for (VF s : sums) *result += largest(s);
    return int64_t(rounds) * kChains * 16;
}

}  // namespace

static void fill_probe(headrace::KernelTable& t) {
    t.probe[static_cast<int>(headrace::Input::F32)] = probe_f32;
    t.probe[static_cast<int>(headrace::Input::BF16)] = probe_bf16;
    t.probe[static_cast<int>(headrace::Input::Q32)] = probe_q32;
}
