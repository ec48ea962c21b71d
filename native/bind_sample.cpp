// The sampler for Python: for its tests and benches, and for whoever has logits in an array. Checks every argument.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "sampler.h"

namespace nb = nanobind;

namespace headrace {
namespace {

template <class T>
using Column = nb::ndarray<const T, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Table = nb::ndarray<const T, nb::shape<-1, -1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

template <class T>
nb::ndarray<nb::numpy, T> array(T* data, std::initializer_list<size_t> shape) {
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T>(data, shape, owner);
}

// The arrays of headrace.program.step.Sampling.
struct Columns {
    Column<float> temperature;
    Column<int32_t> top_k;
    Column<float> top_p, min_p, repetition, presence, frequency;
    Column<uint64_t> seed;
    Column<int32_t> position, choice, target, logprobs, bias_indptr, bias_ids;
    Column<float> bias_values;
    Column<int32_t> penalty_indptr, penalty_ids, penalty_counts, mask_rows;
    Table<int32_t> masks;

    void check(size_t rows, int vocab) const {
        check_lengths(rows);
        check_list("bias", bias_indptr, rows, bias_ids.shape(0), bias_values.shape(0));
        check_list("penalty", penalty_indptr, rows, penalty_ids.shape(0), penalty_counts.shape(0));
        for (size_t r = 0; r < rows; r++)
            require(mask_rows(r) >= -1 && mask_rows(r) < static_cast<int64_t>(masks.shape(0)),
                    "mask_rows must be rows of masks, or -1");
        require(masks.shape(0) == 0 || masks.shape(1) == (static_cast<size_t>(vocab) + 31) / 32,
                "masks must have ceil(vocab / 32) words a row");
        for (size_t r = 0; r < rows; r++) check_row(row(r), vocab);
    }

    SamplingRow row(size_t r) const {
        SamplingRow in;
        in.temperature = temperature(r), in.top_k = top_k(r), in.top_p = top_p(r), in.min_p = min_p(r);
        in.repetition = repetition(r), in.presence = presence(r), in.frequency = frequency(r);
        in.seed = seed(r), in.position = position(r), in.choice = choice(r);
        in.target = target(r), in.logprobs = logprobs(r);
        in.bias_ids = bias_ids.data() + bias_indptr(r);
        in.bias_values = bias_values.data() + bias_indptr(r);
        in.biases = bias_indptr(r + 1) - bias_indptr(r);
        in.penalty_ids = penalty_ids.data() + penalty_indptr(r);
        in.penalty_counts = penalty_counts.data() + penalty_indptr(r);
        in.penalties = penalty_indptr(r + 1) - penalty_indptr(r);
        if (mask_rows(r) >= 0) in.mask = masks.data() + mask_rows(r) * masks.shape(1);
        return in;
    }

  private:
    void check_lengths(size_t rows) const {
        const std::pair<const char*, size_t> lengths[] = {
            {"temperature", temperature.shape(0)},
            {"top_k", top_k.shape(0)},
            {"top_p", top_p.shape(0)},
            {"min_p", min_p.shape(0)},
            {"repetition", repetition.shape(0)},
            {"presence", presence.shape(0)},
            {"frequency", frequency.shape(0)},
            {"seed", seed.shape(0)},
            {"position", position.shape(0)},
            {"choice", choice.shape(0)},
            {"target", target.shape(0)},
            {"logprobs", logprobs.shape(0)},
            {"mask_rows", mask_rows.shape(0)},
        };
        for (auto [name, length] : lengths)
            require(length == rows, std::string(name) + " must have one element for each row of logits");
    }

    static void check_list(const std::string& name, const Column<int32_t>& indptr, size_t rows, size_t ids,
                           size_t values) {
        require(ids == values, name + "_ids must be as long as the values that belong to them");
        require(indptr.shape(0) == rows + 1 && indptr(0) == 0 && indptr(rows) == static_cast<int64_t>(ids),
                name + "_indptr must have R + 1 elements, from 0 to the number of ids");
        for (size_t r = 0; r < rows; r++) require(indptr(r) <= indptr(r + 1), name + "_indptr must not descend");
    }
};

// One array for each member of Sampled, on the heap until Python owns them.
using Arrays = nb::typed<nb::tuple, nb::object, nb::ellipsis>;

struct Outputs {
    size_t rows, places;
    int32_t *tokens = new int32_t[rows], *rank = new int32_t[rows], *status = new int32_t[rows];
    int32_t* top_ids = new int32_t[rows * places];
    float *logprob = new float[rows], *top_logprobs = new float[rows * places];

    void take(size_t r, const SampledRow& row) {
        tokens[r] = row.token, logprob[r] = row.logprob, rank[r] = row.rank, status[r] = row.status;
    }
    Arrays give() const {
        return Arrays(nb::make_tuple(array(tokens, {rows}), array(logprob, {rows}), array(rank, {rows}),
                                     array(top_ids, {rows, places}), array(top_logprobs, {rows, places}),
                                     array(status, {rows})));
    }
};

Arrays sample(const std::string& isa, Table<float> logits, int vocab, Column<float> temperature, Column<int32_t> top_k,
              Column<float> top_p, Column<float> min_p, Column<float> repetition, Column<float> presence,
              Column<float> frequency, Column<uint64_t> seed, Column<int32_t> position, Column<int32_t> choice,
              Column<int32_t> target, Column<int32_t> logprobs, Column<int32_t> bias_indptr, Column<int32_t> bias_ids,
              Column<float> bias_values, Column<int32_t> penalty_indptr, Column<int32_t> penalty_ids,
              Column<int32_t> penalty_counts, Column<int32_t> mask_rows, Table<int32_t> masks) {
    const KernelTable& kernels = *choose_kernels(isa.c_str());
    const Columns in{temperature, top_k,          top_p,       min_p,          repetition, presence,    frequency,
                     seed,        position,       choice,      target,         logprobs,   bias_indptr, bias_ids,
                     bias_values, penalty_indptr, penalty_ids, penalty_counts, mask_rows,  masks};
    size_t rows = logits.shape(0), width = logits.shape(1);
    require(vocab >= 1 && static_cast<size_t>(vocab) <= width, "vocab must be from 1 to the width of logits");
    in.check(rows, vocab);
    int32_t places = 0;
    for (size_t r = 0; r < rows; r++) places = std::max(places, logprobs(r));
    require(places <= 1 << 20, "logprobs must be at most 1048576");
    Outputs out{rows, static_cast<size_t>(places)};
    {
        nb::gil_scoped_release release;
        Scratch scratch;
        for (size_t r = 0; r < rows; r++) {
            SampledRow row;
            row.top_ids = out.top_ids + r * places, row.top_logprobs = out.top_logprobs + r * places;
            row.top_places = places;
            sample_row(kernels, logits.data() + r * width, nullptr, vocab, in.row(r), row, scratch);
            out.take(r, row);
        }
    }
    return out.give();
}

}  // namespace
}  // namespace headrace

void bind_sample(nb::module_& m) {
    m.def(
        "sample", &headrace::sample, nb::arg("isa"), nb::arg("logits").noconvert(), nb::arg("vocab"),
        nb::arg("temperature").noconvert(), nb::arg("top_k").noconvert(), nb::arg("top_p").noconvert(),
        nb::arg("min_p").noconvert(), nb::arg("repetition").noconvert(), nb::arg("presence").noconvert(),
        nb::arg("frequency").noconvert(), nb::arg("seed").noconvert(), nb::arg("position").noconvert(),
        nb::arg("choice").noconvert(), nb::arg("target").noconvert(), nb::arg("logprobs").noconvert(),
        nb::arg("bias_indptr").noconvert(), nb::arg("bias_ids").noconvert(), nb::arg("bias_values").noconvert(),
        nb::arg("penalty_indptr").noconvert(), nb::arg("penalty_ids").noconvert(),
        nb::arg("penalty_counts").noconvert(), nb::arg("mask_rows").noconvert(), nb::arg("masks").noconvert(),
        "Samples or scores each row of logits, float32 [R, at least vocab]; ids from vocab on are padding.\n\n"
        "isa: the instruction set to use, \"\" for the best. The other arguments: headrace.program.step.Sampling.\n"
        "Gives (tokens [R], logprob [R], rank [R], top_ids [R, N], top_logprobs [R, N], status [R]); N is the largest\n"
        "logprobs. Unused places hold -1 and -inf. The same bits from every instruction set.\n"
        "Raises TypeError for arrays of another type or layout, ValueError for lengths, ids and numbers out of range.");
}
