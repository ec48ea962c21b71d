#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_kernels(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_sample(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "Headrace's native module: packed weights, kernels per instruction set, plans, the sampler.";
    bind_kernels(m);
    bind_plan(m);
    bind_probe(m);
    bind_sample(m);
}
