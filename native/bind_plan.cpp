#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_plan(nb::module_&) {}
