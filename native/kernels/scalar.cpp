#define HEADRACE_SCALAR 1
#define HEADRACE_ISA_NAME "scalar"
#define HEADRACE_TABLE scalar_kernels
#include "table.inl"
