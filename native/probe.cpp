// What this machine can do at best, for whoever wants to know how far a step is from it: bytes read and multiply-adds a
// second, on a team of threads as a step runs on. Knows nothing of models.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <stdexcept>

#include "kernels.h"
#include "packed.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headrace;

namespace {

constexpr int kRounds = 20000;  // of a probe at once: well under a millisecond

// Runs job(thread) on the team, `repeats` times after once to warm up; seconds of the fastest.
double fastest(Pool& pool, int repeats, std::function<void(int)> job) {
    const auto call = [](void* context, int thread) { (*static_cast<std::function<void(int)>*>(context))(thread); };
    double best = 1e30;
    for (int i = 0; i <= repeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        pool.run(call, &job);
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        if (i) best = std::min(best, took.count());
    }
    return best;
}

// Several streams, wider registers or prefetching read no faster.
uint64_t sum(const uint64_t* at, size_t words) {
    uint64_t sums[8] = {};
    for (size_t i = 0; i + 8 <= words; i += 8)
        for (int k = 0; k < 8; k++) sums[k] += at[i + k];
    uint64_t all = 0;
    for (const uint64_t x : sums) all += x;
    return all;
}

double read_rate(int threads, size_t bytes, int repeats) {
    if (bytes < (size_t(1) << 20) || repeats < 1)
        throw std::invalid_argument("bytes must be at least 1 MiB, repeats at least 1");
    nb::gil_scoped_release release;
    Pool pool(threads);
    Arena arena(bytes);
    const size_t words = bytes / 8 / threads;
    std::atomic<uint64_t> all{0};
    const auto part = [&](int thread) { return reinterpret_cast<uint64_t*>(arena.data()) + thread * words; };
    fastest(pool, 1, [&](int thread) { std::fill_n(part(thread), words, uint64_t(thread)); });  // pages of its own
    return double(words) * 8 * threads / fastest(pool, repeats, [&](int thread) { all += sum(part(thread), words); });
}

double multiply_rate(const std::string& isa, const std::string& kind, int threads, int repeats) {
    const int which = kind == "f32" ? 0 : kind == "bf16" ? 1 : 2;
    if (which == 2 && kind != "int8") throw std::invalid_argument("kind must be f32, bf16 or int8, not " + kind);
    if (repeats < 1) throw std::invalid_argument("repeats must be at least 1");
    const auto run = choose_kernels(isa.c_str())->probe[which];
    nb::gil_scoped_release release;
    Pool pool(threads);
    std::atomic<int64_t> macs{0};
    std::atomic<int> odd{0};  // results are looked at, or they would not be computed
    const double seconds = fastest(pool, repeats, [&](int thread) {
        float result = 0;
        macs = run(kRounds, &result);
        odd += result < float(thread);
    });
    return double(macs) * threads / seconds;
}

}  // namespace

void bind_probe(nb::module_& m) {
    m.def("read_rate", &read_rate, "threads"_a, "bytes"_a = size_t(256) << 20, "repeats"_a = 5,
          "Bytes a second that threads read from so much memory together, the best of `repeats`; 256 MiB take some "
          "0.1 s.");
    m.def("multiply_rate", &multiply_rate, "isa"_a, "kind"_a, "threads"_a, "repeats"_a = 20,
          "Multiply-adds a second of registers, on all threads together, the best of `repeats`; a few milliseconds. "
          "kind: int8, bf16 or f32.");
}
