// AMX's kernels with tile instructions written out, as Intel's manual describes them (vol. 1, ch. 18; TDPBSUD, vol. 2).
// Shapes that the processor would refuse end the program.
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Tile {
    uint8_t row[16][64];
};

struct Tiles {
    uint8_t rows[8];
    uint16_t bytes[8];
    Tile tile[8];
    bool shaped;
} state;

void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "AMX would refuse: %s\n", what);
    std::exit(2);
}

void emulated_shape(const void* memory) {
    const uint8_t* m = static_cast<const uint8_t*>(memory);
    require(m[0] == 1, "palette");
    for (int i = 1; i < 16; i++) require(m[i] == 0, "start row, reserved bytes");
    std::memset(&state, 0, sizeof state);
    for (int t = 0; t < 8; t++) {
        std::memcpy(&state.bytes[t], m + 16 + 2 * t, 2);
        state.rows[t] = m[48 + t];
        require(state.bytes[t] <= 64 && state.rows[t] <= 16 && !state.bytes[t] == !state.rows[t], "a tile's size");
    }
    state.shaped = true;
}

void emulated_release() { state.shaped = false; }

Tile& shaped(int t) {
    require(state.shaped && state.rows[t], "a tile without a shape");
    return state.tile[t];
}

void emulated_zero(int t) { std::memset(&shaped(t), 0, sizeof(Tile)); }

void emulated_load(int t, const void* from, int64_t stride) {
    emulated_zero(t);
    for (int r = 0; r < state.rows[t]; r++)
        std::memcpy(state.tile[t].row[r], static_cast<const uint8_t*>(from) + r * stride, state.bytes[t]);
}

void emulated_store(int t, void* to, int64_t stride) {
    const Tile& tile = shaped(t);
    for (int r = 0; r < state.rows[t]; r++)
        std::memcpy(static_cast<uint8_t*>(to) + r * stride, tile.row[r], state.bytes[t]);
}

// c[m][n] += sum over k and i of a[m][4k + i], signed, times b[k][4n + i], unsigned
void emulated_dot(int c, int a, int b) {
    Tile& sums = shaped(c);
    const Tile &x = shaped(a), &y = shaped(b);
    require(state.rows[c] == state.rows[a] && state.bytes[c] == state.bytes[b], "sizes of a product");
    require(state.bytes[a] == 4 * state.rows[b] && state.bytes[c] % 4 == 0, "inner sizes of a product");
    for (int m = 0; m < state.rows[c]; m++)
        for (int n = 0; n < state.bytes[c] / 4; n++) {
            int32_t sum;
            std::memcpy(&sum, sums.row[m] + 4 * n, 4);
            for (int k = 0; k < state.bytes[a]; k++)
                sum += static_cast<int8_t>(x.row[m][k]) * y.row[k / 4][4 * n + k % 4];
            std::memcpy(sums.row[m] + 4 * n, &sum, 4);
        }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig emulated_shape
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_dpbsud emulated_dot

#define HEADRACE_ISA_NAME "amx_emulated"
#define HEADRACE_TABLE amx_emulated_kernels
#include "kernels/amx.cpp"
