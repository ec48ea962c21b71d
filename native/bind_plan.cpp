// Python's view of plans. A step's arrays are read through the buffer protocol: a tenth of the price of a DLPack
// exchange, and there are thirty of them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <bit>
#include <cstring>
#include <optional>
#include <vector>

#include "plan.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headrace;

namespace {

static_assert(std::endian::native == std::endian::little, "arrays are read in the machine's own byte order");

template <class T>
constexpr const char* kLetters = nullptr;  // struct-module letters of a type on the platforms we build for
template <>
constexpr const char* kLetters<int32_t> = "il";
template <>
constexpr const char* kLetters<uint64_t> = "LQ";
template <>
constexpr const char* kLetters<float> = "f";

// Buffers borrowed from Python objects for the length of a call.
class Borrowed {
  public:
    Borrowed() = default;
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() {
        for (int i = 0; i < count_; i++) PyBuffer_Release(&held_[i]);
    }

    template <class T>
    std::span<const T> read(nb::handle owner, const char* name, int dimensions = 1) {
        const Py_buffer& b = take<T>(owner, name, dimensions, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
        return {static_cast<const T*>(b.buf), static_cast<size_t>(b.len) / sizeof(T)};
    }

    // elements: how many it must have
    template <class T>
    T* write(nb::handle owner, const char* name, size_t elements, int dimensions = 1) {
        const Py_buffer& b = take<T>(owner, name, dimensions, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE);
        if (static_cast<size_t>(b.len) != elements * sizeof(T))
            throw std::invalid_argument("output " + std::string(name) + " must have " + std::to_string(elements) +
                                        " elements");
        return static_cast<T*>(b.buf);
    }

    size_t extent(int axis) const {
        return static_cast<size_t>(held_[count_ - 1].shape[axis]);
    }  // of the last one taken

  private:
    template <class T>
    const Py_buffer& take(nb::handle owner, const char* name, int dimensions, int flags) {
        const nb::object array = nb::getattr(owner, name);
        Py_buffer& b = held_[count_];
        if (PyObject_GetBuffer(array.ptr(), &b, flags) != 0) {
            PyErr_Clear();
            refuse(name, dimensions, kLetters<T>);
        }
        count_++;
        if (b.ndim != dimensions || b.itemsize != sizeof(T) || !b.format || std::strlen(b.format) != 1 ||
            !std::strchr(kLetters<T>, *b.format))
            refuse(name, dimensions, kLetters<T>);
        return b;
    }
    [[noreturn]] static void refuse(const char* name, int dimensions, const char* letters) {
        throw std::invalid_argument("step: " + std::string(name) + " must be a contiguous array of " +
                                    std::to_string(dimensions) + " dimension(s) and type '" + letters[0] + "'");
    }
    Py_buffer held_[48];
    int count_ = 0;
};

SamplingArrays read_sampling(Borrowed& b, nb::handle s) {
    SamplingArrays a;
    a.temperature = b.read<float>(s, "temperature");
    a.top_k = b.read<int32_t>(s, "top_k");
    a.top_p = b.read<float>(s, "top_p");
    a.min_p = b.read<float>(s, "min_p");
    a.repetition = b.read<float>(s, "repetition");
    a.presence = b.read<float>(s, "presence");
    a.frequency = b.read<float>(s, "frequency");
    a.seed = b.read<uint64_t>(s, "seed");
    a.position = b.read<int32_t>(s, "position");
    a.choice = b.read<int32_t>(s, "choice");
    a.target = b.read<int32_t>(s, "target");
    a.logprobs = b.read<int32_t>(s, "logprobs");
    a.bias_indptr = b.read<int32_t>(s, "bias_indptr");
    a.bias_ids = b.read<int32_t>(s, "bias_ids");
    a.bias_values = b.read<float>(s, "bias_values");
    a.penalty_indptr = b.read<int32_t>(s, "penalty_indptr");
    a.penalty_ids = b.read<int32_t>(s, "penalty_ids");
    a.penalty_counts = b.read<int32_t>(s, "penalty_counts");
    a.mask_rows = b.read<int32_t>(s, "mask_rows");
    a.masks = b.read<int32_t>(s, "masks", 2);
    a.mask_count = b.extent(0);
    a.mask_words = b.extent(1);
    return a;
}

StepArrays read_step(Borrowed& b, nb::handle s) {
    StepArrays a;
    a.tokens = b.read<int32_t>(s, "tokens");
    a.positions = b.read<int32_t>(s, "positions");
    a.query_start = b.read<int32_t>(s, "query_start");
    a.context = b.read<int32_t>(s, "context");
    a.page_indptr = b.read<int32_t>(s, "page_indptr");
    a.pages = b.read<int32_t>(s, "pages");
    a.fresh = b.read<int32_t>(s, "fresh");
    a.logit_rows = b.read<int32_t>(s, "logit_rows");
    a.copies = b.read<int32_t>(s, "copies", 2);
    if (b.extent(1) != 2) throw std::invalid_argument("step: copies must have two pages a row");
    a.window_pages = b.read<int32_t>(s, "window_pages");
    a.window_fresh = b.read<int32_t>(s, "window_fresh");
    a.window_copies = b.read<int32_t>(s, "window_copies", 2);
    if (b.extent(1) != 2) throw std::invalid_argument("step: window_copies must have two slots a row");
    a.sampling = read_sampling(b, nb::getattr(s, "sampling"));
    return a;
}

Outcome read_outcome(Borrowed& b, nb::handle s, size_t rows, size_t vocab) {
    Outcome o{};
    o.tokens = b.write<int32_t>(s, "tokens", rows);
    o.logprob = b.write<float>(s, "logprob", rows);
    o.rank = b.write<int32_t>(s, "rank", rows);
    o.status = b.write<int32_t>(s, "status", rows);
    b.read<int32_t>(s, "top_ids", 2);
    const size_t top = b.extent(1);
    o.top = static_cast<int>(top);
    o.top_ids = b.write<int32_t>(s, "top_ids", rows * top, 2);
    o.top_logprobs = b.write<float>(s, "top_logprobs", rows * top, 2);
    if (!nb::getattr(s, "logits").is_none()) o.logits = b.write<float>(s, "logits", rows * vocab, 2);
    return o;
}

void run(Plan& plan, nb::handle step, nb::handle out) {
    Borrowed borrowed;
    const StepArrays arrays = read_step(borrowed, step);
    Outcome outcome = read_outcome(borrowed, out, arrays.logit_rows.size(), plan.limits().vocab);
    nb::gil_scoped_release release;
    plan.run(arrays, outcome);
}

using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<float> values(const std::optional<Vector>& v) {
    return v ? std::vector<float>(v->data(), v->data() + v->shape(0)) : std::vector<float>{};
}

int table(Plan& plan, Matrix cos, Matrix sin) {
    const auto flat = [](const Matrix& m) { return std::vector<float>(m.data(), m.data() + m.size()); };
    return plan.table(flat(cos), flat(sin), static_cast<int>(2 * cos.shape(1)));
}

void linear(Plan& plan, const std::string& name, int in, const std::vector<PieceRef>& pieces, Slice out,
            std::optional<Vector> bias, std::optional<Slice> add) {
    plan.linear(name, in, pieces, out, values(bias), add ? &*add : nullptr);
}

void copy(const Plan& plan, Slice what, nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
    if (out.shape(1) != static_cast<size_t>(std::get<2>(what))) throw std::invalid_argument("copy: widths differ");
    plan.copy(what, static_cast<int>(out.shape(0)), out.data());
}

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>;

Bytes page(nb::pointer_and_handle<Plan> plan, int number) {
    return Bytes(plan.p->page(number), {plan.p->page_bytes()}, plan.h);
}

Bytes slot(nb::pointer_and_handle<Plan> plan, int number) {
    return Bytes(plan.p->slot(number), {plan.p->slot_bytes()}, plan.h);
}

KvFormat kv_format(const std::string& name) {
    if (name == "float16") return KvFormat::F16;
    if (name == "bfloat16") return KvFormat::BF16;
    if (name == "int8") return KvFormat::Int8;
    throw std::invalid_argument("kv must be float16, bfloat16 or int8, not " + name);
}

Plan* make(const std::string& isa, int threads, bool merge, int tokens, int sequences, int pages, int context,
           int vocab, int chunk, std::vector<std::tuple<int, int, bool>> layers, const std::string& kv,
           const Plan* beside, bool apart, int slots) {
    return new Plan(choose_kernels(isa.c_str()), threads, merge,
                    {tokens, sequences, pages, context, vocab, chunk, slots}, std::move(layers), kv_format(kv), beside,
                    apart);
}

}  // namespace

void bind_plan(nb::module_& m) {
    nb::enum_<Extent>(m, "Extent", "How many rows a value has.")
        .value("TOKENS", Extent::Tokens, "the step's tokens")
        .value("LOGITS", Extent::Logits, "the rows that yield logits, a chunk at a time")
        .value("SLOTS", Extent::Slots, "pairs of a token and an expert it chose");

    nb::class_<Company>(m, "Company", "How many threads a short step should have; for its tests. See native/pool.h.")
        .def(nb::init<int>(), nb::arg("threads"))
        .def("threads", &Company::threads)
        .def("ran", &Company::ran, nb::arg("rows"), nb::arg("seconds"), nb::arg("slept"));
    m.def("allowed_processors", &allowed_processors, "Processors that this process may use.");

    nb::class_<Plan>(m, "Plan", R"(A program lowered to phases over fixed buffers.

Built by one call an op in order; a value is a slice (buffer, first column, columns). Packed weights are kept alive.
Every call raises ValueError when what it is given does not fit together.)")
        .def(nb::new_([](std::string isa, int threads, bool merge, int tokens, int sequences, int pages, int context,
                         int vocab, int chunk, std::vector<std::tuple<int, int, bool>> layers, std::string kv,
                         const Plan* beside, bool apart, int slots) {
                 return make(isa, threads, merge, tokens, sequences, pages, context, vocab, chunk, std::move(layers),
                             kv, beside, apart, slots);
             }),
             "isa"_a, "threads"_a, "merge"_a, "tokens"_a, "sequences"_a, "pages"_a, "context"_a, "vocab"_a, "chunk"_a,
             "layers"_a, "kv"_a = "float16", "beside"_a.none() = nullptr, "apart"_a = false, "slots"_a = 0,
             "isa: '' takes the best. chunk: logits rows at once. layers: (kv heads, head size, whether it lies in "
             "slots) of each layer of the KV cache. kv: its format, float16 or int8. beside: a plan whose threads are "
             "used too, and its KV cache unless apart; one of the two runs at a time.")
        .def("route_to", &Plan::route_to, "choices"_a,
             "Experts a row may choose at most; before slot buffers are made.")
        .def("buffer", &Plan::buffer, "width"_a, "extent"_a, "A new buffer's number.")
        .def("prepared", &Plan::prepared, "columns"_a, "extent"_a, "f32"_a, "bf16"_a, "q32"_a,
             "Room for a linear's input in the kinds its weights want; its number.")
        .def("table", &table, "cos"_a, "sin"_a, "A rotation's cos and sin [context, rotary / 2]; its number.")
        .def("embed", &Plan::embed, "table"_a, "scale"_a, "out"_a, nb::keep_alive<1, 2>())
        .def(
            "norm",
            [](Plan& p, Slice x, Vector w, int heads, float eps, Slice out) { p.norm(x, values(w), heads, eps, out); },
            "x"_a, "weight"_a, "heads"_a, "eps"_a, "out"_a)
        .def(
            "norm_into", [](Plan& p, Slice x, Vector w, float eps, int into) { p.norm_into(x, values(w), eps, into); },
            "x"_a, "weight"_a, "eps"_a, "into"_a, "Fills an input with the norm of x.")
        .def("prepare", &Plan::prepare, "x"_a, "into"_a, "Fills an input; one of slots gathers the rows of tokens.")
        .def("glu", &Plan::glu, "x"_a, "activation"_a, "out"_a, "activation: 0 silu, 1 gelu (tanh), 2 gelu (erf).")
        .def("add", &Plan::add, "x"_a, "y"_a, "out"_a)
        .def(
            "bias", [](Plan& p, Slice x, Vector b, Slice out) { p.bias(x, values(b), out); }, "x"_a, "bias"_a, "out"_a)
        .def("scale", &Plan::scale, "x"_a, "factor"_a, "out"_a)
        .def("softcap", &Plan::softcap, "x"_a, "cap"_a, "out"_a)
        .def("rope", &Plan::rope, "x"_a, "head_dim"_a, "table"_a, "out"_a, "out may be x.")
        .def(
            "write",
            [](Plan& p, Slice k, Slice v, int layer, std::optional<Vector> shift) {
                p.write(k, v, layer, values(shift));
            },
            "k"_a, "v"_a, "layer"_a, "shift"_a = nb::none(),
            "Keys and values of the step into the cache; shift: is added to the keys first.")
        .def("rows", &Plan::rows, "x"_a, "out"_a)
        .def("choose", &Plan::choose, "logits"_a, "k"_a, "renormalise"_a, "out"_a, "Overwrites its input.")
        .def("combine", &Plan::combine, "y"_a, "routing"_a, "out"_a)
        .def("linear", &linear, "name"_a, "input"_a, "pieces"_a, "out"_a, "bias"_a = nb::none(), "add"_a = nb::none(),
             nb::keep_alive<1, 4>(), "pieces: (packed, first row, rows), one under the other.")
        .def("gated", &Plan::gated, "name"_a, "input"_a, "gate"_a, "up"_a, "activation"_a, "into"_a,
             nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>(),
             "A gated MLP up to the input of its last linear. gate, up: (packed, first row, rows).")
        .def("sort", &Plan::sort, "routing"_a, "experts"_a, "Deals rows to experts.")
        .def("experts", &Plan::experts, "name"_a, "input"_a, "pieces"_a, "out"_a, nb::keep_alive<1, 4>(),
             "pieces: of each expert.")
        .def("attend", &Plan::attend, "q"_a, "layer"_a, "scale"_a, "window"_a, "softcap"_a, "out"_a, "into"_a = -1,
             "into: also prepares out as that input; heads must be whole blocks of 32.")
        .def("finish", &Plan::finish, "logits"_a, "Samples from these; the last call.")
        .def("run", &run, "step"_a, "out"_a, nb::sig("def run(self, step: object, out: object) -> None"),
             "Runs one step: reads the arrays of a Step, fills those of a Sampled. Raises ValueError, with nothing "
             "changed, when an "
             "array is wrong. Releases the GIL.")
        .def("copy", &copy, "what"_a, "out"_a,
             "A value's rows as the last step left them, into a float32 [rows, columns] array.")
        .def("profile", &Plan::profile, "on"_a, "Starts or stops measuring phases, from zero.")
        .def("timings", &Plan::timings, "(phase, runs, seconds) for each phase in order, waiting included.")
        .def("page", &page, "number"_a,
             "The bytes of a KV page over all layers that lie in pages: a view, which no step may change while it is "
             "used.")
        .def("slot", &slot, "number"_a, "The same of a slot.")
        .def_prop_ro("page_bytes", &Plan::page_bytes, "Bytes of a KV page over all layers that lie in pages.")
        .def_prop_ro("slot_bytes", &Plan::slot_bytes, "Bytes of a slot over all layers that lie in slots.")
        .def_prop_ro("threads", &Plan::threads);
}
