// A program lowered: phases over fixed buffers, built once, run once a step by all threads of a pool.
// Owes: every id, width and length is checked where it comes in; `run` either raises and changes nothing, or runs the
// step. Knows nothing of models and requests.
#pragma once
#include <atomic>
#include <deque>
#include <initializer_list>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "phases.h"
#include "pool.h"

namespace headrace {

using Slice = std::tuple<int, int, int>;               // buffer, first column, columns
using PieceRef = std::tuple<const Packed*, int, int>;  // a packed matrix, its first row (a multiple of 16), rows

class Plan {
  public:
    // layers: (kv heads, head size, windowed) of each layer of the KV cache, kv: its format; those that are windowed
    // lie in slots. merge: row ops that follow each other share a phase. beside: a plan whose threads this one uses
    // too, instead of its own, and its KV cache unless it has one apart; one of the two runs at a time.
    Plan(const KernelTable* kernels, int threads, bool merge, Limits limits,
         std::vector<std::tuple<int, int, bool>> layers, KvFormat kv, const Plan* beside = nullptr, bool apart = false);

    // ---- building; extents of results decide where a phase goes: those of logits rows run last, in chunks
    void route_to(int choices);  // experts a row may choose at most; before slot buffers are made
    int buffer(int width, Extent extent);
    int prepared(int columns, Extent extent, bool f32, bool bf16, bool q32);
    int table(std::vector<float> cos, std::vector<float> sin, int rotary);  // [context][rotary / 2] each

    void embed(const std::vector<const Packed*>& table, float scale, Slice out);
    void norm(Slice x, std::vector<float> weight, int heads, float eps, Slice out);
    void norm_into(Slice x, std::vector<float> weight, float eps, int into);  // prepares the norm
    void prepare(Slice x, int into);                                          // into slots: gathers each slot's row
    void glu(Slice x, int activation, Slice out);
    void add(Slice x, Slice y, Slice out);
    void bias(Slice x, std::vector<float> bias, Slice out);
    void scale(Slice x, float factor, Slice out);
    void softcap(Slice x, float cap, Slice out);
    void rope(Slice x, int head_dim, int table, Slice out);
    void write(Slice k, Slice v, int layer, std::vector<float> shift);  // shift: added to keys first; empty: none
    void rows(Slice x, Slice out);
    void choose(Slice logits, int k, bool renormalise, Slice out);
    void combine(Slice y, Slice routing, Slice out);

    void linear(const std::string& name, int in, const std::vector<PieceRef>& pieces, Slice out,
                std::vector<float> bias, const Slice* add);
    void gated(const std::string& name, int in, const PieceRef& gate, const PieceRef& up, int activation, int into);
    void sort(Slice routing, int experts);
    void experts(const std::string& name, int in, const std::vector<std::vector<PieceRef>>& pieces, Slice out);
    // into: the input that out is prepared as, or -1
    void attend(Slice q, int layer, float scale, int window, float softcap, Slice out, int into);
    void finish(Slice logits);  // samples from them; last

    // ---- running
    // Throws std::invalid_argument when an array is wrong, std::runtime_error when it runs already.
    void run(const StepArrays& step, Outcome& outcome);
    void copy(Slice what, int rows, float* out) const;  // rows of a buffer as the last step left them
    void profile(bool on);
    std::vector<std::tuple<std::string, long, double>> timings() const;  // (phase, runs, seconds)

    size_t page_bytes() const { return page_bytes_; }
    uint8_t* page(int number);  // its page_bytes, over all layers that lie in pages
    size_t slot_bytes() const { return slot_bytes_; }
    uint8_t* slot(int number);
    int threads() const { return pool_.threads(); }
    const Limits& limits() const { return limits_; }

  private:
    struct Buffer {
        Arena memory;
        size_t stride;
        int width;
        Extent extent;
    };
    struct Input {
        Prepared prepared;
        int columns;
        Extent extent;
    };
    struct Rotation {
        std::vector<float> cos, sin;
        int rotary;
    };

    struct Common {  // of all plans beside each other
        explicit Common(int threads) : pool(threads) {}
        std::atomic<bool> busy{false};
        Pool pool;
    };

    int rows_of(Extent extent) const;
    Buffer& buffer_of(Slice s);
    View view(Slice s);
    Input& input(int id);
    const Slots* slots(Extent e) const { return e == Extent::Slots ? &slots_ : nullptr; }
    Extent shared(const char* op, std::initializer_list<Slice> values);
    std::vector<std::unique_ptr<Phase>>& part(Extent e);
    void row_op(const char* name, Extent extent, std::unique_ptr<RowOp> op);
    std::vector<Piece> pieces(const std::vector<PieceRef>& refs, const Input& in, int width) const;
    Crowd* crowd(int heads, int kv_heads, int window);

    static void job(void* plan, int thread);
    void work(int thread);
    void prepare_pages(const StepArrays& step, int thread);
    void sweep(const std::vector<std::unique_ptr<Phase>>& phases, const Here& here);

    const KernelTable* kernels_;
    Limits limits_;
    bool merge_;
    int ids_;
    int choices_ = 0;
    size_t page_bytes_ = 0, slot_bytes_ = 0;
    std::vector<Layer> layers_;
    std::deque<Buffer> buffers_;
    std::deque<Input> inputs_;
    std::deque<Rotation> rotations_;
    Partials partials_;
    std::deque<Crowd> crowds_;
    Slots slots_;
    Slice chosen_{-1, 0, 0}, sorted_{-1, 0, 0};  // routings: of the last choose, of the last sort
    int rated_ = 0;                              // experts of the last choose
    std::vector<std::unique_ptr<Phase>> body_, tail_;
    bool finished_ = false, profiling_ = false;
    double clock_ = 0;
    Live live_;
    int blocks_ = 0;  // of rows, of the last step
    Company company_;
    std::shared_ptr<Arena> cache_;
    std::shared_ptr<Common> common_;  // last: its threads end before what they use
    std::atomic<bool>& busy_;
    Pool& pool_;
};

}  // namespace headrace
