#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace headrace {

#if !(defined(__x86_64__) || defined(_M_X64))
const KernelTable* avx2_kernels() { return nullptr; }
const KernelTable* avx512_kernels() { return nullptr; }
#endif

namespace {

bool has_avx2() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
    return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

}  // namespace

const KernelTable* choose_kernels(const char* isa) {
    std::vector<const KernelTable*> usable;  // best first
    if (has_avx512()) usable.push_back(avx512_kernels());
    if (has_avx2()) usable.push_back(avx2_kernels());
    usable.push_back(scalar_kernels());
    if (isa == nullptr || *isa == 0) return usable.front();
    std::string names;
    for (const KernelTable* t : usable) {
        if (std::string(isa) == t->isa) return t;
        names += (names.empty() ? "" : ", ") + std::string(t->isa);
    }
    throw std::invalid_argument("instruction set '" + std::string(isa) +
                                "' is not available here; choose one of: " + names);
}

}  // namespace headrace
