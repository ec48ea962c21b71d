#include "step.h"

#include <stdexcept>
#include <string>

#include "attention.h"

namespace headrace {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("step: " + what); }

void within(const char* name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        refuse(std::string(name) + " holds " + std::to_string(value) + ", which lies outside " + std::to_string(low) +
               " to " + std::to_string(high));
}

void all_within(const char* name, Ints values, int64_t low, int64_t high) {
    for (int32_t v : values)
        if (v < low || v > high) within(name, v, low, high);
}

template <class T>
void length(const char* name, std::span<const T> a, size_t wanted) {
    if (a.size() != wanted)
        refuse(std::string(name) + " has length " + std::to_string(a.size()) + ", not " + std::to_string(wanted));
}

// indptr [n + 1] ascends from 0 to the length of what it cuts
void check_indptr(const char* name, Ints indptr, size_t n, size_t end) {
    length(name, indptr, n + 1);
    if (indptr.front() != 0 || indptr.back() != static_cast<int64_t>(end))
        refuse(std::string(name) + " must go from 0 to " + std::to_string(end));
    for (size_t i = 0; i < n; i++)
        if (indptr[i] > indptr[i + 1]) refuse(std::string(name) + " must ascend");
}

void check_sequence(const StepArrays& s, int b, const Limits& limits) {
    const int from = s.query_start[b], to = s.query_start[b + 1];
    if (from == to) refuse("sequence " + std::to_string(b) + " has no rows");
    within("context", s.context[b], 1, limits.context);
    const int64_t first = int64_t(s.context[b]) - (to - from);
    for (int row = from; row < to; row++)
        if (s.positions[row] != first + (row - from) || first < 0)
            refuse("positions of sequence " + std::to_string(b) +
                   " must ascend by one up to context - 1 = " + std::to_string(s.context[b] - 1));
    const size_t wanted = (s.context[b] + kPageTokens - 1) / kPageTokens;
    if (s.table(b).size() < wanted)
        refuse("sequence " + std::to_string(b) + " needs " + std::to_string(wanted) + " pages and has " +
               std::to_string(s.table(b).size()));
}

void check_rows(const StepArrays& s, const Limits& limits, int ids) {
    if (s.tokens.empty()) refuse("tokens is empty");
    within("the length of tokens", s.rows(), 1, limits.tokens);
    all_within("tokens", s.tokens, 0, int64_t(ids) - 1);
    length("positions", s.positions, s.tokens.size());
    within("the length of context", s.sequences(), 1, limits.sequences);
    check_indptr("query_start", s.query_start, s.context.size(), s.tokens.size());
    check_indptr("page_indptr", s.page_indptr, s.context.size(), s.pages.size());
    all_within("pages", s.pages, 0, int64_t(limits.pages) - 1);
    all_within("copies", s.copies, 0, int64_t(limits.pages) - 1);
    all_within("fresh", s.fresh, 0, int64_t(limits.pages) - 1);
    if (limits.slots) {  // else nobody reads them
        length("window_pages", s.window_pages, s.pages.size());
        all_within("window_pages", s.window_pages, 0, int64_t(limits.slots) - 1);
        all_within("window_copies", s.window_copies, 0, int64_t(limits.slots) - 1);
        all_within("window_fresh", s.window_fresh, 0, int64_t(limits.slots) - 1);
    }
    for (int b = 0; b < s.sequences(); b++) check_sequence(s, b, limits);
    all_within("logit_rows", s.logit_rows, 0, int64_t(s.rows()) - 1);
    for (int r = 1; r < s.logits(); r++)
        if (s.logit_rows[r] <= s.logit_rows[r - 1]) refuse("logit_rows must ascend");
}

void check_sampling(const SamplingArrays& a, size_t rows, const Limits& limits) {
    const int64_t last = int64_t(limits.vocab) - 1;
    length("temperature", a.temperature, rows);
    length("top_k", a.top_k, rows);
    length("top_p", a.top_p, rows);
    length("min_p", a.min_p, rows);
    length("repetition", a.repetition, rows);
    length("presence", a.presence, rows);
    length("frequency", a.frequency, rows);
    length("seed", a.seed, rows);
    length("position", a.position, rows);
    length("choice", a.choice, rows);
    length("target", a.target, rows);
    length("logprobs", a.logprobs, rows);
    length("mask_rows", a.mask_rows, rows);
    all_within("target", a.target, -1, last);
    all_within("logprobs", a.logprobs, -1, limits.vocab);
    length("bias_values", a.bias_values, a.bias_ids.size());
    check_indptr("bias_indptr", a.bias_indptr, rows, a.bias_ids.size());
    all_within("bias_ids", a.bias_ids, 0, last);
    length("penalty_counts", a.penalty_counts, a.penalty_ids.size());
    check_indptr("penalty_indptr", a.penalty_indptr, rows, a.penalty_ids.size());
    all_within("penalty_ids", a.penalty_ids, 0, last);
    all_within("mask_rows", a.mask_rows, -1, int64_t(a.mask_count) - 1);
    if (a.mask_count && a.mask_words != (size_t(limits.vocab) + 31) / 32)
        refuse("masks must have " + std::to_string((limits.vocab + 31) / 32) + " words a row");
}

}  // namespace

void check(const StepArrays& step, const Limits& limits, int ids) {
    check_rows(step, limits, ids);
    check_sampling(step.sampling, step.logit_rows.size(), limits);
}

}  // namespace headrace
