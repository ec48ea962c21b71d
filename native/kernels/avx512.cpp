#define HEADRACE_AVX512 1
#define HEADRACE_ISA_NAME "avx512"
#define HEADRACE_TABLE avx512_kernels
#include "table.inl"
