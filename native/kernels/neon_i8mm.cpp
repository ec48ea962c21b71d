#define HEADRACE_NEON 1
#define HEADRACE_ISA_NAME "neon_i8mm"
#define HEADRACE_TABLE neon_i8mm_kernels
#include "table.inl"
