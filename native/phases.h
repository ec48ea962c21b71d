// What a plan is made of: row ops (each row by itself, chained in one phase without barriers) and phases (all threads
// together, a barrier after each). Knows step arrays and kernels; not how a program was lowered.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "packed.h"
#include "pool.h"
#include "sampler.h"
#include "step.h"

namespace headrace {

// How many rows a value has: the step's tokens, its logits rows (of one chunk), or (token, choice of expert) pairs.
enum class Extent : int32_t { Tokens, Logits, Slots };

// Columns of a buffer: row r is at data + r * stride.
struct View {
    float* data = nullptr;
    size_t stride = 0;
    int width = 0;
    float* row(int r) const { return data + size_t(r) * stride; }
};

// Which expert takes which row: filled by Sort, read by what follows. A slot is one (row, choice).
struct Slots {
    int choices = 0;              // k
    std::vector<int32_t> source;  // [slots] row of the slot; slots are grouped by expert
    std::vector<int32_t> place;   // [rows * k] slot of the row's j-th choice
    std::vector<int32_t> start;   // [experts + 1]
    std::vector<int32_t> used;    // experts that have rows
};

// The step that runs, as all threads see it.
struct Live {
    const KernelTable* kernels = nullptr;
    const StepArrays* step = nullptr;
    Outcome* outcome = nullptr;
    std::vector<int32_t> sequence_of;  // [rows]
    int threads = 1;
};

// The same, as one thread in one chunk of logits rows sees it.
struct Here {
    const Live& live;
    int thread;
    int first;   // logits row that row 0 of this chunk stands for
    int logits;  // logits rows of this chunk
    const KernelTable& kernels() const { return *live.kernels; }
    int rows(Extent extent, const Slots* slots) const {
        if (extent == Extent::Logits) return logits;
        return live.step->rows() * (extent == Extent::Slots ? slots->choices : 1);
    }
    std::pair<int, int> share(int n) const {  // this thread's part of n rows
        return {int(int64_t(n) * thread / live.threads), int(int64_t(n) * (thread + 1) / live.threads)};
    }
};

class RowOp {
  public:
    virtual ~RowOp() = default;
    virtual void run(const Here& here, int row) const = 0;
};

class Phase {
  public:
    explicit Phase(std::string name) : name(std::move(name)) {}
    virtual ~Phase() = default;
    virtual void run(const Here& here) = 0;
    // By one thread before a step whose rows make another number of blocks than those of the last.
    virtual void cut_rows(const Here&) {}
    virtual void rewind() {}  // by one thread, when no thread is in it
    // What a thread will read first in `run`, to be asked for while it waits for the others to come here.
    virtual Ahead ahead(const Here&) const { return {}; }
    const std::string name;
    double seconds = 0;  // of thread 0, waiting included, while the plan is profiled
    long runs = 0;
};

// Units handed out by a counter.
class Tickets {
  public:
    int take() { return next_.fetch_add(1, std::memory_order_relaxed); }
    void rewind() { next_.store(0, std::memory_order_relaxed); }

  private:
    alignas(64) std::atomic<int> next_{0};
    char fill_[60] = {};
};

// Units dealt out to the threads in runs, so that each streams through memory. A thread takes its own from the front;
// when it has none left it takes others' from the back.
class Runs {
  public:
    explicit Runs(int threads) : runs_(threads) {}
    void deal(int units) {
        const int n = static_cast<int>(runs_.size());
        for (int t = 0; t < n; t++)
            runs_[t].left.store(pack(int64_t(units) * t / n, int64_t(units) * (t + 1) / n), std::memory_order_relaxed);
    }
    int threads() const { return static_cast<int>(runs_.size()); }
    // A thread's units that are left: first, one past the last.
    std::pair<int, int> left(int thread) const {
        const uint64_t now = runs_[thread].left.load(std::memory_order_relaxed);
        return {static_cast<int>(now >> 32), static_cast<int>(static_cast<uint32_t>(now))};
    }
    // The thread's next unit, or -1 when there is none anywhere. alone: no other thread takes any.
    int take(int thread, bool alone) {
        const int own = take_from(runs_[thread], true);
        if (own >= 0) return own;
        for (size_t i = 1; i < runs_.size(); i++) {
            const int other = take_from(runs_[(thread + i) % runs_.size()], alone);
            if (other >= 0) return other;
        }
        return -1;
    }

  private:
    struct alignas(64) Run {
        std::atomic<uint64_t> left{0};  // first unit, one past the last
    };
    static uint64_t pack(int64_t first, int64_t end) { return uint64_t(first) << 32 | uint64_t(end); }
    static int take_from(Run& run, bool front) {
        uint64_t now = run.left.load(std::memory_order_relaxed);
        for (;;) {
            const uint32_t first = now >> 32, end = static_cast<uint32_t>(now);
            if (first >= end) return -1;
            const uint64_t next = front ? pack(first + 1, end) : pack(first, end - 1);
            if (run.left.compare_exchange_weak(now, next, std::memory_order_relaxed))
                return static_cast<int>(front ? first : end - 1);
        }
    }
    std::vector<Run> runs_;
};

constexpr int kRowBlock = 64;  // rows whose inputs and outputs stay in the cache while all weights pass by

// Units of outputs times blocks of rows, dealt out block by block: with many rows each thread has rows of its own, and
// with few ones units of its own.
class Grid {
  public:
    explicit Grid(int threads) : runs_(threads) {}
    void cut_outputs(int units) { units_ = units, deal(); }
    void cut_rows(int rows) { blocks_ = std::max(1, (rows + kRowBlock - 1) / kRowBlock), deal(); }
    void deal() { runs_.deal(units_ * blocks_); }
    struct Cell {
        int unit, row, rows;  // unit -1: none
    };
    // A thread's next. rows: of the step.
    Cell take(const Here& here, int rows) {
        const int i = runs_.take(here.thread, here.live.threads == 1);
        if (i < 0) return {-1, 0, 0};
        const int block = i / units_, row = block * kRowBlock;
        return {i % units_, row, block == blocks_ - 1 ? rows - row : kRowBlock};
    }
    // The units that a thread begins with, as far as they follow each other: first, one past the last.
    std::pair<int, int> ahead(int thread) const {
        const auto [first, end] = runs_.left(thread);
        const int unit = first % units_;
        return {unit, std::min(units_, unit + end - first)};
    }
    int threads() const { return runs_.threads(); }

  private:
    Runs runs_;
    int units_ = 1, blocks_ = 1;
};

// Row ops one after the other, row by row; rows are split between the threads.
class RowPhase : public Phase {
  public:
    RowPhase(std::string name, Extent extent, const Slots* slots)
        : Phase(std::move(name)), extent(extent), slots_(slots) {}
    void run(const Here& here) override;
    std::vector<std::unique_ptr<RowOp>> ops;
    const Extent extent;

  private:
    const Slots* slots_;
};

// A linear's input as its kernels want it.
struct Prepared {
    ActivationBuffers buffers;
    std::vector<Arena> memory;

    // n columns of a row, from `column` (a multiple of 32) on.
    void fill(const KernelTable& k, const float* x, int n, int row, int column) const {
        k.prepare(x, n, row, column, buffers);
    }
};

// Rows of a weight that share a format, as panels of a Packed that the caller keeps alive.
struct Piece {
    LinearFn kernel;
    const uint8_t* data;
    size_t panel_bytes, step;  // of a panel; from one to the next
    int rows, columns;
    int first;  // output column of row 0
    int panels() const { return (rows + kLanes - 1) / kLanes; }
    const uint8_t* panel(int i) const { return data + i * step; }
    // Panels `panel` .. `panel + n - 1` times rows row .. row + rows - 1, to `out`, `stride` floats a row.
    void run(int panel, int n, const Activations& in, int row, int rows, float* out, int stride) const {
        kernel(this->panel(panel), step, n, columns, in, row, rows, out, stride);
    }
};

// What is done to a linear's outputs while they are in the cache.
struct Epilogue {
    std::vector<float> bias;  // [outputs] or empty
    View add;                 // data null: none
    View maxima;              // data null: none; else [outputs / 64], for the sampler: see KernelTable::block_max
};

struct Unit {
    int piece, panel, panels;
};

// Cuts pieces into units of about `bytes`, a multiple of so many panels.
std::vector<Unit> cut(const std::vector<Piece>& pieces, size_t bytes, int multiple = 1);
size_t unit_bytes(const std::vector<Piece>& pieces, int threads);

// out = in . weight (+ bias) (+ add). A unit's outputs are computed whole by one thread.
class LinearPhase : public Phase {
  public:
    LinearPhase(std::string name, Extent extent, const Slots* slots, const Prepared* in, std::vector<Piece> pieces,
                View out, Epilogue epilogue, int threads);
    void run(const Here& here) override;
    void rewind() override { grid_.deal(); }
    void cut_rows(const Here& here) override { grid_.cut_rows(here.rows(extent_, slots_)); }
    Ahead ahead(const Here& here) const override;
    // Whether it could give the maxima of `logits`, which it computes. Then it will.
    bool give_maxima(View logits, View maxima);

  private:
    void cut_up(int multiple);

    const Extent extent_;
    const Slots* slots_;
    const Prepared* in_;
    std::vector<Piece> pieces_;
    View out_;
    Epilogue epilogue_;
    std::vector<Unit> units_;
    Grid grid_;
};

// into = prepared(activation(in . gate) * (in . up)): a gated MLP's first half, a few blocks of 32 outputs at a time,
// which go from their panels of either weight to their place in the next linear's input while it is in the cache.
class GatedPhase : public Phase {
  public:
    GatedPhase(std::string name, Extent extent, const Prepared* in, Piece gate, Piece up, int activation,
               const Prepared* into, int threads);
    void run(const Here& here) override;
    void rewind() override { grid_.deal(); }
    void cut_rows(const Here& here) override { grid_.cut_rows(here.rows(extent_, nullptr)); }
    Ahead ahead(const Here& here) const override;

  private:
    static constexpr int kUnit = 64;  // outputs at once
    const Extent extent_;
    const Prepared* in_;
    const Piece gate_, up_;
    const int activation_;
    const Prepared* into_;
    Grid grid_;
};

// The same for a stack of experts over the rows that were routed to each.
class ExpertsPhase : public Phase {
  public:
    ExpertsPhase(std::string name, const Slots* slots, const Prepared* in, std::vector<std::vector<Piece>> experts,
                 View out, int threads);
    void run(const Here& here) override;
    void rewind() override { tickets_.rewind(); }

  private:
    const Slots* slots_;
    const Prepared* in_;
    std::vector<std::vector<Piece>> experts_;
    View out_;
    std::vector<std::vector<Unit>> units_;
    Tickets tickets_;
};

// Fills the slots from a routing [rows][2 k].
class SortPhase : public Phase {
  public:
    SortPhase(View routing, int experts, Slots* slots)
        : Phase("sort"), routing_(routing), experts_(experts), slots_(slots) {}
    void run(const Here& here) override;

  private:
    View routing_;
    int experts_;
    Slots* slots_;
};

// One layer's part of the KV cache.
struct Layer {
    uint8_t* base;  // in page 0, or in slot 0 if it is windowed
    size_t page_stride;
    int kv_heads, head_dim;
    KvFormat format;
    bool windowed;
    uint8_t* head(int h) const { return base + size_t(h) * head_page_bytes(head_dim, format); }
};

// Memory for what splits give to rows that are not done by one thread in one go; shared by all layers.
struct Partials {
    int room = 0;  // results
    int width = 0;
    Arena memory;  // [room][row_result]
    float* at(int result) { return reinterpret_cast<float*>(memory.data()) + size_t(result) * width; }
};

// Who attends to what in a step: the same for all layers of one shape. A tile is up to kTileRows query rows (query
// heads x tokens) of one sequence and kv head; an item is what a thread takes at a time: a tile as a whole, one split
// of it, or one split of several tiles whose sequences have the split's pages in common, so that these are read once.
// What is computed, and in which order it is merged, does not depend on that.
class Crowd {
  public:
    Crowd(int heads, int kv_heads, int window, Partials* partials, int threads)
        : heads(heads), kv_heads(kv_heads), window(window), partials(partials), runs(threads), threads_(threads) {}
    void gather(const StepArrays& step);

    struct Tile {
        int sequence, row, tokens, kv_head, head, heads;
        int split, splits;
        int partial = -1;                    // first of [splits][rows] results, or -1: done as a whole
        int left = 0;                        // splits not done yet
        int shared_from = 0, shared_to = 0;  // splits that are done together with other sequences
        int rows() const { return tokens * heads; }
        int result(int s, int r) const { return partial + (s - split) * rows() + r; }
    };
    struct Item {
        int first, tiles;  // of members
        int split;         // -1: all
    };
    std::vector<Tile> tiles;
    std::vector<Item> items;
    std::vector<int> members;  // tiles of the items
    const int heads, kv_heads, window;
    Partials* const partials;
    Runs runs;  // of items
    const Tile& member(const Item& item, int i) const { return tiles[members[item.first + i]]; }

  private:
    void size_up(const StepArrays& step);
    void tile_up(const StepArrays& step, int sequence);
    bool group(const StepArrays& step, int split);
    void share_split(const StepArrays& step, int split);
    void add(int tile, int split);
    bool cut(Tile& tile);
    bool sees_all(const StepArrays& step, const Tile& tile, int split) const;

    const int threads_;
    int tokens_ = 0, heads_ = 0;       // of a tile, at most
    int used_ = 0;                     // partials
    std::vector<int> first_;           // tile of each sequence
    std::vector<int> alike_, before_;  // of each sequence: see group
};

class AttendPhase : public Phase {
  public:
    // into: the next linear's input, filled as heads are done; null when heads are no whole blocks of it.
    AttendPhase(Crowd* crowd, Layer layer, View q, View out, const Prepared* into, float scale, float softcap)
        : Phase("attend"),
          crowd_(crowd),
          layer_(layer),
          q_(q),
          out_(out),
          into_(into),
          scale_(scale),
          softcap_(softcap) {}
    void run(const Here& here) override;
    void rewind() override { crowd_->runs.deal(static_cast<int>(crowd_->items.size())); }
    Ahead ahead(const Here& here) const override;

  private:
    AttendSplit work_for(const Here& here, const Crowd::Item& item, QuantQuery* room) const;
    void split(const Here& here, const AttendSplit& work) const;
    Coming pages_of(const Here& here, const Crowd::Tile& tile, int split) const;
    Coming pages_to_come(const Here& here) const;
    void whole(const Here& here, const Crowd::Item& item) const;
    void part(const Here& here, const Crowd::Item& item) const;
    void merge(const Here& here, const Crowd::Tile& tile) const;
    void finish(const Here& here, const Crowd::Tile& tile, int r, const float* all) const;

    Crowd* crowd_;
    Layer layer_;
    View q_, out_;
    const Prepared* into_;
    float scale_, softcap_;
};

// Samples a chunk's logits rows. maxima: see sample_row; data null: none.
class PickPhase : public Phase {
  public:
    PickPhase(View logits, View maxima, int vocab, int threads)
        : Phase("pick"), logits_(logits), maxima_(maxima), vocab_(vocab), scratch_(threads) {}
    void run(const Here& here) override;
    void rewind() override { tickets_.rewind(); }

  private:
    View logits_, maxima_;
    int vocab_;
    std::vector<Scratch> scratch_;
    Tickets tickets_;
};

SamplingRow sampling_row(const SamplingArrays& a, int r);

// Row ops. Views: see each; all widths are the caller's business and were checked when the plan was built.
std::unique_ptr<RowOp> embed_op(std::vector<std::pair<const Packed*, int>> table, float scale, View out);
std::unique_ptr<RowOp> norm_op(View x, std::vector<float> weight, int heads, float eps, View out);
std::unique_ptr<RowOp> norm_into_op(View x, std::vector<float> weight, float eps, const Prepared* into);
std::unique_ptr<RowOp> prepare_op(View x, const Prepared* into,
                                  const Slots* slots);  // slots: row s is x's row source[s]
std::unique_ptr<RowOp> glu_op(View x, int activation, View out);
std::unique_ptr<RowOp> add_op(View x, View y, View out);
std::unique_ptr<RowOp> bias_op(View x, std::vector<float> bias, View out);
std::unique_ptr<RowOp> scale_op(View x, float factor, View out);
std::unique_ptr<RowOp> softcap_op(View x, float cap, View out);
std::unique_ptr<RowOp> rope_op(View x, int head_dim, int rotary, const float* cos, const float* sin, View out);
std::unique_ptr<RowOp> write_op(View k, View v, Layer layer, std::vector<float> shift);
std::unique_ptr<RowOp> gather_op(View x, View out);  // out's rows are the logits rows of x
std::unique_ptr<RowOp> choose_op(View logits, int k, bool renormalise,
                                 View out);  // softmax, the k best: see Recorder.route
std::unique_ptr<RowOp> combine_op(View y, View routing, const Slots* slots, View out);
std::unique_ptr<RowOp> keep_op(View logits);  // into Outcome::logits

}  // namespace headrace
