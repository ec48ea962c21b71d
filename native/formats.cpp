// Repacking: rows of blocks, as files hold them, into panels of 16 rows. Owes the packed bytes of every format and
// their exact values; knows nothing of kernels. Block layouts: ggml (src/ggml-common.h); packed tiles: docs/design.md,
// "Packed weights".
//
// A tile holds its quants as lines of 64 bytes: line j = [16 rows][4 inputs], inputs 4j .. 4j + 3. With four bits, line
// j has inputs 4j .. in the low nibbles and 16 + 4j .. in the high ones. Then come, [16] rows each unless said
// otherwise:
//   Q4_0  4 lines, d (f16)
//   Q4_1  4 lines, d, m (f16)
//   Q4_Z  4 lines, d, the quant that stands for zero (u8)
//   Q5_0  4 lines, fifth-bit line (bit j of a byte: fifth bit for inputs 4j ..), d
//   Q5_1  4 lines, fifth-bit line, d, m
//   Q8_0  8 lines of value + 128, d
//   Q4_K  8 runs of 4 lines, scales u8 [8][16], offsets u8 [4][16][2 runs], dmin, d
//   Q5_K  8 runs of 4 lines and a fifth-bit line, then as Q4_K
//   Q6_K  8 runs of 4 lines and 2 lines g of bit pairs (pair j of a byte: inputs 16g + 4j ..), scales i8 [16][16], d
//   BF16  [16 rows][2 inputs]
//   F16, F32  [2 inputs][16 rows]
#include "formats.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace headrace {
namespace {

constexpr FormatInfo kInfo[kFormats] = {
    {"f32", 1, 4, 2, 128, Input::F32},         {"f16", 1, 2, 2, 64, Input::F32},
    {"bf16", 1, 2, 2, 64, Input::BF16},        {"q4_0", 32, 18, 32, 288, Input::Q32},
    {"q4_1", 32, 20, 32, 320, Input::Q32},     {"q5_0", 32, 22, 32, 352, Input::Q32},
    {"q5_1", 32, 24, 32, 384, Input::Q32},     {"q8_0", 32, 34, 32, 544, Input::Q32},
    {"q4_k", 256, 144, 256, 2368, Input::Q32}, {"q5_k", 256, 176, 256, 2880, Input::Q32},
    {"q6_k", 256, 210, 256, 3360, Input::Q32}, {"q4_z", 32, 19, 32, 304, Input::Q32},
};

constexpr int kLine = 64;  // bytes of a line: 16 rows of 4
constexpr int kRuns = 8;   // runs of 32 values in a block of 256
constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;

template <class T>
T get(const uint8_t* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

uint32_t word(const uint8_t* p, int i) { return get<uint32_t>(p + 4 * i); }

// One row's place in a tile: its four bytes of each line, its entry of each array that follows.
struct Lane {
    uint8_t* tile;
    int row;
    void line(int at, uint32_t v) const { std::memcpy(tile + at * kLine + 4 * row, &v, 4); }
    void half(int at, const uint8_t* from) const { std::memcpy(tile + at + 2 * row, from, 2); }
};

// --- packing: one block (of a float format: two values) of one row -----------------------------------------

void put_nibbles(const uint8_t* quants, Lane to) {
    for (int j = 0; j < 4; j++) to.line(j, word(quants, j));
}

// Exchanges the bits of `mask` with those `shift` above them.
constexpr uint32_t exchange(uint32_t x, uint32_t mask, int shift) {
    const uint32_t t = (x ^ (x >> shift)) & mask;
    return x ^ t ^ (t << shift);
}

// Bit 4j + b goes to bit 8b + j: two places round for the five bits of a bit's number, as four exchanges.
constexpr uint32_t fifth_bits(uint32_t x) {
    x = exchange(x, 0x0a0a0a0au, 3);
    x = exchange(x, 0x00cc00ccu, 6);
    x = exchange(x, 0x0000f0f0u, 12);
    return exchange(x, 0x0000ff00u, 8);
}

void pack_q4_0(const uint8_t* block, Lane to) {
    put_nibbles(block + 2, to);
    to.half(4 * kLine, block);
}

void pack_q4_1(const uint8_t* block, Lane to) {
    put_nibbles(block + 4, to);
    to.half(4 * kLine, block);
    to.half(4 * kLine + 32, block + 2);
}

void pack_q4_z(const uint8_t* block, Lane to) {
    put_nibbles(block + 3, to);
    to.half(4 * kLine, block);
    to.tile[4 * kLine + 32 + to.row] = block[2];
}

void pack_q5_0(const uint8_t* block, Lane to) {
    put_nibbles(block + 6, to);
    to.line(4, fifth_bits(get<uint32_t>(block + 2)));
    to.half(5 * kLine, block);
}

void pack_q5_1(const uint8_t* block, Lane to) {
    put_nibbles(block + 8, to);
    to.line(4, fifth_bits(get<uint32_t>(block + 4)));
    to.half(5 * kLine, block);
    to.half(5 * kLine + 32, block + 2);
}

void pack_q8_0(const uint8_t* block, Lane to) {
    for (int j = 0; j < 8; j++) to.line(j, word(block + 2, j) ^ 0x80808080u);
    to.half(8 * kLine, block);
}

// The 6-bit scale and offset of run i of a Q4_K or Q5_K block: uint8 [12] holds them as headrace.quant.blocks
// describes.
struct Six {
    uint8_t scale, offset;
};
Six six(const uint8_t* p, int i) {
    if (i < 4) return {uint8_t(p[i] & 63), uint8_t(p[4 + i] & 63)};
    const int low = p[4 + i];
    return {uint8_t((low & 15) | (p[i - 4] >> 6 << 4)), uint8_t((low >> 4) | (p[i] >> 6 << 4))};
}

// What follows the runs of a Q4_K or Q5_K tile, `at` bytes into it.
void put_k_scales(const uint8_t* block, Lane to, int at) {
    uint8_t* p = to.tile + at;
    for (int i = 0; i < kRuns; i++) {
        const Six s = six(block + 4, i);
        p[16 * i + to.row] = s.scale;
        p[128 + 16 * i + to.row] = s.offset;
    }
    to.half(at + 256, block + 2);
    to.half(at + 288, block);
}

// 32 bytes hold two runs, low nibbles and high; a run's own line pairs its inputs 4j .. with 16 + 4j ..
void put_k_nibbles(const uint8_t* quants, Lane to, int run, int lines) {
    for (int j = 0; j < 4; j++) {
        const uint32_t a = word(quants, j), b = word(quants, j + 4);
        to.line(run * lines + j, (a & kLow) | (b & kLow) << 4);
        to.line((run + 1) * lines + j, (a & kHigh) >> 4 | (b & kHigh));
    }
}

void pack_q4_k(const uint8_t* block, Lane to) {
    for (int run = 0; run < kRuns; run += 2) put_k_nibbles(block + 16 + 16 * run, to, run, 4);
    put_k_scales(block, to, kRuns * 4 * kLine);
}

void pack_q5_k(const uint8_t* block, Lane to) {
    for (int run = 0; run < kRuns; run += 2) put_k_nibbles(block + 48 + 16 * run, to, run, 5);
    for (int run = 0; run < kRuns; run++) {
        uint32_t fifth = 0;
        for (int j = 0; j < 8; j++) fifth |= (word(block + 16, j) >> run & 0x01010101u) << j;
        to.line(run * 5 + 4, fifth);
    }
    put_k_scales(block, to, kRuns * 5 * kLine);
}

// One run of Q6_K: its 32 nibbles are one half of `low` [32], its bit pairs stand at bit `shift` of `high` [32].
void put_q6_run(const uint8_t* low, bool upper, const uint8_t* high, int shift, Lane to, int run) {
    const int turn = upper ? 4 : 0;
    for (int j = 0; j < 4; j++)
        to.line(run * 6 + j, (word(low, j) >> turn & kLow) | (word(low, j + 4) >> turn & kLow) << 4);
    for (int g = 0; g < 2; g++) {
        uint32_t pairs = 0;
        for (int j = 0; j < 4; j++) pairs |= (word(high, 4 * g + j) >> shift & 0x03030303u) << 2 * j;
        to.line(run * 6 + 4 + g, pairs);
    }
}

void pack_q6_k(const uint8_t* block, Lane to) {
    for (int run = 0; run < kRuns; run++) {
        const int part = run / 4, r = run % 4;  // 128 values share 64 bytes of nibbles and 32 of bit pairs
        put_q6_run(block + 64 * part + 32 * (r % 2), r >= 2, block + 128 + 32 * part, 2 * r, to, run);
    }
    const int at = kRuns * 6 * kLine;
    for (int i = 0; i < 16; i++) to.tile[at + 16 * i + to.row] = block[192 + i];
    to.half(at + 256, block + 208);
}

template <int Bytes>
void pack_columns(const uint8_t* pair, Lane to) {
    for (int i = 0; i < 2; i++) std::memcpy(to.tile + (16 * i + to.row) * Bytes, pair + i * Bytes, Bytes);
}

void pack_bf16(const uint8_t* pair, Lane to) { to.line(0, get<uint32_t>(pair)); }

// Rows [first, first + count) into their panels, tile by tile: a row's blocks are read in order, a tile is written at
// once.
template <void (*Block)(const uint8_t*, Lane)>
void pack_with(const FormatInfo& f, const uint8_t* src, size_t row_bytes, int columns, int first, int count,
               uint8_t* dst) {
    const int step = f.tile_columns / f.block * f.block_bytes, tiles = columns / f.tile_columns;
    const size_t panel = size_t((columns + f.tile_columns - 1) / f.tile_columns) * f.tile_bytes;
    for (int row = first, last = first + count; row < last;) {
        const int stop = std::min(last, (row / kLanes + 1) * kLanes);
        uint8_t* tile = dst + row / kLanes * panel;
        for (int t = 0; t < tiles; t++, tile += f.tile_bytes)
            for (int r = row; r < stop; r++)
                Block(src + size_t(r - first) * row_bytes + size_t(t) * step, {tile, r % kLanes});
        for (int r = row; r < stop && columns % f.tile_columns; r++) {  // one value left, of a float format
            uint8_t pair[256] = {};  // as long as any block: only two values of it are used
            std::memcpy(pair, src + size_t(r - first) * row_bytes + size_t(tiles) * step, f.block_bytes);
            Block(pair, {tile, r % kLanes});
        }
        row = stop;
    }
}

using PackRows = void (*)(const FormatInfo&, const uint8_t*, size_t, int, int, int, uint8_t*);
constexpr PackRows kPack[kFormats] = {
    pack_with<pack_columns<4>>, pack_with<pack_columns<2>>, pack_with<pack_bf16>, pack_with<pack_q4_0>,
    pack_with<pack_q4_1>,       pack_with<pack_q5_0>,       pack_with<pack_q5_1>, pack_with<pack_q8_0>,
    pack_with<pack_q4_k>,       pack_with<pack_q5_k>,       pack_with<pack_q6_k>, pack_with<pack_q4_z>,
};

// --- unpacking: one row of a tile into float32, one rounding an operation, in ggml's order -----------------

using UnpackTile = void (*)(const uint8_t* tile, int row, float* out);

float half(const uint8_t* p) {
    const uint32_t h = get<uint16_t>(p), exponent = h >> 10 & 31, fraction = h & 1023;
    uint32_t u = (exponent + 112) << 23 | fraction << 13;
    if (exponent == 31) u = 0x7f800000u | fraction << 13;
    if (exponent == 0) {
        const float small = static_cast<float>(fraction) * 0x1p-24f;
        std::memcpy(&u, &small, 4);
    }
    u |= (h & 0x8000) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}

float half_of(const uint8_t* tile, int at, int row) { return half(tile + at + 2 * row); }

// 32 quants of a row from four lines of nibbles.
void nibbles(const uint8_t* lines, int row, int* q) {
    for (int i = 0; i < 16; i++) {
        const int byte = lines[i / 4 * kLine + 4 * row + i % 4];
        q[i] = byte & 15;
        q[i + 16] = byte >> 4;
    }
}

void fives(const uint8_t* lines, int row, int* q) {
    nibbles(lines, row, q);
    const uint8_t* fifth = lines + 4 * kLine + 4 * row;
    for (int i = 0; i < 32; i++) q[i] |= (fifth[i % 4] >> i / 4 & 1) << 4;
}

void sixes(const uint8_t* lines, int row, int* q) {
    nibbles(lines, row, q);
    for (int i = 0; i < 32; i++) q[i] |= (lines[(4 + i / 16) * kLine + 4 * row + i % 4] >> i % 16 / 4 * 2 & 3) << 4;
}

using Quants = void (*)(const uint8_t*, int, int*);

template <Quants Get, int Zero, int Scale>  // d at byte `Scale`
void unpack_plain(const uint8_t* tile, int row, float* out) {
    int q[32];
    Get(tile, row, q);
    const float d = half_of(tile, Scale, row);
    for (int i = 0; i < 32; i++) out[i] = static_cast<float>(q[i] - Zero) * d;
}

template <Quants Get, int Scale>  // d, then m
void unpack_affine(const uint8_t* tile, int row, float* out) {
    int q[32];
    Get(tile, row, q);
    const float d = half_of(tile, Scale, row), m = half_of(tile, Scale + 32, row);
    for (int i = 0; i < 32; i++) out[i] = static_cast<float>(q[i]) * d + m;
}

void unpack_q4_z(const uint8_t* tile, int row, float* out) {
    int q[32];
    nibbles(tile, row, q);
    const float d = half_of(tile, 4 * kLine, row);
    const int zero = tile[4 * kLine + 32 + row];
    for (int i = 0; i < 32; i++) out[i] = static_cast<float>(q[i] - zero) * d;
}

void eights(const uint8_t* lines, int row, int* q) {
    for (int i = 0; i < 32; i++) q[i] = lines[i / 4 * kLine + 4 * row + i % 4];
}

template <Quants Get, int Lines>
void unpack_k(const uint8_t* tile, int row, float* out) {
    const uint8_t* scales = tile + kRuns * Lines * kLine;
    const float least = half_of(scales, 256, row), d = half_of(scales, 288, row);
    for (int run = 0; run < kRuns; run++) {
        int q[32];
        Get(tile + run * Lines * kLine, row, q);
        const float step = d * scales[16 * run + row], low = least * scales[128 + 16 * run + row];
        for (int i = 0; i < 32; i++) out[32 * run + i] = step * static_cast<float>(q[i]) - low;
    }
}

void unpack_q6_k(const uint8_t* tile, int row, float* out) {
    const uint8_t* scales = tile + kRuns * 6 * kLine;
    const float d = half_of(scales, 256, row);
    for (int run = 0; run < kRuns; run++) {
        int q[32];
        sixes(tile + run * 6 * kLine, row, q);
        for (int i = 0; i < 32; i++) {
            const float step = d * static_cast<float>(static_cast<int8_t>(scales[16 * (2 * run + i / 16) + row]));
            out[32 * run + i] = step * static_cast<float>(q[i] - 32);
        }
    }
}

void unpack_f32(const uint8_t* tile, int row, float* out) {
    for (int i = 0; i < 2; i++) out[i] = get<float>(tile + 4 * (16 * i + row));
}

void unpack_f16(const uint8_t* tile, int row, float* out) {
    for (int i = 0; i < 2; i++) out[i] = half(tile + 2 * (16 * i + row));
}

void unpack_bf16(const uint8_t* tile, int row, float* out) {
    for (int i = 0; i < 2; i++) {
        const uint32_t u = uint32_t(get<uint16_t>(tile + 4 * row + 2 * i)) << 16;
        std::memcpy(out + i, &u, 4);
    }
}

constexpr UnpackTile kUnpack[kFormats] = {
    unpack_f32,
    unpack_f16,
    unpack_bf16,
    unpack_plain<nibbles, 8, 4 * kLine>,
    unpack_affine<nibbles, 4 * kLine>,
    unpack_plain<fives, 16, 5 * kLine>,
    unpack_affine<fives, 5 * kLine>,
    unpack_plain<eights, 128, 8 * kLine>,
    unpack_k<nibbles, 4>,
    unpack_k<fives, 5>,
    unpack_q6_k,
    unpack_q4_z,
};

}  // namespace

const FormatInfo& info(Format format) { return kInfo[static_cast<int>(format)]; }

Format format_named(const char* name) {
    std::string known;
    for (int i = 0; i < kFormats; i++) {
        if (std::string(name) == kInfo[i].name) return static_cast<Format>(i);
        known += (i ? ", " : "") + std::string(kInfo[i].name);
    }
    throw std::invalid_argument("no weight format is called '" + std::string(name) + "'; choose one of: " + known);
}

int padded_columns(Format format, int columns) {
    const int tile = info(format).tile_columns;
    return (columns + tile - 1) / tile * tile;
}

size_t panel_bytes(Format format, int columns) {
    const FormatInfo& f = info(format);
    return size_t(padded_columns(format, columns) / f.tile_columns) * f.tile_bytes;
}

size_t packed_bytes(Format format, int rows, int columns) {
    return size_t((rows + kLanes - 1) / kLanes) * panel_bytes(format, columns);
}

void pack_rows(Format format, const uint8_t* src, size_t row_bytes, int, int columns, int first, int count,
               uint8_t* dst) {
    kPack[static_cast<int>(format)](info(format), src, row_bytes, columns, first, count, dst);
}

void unpack_row(Format format, const uint8_t* packed, int, int columns, int row, float* out) {
    const FormatInfo& f = info(format);
    const UnpackTile unpack = kUnpack[static_cast<int>(format)];
    const uint8_t* tile = packed + row / kLanes * panel_bytes(format, columns);
    const int whole = columns / f.tile_columns;
    for (int t = 0; t < whole; t++)
        unpack(tile + size_t(t) * f.tile_bytes, row % kLanes, out + size_t(t) * f.tile_columns);
    if (columns % f.tile_columns) {  // one value left, of a float format
        float pair[2];
        unpack(tile + size_t(whole) * f.tile_bytes, row % kLanes, pair);
        out[columns - 1] = pair[0];
    }
}

}  // namespace headrace
