// A row's ids lie in blocks of 64. One pass finds each block's largest logit (and any NaN); nearly everything after
// that visits only the blocks whose largest can matter. A set of kept tokens is always a prefix of the order (logit
// descending, id ascending), so it is written as the last token it holds: a Cut. No logits are sorted, none are copied
// except blocks that a mask, a bias or a penalty changes.
#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <stdexcept>

namespace headrace {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kGreedy = 1e-5f;         // temperatures below are greedy
constexpr float kLargestNoise = 17.34f;  // 25 ln 2 = 17.329 is what u = 1 - 2^-25 gives; the rest is slack
constexpr float kNoMass = -90.0f;        // exp gives exactly 0 from here down
constexpr int kMassGroup = 32;           // blocks whose masses are summed in float32 before they join in float64
constexpr int32_t kUnpatched = -1, kForbidden = -2;  // Scratch::slot, else the number of a patch

// Tokens above `value`, and those equal to it up to `id`.
struct Cut {
    float value;
    int32_t id;
};
constexpr Cut kEveryFinite = {kLowest, std::numeric_limits<int32_t>::max()};

bool comes_first(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// A row as blocks, wherever each lies: in the logits, in the padded tail, or in a patch.
struct View {
    const float* logits;
    const float* last;  // the last block, filled up with -inf
    int vocab, blocks;
    const float* max;     // [blocks]
    const int32_t* slot;  // [blocks], or nullptr: nothing patched
    const float* patches;

    const float* at(int b) const {
        if (slot && slot[b] >= 0) return patches + static_cast<size_t>(slot[b]) * kSampleBlock;
        return b == blocks - 1 ? last : logits + static_cast<size_t>(b) * kSampleBlock;
    }
    float value(int32_t id) const { return at(id / kSampleBlock)[id % kSampleBlock]; }
    // The block with the largest value, the first of several
    int top_block() const { return static_cast<int>(std::max_element(max, max + blocks) - max); }
    // The lowest id with the largest value
    int32_t arg_max() const {
        int b = top_block();
        return b * kSampleBlock + static_cast<int32_t>(std::find(at(b), at(b) + kSampleBlock, max[b]) - at(b));
    }
};

// visit(block, its values, what a kept one must reach) for each of blocks [first, end) that may hold kept tokens.
template <class Visit>
void within(const View& view, Cut cut, int first, int end, Visit visit) {
    for (int b = first; b < end; b++) {
        if (view.max[b] < cut.value) continue;
        int32_t id = b * kSampleBlock;
        if (cut.id >= id + kSampleBlock - 1) {
            visit(b, view.at(b), Floor{cut.value, false});
        } else if (cut.id < id) {
            if (view.max[b] > cut.value) visit(b, view.at(b), Floor{cut.value, true});
        } else {  // the cut goes through this block: later equals are left out
            float kept[kSampleBlock];
            std::memcpy(kept, view.at(b), sizeof kept);
            for (int i = cut.id - id + 1; i < kSampleBlock; i++)
                if (kept[i] == cut.value) kept[i] = std::numeric_limits<float>::quiet_NaN();
            visit(b, kept, Floor{cut.value, false});
        }
    }
}

int count_within(const KernelTable& k, const View& view, Cut cut) {
    int n = 0;
    within(view, cut, 0, view.blocks, [&](int, const float* x, Floor floor) { n += k.block_count(x, floor); });
    return n;
}

// The sum of exp((x - top) / temperature). Groups are cut by block number, so what is skipped cannot move a bit.
double mass_within(const KernelTable& k, const View& view, Cut cut, float top, float temperature) {
    float inverse = 1.0f / temperature;
    double total = 0;
    for (int first = 0; first < view.blocks; first += kMassGroup) {
        float sums[16] = {};
        within(view, cut, first, std::min(first + kMassGroup, view.blocks), [&](int b, const float* x, Floor floor) {
            if ((view.max[b] - top) * inverse > kNoMass) k.block_mass(x, top, inverse, floor, sums);
        });
        for (float s : sums) total += s;
    }
    return total;
}

// All tokens >= value in s.candidates, in ascending order of ids.
void collect(const KernelTable& k, const View& view, float value, Scratch& s) {
    size_t n = 0;
    s.candidates.resize(kSampleBlock);
    within(view, {value, kEveryFinite.id}, 0, view.blocks, [&](int b, const float* x, Floor floor) {
        n += k.block_collect(x, b * kSampleBlock, floor, s.candidates.data() + n);
        if (n + kSampleBlock > s.candidates.size()) s.candidates.resize(2 * s.candidates.size());
    });
    while (n && s.candidates[n - 1].id >= view.vocab) n--;  // the tail's filling, when value is -inf
    s.candidates.resize(n);
}

// A value that at least n tokens reach, cheaply: the n-th largest maximum of runs of blocks, long enough to leave few
// of them; `lowest` when there are fewer blocks than n.
float reached_by(const View& view, int n, float lowest, Scratch& s) {
    if (n > view.blocks) return lowest;
    int run = std::max(1, view.blocks / 4 / n);
    s.order.clear();
    for (int b = 0; b < view.blocks; b += run)
        s.order.push_back(*std::max_element(view.max + b, view.max + std::min(b + run, view.blocks)));
    std::nth_element(s.order.begin(), s.order.begin() + (n - 1), s.order.end(), std::greater<float>());
    return std::max(s.order[n - 1], lowest);
}

// ---- what masks, biases and penalties change ----------------------------------------------------------------------

uint64_t mask_of(const int32_t* mask, int vocab, int b) {
    int words = (vocab + 31) / 32;
    uint64_t low = static_cast<uint32_t>(mask[2 * b]);
    uint64_t high = 2 * b + 1 < words ? static_cast<uint32_t>(mask[2 * b + 1]) : 0;
    return low | high << 32;
}

uint64_t real_ids(int vocab, int b) {
    int n = vocab - b * kSampleBlock;
    return n >= kSampleBlock ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

// Copies blocks out of the raw row the first time that something in them changes.
struct Patcher {
    const View& raw;
    Scratch& s;
    int used = 0;

    float* open(int b) {
        if (s.slot[b] == kUnpatched) {
            size_t need = static_cast<size_t>(used + 1) * kSampleBlock;
            if (s.patches.size() < need) s.patches.resize(std::max(need, 2 * s.patches.size()));
            std::memcpy(s.patches.data() + need - kSampleBlock, raw.at(b), kSampleBlock * sizeof(float));
            s.slot[b] = used++;
        }
        return s.patches.data() + static_cast<size_t>(s.slot[b]) * kSampleBlock;
    }

    // An id's place, or nullptr when its whole block is forbidden.
    float* place(int32_t id) {
        int b = id / kSampleBlock;
        return s.slot[b] == kForbidden ? nullptr : open(b) + id % kSampleBlock;
    }

    void mask(const KernelTable& k, const int32_t* words) {
        for (int b = 0; b < raw.blocks; b++) {
            uint64_t real = real_ids(raw.vocab, b), allowed = mask_of(words, raw.vocab, b) & real;
            if (allowed == real) continue;
            if (allowed) {
                k.block_mask(open(b), allowed);
            } else {
                s.slot[b] = kForbidden;
                s.max[b] = -kInf;
            }
        }
    }
};

// Back to float32; finite stays finite.
float narrowed(double x) {
    if (std::isinf(x)) return static_cast<float>(x);
    return static_cast<float>(std::clamp(x, static_cast<double>(kLowest), -static_cast<double>(kLowest)));
}

double penalised(double x, int32_t count, const SamplingRow& in) {
    x = x > 0 ? x / in.repetition : x * in.repetition;
    return x - static_cast<double>(in.frequency) * count - (count > 0 ? in.presence : 0.0f);
}

bool penalises(const SamplingRow& in) {
    return in.penalties && (in.repetition != 1 || in.presence != 0 || in.frequency != 0);
}

// The row as sampling sees it.
View adjusted(const KernelTable& k, const View& raw, const SamplingRow& in, Scratch& s) {
    if (!in.mask && !in.biases && !penalises(in)) return raw;
    s.slot.assign(raw.blocks, kUnpatched);
    s.max.assign(raw.max, raw.max + raw.blocks);
    Patcher patcher{raw, s};
    if (in.mask) patcher.mask(k, in.mask);
    for (int i = 0; i < in.biases; i++)
        if (float* x = patcher.place(in.bias_ids[i])) *x = narrowed(static_cast<double>(*x) + in.bias_values[i]);
    if (penalises(in))
        for (int i = 0; i < in.penalties; i++)
            if (float* x = patcher.place(in.penalty_ids[i])) *x = narrowed(penalised(*x, in.penalty_counts[i], in));
    s.patch_max.resize(std::max(s.patch_max.size(), static_cast<size_t>(patcher.used)));
    k.block_max(s.patches.data(), patcher.used, s.patch_max.data());
    for (int b = 0; b < raw.blocks; b++)
        if (s.slot[b] >= 0) s.max[b] = s.patch_max[s.slot[b]];
    View view = raw;
    view.max = s.max.data();
    view.slot = s.slot.data();
    view.patches = s.patches.data();
    return view;
}

// ---- choosing -----------------------------------------------------------------------------------------------------

// The least float32 that min_p keeps.
float least_kept(float top, const SamplingRow& in) {
    if (!(in.min_p > 0)) return kLowest;
    double least = std::min<double>(top, top + static_cast<double>(in.temperature) * std::log(double{in.min_p}));
    if (least <= kLowest) return kLowest;
    float rounded = static_cast<float>(least);
    return rounded < least ? std::nextafter(rounded, kInf) : rounded;
}

// What min_p and top_k leave.
Cut filtered(const KernelTable& k, const View& view, const SamplingRow& in, float top, Scratch& s) {
    Cut cut = {least_kept(top, in), kEveryFinite.id};
    if (in.top_k <= 0 || in.top_k >= view.vocab) return cut;
    collect(k, view, reached_by(view, in.top_k, cut.value, s), s);
    if (static_cast<int>(s.candidates.size()) < in.top_k) return cut;  // min_p left fewer
    auto last = s.candidates.begin() + (in.top_k - 1);
    std::nth_element(s.candidates.begin(), last, s.candidates.end(), comes_first);
    return {last->value, last->id};
}

// The token within the cut that has the largest score. Blocks too low to win, whatever their noise, are not visited.
int32_t noisiest(const KernelTable& k, const View& view, const SamplingRow& in, float top, Cut cut) {
    GumbelSearch search{in.seed,
                        static_cast<uint32_t>(in.position),
                        static_cast<uint32_t>(in.choice),
                        top,
                        in.temperature,
                        1.0f / in.temperature,
                        -kInf,
                        -1};
    auto visit = [&](int b, const float* x, Floor floor) { k.block_gumbel(x, b * kSampleBlock, floor, search); };
    int start = view.top_block();  // a good score early spares others
    within(view, cut, start, start + 1, visit);
    within(view, cut, 0, view.blocks, [&](int b, const float* x, Floor floor) {
        bool hopeless = (view.max[b] - top) * search.inverse + kLargestNoise < search.best;
        if (b != start && !hopeless) visit(b, x, floor);
    });
    return search.best_id;
}

// top_p without sorting: the best score among more tokens is the best among fewer if its token is one of the fewer. A
// token is in the nucleus while the mass ahead of it is below top_p; if the winner is not, neither is anything behind
// it.
int32_t drawn(const KernelTable& k, const View& view, const SamplingRow& in, Scratch& s) {
    float top = view.max[view.top_block()];
    Cut cut = filtered(k, view, in, top, s);
    if (in.top_p >= 1) return noisiest(k, view, in, top, cut);
    double share = std::max(in.top_p, std::numeric_limits<float>::min());
    double nucleus = share * mass_within(k, view, cut, top, in.temperature);
    for (;;) {
        int32_t id = noisiest(k, view, in, top, cut);
        Cut ahead = {view.value(id), id - 1};
        if (mass_within(k, view, ahead, top, in.temperature) < nucleus) return id;
        cut = ahead;
    }
}

void choose(const KernelTable& k, const View& raw, const SamplingRow& in, SampledRow& out, Scratch& s) {
    if (in.target >= 0) {
        out.token = in.target;
        return;
    }
    View view = adjusted(k, raw, in, s);
    if (view.max[view.top_block()] == -kInf)
        out.status = kNothingAllowed;
    else
        out.token = in.temperature < kGreedy ? view.arg_max() : drawn(k, view, in, s);
}

// ---- reporting ----------------------------------------------------------------------------------------------------

void report_best(const KernelTable& k, const View& raw, int n, double shift, SampledRow& out, Scratch& s) {
    collect(k, raw, reached_by(raw, n, -kInf, s), s);
    auto end = s.candidates.begin() + std::min<size_t>(n, s.candidates.size());
    std::partial_sort(s.candidates.begin(), end, s.candidates.end(), comes_first);
    int place = 0;
    for (auto c = s.candidates.begin(); c != end; ++c, ++place) {
        out.top_ids[place] = c->id;
        out.top_logprobs[place] = static_cast<float>(c->value - shift);
    }
}

void report(const KernelTable& k, const View& raw, const SamplingRow& in, SampledRow& out, Scratch& s) {
    float top = raw.max[raw.top_block()];
    double mass = top == -kInf ? 1.0 : mass_within(k, raw, kEveryFinite, top, 1.0f);
    double shift = (top == -kInf ? 0.0 : top) + std::log(mass);
    float logit = raw.value(out.token);
    out.logprob = static_cast<float>(logit - shift);
    out.rank = count_within(k, raw, {logit, out.token});
    int n = std::min(in.logprobs, out.top_places);
    if (n > 0) report_best(k, raw, n, shift, out, s);
}

// The raw row as blocks, and whether its logits can be used.
bool scan(const KernelTable& k, const float* logits, int vocab, Scratch& s, View& view) {
    int blocks = (vocab + kSampleBlock - 1) / kSampleBlock, whole = vocab / kSampleBlock;
    s.raw_max.resize(std::max(s.raw_max.size(), static_cast<size_t>(blocks)));
    const float* last = logits + static_cast<size_t>(blocks - 1) * kSampleBlock;
    int bad = k.block_max(logits, whole, s.raw_max.data());
    if (whole < blocks) {
        std::fill(std::copy(last, logits + vocab, s.tail), s.tail + kSampleBlock, -kInf);
        last = s.tail;
        bad |= k.block_max(last, 1, s.raw_max.data() + whole);
    }
    view = {logits, last, vocab, blocks, s.raw_max.data(), nullptr, nullptr};
    return !bad;
}

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

void check_ids(const int32_t* ids, int n, int vocab, const char* what) {
    require(n >= 0 && (n == 0 || ids != nullptr), what);
    for (int i = 0; i < n; i++) require(ids[i] >= 0 && ids[i] < vocab, what);
}

}  // namespace

void check_row(const SamplingRow& in, int vocab) {
    require(vocab >= 1, "vocab must be at least 1");
    require(std::isfinite(in.temperature) && in.temperature >= 0, "temperature must be a finite number of at least 0");
    require(in.top_k >= 0, "top_k must be at least 0 (0: off)");
    require(in.top_p >= 0 && in.top_p <= 1, "top_p must be from 0 to 1");
    require(in.min_p >= 0 && in.min_p <= 1, "min_p must be from 0 to 1");
    require(std::isfinite(in.repetition) && in.repetition > 0, "repetition must be a finite number above 0 (1: off)");
    require(std::isfinite(in.presence) && std::isfinite(in.frequency), "presence and frequency must be finite");
    require(in.position >= 0 && in.choice >= 0, "position and choice must be at least 0");
    require(in.target >= -1 && in.target < vocab, "target must be an id of the vocabulary, or -1");
    require(in.logprobs >= -1, "logprobs must be at least -1 (-1: none)");
    check_ids(in.bias_ids, in.biases, vocab, "bias_ids must be ids of the vocabulary");
    for (int i = 0; i < in.biases; i++) require(in.bias_values[i] < kInf, "bias_values must be finite, or -inf");
    check_ids(in.penalty_ids, in.penalties, vocab, "penalty_ids must be ids of the vocabulary");
    for (int i = 0; i < in.penalties; i++) require(in.penalty_counts[i] >= 0, "penalty_counts must be at least 0");
}

void sample_row(const KernelTable& k, const float* logits, int vocab, const SamplingRow& in, SampledRow& out,
                Scratch& s) {
    out.token = out.rank = 0;
    out.logprob = 0;
    out.status = kSampled;
    std::fill_n(out.top_ids, out.top_places, kNoId);
    std::fill_n(out.top_logprobs, out.top_places, kNoLogprob);
    View raw;
    if (scan(k, logits, vocab, s, raw))
        choose(k, raw, in, out, s);
    else
        out.status = kLogitsNotFinite;
    if (out.status == kSampled && in.logprobs >= 0) report(k, raw, in, out, s);
}

}  // namespace headrace
