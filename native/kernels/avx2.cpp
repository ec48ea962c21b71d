#define HEADRACE_AVX2 1
#define HEADRACE_ISA_NAME "avx2"
#define HEADRACE_TABLE avx2_kernels
#include "table.inl"
