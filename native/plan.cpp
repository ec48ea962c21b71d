#include "plan.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

void require(bool right, const std::string& what) {
    if (!right) throw std::invalid_argument("plan: " + what);
}

constexpr int kShortStep = 32;  // rows; a longer one has time to share its work out
constexpr int kWarmLines = 64;  // of the next phase, asked for before a thread says that it has come
constexpr int kMostRows = 1 << 24, kMost = 1 << 30;  // of a step; of anything else that is counted

constexpr size_t kPartialBytes = size_t(32) << 20;  // touched where splits of a row are done apart

int padded(int n, int to) { return (n + to - 1) / to * to; }

// Elements from a row to the next: whole cache lines, an odd number of them, so that the same column of many rows
// does not fall into a few sets of a cache.
int apart(int columns, int elements_a_line) {
    return (padded(columns, elements_a_line) / elements_a_line | 1) * elements_a_line;
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Numbers are rounded to nearest and denormal ones are zeros while a step runs, on every thread alike, whatever mode
// other libraries left; the caller's mode comes back.
class OwnMode {
  public:
#if defined(__x86_64__)
    OwnMode() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80 | 0x8040); }
    ~OwnMode() { _mm_setcsr(before_); }

  private:
    unsigned before_;
#elif defined(__aarch64__)
    OwnMode() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(1ull << 24));
    }
    ~OwnMode() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

  private:
    uint64_t before_;
#endif
};

class Busy {
  public:
    explicit Busy(std::atomic<bool>& flag) : flag_(flag) {
        if (flag_.exchange(true)) throw std::runtime_error("this executor runs a step already; run one at a time");
    }
    ~Busy() { flag_ = false; }

  private:
    std::atomic<bool>& flag_;
};

}  // namespace

Plan::Plan(const KernelTable* kernels, int threads, bool merge, Limits limits,
           std::vector<std::tuple<int, int, bool>> layers, KvFormat kv, const Plan* beside, bool apart)
    : kernels_(kernels),
      limits_(limits),
      merge_(merge),
      ids_(limits.vocab),
      company_(threads),
      cache_(beside && !apart ? beside->cache_ : std::make_shared<Arena>()),
      common_(beside ? beside->common_ : std::make_shared<Common>(threads)),
      busy_(common_->busy),
      pool_(common_->pool) {
    require(limits.tokens > 0 && limits.sequences > 0 && limits.pages > 0 && limits.context > 0 && limits.vocab > 0 &&
                limits.chunk > 0 && limits.slots >= 0,
            "every limit must be at least 1");
    require(
        limits.tokens <= kMostRows && limits.sequences <= kMostRows && limits.context <= kMost,
        "a step has at most " + std::to_string(kMostRows) + " rows, a context " + std::to_string(kMost) + " tokens");
    limits_.chunk = std::min(limits_.chunk, limits_.tokens);
    for (auto [kv_heads, head_dim, windowed] : layers) {
        require(!windowed || limits.slots, "layers with windows lie in slots, and there are none");
        require(kv_heads > 0 && head_dim > 0 && head_dim % 2 == 0 && head_dim <= kMaxHeadDim,
                "heads must have an even size of at most " + std::to_string(kMaxHeadDim) + ", not " +
                    std::to_string(head_dim));
        (windowed ? slot_bytes_ : page_bytes_) += kv_heads * head_page_bytes(head_dim, kv);
        partials_.width = std::max(partials_.width, row_result(head_dim));
    }
    if (beside) require(threads == beside->threads(), "plans beside each other have the same threads");
    if (beside && !apart)
        require(limits.pages == beside->limits_.pages && limits.slots == beside->limits_.slots &&
                    std::equal(layers.begin(), layers.end(), beside->layers_.begin(), beside->layers_.end(),
                               [&](const auto& one, const Layer& other) {
                                   return one == std::tuple(other.kv_heads, other.head_dim, other.windowed) &&
                                          other.format == kv;
                               }),
                "plans of one cache have the same layers, pages, slots and format of pages");
    else
        *cache_ = Arena(page_bytes_ * limits.pages + slot_bytes_ * limits.slots);
    size_t in_page = 0, in_slot = page_bytes_ * limits.pages;
    for (auto [kv_heads, head_dim, windowed] : layers) {
        size_t& at = windowed ? in_slot : in_page;
        layers_.push_back(
            {cache_->data() + at, windowed ? slot_bytes_ : page_bytes_, kv_heads, head_dim, kv, windowed});
        at += kv_heads * head_page_bytes(head_dim, kv);
    }
    if (!layers.empty()) partials_.room = kPartialBytes / (sizeof(float) * partials_.width);
    partials_.memory = Arena(sizeof(float) * partials_.width * partials_.room);
    live_.kernels = kernels;
    live_.threads = threads;
    live_.sequence_of.resize(limits.tokens);
}

// --------------------------------------------------------------------------------------------------------------
// building

int Plan::rows_of(Extent extent) const {
    const int64_t rows =
        extent == Extent::Logits ? limits_.chunk : int64_t(limits_.tokens) * (extent == Extent::Slots ? choices_ : 1);
    require(rows > 0 && rows < (1 << 30), "too many rows, or slots before route_to");
    return static_cast<int>(rows);
}

void Plan::route_to(int choices) {
    require(choices > 0 && choices <= 1024, "a row chooses 1 to 1024 experts");
    const auto of_slots = [](const auto& room) { return room.extent == Extent::Slots; };
    require(std::none_of(buffers_.begin(), buffers_.end(), of_slots) &&
                std::none_of(inputs_.begin(), inputs_.end(), of_slots),
            "route_to comes before buffers and inputs of slots");
    choices_ = std::max(choices_, choices);
}

int Plan::buffer(int width, Extent extent) {
    require(width > 0, "a buffer needs at least one column");
    const size_t stride = apart(width, 16);
    buffers_.push_back({Arena(sizeof(float) * stride * rows_of(extent)), stride, width, extent});
    return static_cast<int>(buffers_.size()) - 1;
}

Plan::Buffer& Plan::buffer_of(Slice s) {
    const auto [id, column, width] = s;
    require(id >= 0 && id < static_cast<int>(buffers_.size()), "there is no buffer " + std::to_string(id));
    Buffer& b = buffers_[id];
    require(column >= 0 && width > 0 && column <= b.width - width, "columns lie outside their buffer");
    return b;
}

View Plan::view(Slice s) {
    Buffer& b = buffer_of(s);
    return {reinterpret_cast<float*>(b.memory.data()) + std::get<1>(s), b.stride, std::get<2>(s)};
}

Plan::Input& Plan::input(int id) {
    require(id >= 0 && id < static_cast<int>(inputs_.size()), "there is no input " + std::to_string(id));
    return inputs_[id];
}

int Plan::prepared(int columns, Extent extent, bool f32, bool bf16, bool q32) {
    require(columns > 0, "an input needs at least one column");
    inputs_.push_back({{}, columns, extent});
    Prepared& p = inputs_.back().prepared;
    ActivationBuffers& to = p.buffers;
    Activations& a = to.view;
    const size_t rows = rows_of(extent), blocks = padded(columns, 32) / 32;
    const auto take = [&](size_t elements, auto* kind) {
        p.memory.emplace_back(rows * elements * sizeof(*kind));
        return reinterpret_cast<decltype(kind)>(p.memory.back().data());
    };
    a.columns = columns;
    a.f32_stride = apart(columns, 16), a.bf16_stride = apart(columns, 32), a.q_stride = apart(columns, 64);
    a.blocks_stride = static_cast<int>(blocks);
    to.want_bf16 = bf16, to.want_q32 = q32;
    if (f32) a.f32 = to.f32 = take(a.f32_stride, static_cast<float*>(nullptr));
    if (bf16) a.bf16 = take(a.bf16_stride, static_cast<uint16_t*>(nullptr));
    if (q32) {
        a.q32 = take(a.q_stride, static_cast<int8_t*>(nullptr));
        a.d32 = take(blocks, static_cast<float*>(nullptr));
        a.sum32 = take(blocks, static_cast<int32_t*>(nullptr));
        a.s32 = take(blocks, static_cast<float*>(nullptr));
        a.sum16 = take(2 * blocks, static_cast<int32_t*>(nullptr));
    }
    return static_cast<int>(inputs_.size()) - 1;
}

int Plan::table(std::vector<float> cos, std::vector<float> sin, int rotary) {
    require(rotary > 0 && rotary % 2 == 0 && cos.size() == sin.size() &&
                cos.size() >= size_t(limits_.context) * (rotary / 2),
            "a rotation needs cos and sin for every position of the context");
    rotations_.push_back({std::move(cos), std::move(sin), rotary});
    return static_cast<int>(rotations_.size()) - 1;
}

// The extent that all of these have.
Extent Plan::shared(const char* op, std::initializer_list<Slice> values) {
    const Extent extent = buffer_of(*values.begin()).extent;
    for (const Slice& s : values) require(buffer_of(s).extent == extent, std::string(op) + ": extents differ");
    return extent;
}

std::vector<std::unique_ptr<Phase>>& Plan::part(Extent e) {
    require(!finished_, "it is finished");
    return e == Extent::Logits ? tail_ : body_;
}

void Plan::row_op(const char* name, Extent extent, std::unique_ptr<RowOp> op) {
    auto& phases = part(extent);
    auto* last = phases.empty() ? nullptr : dynamic_cast<RowPhase*>(phases.back().get());
    if (!merge_ || !last || last->extent != extent) {
        phases.push_back(std::make_unique<RowPhase>(name, extent, slots(extent)));
        last = static_cast<RowPhase*>(phases.back().get());
    }
    last->ops.push_back(std::move(op));
}

void Plan::embed(const std::vector<const Packed*>& table, float scale, Slice out) {
    std::vector<std::pair<const Packed*, int>> parts;
    int rows = 0;
    for (const Packed* p : table) {
        require(p->columns() == view(out).width, "the table's columns must be the width of what it gives");
        parts.push_back({p, rows});
        rows += p->rows();
    }
    require(rows > 0, "a table needs rows");
    require(buffer_of(out).extent == Extent::Tokens, "embed: gives rows of tokens");
    ids_ = std::min(ids_, rows);
    row_op("embed", Extent::Tokens, embed_op(std::move(parts), scale, view(out)));
}

void Plan::norm(Slice x, std::vector<float> weight, int heads, float eps, Slice out) {
    require(heads > 0 && size_t(view(x).width) == weight.size() * heads && view(out).width == view(x).width,
            "norm: widths differ");
    row_op("norm", shared("norm", {x, out}), norm_op(view(x), std::move(weight), heads, eps, view(out)));
}

void Plan::norm_into(Slice x, std::vector<float> weight, float eps, int into) {
    Input& in = input(into);
    require(in.columns == view(x).width && size_t(in.columns) == weight.size(), "norm_into: widths differ");
    require(in.extent == buffer_of(x).extent, "norm_into: extents differ");
    row_op("norm", in.extent, norm_into_op(view(x), std::move(weight), eps, &in.prepared));
}

void Plan::prepare(Slice x, int into) {
    Input& in = input(into);
    require(in.columns == view(x).width, "prepare: widths differ");
    const bool gathers = in.extent == Extent::Slots && buffer_of(x).extent == Extent::Tokens;
    require(gathers || in.extent == buffer_of(x).extent, "prepare: extents differ");
    require(!gathers || std::get<2>(sorted_), "prepare: slots are filled by sort");
    row_op("prepare", in.extent, prepare_op(view(x), &in.prepared, gathers ? &slots_ : nullptr));
}

void Plan::glu(Slice x, int activation, Slice out) {
    require(view(x).width == 2 * view(out).width, "glu: widths differ");
    require(activation >= 0 && activation < 3, "glu: there are activations 0 to 2");
    row_op("glu", shared("glu", {x, out}), glu_op(view(x), activation, view(out)));
}

void Plan::add(Slice x, Slice y, Slice out) {
    require(view(x).width == view(out).width && view(y).width == view(out).width, "add: widths differ");
    row_op("add", shared("add", {x, y, out}), add_op(view(x), view(y), view(out)));
}

void Plan::bias(Slice x, std::vector<float> bias, Slice out) {
    require(view(x).width == view(out).width && bias.size() == size_t(view(out).width), "bias: widths differ");
    row_op("bias", shared("bias", {x, out}), bias_op(view(x), std::move(bias), view(out)));
}

void Plan::scale(Slice x, float factor, Slice out) {
    require(view(x).width == view(out).width, "scale: widths differ");
    row_op("scale", shared("scale", {x, out}), scale_op(view(x), factor, view(out)));
}

void Plan::softcap(Slice x, float cap, Slice out) {
    require(view(x).width == view(out).width && cap > 0, "softcap: widths differ, or a cap that is not positive");
    row_op("softcap", shared("softcap", {x, out}), softcap_op(view(x), cap, view(out)));
}

void Plan::rope(Slice x, int head_dim, int table, Slice out) {
    require(table >= 0 && table < static_cast<int>(rotations_.size()), "rope: there is no such table");
    const Rotation& t = rotations_[table];
    require(view(x).width == view(out).width && head_dim >= t.rotary && view(x).width % head_dim == 0,
            "rope: widths differ");
    require(shared("rope", {x, out}) == Extent::Tokens, "rope: takes rows of tokens");
    row_op("rope", Extent::Tokens, rope_op(view(x), head_dim, t.rotary, t.cos.data(), t.sin.data(), view(out)));
}

void Plan::write(Slice k, Slice v, int layer, std::vector<float> shift) {
    require(layer >= 0 && layer < static_cast<int>(layers_.size()), "there is no layer " + std::to_string(layer));
    const Layer& l = layers_[layer];
    require(view(k).width == l.kv_heads * l.head_dim && view(v).width == view(k).width, "write: widths differ");
    require(shift.empty() || static_cast<int>(shift.size()) == view(k).width, "write: the shift has another width");
    require(shared("write", {k, v}) == Extent::Tokens, "write: takes rows of tokens");
    row_op("write", Extent::Tokens, write_op(view(k), view(v), l, std::move(shift)));
}

void Plan::rows(Slice x, Slice out) {
    require(view(x).width == view(out).width, "rows: widths differ");
    require(buffer_of(x).extent == Extent::Tokens && buffer_of(out).extent == Extent::Logits,
            "rows: from tokens to logits");
    row_op("rows", Extent::Logits, gather_op(view(x), view(out)));
}

void Plan::choose(Slice logits, int k, bool renormalise, Slice out) {
    require(k > 0 && k <= view(logits).width && view(out).width == 2 * k, "choose: widths differ");
    row_op("choose", shared("choose", {logits, out}), choose_op(view(logits), k, renormalise, view(out)));
    chosen_ = out;
    rated_ = view(logits).width;
}

void Plan::combine(Slice y, Slice routing, Slice out) {
    require(view(y).width == view(out).width && buffer_of(y).extent == Extent::Slots,
            "combine: widths or extents differ");
    require(routing == sorted_, "combine: takes the routing that was sorted last");
    require(buffer_of(out).extent == Extent::Tokens, "combine: gives rows of tokens");
    row_op("combine", Extent::Tokens, combine_op(view(y), view(routing), &slots_, view(out)));
}

// Whether bf16 weights meet an input that was left in float32.
static bool wide(Format format, const Activations& a) { return format == Format::BF16 && a.f32 && !a.bf16; }

std::vector<Piece> Plan::pieces(const std::vector<PieceRef>& refs, const Input& in, int width) const {
    std::vector<Piece> all;
    int first = 0;
    for (auto [packed, row, rows] : refs) {
        require(packed->columns() == in.columns, "a weight's columns must be the width of its input");
        require(row >= 0 && row % kLanes == 0 && rows > 0 && row <= packed->rows() - rows,
                "rows lie outside their matrix");
        require(rows % kLanes == 0 || row + rows == packed->rows(), "only the last panel of a matrix may be cut");
        const Activations& a = in.prepared.buffers.view;
        const void* wanted[] = {a.f32, a.bf16, a.q32};
        require(wide(packed->format(), a) || wanted[static_cast<int>(info(packed->format()).input)],
                "the input is not prepared for the weight's format");
        LinearFn kernel = kernels_->linear[static_cast<int>(packed->format())];
        if (wide(packed->format(), a)) kernel = kernels_->linear_bf16_exact;
        require(kernel, std::string("no kernel for ") + info(packed->format()).name);
        all.push_back({kernel, packed->panel(row / kLanes), packed->panel_bytes(), packed->step(), rows,
                       packed->columns(), first});
        first += rows;
    }
    require(first == width, "a weight's rows must be the width of what it gives");
    return all;
}

void Plan::linear(const std::string& name, int in, const std::vector<PieceRef>& refs, Slice out,
                  std::vector<float> bias, const Slice* add) {
    const Input& i = input(in);
    const Extent extent = buffer_of(out).extent;
    require(i.extent == extent, "linear: extents differ");
    require(bias.empty() || bias.size() == size_t(view(out).width), "linear: the bias has another width");
    Epilogue epilogue{std::move(bias), add ? view(*add) : View{}, {}};
    require(!add || (epilogue.add.width == view(out).width && buffer_of(*add).extent == extent),
            "linear: widths differ");
    part(extent).push_back(std::make_unique<LinearPhase>(name, extent, slots(extent), &i.prepared,
                                                         pieces(refs, i, view(out).width), view(out),
                                                         std::move(epilogue), pool_.threads()));
}

void Plan::gated(const std::string& name, int in, const PieceRef& gate, const PieceRef& up, int activation, int into) {
    const Input &from = input(in), &to = input(into);
    require(!finished_ && in != into && from.extent == to.extent && from.extent != Extent::Slots,
            "gated: extents differ, or it would overwrite its input");
    require(to.columns % 32 == 0 && activation >= 0 && activation < 3, "gated: takes whole blocks of 32 outputs");
    part(from.extent)
        .push_back(std::make_unique<GatedPhase>(name, from.extent, &from.prepared, pieces({gate}, from, to.columns)[0],
                                                pieces({up}, from, to.columns)[0], activation, &to.prepared,
                                                pool_.threads()));
}

void Plan::sort(Slice routing, int experts) {
    require(experts > 0 && view(routing).width % 2 == 0 && view(routing).width / 2 <= choices_,
            "sort: too many choices");
    require(buffer_of(routing).extent == Extent::Tokens, "sort: takes rows of tokens");
    require(routing == chosen_ && experts == rated_, "sort: takes what choose gave last, among as many experts");
    part(Extent::Tokens).push_back(std::make_unique<SortPhase>(view(routing), experts, &slots_));
    sorted_ = routing;
}

void Plan::experts(const std::string& name, int in, const std::vector<std::vector<PieceRef>>& refs, Slice out) {
    const Input& i = input(in);
    require(i.extent == Extent::Slots && buffer_of(out).extent == Extent::Slots,
            "experts: take and give rows of slots");
    require(static_cast<int>(refs.size()) == rated_ && std::get<2>(sorted_), "experts: not those that were sorted");
    std::vector<std::vector<Piece>> all;
    for (const auto& r : refs) all.push_back(pieces(r, i, view(out).width));
    part(Extent::Slots)
        .push_back(
            std::make_unique<ExpertsPhase>(name, &slots_, &i.prepared, std::move(all), view(out), pool_.threads()));
}

Crowd* Plan::crowd(int heads, int kv_heads, int window) {
    for (Crowd& c : crowds_)
        if (c.heads == heads && c.kv_heads == kv_heads && c.window == window) return &c;
    return &crowds_.emplace_back(heads, kv_heads, window, &partials_, pool_.threads());
}

void Plan::attend(Slice q, int layer, float scale, int window, float softcap, Slice out, int into) {
    require(layer >= 0 && layer < static_cast<int>(layers_.size()), "there is no layer " + std::to_string(layer));
    const Layer& l = layers_[layer];
    const int heads = view(q).width / l.head_dim;
    require(view(q).width == heads * l.head_dim && heads % l.kv_heads == 0 && view(out).width == view(q).width,
            "attend: widths differ");
    require(shared("attend", {q, out}) == Extent::Tokens, "attend: takes rows of tokens");
    require(window >= 0 && softcap >= 0, "attend: window and softcap cannot be negative");
    const Prepared* prepared = nullptr;
    if (into >= 0) {
        const Input& to = input(into);
        require(l.head_dim % 32 == 0 && to.columns == view(out).width && to.extent == Extent::Tokens,
                "attend: heads are no whole blocks of the input");
        prepared = &to.prepared;
    }
    part(Extent::Tokens)
        .push_back(std::make_unique<AttendPhase>(crowd(heads, l.kv_heads, window), l, view(q), view(out), prepared,
                                                 scale, softcap));
}

void Plan::finish(Slice logits) {
    require(!finished_, "it is finished");
    require(buffer_of(logits).extent == Extent::Logits && view(logits).width >= limits_.vocab,
            "fewer logits than the vocabulary");
    View z = view(logits);
    z.width = limits_.vocab;
    View maxima = view({buffer((z.width + kSampleBlock - 1) / kSampleBlock, Extent::Logits), 0, 1});
    auto* head = tail_.empty() ? nullptr : dynamic_cast<LinearPhase*>(tail_.back().get());
    if (!head || !head->give_maxima(z, maxima)) maxima = {};
    row_op("keep", Extent::Logits, keep_op(z));
    tail_.push_back(std::make_unique<PickPhase>(z, maxima, limits_.vocab, pool_.threads()));
    finished_ = true;
}

// ---------------------------------------------------------------------------------------------------------------
// running

void Plan::run(const StepArrays& step, Outcome& outcome) {
    const Busy busy(busy_);
    require(finished_, "it is not finished");
    check(step, limits_, ids_);
    for (int r = 0; r < step.logits(); r++) check_row(sampling_row(step.sampling, r), limits_.vocab);
    live_.step = &step;
    live_.outcome = &outcome;
    for (int b = 0; b < step.sequences(); b++)
        std::fill(live_.sequence_of.begin() + step.query_start[b], live_.sequence_of.begin() + step.query_start[b + 1],
                  b);
    const bool brief = step.rows() <= kShortStep;
    live_.threads = brief ? company_.threads() : pool_.threads();
    if (const int blocks = (step.rows() + kRowBlock - 1) / kRowBlock; blocks != blocks_) {
        blocks_ = blocks;
        for (const auto& phase : body_) phase->cut_rows({live_, 0, 0, 0});
    }
    for (Crowd& c : crowds_) c.gather(step);
    const double from = now();
    if (live_.threads == 1)
        pool_.run_alone(&Plan::job, this);
    else
        pool_.run(&Plan::job, this);
    if (brief) company_.ran(step.rows(), now() - from, live_.threads == 1 ? 0 : pool_.slept());
}

void Plan::job(void* plan, int thread) { static_cast<Plan*>(plan)->work(thread); }

void Plan::work(int thread) {
    const OwnMode mode;
    const StepArrays& step = *live_.step;
    prepare_pages(step, thread);
    if (thread == 0 && profiling_) clock_ = now();
    sweep(body_, {live_, thread, 0, 0});
    for (int first = 0; first < step.logits(); first += limits_.chunk)
        sweep(tail_, {live_, thread, first, std::min(limits_.chunk, step.logits() - first)});
}

uint8_t* Plan::page(int number) {
    require(number >= 0 && number < limits_.pages, "no such page");
    return cache_->data() + number * page_bytes_;
}

uint8_t* Plan::slot(int number) {
    require(number >= 0 && number < limits_.slots, "no such slot");
    return cache_->data() + limits_.pages * page_bytes_ + number * slot_bytes_;
}

// Each thread has its own bytes of all pages: what is copied, copied on and zeroed stays in order without a barrier.
void Plan::prepare_pages(const StepArrays& step, int thread) {
    if (step.fresh.empty() && step.copies.empty() && step.window_fresh.empty() && step.window_copies.empty()) return;
    const auto prepare = [&](uint8_t* base, size_t stride, Ints copies, Ints fresh) {
        const size_t from = stride * thread / live_.threads, bytes = stride * (thread + 1) / live_.threads - from;
        const auto at = [&](int32_t page) { return base + page * stride + from; };
        for (size_t i = 0; i < copies.size(); i += 2) memmove(at(copies[i + 1]), at(copies[i]), bytes);
        for (int32_t page : fresh) memset(at(page), 0, bytes);
    };
    prepare(cache_->data(), page_bytes_, step.copies, step.fresh);
    if (limits_.slots)
        prepare(cache_->data() + page_bytes_ * limits_.pages, slot_bytes_, step.window_copies, step.window_fresh);
    pool_.barrier(thread);
}

void Plan::sweep(const std::vector<std::unique_ptr<Phase>>& phases, const Here& here) {
    for (size_t i = 0; i < phases.size(); i++) {
        const auto& phase = phases[i];
        phase->run(here);
        Ahead ahead = i + 1 < phases.size() ? phases[i + 1]->ahead(here) : Ahead{};
        for (int lines = 0; lines < kWarmLines; lines += 4) ahead.ask();
        pool_.barrier(here.thread, ahead);
        if (here.thread != 0) continue;
        phase->rewind();  // nobody comes back to it before the next barrier
        if (!profiling_) continue;
        const double t = now();
        phase->seconds += t - clock_;
        phase->runs++;
        clock_ = t;
    }
}

void Plan::copy(Slice what, int rows, float* out) const {
    Plan& self = const_cast<Plan&>(*this);
    const View v = self.view(what);
    require(rows >= 0 && rows <= rows_of(self.buffer_of(what).extent), "more rows than the buffer has");
    for (int r = 0; r < rows; r++) memcpy(out + size_t(r) * v.width, v.row(r), sizeof(float) * v.width);
}

void Plan::profile(bool on) {
    profiling_ = on;
    for (auto* phases : {&body_, &tail_})
        for (auto& p : *phases) p->seconds = 0, p->runs = 0;
}

std::vector<std::tuple<std::string, long, double>> Plan::timings() const {
    std::vector<std::tuple<std::string, long, double>> all;
    for (auto* phases : {&body_, &tail_})
        for (const auto& p : *phases) all.emplace_back(p->name, p->runs, p->seconds);
    return all;
}

}  // namespace headrace
