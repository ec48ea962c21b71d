// Weight formats and their packed layout: panels of 16 output rows, tiles of 16 rows x 32 (or 256) inputs.
// Lanes are output rows, so a dot product never needs a horizontal sum. Layouts: docs/design.md, "Packed weights".
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

enum class Format : int32_t { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, Q4_Z, Count };
constexpr int kFormats = static_cast<int>(Format::Count);
constexpr int kLanes = 16;  // output rows of a panel

// How a linear's input must be prepared for a format.
enum class Input : int32_t { F32, BF16, Q32 };

struct FormatInfo {
    const char* name;  // as in headrace.base.formats
    int block;         // values that share a block in the file
    int block_bytes;   // bytes of such a block in the file
    int tile_columns;  // inputs of a packed tile
    int tile_bytes;    // bytes of a packed tile of 16 rows
    Input input;
};

const FormatInfo& info(Format format);
Format format_named(const char* name);           // throws std::invalid_argument
int padded_columns(Format format, int columns);  // rounded up to whole tiles (and to an even number for bf16 pairs)
size_t panel_bytes(Format format, int columns);  // bytes of one panel of 16 rows
size_t packed_bytes(Format format, int rows, int columns);  // all panels; rows are padded to 16 with zeros

// Repacks rows [first, first + count) of a matrix (count a multiple of 16, or the tail) from the file's layout into its
// panels. src: rows of `row_bytes` bytes each. dst: the whole packed matrix. Base code: scalar, portable.
void pack_rows(Format format, const uint8_t* src, size_t row_bytes, int rows, int columns, int first, int count,
               uint8_t* dst);

// Row `row` of a packed matrix as float32 [columns]: what an embedding look-up reads. Exact dequantisation.
void unpack_row(Format format, const uint8_t* packed, int rows, int columns, int row, float* out);

}  // namespace headrace
