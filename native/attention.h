// Attention over pages: what a kernel is given for one split of one sequence and one kv head.
// A page of a kv head: K [head_dim][32 tokens] f16, then V [32 tokens][head_dim, padded to 16] f16. Of the two-byte
// formats f16 keeps three more bits than bf16, which shows in logits (docs/log.md); what exceeds 65504 becomes
// infinite, and shows in the row's status.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

constexpr int kPageTokens = 32;
constexpr int kSplitTokens = 256;  // splits start at absolute positions: multiples of this
constexpr int kTileRows = 24;      // query rows that share a pass over keys and values, at most
constexpr int kMaxHeadDim = 256;

static constexpr size_t key_bytes(int head_dim) { return size_t(head_dim) * kPageTokens * 2; }
static constexpr int value_width(int head_dim) { return (head_dim + 15) / 16 * 16; }
static constexpr size_t head_page_bytes(int head_dim) {
    return key_bytes(head_dim) + size_t(value_width(head_dim)) * kPageTokens * 2;
}

// A kv head's part of the pages that will be read next, as far as they are known; null: unknown.
struct Coming {
    const uint8_t* page[2];
};

// Query rows that share a pass over keys and values; row r sees the positions lo[r] .. hi[r] - 1, and within the
// split neither lo nor hi descends from a row to the next. They may be of several sequences where those have the
// split's pages in common. Rows that see nothing of the split are passed over, and nothing is written for them.
struct AttendSplit {
    const uint8_t* cache;  // this kv head's part of page 0
    size_t page_stride;    // bytes from a page to the next
    const int32_t* pages;  // the page table
    int split;             // positions 256 * split .. 256 * split + 255
    int rows;              // 1 to kTileRows
    int head_dim;          // even, at most kMaxHeadDim
    float scale, softcap;  // softcap 0: none
    const float* q[kTileRows];
    int lo[kTileRows], hi[kTileRows];
    float* out[kTileRows];  // of each row, room for row_result(head_dim): see there
    Coming next;            // after this split
};

// What a split gives for a row: sum over the keys of exp(score - max) * v [value_width(head_dim)], then max, the
// largest score, and the sum of exp(score - max); padded.
static constexpr int row_result(int head_dim) { return value_width(head_dim) + 16; }

}  // namespace headrace
