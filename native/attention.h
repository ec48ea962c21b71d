// Attention over pages: what a kernel is given for one split of one sequence and one kv head.
// A page of a kv head is
//   F16:  K [head_dim][32 tokens], V [32 tokens][head_dim, padded to 16]. Of the two-byte formats f16 keeps three more
//         bits than bf16, which shows in logits (docs/log.md); what exceeds 65504 becomes infinite, and shows in the
//         row's status.
//   BF16: the same in bf16, for models whose keys or values are larger than that.
//   Int8: K [head_dim / 4][32 tokens][4] as q + 128, its scales [32] f16, V [8][head_dim, padded to 16][4
//         tokens] as q, its scales [32]: value = scale * q, one scale for a token's key and one for its value, the
//         least f16 from amax / 127 on. A key or value that has no such scale gets NaN, which shows in the row's
//         status.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int kPageTokens = 32;
constexpr int kSplitTokens = 256;  // splits start at absolute positions: multiples of this
constexpr int kTileRows = 24;      // query rows that share a pass over keys and values, at most
constexpr int kMaxHeadDim = 256;

enum class KvFormat { F16, BF16, Int8 };
constexpr int kKvFormats = 3;

constexpr size_t kScaleBytes = kPageTokens * 2;  // of the keys, or the values, of an int8 page

static constexpr int quad_groups(int head_dim) { return (head_dim + 3) / 4; }  // of dimensions, in int8 keys
static constexpr int value_width(int head_dim) { return (head_dim + 15) / 16 * 16; }
static constexpr size_t key_bytes(int head_dim, KvFormat format) {
    return format == KvFormat::Int8 ? size_t(quad_groups(head_dim)) * kPageTokens * 4 + kScaleBytes
                                    : size_t(head_dim) * kPageTokens * 2;
}
static constexpr size_t head_page_bytes(int head_dim, KvFormat format) {
    const size_t values = size_t(value_width(head_dim)) * kPageTokens;
    return key_bytes(head_dim, format) + (format == KvFormat::Int8 ? values + kScaleBytes : 2 * values);
}

// A query head for int8 keys: d * (128 * high + low), 15 bits, d = amax / 16256; zeros fill the last group of four.
struct QuantQuery {
    float d;
    int32_t high_sum, low_sum;
    alignas(16) int8_t high[kMaxHeadDim], low[kMaxHeadDim];  // -127 .. 127, -64 .. 63
};

// A kv head's part of the pages that will be read next, as far as they are known; null: unknown.
struct Coming {
    static constexpr int kPages = 8;
    const uint8_t* page[kPages];
};

// Query rows that share a pass over keys and values; row r sees the positions lo[r] .. hi[r] - 1, and within the
// split neither lo nor hi descends from a row to the next. They may be of several sequences where those have the
// split's pages in common. Rows that see nothing of the split are passed over, and nothing is written for them.
struct AttendSplit {
    const uint8_t* cache;                // this kv head's part of page 0
    size_t page_stride;                  // bytes from a page to the next
    const int32_t* pages;                // the page table
    int split;                           // positions 256 * split .. 256 * split + 255
    int rows;                            // 1 to kTileRows
    int head_dim;                        // even, at most kMaxHeadDim
    float scale, softcap;                // softcap 0: none
    const float* q[kTileRows];           // for F16 and BF16
    const QuantQuery* quant[kTileRows];  // for Int8
    int lo[kTileRows], hi[kTileRows];
    float* out[kTileRows];  // of each row, room for row_result(head_dim): see there
    Coming next;            // after this split
};

// What a split gives for a row: sum over the keys of exp(score - max) * v [value_width(head_dim)], then max, the
// largest score, and the sum of exp(score - max); padded.
static constexpr int row_result(int head_dim) { return value_width(head_dim) + 16; }

}  // namespace headrace
