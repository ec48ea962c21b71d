#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

#if defined(HEADRACE_HAS_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace headrace {
namespace {

bool always() { return true; }

#if defined(__x86_64__)

bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512bf16");
}

#if defined(HEADRACE_HAS_AMX)
// The processor has tiles of int8, and the system lets this process use them (arch_prctl, Linux 5.16: a process must
// ask).
bool has_amx() {
    constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    return has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3 &&
           syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}
#endif

#elif defined(__aarch64__) && defined(__linux__)

bool has_dot() { return getauxval(AT_HWCAP) >> 20 & 1; }                 // HWCAP_ASIMDDP
bool has_i8mm() { return has_dot() && getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM

#elif defined(__aarch64__) && defined(__APPLE__)

bool has(const char* feature) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(feature, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dot() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_dot() && has("hw.optional.arm.FEAT_I8MM"); }

#elif defined(__aarch64__)

bool has_dot() { return false; }
bool has_i8mm() { return false; }

#endif

struct Offer {
    const KernelTable* (*table)();
    bool (*usable)();
};

constexpr Offer kOffers[] = {
// best first
#if defined(__x86_64__)
    {avx512_kernels, has_avx512},
    {avx2_kernels, has_avx2},
#elif defined(__aarch64__)
    {neon_i8mm_kernels, has_i8mm},
    {neon_dot_kernels, has_dot},
#endif
    {scalar_kernels, always},
#if defined(HEADRACE_HAS_AMX)
    {amx_kernels, has_amx},  // never taken unless asked for
#endif
};

}  // namespace

std::vector<std::string> kernel_names() {
    std::vector<std::string> names;
    for (const Offer& o : kOffers)
        if (o.usable()) names.emplace_back(o.table()->isa);
    return names;
}

const KernelTable* choose_kernels(const char* isa) {
    const std::string asked = isa ? isa : "";
    for (const Offer& o : kOffers)
        if (o.usable() && (asked.empty() || asked == o.table()->isa)) return o.table();
    std::string there;
    for (const std::string& name : kernel_names()) there += (there.empty() ? "" : ", ") + name;
    throw std::invalid_argument("instruction set '" + asked + "' is not available here; choose one of: " + there);
}

}  // namespace headrace
