// One translation unit per instruction set includes this once.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../simd.h"
#include "attention.inl"
#include "encode.inl"
#include "linear.inl"
#include "probe.inl"
#include "rows.inl"
#include "sample.inl"

namespace headrace {

const KernelTable* HEADRACE_TABLE() {
    static const KernelTable table = [] {
        KernelTable t{};
        t.isa = HEADRACE_ISA_NAME;
        fill_linear(t);
        fill_rows(t);
        fill_attention(t);
        fill_sample(t);
        fill_probe(t);
        fill_encode(t);
        return t;
    }();
    return &table;
}

}  // namespace headrace
