// The kernels that exist once per instruction set, as a table of function pointers chosen when the module is loaded.
// Contract (docs/design.md, "Exactness"): the same bits from every table, for every number of rows, for every thread
// count.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention.h"
#include "formats.h"

namespace headrace {

// A linear's input of up to `rows` rows, prepared once and shared by every weight that reads it.
// Only the arrays that the readers' formats need are set (see FormatInfo::input). All leading dimensions count
// elements.
struct Activations {
    int columns = 0;  // K
    // Input::F32: the values themselves, padded with zeros to an even, tile-whole number of columns
    const float* f32 = nullptr;  // [rows][f32_stride]
    int f32_stride = 0;
    // Input::BF16: round to nearest even
    const uint16_t* bf16 = nullptr;  // [rows][bf16_stride]
    int bf16_stride = 0;
    // Input::Q32: symmetric int8 per 32 values: value = d * q, d = amax / 127, q = rint(value / d) (ties to even)
    const int8_t* q32 = nullptr;     // [rows][q_stride]
    const float* d32 = nullptr;      // [rows][blocks_stride]
    const int32_t* sum32 = nullptr;  // [rows][blocks_stride]   sum of the block's q
    const float* s32 = nullptr;      // [rows][blocks_stride]   d * (float)sum
    const int32_t* sum16 = nullptr;  // [rows][2 * blocks_stride] sum of each half block's q
    int q_stride = 0;
    int blocks_stride = 0;  // at least K / 32, even
};

// The same arrays, writable, and which of them to fill.
struct ActivationBuffers {
    Activations view;
    float* f32 = nullptr;  // the writable side of view.f32
    bool want_bf16 = false, want_q32 = false;
};

// out[m * out_stride + i] for i in 0 .. 16 * panels: rows of the weight from `packed` on, whose panels begin every
// `step` bytes; m in 0 .. rows. Any rows >= 1.
using LinearFn = void (*)(const uint8_t* packed, size_t step, int panels, int columns, const Activations& in, int row0,
                          int rows, float* out, int out_stride);

// What a logit must reach: at least `value`, or more than it when strict.
struct Floor {
    float value;
    bool strict;
};

struct Candidate {
    float value;
    int32_t id;
};

// The search for the token with the largest score = (logit - top) / temperature + Gumbel noise; ties go to the lowest
// id. Noise is -ln of an exponential variable. Of a block's 64 exponential variables the least comes first, an
// exponential variable / 64, then whose it is; the others exceed it by exponential variables of their own.
struct GumbelSearch {
    uint64_t seed;
    uint32_t position, choice;
    float top, temperature, inverse;  // the largest logit; inverse = 1 / temperature
    float best;                       // -inf at first
    int32_t best_id;                  // -1 at first
};

// Of 16 blocks of ids: the least of each one's exponential variables, and which of its ids has it.
struct BlockNoise {
    float least[16];
    int32_t which[16];
};

struct KernelTable {
    const char* isa;  // its name: "scalar", "avx2" ...
    LinearFn linear[kFormats];
    LinearFn linear_bf16_exact;  // bf16 weights on Input::F32

    // RMSNorm of one row: out = x * (1 / sqrt(mean(x^2) + eps)) * weight. 16 virtual lanes, fixed tree.
    void (*norm)(const float* x, const float* weight, int n, float eps, float* out);
    // Prepares n columns of row `row` of `buffers`, from `column` (a multiple of 32) on; fills what is wanted, and the
    // rest of a last block with zeros.
    void (*prepare)(const float* x, int n, int row, int column, const ActivationBuffers& buffers);
    // Prepares the norm of a row as row `row`.
    void (*norm_into)(const float* x, const float* weight, int n, float eps, int row, const ActivationBuffers& buffers);
    // out[i] = act(gate[i]) * up[i]; activation 0 silu, 1 gelu (tanh form), 2 gelu (erf form)
    void (*glu)(const float* gate, const float* up, int n, int activation, float* out);
    void (*add)(const float* x, const float* y, int n, float* out);
    // out [rows][columns], rows `stride` floats apart: adds bias [columns] to each row, then add [rows]; either may be
    // null
    void (*add_rows)(float* out, size_t stride, int rows, int columns, const float* bias, const float* add,
                     size_t add_stride);
    void (*scale)(const float* x, float factor, int n, float* out);
    void (*softcap)(const float* x, float cap, int n, float* out);
    // Turns pairs (i, i + rotary/2) of `heads` heads in place; cos, sin [rotary/2]
    void (*rope)(float* x, int heads, int head_dim, int rotary, const float* cos, const float* sin);
    // By KvFormat: one KV split (at most 256 positions) of attention for query rows that share a kv head
    void (*attend_split[kKvFormats])(const AttendSplit& work);
    void (*quantize_query)(const float* q, int head_dim, QuantQuery& out);
    // Adds a later split's result to what the earlier ones gave, both as AttendSplit::out; n: columns, a multiple of 16
    void (*attend_merge)(float* all, const float* part, int n);
    // out[i] = all[i] / sum
    void (*attend_finish)(const float* all, int head_dim, float* out);
    // By KvFormat: one token's key and value [head_dim], rounded to it, into place `slot` of a kv head's page
    void (*write_kv[kKvFormats])(const float* k, const float* v, int head_dim, int slot, uint8_t* page);
    // By Format: so many blocks of it, from float32 values; null where there is no encoder
    void (*encode[kFormats])(const float* x, int blocks, uint8_t* out);
    // n values (a multiple of 16) of F32, F16 or BF16 as float32
    void (*widen)(Format from, const uint8_t* src, int n, float* out);
    // exp (own polynomial), elementwise
    void (*exp)(const float* x, int n, float* out);
    // The sampler's passes, over blocks of 64 logits. -inf is allowed; a NaN stands for a token left out.
    // max[b]: largest of block b, NaN when it holds a NaN or +inf; x is [blocks][64].
    void (*block_max)(const float* x, int blocks, float* max);
    // How many of the block reach the floor
    int (*block_count)(const float* x, Floor floor);
    // Appends those that reach the floor to `found`, in order; returns how many
    int (*block_collect)(const float* x, int32_t first_id, Floor floor, Candidate* found);
    // sums[16] += exp((x - top) * inverse) of those that reach the floor, lane by lane
    void (*block_mass)(const float* x, float top, float inverse, Floor floor, float* sums);
    // Bit i: block first_block + i, whose largest logit is max[i] >= floor, may hold a score of at least search.best.
    // Fills `noise` of all 16 unless none may.
    uint32_t (*blocks_in_reach)(const float* max, int32_t first_block, float floor, const GumbelSearch& search,
                                BlockNoise& noise);
    // Searches a block, given its noise: updates best and best_id
    void (*block_gumbel)(const float* x, int32_t first_id, Floor floor, float least, int32_t which,
                         GumbelSearch& search);
    // x = -inf where bit i of `allowed` is 0
    void (*block_mask)(float* x, uint64_t allowed);
    // By Input: so many rounds of nothing but multiply-adds of registers; returns how many that were. *result += what
    // came of them.
    int64_t (*probe[3])(int rounds, float* result);
};

// What each instruction set's translation unit offers; those of another processor family aren't there.
const KernelTable* scalar_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* amx_kernels();
const KernelTable* neon_dot_kernels();
const KernelTable* neon_i8mm_kernels();

// Names of the tables that this machine can run, best first.
std::vector<std::string> kernel_names();

// The best table this machine can run, or the one named by `isa` ("" = best; HEADRACE_ISA is read by the caller).
// Throws std::invalid_argument when the machine lacks it, naming those it has.
const KernelTable* choose_kernels(const char* isa);

}  // namespace headrace
