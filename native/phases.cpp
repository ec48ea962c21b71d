#include "phases.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace headrace {

void RowPhase::run(const Here& here) {
    const auto [from, to] = here.share(here.rows(extent, slots_));
    for (int row = from; row < to; row++)
        for (const auto& op : ops) op->run(here, row);
}

// ----------------------------------------------------------------------------------------------------------------
// linear

namespace {

constexpr size_t kLargestUnit = 64 << 10;
constexpr size_t kMostAhead = 256 << 10;

void finish_unit(const KernelTable& k, const Epilogue& e, View out, int column, int columns, int row, int rows) {
    if (!e.bias.empty() || e.add.data)
        k.add_rows(out.row(row) + column, out.stride, rows, columns, e.bias.empty() ? nullptr : e.bias.data() + column,
                   e.add.data ? e.add.row(row) + column : nullptr, e.add.stride);
    if (!e.maxima.data) return;
    for (int r = row; r < row + rows; r++)
        k.block_max(out.row(r) + column, columns / kSampleBlock, e.maxima.row(r) + column / kSampleBlock);
}

// Panels `first` .. `end - 1` of a piece, or as many as a thread could ask for while it waits.
Ahead panels_ahead(const Piece& p, int first, int end) {
    const uint8_t* at = p.panel(first);
    return {at, at + std::min(kMostAhead, (end - first) * p.step)};
}

// The last panel of a piece whose rows are no multiple of 16 must not write beyond them.
void ragged_panel(const Piece& p, int panel, const Activations& in, int row, int rows, View out) {
    float wide[kRowBlock * kLanes];
    p.run(panel, 1, in, row, rows, wide, kLanes);
    const int first = panel * kLanes;
    for (int r = 0; r < rows; r++)
        memcpy(out.row(row + r) + p.first + first, wide + r * kLanes, sizeof(float) * (p.rows - first));
}

void run_unit(const KernelTable& k, const Piece& p, const Unit& u, const Activations& in, int row, int rows, View out,
              const Epilogue& e) {
    const int whole = std::min(u.panels, p.rows / kLanes - u.panel);
    const int columns = std::min((u.panel + u.panels) * kLanes, p.rows) - u.panel * kLanes;
    for (int end = row + rows; row < end; row += kRowBlock) {
        const int n = std::min(kRowBlock, end - row);
        if (whole > 0)
            p.run(u.panel, whole, in, row, n, out.row(row) + p.first + u.panel * kLanes, static_cast<int>(out.stride));
        if (whole < u.panels) ragged_panel(p, u.panel + u.panels - 1, in, row, n, out);
        finish_unit(k, e, out, p.first + u.panel * kLanes, columns, row, n);
    }
}

}  // namespace

std::vector<Unit> cut(const std::vector<Piece>& pieces, size_t bytes, int multiple) {
    std::vector<Unit> units;
    for (int i = 0; i < static_cast<int>(pieces.size()); i++) {
        const int most = static_cast<int>(bytes / pieces[i].panel_bytes), n = pieces[i].panels();
        const int each = std::max(1, most / multiple) * multiple;
        for (int panel = 0; panel < n; panel += each) units.push_back({i, panel, std::min(each, n - panel)});
    }
    return units;
}

size_t unit_bytes(const std::vector<Piece>& pieces, int threads) {
    size_t all = 0;
    for (const Piece& p : pieces) all += p.panels() * p.panel_bytes;
    return std::min(kLargestUnit, all / (size_t(threads) * 16));
}

LinearPhase::LinearPhase(std::string name, Extent extent, const Slots* slots, const Prepared* in,
                         std::vector<Piece> pieces, View out, Epilogue epilogue, int threads)
    : Phase(std::move(name)),
      extent_(extent),
      slots_(slots),
      in_(in),
      pieces_(std::move(pieces)),
      out_(out),
      epilogue_(std::move(epilogue)),
      grid_(threads) {
    cut_up(1);
}

void LinearPhase::cut_up(int multiple) {
    units_ = cut(pieces_, grid_.threads() > 1 ? unit_bytes(pieces_, grid_.threads()) : kLargestUnit, multiple);
    grid_.cut_outputs(static_cast<int>(units_.size()));
}

bool LinearPhase::give_maxima(View logits, View maxima) {
    if (out_.data != logits.data || out_.stride != logits.stride) return false;
    for (const Piece& p : pieces_)
        if (p.first % kSampleBlock) return false;
    epilogue_.maxima = maxima;
    cut_up(kSampleBlock / kLanes);
    return true;
}

void LinearPhase::run(const Here& here) {
    const int rows = here.rows(extent_, slots_);
    for (Grid::Cell c; (c = grid_.take(here, rows)).unit >= 0;) {
        const Unit& u = units_[c.unit];
        run_unit(here.kernels(), pieces_[u.piece], u, in_->buffers.view, c.row, c.rows, out_, epilogue_);
    }
}

Ahead LinearPhase::ahead(const Here& here) const {
    const auto [first, end] = grid_.ahead(here.thread);
    if (first >= end) return {};
    const Unit &from = units_[first], &last = units_[end - 1];
    const Piece& p = pieces_[from.piece];
    return panels_ahead(p, from.panel, from.piece == last.piece ? last.panel + last.panels : p.panels());
}

// ---------------------------------------------------------------------------------------------------------------
// gated

GatedPhase::GatedPhase(std::string name, Extent extent, const Prepared* in, Piece gate, Piece up, int activation,
                       const Prepared* into, int threads)
    : Phase(std::move(name)),
      extent_(extent),
      in_(in),
      gate_(gate),
      up_(up),
      activation_(activation),
      into_(into),
      grid_(threads) {
    grid_.cut_outputs((gate.rows + kUnit - 1) / kUnit);
}

void GatedPhase::run(const Here& here) {
    const int rows = here.rows(extent_, nullptr);
    const Activations& in = in_->buffers.view;
    alignas(64) float gate[kRowBlock * kUnit], up[kRowBlock * kUnit];
    for (Grid::Cell c; (c = grid_.take(here, rows)).unit >= 0;) {
        const int first = c.unit * kUnit, width = std::min(kUnit, gate_.rows - first), end = c.row + c.rows;
        for (int row = c.row; row < end; row += kRowBlock) {
            const int n = std::min(kRowBlock, end - row);
            for (int i = 0; i < width; i += kLanes) {  // in turn, as they lie in memory
                gate_.run((first + i) / kLanes, 1, in, row, n, gate + i, kUnit);
                up_.run((first + i) / kLanes, 1, in, row, n, up + i, kUnit);
            }
            for (int r = 0; r < n; r++) {
                float* g = gate + r * kUnit;
                here.kernels().glu(g, up + r * kUnit, width, activation_, g);
                into_->fill(here.kernels(), g, width, row + r, first);
            }
        }
    }
}

Ahead GatedPhase::ahead(const Here& here) const {
    const auto [first, end] = grid_.ahead(here.thread);
    if (first >= end) return {};
    return panels_ahead(gate_, first * (kUnit / kLanes), std::min(end * (kUnit / kLanes), gate_.panels()));
}

// ---------------------------------------------------------------------------------------------------------------
// experts

ExpertsPhase::ExpertsPhase(std::string name, const Slots* slots, const Prepared* in,
                           std::vector<std::vector<Piece>> experts, View out, int threads)
    : Phase(std::move(name)), slots_(slots), in_(in), experts_(std::move(experts)), out_(out) {
    for (const auto& pieces : experts_) units_.push_back(cut(pieces, unit_bytes(pieces, threads)));
}

void ExpertsPhase::run(const Here& here) {
    int before = 0;  // units of the experts passed so far
    size_t at = 0;
    for (int i = tickets_.take();; i = tickets_.take()) {
        for (; at < slots_->used.size(); at++) {
            const int n = static_cast<int>(units_[slots_->used[at]].size());
            if (i < before + n) break;
            before += n;
        }
        if (at == slots_->used.size()) return;
        const int e = slots_->used[at], first = slots_->start[e];
        const Unit& u = units_[e][i - before];
        run_unit(here.kernels(), experts_[e][u.piece], u, in_->buffers.view, first, slots_->start[e + 1] - first, out_,
                 {});
    }
}

void SortPhase::run(const Here& here) {
    if (here.thread != 0) return;
    const int rows = here.live.step->rows(), k = routing_.width / 2;
    Slots& s = *slots_;
    s.choices = k;
    s.source.resize(size_t(rows) * k);
    s.place.resize(size_t(rows) * k);
    s.start.assign(experts_ + 1, 0);
    s.used.clear();
    const auto expert = [&](int row, int j) { return static_cast<int>(routing_.row(row)[j]); };
    for (int row = 0; row < rows; row++)
        for (int j = 0; j < k; j++) s.start[expert(row, j) + 1]++;
    for (int e = 0; e < experts_; e++) {
        if (s.start[e + 1]) s.used.push_back(e);
        s.start[e + 1] += s.start[e];
    }
    std::vector<int32_t> next(s.start.begin(), s.start.end() - 1);
    for (int row = 0; row < rows; row++)
        for (int j = 0; j < k; j++) {
            const int slot = next[expert(row, j)]++;
            s.place[row * k + j] = slot;
            s.source[slot] = row;
        }
}

// -------------------------------------------------------------------------------------------------------------
// attention

// Chooses the size of tiles: large ones read keys and values less often, small ones keep all threads busy.
void Crowd::size_up(const StepArrays& step) {
    const int group = heads / kv_heads;
    heads_ = std::min(group, kTileRows);
    tokens_ = kTileRows / heads_;
    const auto units = [&] {
        int n = 0;
        for (int b = 0; b < step.sequences(); b++) {
            const int tokens = step.query_start[b + 1] - step.query_start[b];
            n += (tokens + tokens_ - 1) / tokens_ * ((step.context[b] + kSplitTokens - 1) / kSplitTokens);
        }
        return n * kv_heads * ((group + heads_ - 1) / heads_);
    };
    while (tokens_ > 1 && units() < 4 * threads_) tokens_ /= 2;
    while (heads_ > 1 && units() < threads_) heads_ = (heads_ + 1) / 2;
}

void Crowd::tile_up(const StepArrays& step, int b) {
    const int group = heads / kv_heads, from = step.query_start[b], to = step.query_start[b + 1];
    first_.push_back(static_cast<int>(tiles.size()));
    const auto tile = [&](int row, int kv_head, int head) {
        Tile t{b, row, std::min(tokens_, to - row), kv_head, kv_head * group + head, std::min(heads_, group - head),
               0, 0};
        const int first = step.positions[row] + 1, last = step.positions[row + t.tokens - 1];
        t.split = window ? std::max(0, first - window) / kSplitTokens : 0;
        t.splits = last / kSplitTokens + 1 - t.split;
        tiles.push_back(t);
    };
    const int last = from + (to - from - 1) / tokens_ * tokens_;  // the longest first
    for (int h = 0; h < kv_heads; h++)
        for (int row = last; row >= from; row -= tokens_)
            for (int head = 0; head < group; head += heads_) tile(row, h, head);
}

// Whether there is room to keep what each split gives.
bool Crowd::cut(Tile& tile) {
    if (tile.partial >= 0) return true;
    const int results = tile.splits * tile.rows();
    if (results > partials->room - used_) return false;
    tile.partial = used_;
    tile.left = tile.splits;
    used_ += results;
    return true;
}

bool Crowd::sees_all(const StepArrays& step, const Tile& tile, int split) const {
    const int first = step.positions[tile.row] + 1, last = first + tile.tokens - 1;
    return first >= (split + 1) * kSplitTokens && (!window || last - window <= split * kSplitTokens);
}

// Sequences whose pages were the same up to `split` are grouped by their pages of that split as well: alike_[b] is the
// first of b's group, or -1 where nobody else is in it. Whether there are any groups left.
bool Crowd::group(const StepArrays& step, int split) {
    constexpr int kPages = kSplitTokens / kPageTokens;
    const auto pages = [&](int b) { return step.table(b).data() + size_t(split) * kPages; };
    before_.swap(alike_);
    alike_.assign(before_.size(), -1);
    bool any = false;
    for (int b = 0; b < step.sequences(); b++) {
        if (before_[b] < 0 || step.context[b] < (split + 1) * kSplitTokens) continue;
        for (int c = before_[b]; c < b && alike_[b] < 0; c++)
            if (before_[c] == before_[b] && !memcmp(pages(b), pages(c), kPages * sizeof(int32_t)))
                alike_[b] = alike_[c] = c, any = true;
    }
    return any;
}

void Crowd::add(int tile, int split) {
    items.push_back({static_cast<int>(members.size()), 1, split});
    members.push_back(tile);
}

// Items for a split and all small tiles of each group of sequences.
void Crowd::share_split(const StepArrays& step, int split) {
    const int chunks = (heads / kv_heads + heads_ - 1) / heads_;
    for (int leader = 0; leader < step.sequences(); leader++)
        for (int j = 0; alike_[leader] == leader && j < kv_heads * chunks; j++) {
            int room = 0;  // rows that the last item can take
            for (int b = leader; b < step.sequences(); b++) {
                if (alike_[b] != leader || step.query_start[b + 1] - step.query_start[b] > tokens_) continue;
                Tile& t = tiles[first_[b] + j];
                if (2 * t.rows() > kTileRows || !sees_all(step, t, split) || !cut(t)) continue;
                if (t.shared_to == 0) t.shared_from = split;
                t.shared_to = split + 1;
                if (t.rows() > room) {
                    add(first_[b] + j, split);
                    room = kTileRows;
                } else {
                    members.push_back(first_[b] + j);
                    items.back().tiles++;
                }
                room -= t.rows();
            }
        }
}

void Crowd::gather(const StepArrays& step) {
    tiles.clear(), items.clear(), members.clear(), first_.clear();
    used_ = 0;
    size_up(step);
    for (int b = 0; b < step.sequences(); b++) tile_up(step, b);
    alike_.assign(step.sequences(), 0);
    for (int split = 0; group(step, split); split++) share_split(step, split);
    int64_t cost = 0;
    for (const Tile& t : tiles) cost += int64_t(t.splits) * t.rows();
    for (int i = 0; i < static_cast<int>(tiles.size()); i++) {
        Tile& t = tiles[i];
        const bool large = threads_ > 1 && t.splits > 1 && int64_t(t.splits) * t.rows() * 4 * threads_ > cost;
        if (t.partial < 0 && !(large && cut(t))) {
            add(i, -1);
        } else {
            for (int s = t.split; s < t.split + t.splits; s++)
                if (s < t.shared_from || s >= t.shared_to) add(i, s);
        }
    }
    runs.deal(static_cast<int>(items.size()));
}

// room: for as many quantised queries as a tile has rows
AttendSplit AttendPhase::work_for(const Here& here, const Crowd::Item& item, QuantQuery* room) const {
    const StepArrays& step = *here.live.step;
    const Crowd::Tile& leader = crowd_->member(item, 0);
    AttendSplit w{};
    w.cache = layer_.head(leader.kv_head);
    w.page_stride = layer_.page_stride;
    w.pages = step.table(leader.sequence, layer_.windowed).data();
    w.split = item.split;
    w.head_dim = layer_.head_dim;
    w.scale = scale_;
    w.softcap = softcap_;
    for (int i = 0; i < item.tiles; i++) {
        const Crowd::Tile& tile = crowd_->member(item, i);
        for (int r = 0; r < tile.rows(); r++, w.rows++) {
            const int row = tile.row + r / tile.heads;
            w.q[w.rows] = q_.row(row) + (tile.head + r % tile.heads) * layer_.head_dim;
            w.hi[w.rows] = step.positions[row] + 1;
            w.lo[w.rows] = crowd_->window ? std::max(0, w.hi[w.rows] - crowd_->window) : 0;
            w.quant[w.rows] = room + w.rows;
            if (layer_.format == KvFormat::Int8)
                here.kernels().quantize_query(w.q[w.rows], layer_.head_dim, room[w.rows]);
        }
    }
    return w;
}

void AttendPhase::split(const Here& here, const AttendSplit& work) const {
    here.kernels().attend_split[static_cast<int>(layer_.format)](work);
}

void AttendPhase::finish(const Here& here, const Crowd::Tile& tile, int r, const float* all) const {
    const int row = tile.row + r / tile.heads, column = (tile.head + r % tile.heads) * layer_.head_dim;
    float* out = out_.row(row) + column;
    here.kernels().attend_finish(all, layer_.head_dim, out);
    if (into_) into_->fill(here.kernels(), out, layer_.head_dim, row, column);
}

// The first pages that a tile reads of a split.
Coming AttendPhase::pages_of(const Here& here, const Crowd::Tile& tile, int split) const {
    const StepArrays& step = *here.live.step;
    const int hi = step.positions[tile.row] + 1, lo = crowd_->window ? std::max(0, hi - crowd_->window) : 0;
    const int first = std::max(lo, split * kSplitTokens) / kPageTokens;
    const Ints table = step.table(tile.sequence, layer_.windowed);
    Coming pages{};
    for (size_t i = 0; i < Coming::kPages && first + i < table.size(); i++)
        pages.page[i] = layer_.head(tile.kv_head) + size_t(table[first + i]) * layer_.page_stride;
    return pages;
}

// What this thread will probably read next, after the item that it has.
Coming AttendPhase::pages_to_come(const Here& here) const {
    const auto [first, end] = crowd_->runs.left(here.thread);
    if (first >= end) return {};
    const Crowd::Item& item = crowd_->items[first];
    const Crowd::Tile& tile = crowd_->member(item, 0);
    return pages_of(here, tile, std::max(item.split, tile.split));
}

Ahead AttendPhase::ahead(const Here& here) const {
    const uint8_t* from = pages_to_come(here).page[0];
    if (!from) return {};
    return {from, from + head_page_bytes(layer_.head_dim, layer_.format)};
}

namespace {

bool sees(const AttendSplit& w, int r, int split) {
    return w.lo[r] < (split + 1) * kSplitTokens && w.hi[r] > split * kSplitTokens;
}

}  // namespace

void AttendPhase::whole(const Here& here, const Crowd::Item& item) const {
    alignas(64) float all[kTileRows * row_result(kMaxHeadDim)], one[kTileRows * row_result(kMaxHeadDim)];
    const Crowd::Tile& tile = crowd_->member(item, 0);
    QuantQuery queries[kTileRows];
    AttendSplit w = work_for(here, item, queries);
    const int room = row_result(w.head_dim), end = tile.split + tile.splits;
    bool begun[kTileRows] = {};
    for (w.split = tile.split; w.split < end; w.split++) {
        w.next = w.split + 1 < end ? pages_of(here, tile, w.split + 1) : pages_to_come(here);
        for (int r = 0; r < w.rows; r++) w.out[r] = (begun[r] ? one : all) + r * room;
        split(here, w);
        for (int r = 0; r < w.rows; r++) {
            if (!sees(w, r, w.split)) continue;
            if (begun[r]) here.kernels().attend_merge(all + r * room, one + r * room, value_width(w.head_dim));
            begun[r] = true;
        }
    }
    for (int r = 0; r < w.rows; r++) finish(here, tile, r, all + r * room);
}

void AttendPhase::part(const Here& here, const Crowd::Item& item) const {
    QuantQuery queries[kTileRows];
    AttendSplit w = work_for(here, item, queries);
    w.next = pages_to_come(here);
    for (int i = 0, row = 0; i < item.tiles; i++) {
        const Crowd::Tile& tile = crowd_->member(item, i);
        for (int r = 0; r < tile.rows(); r++) w.out[row++] = crowd_->partials->at(tile.result(item.split, r));
    }
    split(here, w);
    for (int i = 0; i < item.tiles; i++) {
        Crowd::Tile& tile = crowd_->tiles[crowd_->members[item.first + i]];
        if (std::atomic_ref<int>(tile.left).fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
        tile.left = tile.splits;  // the last one merges, and makes ready for the next layer
        merge(here, tile);
    }
}

// Adds up what a tile's splits gave.
void AttendPhase::merge(const Here& here, const Crowd::Tile& tile) const {
    const StepArrays& step = *here.live.step;
    for (int r = 0; r < tile.rows(); r++) {
        const int hi = step.positions[tile.row + r / tile.heads] + 1;
        const int first = crowd_->window ? std::max(0, hi - crowd_->window) / kSplitTokens : 0;
        float* all = crowd_->partials->at(tile.result(first, r));
        for (int s = first + 1; s <= (hi - 1) / kSplitTokens; s++)
            here.kernels().attend_merge(all, crowd_->partials->at(tile.result(s, r)), value_width(layer_.head_dim));
        finish(here, tile, r, all);
    }
}

void AttendPhase::run(const Here& here) {
    for (int i; (i = crowd_->runs.take(here.thread, here.live.threads == 1)) >= 0;) {
        const Crowd::Item& item = crowd_->items[i];
        if (item.split < 0)
            whole(here, item);
        else
            part(here, item);
    }
}

// --------------------------------------------------------------------------------------------------------------
// sampling

SamplingRow sampling_row(const SamplingArrays& a, int r) {
    SamplingRow row;
    row.temperature = a.temperature[r];
    row.top_k = a.top_k[r];
    row.top_p = a.top_p[r];
    row.min_p = a.min_p[r];
    row.repetition = a.repetition[r];
    row.presence = a.presence[r];
    row.frequency = a.frequency[r];
    row.seed = a.seed[r];
    row.position = a.position[r];
    row.choice = a.choice[r];
    row.target = a.target[r];
    row.logprobs = a.logprobs[r];
    row.bias_ids = a.bias_ids.data() + a.bias_indptr[r];
    row.bias_values = a.bias_values.data() + a.bias_indptr[r];
    row.biases = a.bias_indptr[r + 1] - a.bias_indptr[r];
    row.penalty_ids = a.penalty_ids.data() + a.penalty_indptr[r];
    row.penalty_counts = a.penalty_counts.data() + a.penalty_indptr[r];
    row.penalties = a.penalty_indptr[r + 1] - a.penalty_indptr[r];
    row.mask = a.mask_rows[r] < 0 ? nullptr : a.masks.data() + a.mask_rows[r] * a.mask_words;
    return row;
}

void PickPhase::run(const Here& here) {
    Outcome& o = *here.live.outcome;
    for (int i; (i = tickets_.take()) < here.logits;) {
        const int r = here.first + i;
        SampledRow row;
        row.top_ids = o.top_ids + size_t(r) * o.top;
        row.top_logprobs = o.top_logprobs + size_t(r) * o.top;
        row.top_places = o.top;
        sample_row(here.kernels(), logits_.row(i), maxima_.data ? maxima_.row(i) : nullptr, vocab_,
                   sampling_row(here.live.step->sampling, r), row, scratch_[here.thread]);
        o.tokens[r] = row.token;
        o.logprob[r] = row.logprob;
        o.rank[r] = row.rank;
        o.status[r] = row.status;
    }
}

}  // namespace headrace
