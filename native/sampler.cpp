// A row's ids lie in blocks of 64. The largest logit of each block comes from one pass (or from whoever computed the
// logits), the largest of each 64 blocks from those; nearly everything after that visits only blocks whose largest can
// matter. A set of kept tokens is always a prefix of the order (logit descending, id ascending), so it is written as
// the last token it holds: a Cut. No logits are sorted, none are copied except blocks that a mask, a bias or a penalty
// changes.
#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>

namespace headrace {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kGreedy = 1e-5f;                     // temperatures below are greedy
constexpr float kNoMass = -90.0f;                    // exp gives exactly 0 from here down
constexpr int kGroup = 64;                           // blocks that share a peak, and whose masses are summed in float32
constexpr int kReach = 16;                           // blocks that blocks_in_reach looks at
constexpr int32_t kUnpatched = -1, kForbidden = -2;  // Scratch::slot, else the number of a patch

// Tokens above `value`, and those equal to it up to `id`.
struct Cut {
    float value;
    int32_t id;
};
constexpr Cut kEveryFinite = {kLowest, std::numeric_limits<int32_t>::max()};

int groups_of(int blocks) { return (blocks + kGroup - 1) / kGroup; }

bool comes_first(const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// A row as blocks, wherever each lies: in the logits, in the padded tail, or in a patch.
struct View {
    const float* logits;
    const float* last;  // the last block, filled up with -inf
    int vocab, blocks;
    const float* max;     // [groups][kGroup], filled up with -inf
    const float* peaks;   // [groups]
    float top;            // the largest value
    int top_block;        // the first block that has it
    const int32_t* slot;  // [blocks], or nullptr: nothing patched
    const float* patches;

    const float* at(int b) const {
        if (slot && slot[b] >= 0) return patches + static_cast<size_t>(slot[b]) * kSampleBlock;
        return b == blocks - 1 ? last : logits + static_cast<size_t>(b) * kSampleBlock;
    }
    float value(int32_t id) const { return at(id / kSampleBlock)[id % kSampleBlock]; }
    // The lowest id with the largest value
    int32_t arg_max() const {
        const float* x = at(top_block);
        return top_block * kSampleBlock + static_cast<int32_t>(std::find(x, x + kSampleBlock, top) - x);
    }
};

// visit(block, its values, what a kept one must reach) for each of blocks [first, end) that may hold kept tokens.
template <class Visit>
void within(const View& view, Cut cut, int first, int end, Visit visit) {
    for (int b = first; b < end; b++) {
        if (view.max[b] < cut.value) {
            if (b % kGroup == 0 && view.peaks[b / kGroup] < cut.value) b += kGroup - 1;
            continue;
        }
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
double mass_within(const KernelTable& k, const View& view, Cut cut, float temperature) {
    float inverse = 1.0f / temperature;
    double total = 0;
    for (int first = 0; first < view.blocks; first += kGroup) {
        float sums[16] = {};
        within(view, cut, first, std::min(first + kGroup, view.blocks), [&](int b, const float* x, Floor floor) {
            if ((view.max[b] - view.top) * inverse > kNoMass) k.block_mass(x, view.top, inverse, floor, sums);
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

// A value that at least n tokens reach, cheaply: the n-th largest of the peaks or, when they are too few, of the
// blocks' largest; `lowest` when those are too few as well.
float reached_by(const View& view, int n, float lowest, Scratch& s) {
    if (n > view.blocks) return lowest;
    const int groups = groups_of(view.blocks);
    const float* all = n > groups ? view.max : view.peaks;
    s.order.assign(all, all + (n > groups ? view.blocks : groups));
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

// Sets a view's largest values, given those of its blocks. False when there is a NaN or +inf among them.
bool find_top(const KernelTable& k, const std::vector<float>& max, std::vector<float>& peaks, View& view) {
    const int groups = groups_of(view.blocks);
    peaks.resize(groups);
    k.block_max(max.data(), groups, peaks.data());
    view.max = max.data();
    view.peaks = peaks.data();
    if (std::any_of(peaks.begin(), peaks.end(), [](float x) { return std::isnan(x); })) return false;
    const auto group = std::max_element(peaks.begin(), peaks.end());
    view.top = *group;
    const float* first = view.max + (group - peaks.begin()) * kGroup;
    view.top_block = static_cast<int>(std::find(first, first + kGroup, view.top) - view.max);
    return true;
}

// The row as sampling sees it.
View adjusted(const KernelTable& k, const View& raw, const SamplingRow& in, Scratch& s) {
    if (!in.mask && !in.biases && !penalises(in)) return raw;
    s.slot.assign(raw.blocks, kUnpatched);
    s.max.assign(raw.max, raw.max + groups_of(raw.blocks) * kGroup);
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
    find_top(k, s.max, s.peaks, view);
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
Cut filtered(const KernelTable& k, const View& view, const SamplingRow& in, Scratch& s) {
    Cut cut = {least_kept(view.top, in), kEveryFinite.id};
    if (in.top_k <= 0 || in.top_k >= view.vocab) return cut;
    collect(k, view, reached_by(view, in.top_k, cut.value, s), s);
    if (static_cast<int>(s.candidates.size()) < in.top_k) return cut;  // min_p left fewer
    auto last = s.candidates.begin() + (in.top_k - 1);
    std::nth_element(s.candidates.begin(), last, s.candidates.end(), comes_first);
    return {last->value, last->id};
}

// The token within the cut that has the largest score. Blocks are visited only while their largest logit and their
// largest noise together could win: some dozens of them, whatever the logits.
int32_t noisiest(const KernelTable& k, const View& view, const SamplingRow& in, Cut cut) {
    GumbelSearch search{in.seed,
                        static_cast<uint32_t>(in.position),
                        static_cast<uint32_t>(in.choice),
                        view.top,
                        in.temperature,
                        1.0f / in.temperature,
                        -kInf,
                        -1};
    BlockNoise noise;
    auto search_some = [&](int first, uint32_t among) {
        among &= k.blocks_in_reach(view.max + first, first, cut.value, search, noise);
        for (; among; among &= among - 1) {
            const int i = std::countr_zero(among);
            within(view, cut, first + i, first + i + 1, [&](int b, const float* x, Floor floor) {
                k.block_gumbel(x, b * kSampleBlock, floor, noise.least[i], noise.which[i], search);
            });
        }
    };
    const int start = view.top_block / kReach * kReach;
    const uint32_t top = 1u << (view.top_block - start);
    search_some(start, top);  // a good score early spares others
    for (int first = 0; first < view.blocks; first += kReach) search_some(first, first == start ? ~top : ~0u);
    return search.best_id;
}

// The part of a cut's mass that top_p keeps. All of the mass is summed up only when its largest parts leave it open
// whether a token is kept.
class Nucleus {
  public:
    Nucleus(const KernelTable& k, const View& view, const SamplingRow& in, Cut cut)
        : k_(k),
          view_(view),
          cut_(cut),
          temperature_(in.temperature),
          share_(std::max(in.top_p, std::numeric_limits<float>::min())) {}

    // A token is kept while the mass ahead of it is below top_p's share.
    bool holds(float value, int32_t id) {
        const double ahead = mass_within(k_, view_, {value, id - 1}, temperature_);
        if (total_ < 0 && ahead < share_ * (ahead + at_least(value))) return true;
        if (total_ < 0) total_ = mass_within(k_, view_, cut_, temperature_);
        return ahead < share_ * total_;
    }

  private:
    // Of the mass that is not ahead: a token's own, and that of the largest of each block below.
    double at_least(float value) const {
        float own = (value - view_.top) * (1.0f / temperature_);
        k_.exp(&own, 1, &own);
        return std::max(0.0, of_maxima({cut_.value, true}) - of_maxima({value, false})) + own;
    }
    double of_maxima(Floor floor) const {
        float sums[16] = {};
        for (int g = 0; g < groups_of(view_.blocks); g++)
            k_.block_mass(view_.max + g * kGroup, view_.top, 1.0f / temperature_, floor, sums);
        return std::accumulate(sums, sums + 16, 0.0);
    }

    const KernelTable& k_;
    const View& view_;
    const Cut cut_;
    const float temperature_;
    const double share_;
    double total_ = -1;  // not known
};

// top_p without sorting: the best score among more tokens is the best among fewer if its token is one of the fewer; if
// the winner is not in the nucleus, neither is anything behind it.
int32_t drawn(const KernelTable& k, const View& view, const SamplingRow& in, Scratch& s) {
    Cut cut = filtered(k, view, in, s);
    if (in.top_p >= 1) return noisiest(k, view, in, cut);
    Nucleus nucleus(k, view, in, cut);
    for (;;) {
        const int32_t id = noisiest(k, view, in, cut);
        const float value = view.value(id);
        if (nucleus.holds(value, id)) return id;
        cut = {value, id - 1};
    }
}

void choose(const KernelTable& k, const View& raw, const SamplingRow& in, SampledRow& out, Scratch& s) {
    if (in.target >= 0) {
        out.token = in.target;
        return;
    }
    View view = adjusted(k, raw, in, s);
    if (view.top == -kInf)
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
    const bool none = raw.top == -kInf;
    const double shift = none ? 0.0 : raw.top + std::log(mass_within(k, raw, kEveryFinite, 1.0f));
    float logit = raw.value(out.token);
    out.logprob = static_cast<float>(logit - shift);
    out.rank = count_within(k, raw, {logit, out.token});
    int n = std::min(in.logprobs, out.top_places);
    if (n > 0) report_best(k, raw, n, shift, out, s);
}

// The raw row as blocks, and whether its logits can be used. maxima: of its whole blocks, or nullptr.
bool scan(const KernelTable& k, const float* logits, const float* maxima, int vocab, Scratch& s, View& view) {
    const int blocks = (vocab + kSampleBlock - 1) / kSampleBlock, whole = vocab / kSampleBlock;
    s.raw_max.resize(groups_of(blocks) * kGroup);
    std::fill(s.raw_max.begin() + whole, s.raw_max.end(), -kInf);
    if (maxima)
        std::copy(maxima, maxima + whole, s.raw_max.begin());
    else
        k.block_max(logits, whole, s.raw_max.data());
    const float* last = logits + static_cast<size_t>(blocks - 1) * kSampleBlock;
    if (whole < blocks) {
        std::fill(std::copy(last, logits + vocab, s.tail), s.tail + kSampleBlock, -kInf);
        last = s.tail;
        k.block_max(last, 1, s.raw_max.data() + whole);
    }
    view = {logits, last, vocab, blocks, nullptr, nullptr, 0, 0, nullptr, nullptr};
    return find_top(k, s.raw_max, s.raw_peaks, view);
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

void sample_row(const KernelTable& k, const float* logits, const float* maxima, int vocab, const SamplingRow& in,
                SampledRow& out, Scratch& s) {
    out.token = out.rank = 0;
    out.logprob = 0;
    out.status = kSampled;
    std::fill_n(out.top_ids, out.top_places, kNoId);
    std::fill_n(out.top_logprobs, out.top_places, kNoLogprob);
    View raw;
    if (scan(k, logits, maxima, vocab, s, raw))
        choose(k, raw, in, out, s);
    else
        out.status = kLogitsNotFinite;
    if (out.status == kSampled && in.logprobs >= 0) report(k, raw, in, out, s);
}

}  // namespace headrace
