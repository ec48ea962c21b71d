// From a row of logits to a token: the rules of headrace.program.sample, in one or two passes over the vocabulary.
// Knows a row and its parameters; not requests, batches or threads. Never writes to the logits.
#pragma once
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels.h"

namespace headrace {

constexpr int kSampleBlock = 64;  // ids that share a maximum: 16 Philox counters of four words, two words of a mask

enum SampleStatus : int32_t { kSampled = 0, kLogitsNotFinite = 1, kNothingAllowed = 2 };

// Fills unused places of the n best.
constexpr int32_t kNoId = -1;
constexpr float kNoLogprob = -std::numeric_limits<float>::infinity();

// One row's parameters, as in headrace.program.step.Sampling. Lists and mask belong to the caller.
struct SamplingRow {
    float temperature = 0;  // below 1e-5: greedy
    int32_t top_k = 0;      // 0: off
    float top_p = 1;        // 1: off
    float min_p = 0;        // 0: off
    float repetition = 1, presence = 0, frequency = 0;
    uint64_t seed = 0;
    int32_t position = 0, choice = 0;
    int32_t target = -1;    // an id to score instead of sampling, or -1
    int32_t logprobs = -1;  // -1: none; 0: of the token; n: also of the n best
    const int32_t* bias_ids = nullptr;
    const float* bias_values = nullptr;
    int32_t biases = 0;
    const int32_t* penalty_ids = nullptr;  // each id once
    const int32_t* penalty_counts = nullptr;
    int32_t penalties = 0;
    const int32_t* mask = nullptr;  // [ceil(vocab / 32)], bit i of word w allows id 32 w + i; nullptr: all allowed
};

// What sample_row reports. The caller sets the last three; all `top_places` of the two arrays are written.
struct SampledRow {
    int32_t token = 0;  // 0 when status is not kSampled
    float logprob = 0;  // of the token in the raw distribution; 0 when not asked for
    int32_t rank = 0;   // 1: the most likely; 0 when not asked for
    int32_t status = kSampled;
    int32_t* top_ids = nullptr;
    float* top_logprobs = nullptr;
    int32_t top_places = 0;
};

// Buffers that sample_row reuses: one per thread. They grow with the largest row seen and never shrink.
class Scratch {
  public:
    std::vector<float> raw_max;         // [groups][64] the largest raw logit of each block, then -inf
    std::vector<float> raw_peaks;       // [groups] the largest of 64 blocks
    std::vector<float> max, peaks;      // the same once masks, biases and penalties are applied
    std::vector<float> patches;         // [patches][64] blocks that differ from the raw logits
    std::vector<float> patch_max;       // [patches]
    std::vector<int32_t> slot;          // [blocks] which patch holds the block; see sampler.cpp
    std::vector<float> order;           // [blocks] for selection
    std::vector<Candidate> candidates;  // tokens at or above a floor
    float tail[kSampleBlock] = {};      // the last block, filled up with -inf
};

// Throws std::invalid_argument, naming the field, when a row's parameters cannot be meant for `vocab` ids.
void check_row(const SamplingRow& in, int vocab);

// Samples or scores one row of `vocab` >= 1 logits. `in` must pass check_row. Same bits from every KernelTable.
// maxima: what KernelTable::block_max gives for the row's whole blocks of 64 (NaN where a logit is not finite), or
// nullptr: they are computed here.
void sample_row(const KernelTable& k, const float* logits, const float* maxima, int vocab, const SamplingRow& in,
                SampledRow& out, Scratch& s);

}  // namespace headrace
