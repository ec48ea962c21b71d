// The kernels that exist once per instruction set, as a table of function pointers chosen when the module is loaded.
// Contract (docs/design.md, "Exactness"): the same bits from every table, for every number of rows, for every thread count.
#pragma once
#include <cstddef>
#include <cstdint>

#include "formats.h"

namespace headrace {

// A linear's input of up to `rows` rows, prepared once and shared by every weight that reads it.
// Only the arrays that the readers' formats need are set (see FormatInfo::input). All leading dimensions count elements.
struct Activations {
    int columns = 0;                 // K
    // Input::F32: the values themselves, padded with zeros to an even, tile-whole number of columns
    const float* f32 = nullptr;      // [rows][f32_stride]
    int f32_stride = 0;
    // Input::BF16: round to nearest even
    const uint16_t* bf16 = nullptr;  // [rows][bf16_stride]
    int bf16_stride = 0;
    // Input::Q32: symmetric int8 per 32 values: value = d * q, d = amax / 127, q = rint(value / d) (ties to even)
    const int8_t* q32 = nullptr;     // [rows][q_stride]
    const float* d32 = nullptr;      // [rows][blocks_stride]
    const int32_t* sum32 = nullptr;  // [rows][blocks_stride]   sum of the block's q
    const float* s32 = nullptr;      // [rows][blocks_stride]   d * (float)sum
    // Input::Q256: symmetric int8 per 256 values, for the K formats
    const int8_t* q256 = nullptr;    // [rows][q_stride]
    const float* d256 = nullptr;     // [rows][blocks_stride]   one per 256 (index b, blocks_stride shared)
    const int32_t* sum16 = nullptr;  // [rows][2 * blocks_stride] sum of each 16 q
    const int16_t* sum32h = nullptr; // [rows][blocks_stride]   sum of each 32 q (fits: 32 * 127)
    int q_stride = 0;
    int blocks_stride = 0;           // at least K / 32, even
};

// The same arrays, writable, and which of them to fill.
struct ActivationBuffers {
    Activations view;
    bool want_bf16 = false, want_q32 = false, want_q256 = false;
};

// out[m * out_stride + i] for i in 0 .. 16 * panels: rows of the weight from `packed` on; m in 0 .. rows. Any rows >= 1.
using LinearFn = void (*)(const uint8_t* packed, int panels, int columns, const Activations& in, int row0, int rows, float* out, int out_stride);

// One KV split (at most 256 positions) of attention for R query rows that share a kv head. See kernels/attention.inl.
struct AttendSplit;

struct KernelTable {
    const char* isa;                     // "scalar", "avx2", "avx512"
    LinearFn linear[kFormats];
    int row_tile;                        // rows the linear kernels like to be given at once (16, 4, 1)

    // RMSNorm of one row: out = x * (1 / sqrt(mean(x^2) + eps)) * weight. 16 virtual lanes, fixed tree.
    void (*norm)(const float* x, const float* weight, int n, float eps, float* out);
    // Prepares row `row` of `buffers` from x [columns]; fills what is wanted, pads with zeros.
    void (*prepare)(const float* x, int row, const ActivationBuffers& buffers);
    // out[i] = act(gate[i]) * up[i]; activation 0 silu, 1 gelu (tanh form), 2 gelu (erf form)
    void (*glu)(const float* gate, const float* up, int n, int activation, float* out);
    void (*add)(const float* x, const float* y, int n, float* out);
    void (*scale)(const float* x, float factor, int n, float* out);
    void (*softcap)(const float* x, float cap, int n, float* out);
    // Turns pairs (i, i + rotary/2) of `heads` heads in place; cos, sin [rotary/2]
    void (*rope)(float* x, int heads, int head_dim, int rotary, const float* cos, const float* sin);
    void (*attend_split)(const AttendSplit& work);
    // log-sum-exp of n logits relative to `max`, in 16 virtual lanes: sum of exp(x - max)
    float (*sum_exp)(const float* x, int n, float max);
    // largest value and the lowest index that has it
    void (*arg_max)(const float* x, int n, float* value, int32_t* index);
    // 1 when a NaN or +inf is among x (-inf is allowed)
    int (*not_finite)(const float* x, int n);
    // exp, log (own polynomials; same bits everywhere), elementwise
    void (*exp)(const float* x, int n, float* out);
    void (*log)(const float* x, int n, float* out);
    // Fills tables of the sampler; see kernels/sample.inl. The best of logits + Gumbel noise among those >= floor.
    void (*gumbel_max)(const float* z, int n, float floor, uint64_t seed, uint32_t position, uint32_t choice, float* value, int32_t* index);
};

const KernelTable* scalar_kernels();
const KernelTable* avx2_kernels();    // nullptr when not built for this machine's architecture
const KernelTable* avx512_kernels();

// The best table this machine can run, or the one named by `isa` ("" = best; HEADRACE_ISA is read by the caller).
// Throws std::invalid_argument when the machine lacks it, naming those it has.
const KernelTable* choose_kernels(const char* isa);

}  // namespace headrace
