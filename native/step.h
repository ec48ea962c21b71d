// What crosses into a plan each step, as views of the caller's arrays, and the check that makes them safe to index
// with. Field names and meanings are those of headrace.program.step.
#pragma once
#include <cstdint>
#include <span>

namespace headrace {

// What a plan can hold; chunk: logits rows at once; slots: of layers with windows, 0: these lie in pages as others do.
struct Limits {
    int tokens, sequences, pages, context, vocab, chunk, slots = 0;
};

using Ints = std::span<const int32_t>;
using Floats = std::span<const float>;

struct SamplingArrays {
    Floats temperature, top_p, min_p, repetition, presence, frequency;
    Ints top_k, position, choice, target, logprobs, mask_rows;
    std::span<const uint64_t> seed;
    Ints bias_indptr, bias_ids;
    Floats bias_values;
    Ints penalty_indptr, penalty_ids, penalty_counts;
    Ints masks;  // [mask_count][mask_words]
    size_t mask_count = 0, mask_words = 0;
};

struct StepArrays {
    Ints tokens, positions, query_start, context, page_indptr, pages, fresh, logit_rows;
    Ints copies;                                     // [..][2]: from, to
    Ints window_pages, window_fresh, window_copies;  // the same of slots
    SamplingArrays sampling;

    int rows() const { return static_cast<int>(tokens.size()); }
    int sequences() const { return static_cast<int>(context.size()); }
    int logits() const { return static_cast<int>(logit_rows.size()); }
    Ints table(int sequence, bool windowed = false) const {  // pages of a sequence, or its slots
        return (windowed ? window_pages : pages)
            .subspan(page_indptr[sequence], page_indptr[sequence + 1] - page_indptr[sequence]);
    }
};

// Where a step's results go; all for R rows. logits [R][vocab] may be null.
struct Outcome {
    int32_t *tokens, *rank, *status, *top_ids;
    float *logprob, *top_logprobs, *logits;
    int top;  // width of top_ids and top_logprobs
};

// Throws std::invalid_argument naming the array, unless every length, id, page and index is in range.
// ids: rows of the embedding table.
void check(const StepArrays& step, const Limits& limits, int ids);

}  // namespace headrace
