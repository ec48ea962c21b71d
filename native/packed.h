// A packed weight and the memory it lies in. Owes aligned, zeroed, growing-on-touch memory and bounds that were checked
// once; knows nothing of files or threads: rows may be packed from several threads as long as each row is packed once.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "formats.h"

namespace headrace {

// Zeroed memory straight from the system, aligned to 64 bytes at least, to 2 MiB (and asking for huge pages) when
// large. Readers may run up to kSlack bytes past the end.
class Arena {
  public:
    static constexpr size_t kHuge = size_t(2) << 20, kSlack = 4096;

    Arena() = default;
    explicit Arena(size_t bytes) : bytes_(bytes) {
        const size_t align = bytes >= kHuge ? kHuge : 0;
        if (bytes > std::numeric_limits<size_t>::max() - kSlack - align) throw std::bad_alloc();
        mapped_ = bytes + kSlack + align;
        base_ = ::mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base_ == MAP_FAILED) {
            base_ = nullptr;
            throw std::bad_alloc();
        }
        auto at = reinterpret_cast<uintptr_t>(base_);
        if (align) at = (at + align - 1) / align * align;
        data_ = reinterpret_cast<uint8_t*>(at);
#ifdef MADV_HUGEPAGE
        if (align) ::madvise(data_, bytes, MADV_HUGEPAGE);  // advice: it is no error where the system declines
#endif
    }
    Arena(Arena&& o) noexcept { swap(o); }
    Arena& operator=(Arena&& o) noexcept {
        swap(o);
        return *this;
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        if (base_) ::munmap(base_, mapped_);
    }

    uint8_t* data() { return data_; }
    const uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    void swap(Arena& o) {
        std::swap(base_, o.base_);
        std::swap(data_, o.data_);
        std::swap(bytes_, o.bytes_);
        std::swap(mapped_, o.mapped_);
    }
    void* base_ = nullptr;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0, mapped_ = 0;
};

// One stretch of memory for many matrices, in the order in which they are made: small ones share huge pages, and a step
// that reads them in that order streams.
class Room {
  public:
    explicit Room(size_t bytes) : arena_(bytes) {}
    uint8_t* take(size_t bytes) {
        const size_t from = (taken_ + 63) / 64 * 64;
        if (bytes > arena_.bytes() || from > arena_.bytes() - bytes) throw std::bad_alloc();
        taken_ = from + bytes;
        return arena_.data() + from;
    }

  private:
    Arena arena_;
    size_t taken_ = 0;
};

// A matrix [rows][columns] in panels of 16 rows; rows beyond the last are zeros.
class Packed {
  public:
    // Throws std::invalid_argument for sizes that cannot be: none or negative, or columns that are no whole blocks.
    // room: where it lies; null gives it memory of its own.
    Packed(Format format, int rows, int columns, std::shared_ptr<Room> room = nullptr)
        : format_(format), rows_(rows), columns_(columns), room_(std::move(room)) {
        const FormatInfo& f = info(format);
        if (rows < 1 || columns < 1 || rows > kMost || columns > kMost)
            throw std::invalid_argument("a packed matrix has 1 to " + std::to_string(kMost) +
                                        " rows and columns, not [" + std::to_string(rows) + ", " +
                                        std::to_string(columns) + "]");
        if (columns % f.block)
            throw std::invalid_argument(std::string(f.name) + " has blocks of " + std::to_string(f.block) +
                                        " values; " + std::to_string(columns) + " columns are no whole number of them");
        step_ = panel_bytes_ = headrace::panel_bytes(format, columns);
        bytes_ = packed_bytes(format, rows, columns);
        if (!room_) arena_ = Arena(bytes_);
        data_ = room_ ? room_->take(bytes_) : arena_.data();
    }

    // Two matrices of one size for work that reads both together: their panels lie in turn, so that it reads one stream
    // of memory (one after the other where panels are no whole cache lines).
    static std::pair<Packed, Packed> in_turn(Format format, int rows, int columns, std::shared_ptr<Room> room) {
        Packed first(format, rows, columns, room), second(format, rows, columns, std::move(room));
        if (first.panel_bytes_ % 64 == 0) {  // and so the second begins where the first ends
            first.step_ = second.step_ = 2 * first.panel_bytes_;
            second.data_ = first.data_ + first.panel_bytes_;
        }
        return {std::move(first), std::move(second)};
    }

    // Rows first .. first + count - 1, `row_bytes()` each, one after the other.
    void pack(int first, const uint8_t* src, int count) {
        if (first < 0 || count < 0 || first > rows_ || count > rows_ - first)
            throw std::out_of_range("rows " + std::to_string(first) + " to " + std::to_string(int64_t(first) + count) +
                                    " do not lie in a matrix of " + std::to_string(rows_) + " rows");
        if (step_ == panel_bytes_) return pack_rows(format_, src, row_bytes(), rows_, columns_, first, count, data_);
        for (int row = first; row < first + count;) {
            const int n = std::min(kLanes - row % kLanes, first + count - row);
            pack_rows(format_, src + (row - first) * row_bytes(), row_bytes(), rows_, columns_, row % kLanes, n,
                      data_ + row / kLanes * step_);
            row += n;
        }
    }

    // out [columns]
    void unpack_row(int row, float* out) const {
        if (row < 0 || row >= rows_)
            throw std::out_of_range("row " + std::to_string(row) + " does not lie in a matrix of " +
                                    std::to_string(rows_) + " rows");
        headrace::unpack_row(format_, panel(row / kLanes), rows_, columns_, row % kLanes, out);
    }

    Format format() const { return format_; }
    int rows() const { return rows_; }
    int columns() const { return columns_; }
    int panels() const { return (rows_ + kLanes - 1) / kLanes; }
    size_t nbytes() const { return bytes_; }
    size_t row_bytes() const {
        return size_t(columns_ / info(format_).block) * info(format_).block_bytes;
    }  // in the file's layout
    size_t panel_bytes() const { return panel_bytes_; }
    size_t step() const { return step_; }  // bytes from a panel to the next
    const uint8_t* panel(int i) const { return data_ + size_t(i) * step_; }

  private:
    static constexpr int kMost = 1 << 26;
    Format format_;
    int rows_, columns_;
    size_t panel_bytes_ = 0, step_ = 0, bytes_ = 0;
    std::shared_ptr<Room> room_;
    Arena arena_;
    uint8_t* data_ = nullptr;
};

}  // namespace headrace
