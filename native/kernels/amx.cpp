// Quantised linears on AMX's tiles, 8 rows or more at a time; all else is AVX-512's. The integer sums are the same, and
// what is done with them, so the bits are. Not run on hardware yet: tests run it on emulated tiles, and it is used only
// where it is asked for by name.
#define HEADRACE_AVX512 1
#define HEADRACE_AMX 1
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../kernels.h"
#include "../simd.h"
#include "linear.inl"

#if !defined(HEADRACE_TABLE)
#define HEADRACE_ISA_NAME "amx"
#define HEADRACE_TABLE amx_kernels
#endif

namespace {
namespace lin {

constexpr int kTileMost = 16, kTileLeast = 8;  // rows of a tile; with fewer AVX-512 is as fast

// Tile 0: sums [rows][16] int32; 1: activations [rows][inputs] int8; 2: lines of weights [inputs / 4][16][4] uint8
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

void shape_tiles(int rows, int inputs) {
    TileShapes shapes;
    shapes.rows[0] = shapes.rows[1] = static_cast<uint8_t>(rows);
    shapes.rows[2] = static_cast<uint8_t>(inputs / 4);
    shapes.bytes[0] = shapes.bytes[2] = kLine;
    shapes.bytes[1] = static_cast<uint16_t>(inputs);
    _tile_loadconfig(&shapes);
}

HR_INLINE void dot_tiles(const VB* lines, const int8_t* a, int stride, int32_t* sums) {
    _tile_zero(0);
    _tile_loadd(1, a, stride);
    _tile_loadd(2, lines, kLine);
    _tile_dpbsud(0, 1, 2);
    _tile_stored(0, sums, kLine);
}

// As tile_quants, of one panel and `rows` rows, for which the tiles have been shaped.
template <class F>
void tile_amx(const uint8_t* t, int columns, const Activations& in, int row0, int rows, float* out, int stride) {
    using Q = typename F::Q;
    const int8_t* q = in.q32 + (size_t)row0 * in.q_stride;
    const size_t at = (size_t)row0 * in.blocks_stride;
    const int blocks = columns / (32 * F::kRuns);
    alignas(64) int32_t sums[F::kHalves ? 2 : 1][kTileMost][16];
    VF acc[kTileMost];
    for (int m = 0; m < rows; m++) acc[m] = zero();
    for (int b = 0; b < blocks; b++, t += F::kBytes) {
        for (int s = 0; s < F::kRuns; s++) {
            const int r = b * F::kRuns + s;
            prefetch_run<F, kTileMost>(t, s);
            const Lines l = lines_of<Q>(t + s * Q::kBytes);
            const F block(t, s);
            dot_tiles(l.q, q + 32 * r, in.q_stride, sums[0][0]);
            if constexpr (F::kHalves) dot_tiles(l.q + 4, q + 32 * r + 16, in.q_stride, sums[1][0]);
            for (int m = 0; m < rows; m++) {
                const size_t i = at + (size_t)m * in.blocks_stride + r;
                VI second = zeroi();
                if constexpr (F::kHalves) second = load_int(sums[1][m]);
                acc[m] = block.add(acc[m], load_int(sums[0][m]), second,
                                   {in.d32 + i, in.s32 + i, in.sum32 + i, in.sum16 + 2 * i});
            }
        }
    }
    for (int m = 0; m < rows; m++) store(out + (size_t)m * stride, acc[m]);
}

template <class F, headrace::Format Which>
void linear_amx(const uint8_t* packed, size_t bytes, int panels, int columns, const Activations& in, int row0, int rows,
                float* out, int stride) {
    const auto tiles = [&](int first, int each, int last) {
        shape_tiles(each, F::kHalves ? 16 : 32);
        for (int p = 0; p < panels; p++)
            for (int r = first; r < last; r += each)
                tile_amx<F>(packed + p * bytes, columns, in, row0 + r, each, out + (size_t)r * stride + 16 * p, stride);
        _tile_release();
    };
    const int whole = rows / kTileMost * kTileMost, left = rows - whole;
    if (whole) tiles(0, kTileMost, whole);
    if (left >= kTileLeast)
        tiles(whole, left, rows);
    else if (left)
        headrace::avx512_kernels()->linear[(int)Which](packed, bytes, panels, columns, in, row0 + whole, left,
                                                       out + (size_t)whole * stride, stride);
}

}  // namespace lin
}  // namespace

namespace headrace {

const KernelTable* HEADRACE_TABLE() {
    static const KernelTable table = [] {
        using namespace lin;
        KernelTable t = *avx512_kernels();
        t.isa = HEADRACE_ISA_NAME;
        each_quantised([&]<class Block, Format Which>() { t.linear[(int)Which] = linear_amx<Block, Which>; });
        return t;
    }();
    return &table;
}

}  // namespace headrace
