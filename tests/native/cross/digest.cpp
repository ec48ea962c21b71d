// digest: names of the kernel tables that run here. digest ISA: a line for each kernel, what it made of fixed inputs as
// a digest. Two programs agree on a line only if every bit is the same (what is not a number counts as one value), so
// that machines which cannot run in one process can be compared. Inputs are made of integers alone, by exact steps.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "sampler.h"

using namespace headrace;

#if defined(DIGEST_AMX)
namespace headrace {
const KernelTable* amx_emulated_kernels();
}
#endif

namespace {

// Also "amx_emulated", wherever AVX-512 runs.
const KernelTable* chosen(const char* isa) {
#if defined(DIGEST_AMX)
    if (std::string(isa) == "amx_emulated" && choose_kernels("avx512")) return amx_emulated_kernels();
#endif
    return choose_kernels(isa);
}

class Random {  // splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014)
  public:
    uint64_t word() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ z >> 27) * 0x94d049bb133111ebull;
        return z ^ z >> 31;
    }
    float uniform() {
        return static_cast<float>(static_cast<int32_t>(word() >> 40) - (1 << 23)) * 0x1p-23f;
    }  // -1 .. 1
    std::vector<float> floats(size_t n, float spread = 1) {
        std::vector<float> all(n);
        for (float& x : all) x = uniform() * spread;
        return all;
    }
    uint16_t half() { return static_cast<uint16_t>(0x2000 + (word() & 0x8fff)); }  // 2^-7 to 2, either sign

  private:
    uint64_t state_ = 1;
};

class Digest {  // FNV-1a over words
  public:
    void word(uint32_t x) { hash_ = (hash_ ^ x) * 0x100000001b3ull; }
    void operator()(const float* x, size_t n) {
        for (size_t i = 0; i < n; i++) {
            uint32_t u;
            std::memcpy(&u, x + i, 4);
            word(x[i] == x[i] ? u : 0x7fc00000u);
        }
    }
    void operator()(const std::vector<float>& x) { (*this)(x.data(), x.size()); }
    template <class T>
    void integers(const std::vector<T>& all) {
        for (T x : all) word(static_cast<uint32_t>(x));
    }
    void print(const std::string& name) const { std::printf("%s %016llx\n", name.c_str(), (unsigned long long)hash_); }

  private:
    uint64_t hash_ = 0xcbf29ce484222325ull;
};

struct Inputs {
    std::vector<float> x;
    std::vector<uint16_t> bf16;
    std::vector<int8_t> q;
    std::vector<float> d, s;
    std::vector<int32_t> sums, halves;
    ActivationBuffers buffers;

    Inputs(const KernelTable& k, const std::vector<float>& values, int rows, int columns)
        : x(size_t(rows) * (columns + columns % 2)),
          bf16(x.size()),
          q(size_t(rows) * ((columns + 31) / 32 * 32)),
          d(q.size() / 32),
          s(d.size()),
          sums(d.size()),
          halves(2 * d.size()) {
        Activations& v = buffers.view;
        const int even = columns + columns % 2;
        v = {columns,
             x.data(),
             even,
             bf16.data(),
             even,
             q.data(),
             d.data(),
             sums.data(),
             s.data(),
             halves.data(),
             static_cast<int>(q.size()) / rows,
             static_cast<int>(d.size()) / rows};
        buffers.want_bf16 = buffers.want_q32 = true;
        for (int r = 0; r < rows; r++) {
            std::copy_n(values.data() + size_t(r) * columns, columns, x.data() + size_t(r) * even);
            k.prepare(x.data() + size_t(r) * even, columns, r, 0, buffers);
        }
    }
};

// A random matrix as a file holds it: any quants, scales that are ordinary numbers.
std::vector<uint8_t> matrix(const FormatInfo& f, int rows, int columns, Random& random) {
    const std::string name = f.name;
    const int blocks = rows * columns / f.block;
    std::vector<uint8_t> bytes(size_t(blocks) * f.block_bytes);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random.word() >> 32);
    for (int i = 0; i < blocks; i++) {
        uint8_t* block = bytes.data() + size_t(i) * f.block_bytes;
        const float value = random.uniform();
        uint32_t u;
        std::memcpy(&u, &value, 4);
        const uint16_t brain = static_cast<uint16_t>(u >> 16), scales[2] = {random.half(), random.half()};
        if (name == "f32")
            std::memcpy(block, &value, 4);
        else if (name == "bf16")
            std::memcpy(block, &brain, 2);
        else if (name == "q6_k")
            std::memcpy(block + 208, scales, 2);
        else
            std::memcpy(block, scales, name == "f16" || name.ends_with("_0") ? 2 : 4);
    }
    return bytes;
}

void linears(const KernelTable& k) {
    constexpr int kRows[] = {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 35}, kMost = 35, kPanels = 5;
    for (int i = 0; i < kFormats; i++) {
        const Format format = static_cast<Format>(i);
        const FormatInfo& f = info(format);
        const int columns = f.block == 1 ? 77 : 3 * f.block;
        Random random;
        const auto file = matrix(f, 16 * kPanels, columns, random);
        std::vector<uint8_t> packed(packed_bytes(format, 16 * kPanels, columns) + 4096);
        pack_rows(format, file.data(), file.size() / (16 * kPanels), 16 * kPanels, columns, 0, 16 * kPanels,
                  packed.data());
        const Inputs in(k, random.floats(size_t(kMost) * columns, 3), kMost, columns);
        Digest digest;
        for (const int rows : kRows) {
            std::vector<float> out(size_t(rows) * 16 * kPanels);
            const auto run = [&](LinearFn linear) {
                linear(packed.data(), panel_bytes(format, columns), kPanels, columns, in.buffers.view, kMost - rows,
                       rows, out.data(), 16 * kPanels);
                digest(out);
            };
            run(k.linear[i]);
            if (format == Format::BF16) run(k.linear_bf16_exact);
        }
        digest.print(std::string("linear ") + f.name);
    }
}

void rows(const KernelTable& k) {
    Random random;
    Digest prepared, norms, activations, sums, caps, turns, exps;
    for (const int n : {1, 15, 16, 33, 64, 576, 1000}) {
        for (const float spread : {1e-38f, 1e-3f, 1.0f, 40.0f, 3e38f}) {
            std::vector<float> x = random.floats(n, spread), y = random.floats(n, 2), out(n);
            const float odd[] = {0.0f, -0.0f, __builtin_inff(), -__builtin_inff(), __builtin_nanf(""), 1e-45f, 88.8f};
            for (size_t i = 0; i < 7 && n > 500; i++) x[32 * i + i] = odd[i];
            const Inputs in(k, x, 1, n);
            prepared(in.d), prepared(in.s);
            prepared.integers(in.q), prepared.integers(in.sums), prepared.integers(in.halves);
            for (uint16_t u : in.bf16) prepared.word((u & 0x7fff) > 0x7f80 ? 0x7fc0 : u);
            k.norm(x.data(), y.data(), n, 1e-5f, out.data()), norms(out);
            for (int a = 0; a < 3; a++) k.glu(x.data(), y.data(), n, a, out.data()), activations(out);
            k.add(x.data(), y.data(), n, out.data()), sums(out);
            k.scale(x.data(), 0.3f, n, out.data()), sums(out);
            k.softcap(x.data(), 30, n, out.data()), caps(out);
            k.exp(x.data(), n, out.data()), exps(out);
        }
        std::vector<float> heads = random.floats(3 * (2 * n + 1)), cos = random.floats(n), sin = random.floats(n);
        k.rope(heads.data(), 3, 2 * n + 1, 2 * n, cos.data(), sin.data()), turns(heads);
    }
    prepared.print("prepare"), norms.print("norm"), activations.print("glu"), sums.print("add scale");
    caps.print("softcap"), exps.print("exp"), turns.print("rope");
}

void encoders(const KernelTable& k) {
    constexpr int kValues = 4096;
    for (int i = 0; i < kFormats; i++) {
        if (!k.encode[i]) continue;
        const FormatInfo& f = info(static_cast<Format>(i));
        Random random;
        Digest digest;
        for (const float spread : {1e-44f, 1e-38f, 1e-6f, 0.05f, 3e4f, 3e38f}) {
            auto x = random.floats(kValues, spread);
            for (int n = 0; n < kValues; n += 5) x[n] = spread * static_cast<float>(n % 3 - 1);  // ties
            for (int n = 1024; n < 1536; n++) x[n] = n % 2 ? 0.0f : -0.0f;
            for (const Format source : {Format::F32, Format::F16, Format::BF16}) {
                std::vector<float> wide(kValues);
                k.widen(source, reinterpret_cast<const uint8_t*>(x.data()), kValues, wide.data());
                const bool meant = source == Format::F32;  // others read halves of floats, some of them no numbers
                if (!meant) digest(wide);
                std::vector<uint8_t> blocks(kValues / f.block * f.block_bytes);
                if (meant) k.encode[i](wide.data(), kValues / f.block, blocks.data());
                digest.integers(blocks);
            }
        }
        digest.print(std::string("encode ") + f.name);
    }
}

// Pages of keys and values of all sizes, some of them no numbers.
std::vector<uint8_t> odd_pages(const KernelTable& k, int format) {
    constexpr int kHeadDim = 18;
    Random random;
    std::vector<uint8_t> page(head_page_bytes(kHeadDim, static_cast<KvFormat>(format)));
    const float sizes[] = {0, 1e-42f, 1e-33f, 1e-8f, 1e-5f, 1, 6e4f, 8e6f, 1e7f, 1e38f};
    for (int t = 0; t < kPageTokens; t++) {
        auto key = random.floats(kHeadDim, sizes[t % 10]), value = random.floats(kHeadDim, sizes[t * 3 % 10]);
        if (t == 20) key[3] = __builtin_inff();
        if (t == 21) value[4] = -__builtin_inff();
        k.write_kv[format](key.data(), value.data(), kHeadDim, t, page.data());
    }
    return page;
}

void attention(const KernelTable& k, KvFormat format) {
    const int kv = static_cast<int>(format);
    Digest digest;
    for (const int head_dim : {16, 64, 80, 256}) {
        Random random;
        constexpr int kPages = 2 * kSplitTokens / kPageTokens;
        const int width = value_width(head_dim);
        const size_t page_bytes = head_page_bytes(head_dim, format);
        std::vector<uint8_t> cache(page_bytes * kPages);
        std::vector<int32_t> pages(kPages);
        for (int p = 0; p < kPages; p++) {
            pages[p] = (5 * p + 3) % kPages;
            for (int t = 0; t < kPageTokens; t++) {
                const auto key = random.floats(head_dim, 2), value = random.floats(head_dim, 70);
                k.write_kv[kv](key.data(), value.data(), head_dim, t, cache.data() + pages[p] * page_bytes);
            }
        }
        for (const float softcap : {0.0f, 20.0f}) {
            const auto q = random.floats(size_t(kTileRows) * head_dim, 0.5f);
            std::vector<QuantQuery> quant(kTileRows);
            AttendSplit work{};
            work.cache = cache.data(), work.page_stride = page_bytes, work.pages = pages.data();
            work.rows = kTileRows, work.head_dim = head_dim, work.scale = 0.125f, work.softcap = softcap;
            for (int r = 0; r < kTileRows; r++) {
                work.q[r] = q.data() + r * head_dim, work.lo[r] = 7 * r, work.hi[r] = 333 + 11 * r;
                k.quantize_query(work.q[r], head_dim, quant[r]);
                work.quant[r] = &quant[r];
            }
            const size_t size = row_result(head_dim);
            std::vector<float> out[2];
            for (int s = 0; s < 2; s++) {
                out[s].resize(kTileRows * size);
                work.split = s;
                for (int r = 0; r < kTileRows; r++) work.out[r] = out[s].data() + r * size;
                k.attend_split[kv](work);
                for (int r = 0; r < kTileRows; r++) digest(work.out[r], width + 2);
            }
            for (int r = 0; r < kTileRows; r++) {
                std::vector<float> result(head_dim);
                k.attend_merge(out[0].data() + r * size, out[1].data() + r * size, width);
                k.attend_finish(out[0].data() + r * size, head_dim, result.data());
                digest(result);
            }
        }
    }
    for (uint8_t byte : odd_pages(k, kv)) digest.word(byte);
    digest.print(format == KvFormat::F16 ? "attention" : "attention int8");
}

// Rows through the whole sampler, whose passes are the kernels.
void sampling(const KernelTable& k) {
    constexpr int kVocab = 64 * 64 - 5, kTop = 5;
    Random random;
    Digest digest;
    Scratch scratch;
    for (int i = 0; i < 60; i++) {
        const std::vector<float> logits = random.floats(kVocab, i % 3 ? 12 : 2);
        SamplingRow in;
        in.temperature = i % 7 ? 0.7f : 0.0f, in.seed = random.word(), in.position = i, in.logprobs = kTop;
        in.top_k = i % 4 == 1 ? 40 : 0, in.top_p = i % 4 == 2 ? 0.9f : 1.0f, in.min_p = i % 4 == 3 ? 0.05f : 0.0f;
        std::vector<int32_t> ids(kTop);
        std::vector<float> logprobs(kTop);
        SampledRow out;
        out.top_ids = ids.data(), out.top_logprobs = logprobs.data(), out.top_places = kTop;
        sample_row(k, logits.data(), nullptr, kVocab, in, out, scratch);
        for (const int32_t x : {out.token, out.rank, out.status}) digest.word(static_cast<uint32_t>(x));
        digest(&out.logprob, 1), digest(logprobs), digest.integers(ids);
    }
    digest.print("sampling");
}

}  // namespace

int main(int count, char** arguments) try {
    if (count < 2) {
        for (const std::string& name : kernel_names()) std::printf("%s\n", name.c_str());
        return 0;
    }
    const KernelTable& k = *chosen(arguments[1]);
    linears(k), rows(k), sampling(k), encoders(k);
    attention(k, KvFormat::F16), attention(k, KvFormat::Int8);
    return 0;
} catch (const std::exception& wrong) {
    std::fprintf(stderr, "%s\n", wrong.what());
    return 1;
}
