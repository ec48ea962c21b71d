#define HEADRACE_NEON 1
#define HEADRACE_ISA_NAME "neon_dot"
#define HEADRACE_TABLE neon_dot_kernels
#include "table.inl"
