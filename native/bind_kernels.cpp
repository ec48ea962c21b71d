// Python's view of packed weights and of single kernels (the latter for tests and benchmarks: a step runs a plan
// instead). Owes checks of every shape, type and number that a caller can get wrong, so that the kernels need none.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "packed.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace headrace;

namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out1 = nb::ndarray<nb::numpy, T, nb::ndim<1>>;
template <class T>
using Out2 = nb::ndarray<nb::numpy, T, nb::ndim<2>>;

using Arrays = nb::typed<nb::dict, nb::str, nb::any>;

void check(bool good, const std::string& what) {
    if (!good) throw std::invalid_argument(what);
}

std::string text(size_t n) { return std::to_string(n); }

// A numpy array that owns a copy-free buffer.
template <class T>
T* buffer(size_t n, nb::capsule& owner) {
    auto held = std::make_unique<T[]>(n > 0 ? n : 1);
    T* data = held.get();
    owner = nb::capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    held.release();
    return data;
}

template <class T>
struct Array1 {
    nb::capsule owner;
    size_t n;
    T* data;
    explicit Array1(size_t size) : n(size), data(buffer<T>(size, owner)) {}
    Out1<T> out() { return Out1<T>(data, {n}, owner); }
};

template <class T>
struct Array2 {
    nb::capsule owner;
    size_t rows, columns;
    T* data;
    Array2(size_t r, size_t c) : rows(r), columns(c), data(buffer<T>(r * c, owner)) {}
    Out2<T> out() { return Out2<T>(data, {rows, columns}, owner); }
};

// Room for prepared inputs of `rows` rows, and the pointers to it.
struct Prepared {
    std::vector<uint16_t> bf16;
    std::vector<int8_t> q;
    std::vector<float> d, s;
    std::vector<int32_t> sums, halves;
    ActivationBuffers buffers;

    Prepared(Input kind, const float* x, int rows, int columns) {
        const size_t n = rows;
        Activations& v = buffers.view;
        v.columns = columns;
        v.f32 = x;
        v.f32_stride = columns;
        v.bf16_stride = (columns + 1) / 2 * 2;
        v.q_stride = (columns + 31) / 32 * 32;
        v.blocks_stride = v.q_stride / 32;
        buffers.want_bf16 = kind == Input::BF16;
        buffers.want_q32 = kind == Input::Q32;
        bf16.resize(n * v.bf16_stride);
        q.resize(n * v.q_stride);
        d.resize(n * v.blocks_stride);
        s.resize(n * v.blocks_stride);
        sums.resize(n * v.blocks_stride);
        halves.resize(n * 2 * v.blocks_stride);
        v.bf16 = bf16.data();
        v.q32 = q.data();
        v.d32 = d.data();
        v.s32 = s.data();
        v.sum32 = sums.data();
        v.sum16 = halves.data();
    }

    void fill(const KernelTable& k) {
        for (int r = 0, n = static_cast<int>(rows()); r < n; r++)
            k.prepare(buffers.view.f32 + size_t(r) * buffers.view.columns, buffers.view.columns, r, 0, buffers);
    }
    size_t rows() const { return d.size() / buffers.view.blocks_stride; }
};

int size_of(size_t n, const char* what) {
    check(n >= 1 && n <= size_t(1) << 26,
          std::string(what) + " must be 1 to " + text(size_t(1) << 26) + ", not " + text(n));
    return static_cast<int>(n);
}

const KernelTable& table(const std::string& isa) { return *choose_kernels(isa.c_str()); }

std::vector<std::string> formats() {
    std::vector<std::string> names;
    for (int i = 0; i < kFormats; i++) names.emplace_back(info(static_cast<Format>(i)).name);
    return names;
}

// --- packed weights ----------------------------------------------------------------------------------------

void pack(Packed& p, int first, Rows rows) {
    check(rows.shape(1) == p.row_bytes(), std::string("a row of ") + info(p.format()).name + " [" +
                                              std::to_string(p.columns()) + "] has " + text(p.row_bytes()) +
                                              " bytes, not " + text(rows.shape(1)));
    check(rows.shape(0) <= size_t(p.rows()),
          "there are " + std::to_string(p.rows()) + " rows to pack, not " + text(rows.shape(0)));
    const uint8_t* src = rows.data();
    const int count = static_cast<int>(rows.shape(0));
    nb::gil_scoped_release release;
    p.pack(first, src, count);
}

constexpr int kAtOnce = 4096;  // values that are widened and then encoded

void encode(const std::string& isa, const std::string& from, const std::string& to, Rows rows, Blocks out) {
    const KernelTable& k = table(isa);
    const Format source = format_named(from.c_str()), format = format_named(to.c_str());
    const FormatInfo &given = info(source), &wanted = info(format);
    const auto blocks = k.encode[static_cast<int>(format)];
    check(given.block == 1, from + " is no format of floats");
    check(blocks, "there is no encoder for " + to);
    const size_t values = rows.size() / given.block_bytes, columns = rows.shape(1) / given.block_bytes;
    check(rows.shape(1) % given.block_bytes == 0 && columns % wanted.block == 0,
          "rows of " + text(rows.shape(1)) + " bytes of " + from + " are no whole blocks of " + to);
    check(out.shape(0) == rows.shape(0) && out.shape(1) == columns / wanted.block * wanted.block_bytes,
          "out must have " + text(rows.shape(0)) + " rows of " + text(columns / wanted.block * wanted.block_bytes) +
              " bytes");
    const uint8_t* src = rows.data();
    uint8_t* to_write = out.data();
    nb::gil_scoped_release release;
    alignas(64) float x[kAtOnce];
    for (size_t at = 0; at < values; at += kAtOnce) {
        const int n = static_cast<int>(std::min<size_t>(kAtOnce, values - at));
        k.widen(source, src + at * given.block_bytes, n, x);
        blocks(x, n / wanted.block, to_write + at / wanted.block * wanted.block_bytes);
    }
}

Out1<float> unpack(const Packed& p, int row) {
    Array1<float> out(p.columns());
    p.unpack_row(row, out.data);
    return out.out();
}

// --- kernels, one at a time --------------------------------------------------------------------------------

Out2<float> linear_of(const std::string& isa, const Packed& p, Matrix x, int first_panel, int panels) {
    const KernelTable& k = table(isa);
    const int rows = size_of(x.shape(0), "rows of x");
    check(x.shape(1) == size_t(p.columns()),
          "x has " + text(x.shape(1)) + " columns, the weight " + std::to_string(p.columns()));
    if (panels < 0) panels = p.panels() - first_panel;
    check(first_panel >= 0 && panels >= 1 && first_panel + panels <= p.panels(),
          "the weight has panels 0 to " + std::to_string(p.panels() - 1));
    Prepared in(info(p.format()).input, x.data(), rows, p.columns());
    const int wanted = std::min(p.rows() - 16 * first_panel, 16 * panels);
    Array2<float> out(rows, wanted);
    std::vector<float> padded(size_t(rows) * 16 * panels);
    {
        nb::gil_scoped_release release;
        in.fill(k);
        k.linear[static_cast<int>(p.format())](p.panel(first_panel), p.step(), panels, p.columns(), in.buffers.view, 0,
                                               rows, padded.data(), 16 * panels);
    }
    for (int r = 0; r < rows; r++)
        std::copy_n(padded.data() + size_t(r) * 16 * panels, wanted, out.data + size_t(r) * wanted);
    return out.out();
}

constexpr const char* kInputs[] = {"f32", "bf16", "q32"};

Input input_named(const std::string& kind) {
    for (int i = 0; i < 3; i++)
        if (kind == kInputs[i]) return static_cast<Input>(i);
    throw std::invalid_argument("no input is called '" + kind + "'; choose one of: bf16, q32");
}

template <class T>
Out2<T> copy_rows(const T* from, size_t rows, size_t stride, size_t columns) {
    Array2<T> out(rows, columns);
    for (size_t r = 0; r < rows; r++) std::copy_n(from + r * stride, columns, out.data + r * columns);
    return out.out();
}

Arrays prepare(const std::string& isa, const std::string& kind, Matrix x) {
    const Input input = input_named(kind);
    check(input != Input::F32, "an f32 input needs no preparation");
    const int n = size_of(x.shape(0), "rows of x"), columns = size_of(x.shape(1), "columns of x");
    Prepared in(input, x.data(), n, columns);
    in.fill(table(isa));
    const Activations& v = in.buffers.view;
    const size_t blocks = (columns + 31) / 32;
    Arrays out;
    if (input == Input::BF16) out["bf16"] = copy_rows(v.bf16, n, v.bf16_stride, v.bf16_stride);
    if (input == Input::Q32) {
        out["q"] = copy_rows(v.q32, n, v.q_stride, 32 * blocks);
        out["d"] = copy_rows(v.d32, n, v.blocks_stride, blocks);
        out["sum"] = copy_rows(v.sum32, n, v.blocks_stride, blocks);
        out["s"] = copy_rows(v.s32, n, v.blocks_stride, blocks);
        out["sum16"] = copy_rows(v.sum16, n, 2 * v.blocks_stride, 2 * blocks);
    }
    return out;
}

template <class F>
Out1<float> made(Floats x, F f) {
    const int n = size_of(x.size(), "the number of values");
    Array1<float> out(n);
    f(x.data(), n, out.data);
    return out.out();
}

void same_size(Floats x, Floats y) {
    check(x.size() == y.size(),
          "the arrays have " + text(x.size()) + " and " + text(y.size()) + " values; they must be as long");
}

Out1<float> norm(const std::string& isa, Floats x, Floats weight, float eps) {
    same_size(x, weight);
    return made(x, [&](const float* p, int n, float* out) { table(isa).norm(p, weight.data(), n, eps, out); });
}

Out1<float> glu(const std::string& isa, Floats gate, Floats up, int activation) {
    same_size(gate, up);
    check(activation >= 0 && activation <= 2,
          "activation is 0 (silu), 1 (gelu, tanh form) or 2 (gelu, erf form), not " + std::to_string(activation));
    return made(gate, [&](const float* p, int n, float* out) { table(isa).glu(p, up.data(), n, activation, out); });
}

Out1<float> add(const std::string& isa, Floats x, Floats y) {
    same_size(x, y);
    return made(x, [&](const float* p, int n, float* out) { table(isa).add(p, y.data(), n, out); });
}

Out1<float> scale(const std::string& isa, Floats x, float factor) {
    return made(x, [&](const float* p, int n, float* out) { table(isa).scale(p, factor, n, out); });
}

Out1<float> softcap(const std::string& isa, Floats x, float cap) {
    return made(x, [&](const float* p, int n, float* out) { table(isa).softcap(p, cap, n, out); });
}

Out1<float> exp_of(const std::string& isa, Floats x) {
    return made(x, [&](const float* p, int n, float* out) { table(isa).exp(p, n, out); });
}

Out2<float> rope(const std::string& isa, Matrix x, Floats cos, Floats sin) {
    same_size(cos, sin);
    const int heads = size_of(x.shape(0), "the number of heads"), head_dim = size_of(x.shape(1), "head_dim");
    check(2 * cos.size() <= x.shape(1), "cos has " + text(cos.size()) + " angles, a head of " + text(x.shape(1)) +
                                            " values at most " + text(x.shape(1) / 2));
    Array2<float> out(x.shape(0), x.shape(1));
    std::copy_n(x.data(), x.size(), out.data);
    table(isa).rope(out.data, heads, head_dim, static_cast<int>(2 * cos.size()), cos.data(), sin.data());
    return out.out();
}

// Seconds that one call of the linear takes on prepared rows, the best of `repeats`.
double time_linear(const std::string& isa, const Packed& p, Matrix x, int panels, int repeats) {
    const KernelTable& k = table(isa);
    const int rows = size_of(x.shape(0), "rows of x");
    check(x.shape(1) == size_t(p.columns()),
          "x has " + text(x.shape(1)) + " columns, the weight " + std::to_string(p.columns()));
    check(panels >= 1 && panels <= p.panels() && repeats >= 1,
          "panels must be 1 to " + std::to_string(p.panels()) + ", repeats at least 1");
    Prepared in(info(p.format()).input, x.data(), rows, p.columns());
    in.fill(k);
    std::vector<float> out(size_t(rows) * 16 * panels);
    nb::gil_scoped_release release;
    double best = 1e30;
    for (int i = 0; i < repeats; i++) {
        const auto start = std::chrono::steady_clock::now();
        k.linear[static_cast<int>(p.format())](p.panel(0), p.step(), panels, p.columns(), in.buffers.view, 0, rows,
                                               out.data(), 16 * panels);
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return best;
}

}  // namespace

void bind_kernels(nb::module_& m) {
    m.def("isa_names", &kernel_names, "Instruction sets that this machine can run, best first.");
    m.def("formats", &formats, "Names of the weight formats that can be packed.");

    nb::class_<Room>(
        m, "Room",
        "One stretch of memory for many packed matrices, in the order in which they are made. Takes no memory until "
        "they are packed.")
        .def(nb::init<size_t>(), "bytes"_a);

    nb::class_<Packed>(m, "Packed", "A matrix [rows, columns] in panels of 16 rows, as the kernels read it.")
        .def(
            "__init__",
            [](Packed* self, const std::string& format, int rows, int columns, std::shared_ptr<Room> room) {
                new (self) Packed(format_named(format.c_str()), rows, columns, std::move(room));
            },
            "format"_a, "rows"_a, "columns"_a, "room"_a = nb::none(),
            "All zeros at first. room: where it lies, or memory of its own. ValueError: unknown format, sizes that "
            "cannot be, "
            "columns that are no whole blocks. MemoryError: the room is full.")
        .def_static(
            "in_turn",
            [](const std::string& format, int rows, int columns, std::shared_ptr<Room> room) {
                return Packed::in_turn(format_named(format.c_str()), rows, columns, std::move(room));
            },
            "format"_a, "rows"_a, "columns"_a, "room"_a,
            "Two matrices of one size for work that reads both: their panels lie in turn in the room.")
        .def("pack", &pack, "first"_a, "rows"_a.noconvert(),
             "Packs uint8 [n, row bytes], blocks as in the file, as rows first .. first + n - 1. May run in several "
             "threads at once\n"
             "for different rows. ValueError: wrong row size; IndexError: rows outside the matrix.")
        .def("unpack_row", &unpack, "row"_a, "Row `row` as float32 [columns], exactly.")
        .def_prop_ro("format", [](const Packed& p) { return std::string(info(p.format()).name); })
        .def_prop_ro("rows", &Packed::rows)
        .def_prop_ro("columns", &Packed::columns)
        .def_prop_ro("row_bytes", &Packed::row_bytes, "Bytes of a row in the file's layout.")
        .def_prop_ro("panels", &Packed::panels)
        .def_prop_ro("nbytes", &Packed::nbytes, "Bytes of the packed matrix.");

    m.def(
        "packed_bytes",
        [](const std::string& format, int rows, int columns) {
            return packed_bytes(format_named(format.c_str()), rows, columns);
        },
        "format"_a, "rows"_a, "columns"_a, "`Packed.nbytes` of such a matrix. ValueError: unknown format.");

    m.def("encode", &encode, "isa"_a, "source"_a, "format"_a, "rows"_a.noconvert(), "out"_a.noconvert(),
          "Rows of f32, f16 or bf16, uint8 [n, row bytes], as blocks of q8_0, q6_k, q5_0, q4_k, q4_1 or q4_0 into out, "
          "uint8 [n, row bytes]: `quant.encode.plain`, bit for bit. ValueError: formats and sizes that do not fit.");
    m.def("linear", &linear_of, "isa"_a, "packed"_a, "x"_a.noconvert(), "first_panel"_a = 0, "panels"_a = -1,
          "x float32 [M, columns] times the weight's panels (all, unless said): float32 [M, rows]. Prepares x as the "
          "format asks.");
    m.def("time_linear", &time_linear, "isa"_a, "packed"_a, "x"_a.noconvert(), "panels"_a, "repeats"_a,
          "Seconds that x float32 [M, columns] times the first `panels` panels takes, preparation apart: the best of "
          "`repeats`.");
    m.def("prepare", &prepare, "isa"_a, "kind"_a, "x"_a.noconvert(),
          "A linear's input as kernels read it. kind bf16: {bf16 uint16 [M, even K]}; q32: {q int8 [M, K], d, sum, s "
          "[M, K/32], sum16 [M, K/16]}.");
    m.def("norm", &norm, "isa"_a, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a,
          "x / sqrt(mean(x^2) + eps) * weight, float32 [n].");
    m.def("glu", &glu, "isa"_a, "gate"_a.noconvert(), "up"_a.noconvert(), "activation"_a,
          "act(gate) * up; 0 silu, 1 gelu (tanh form), 2 gelu (erf form).");
    m.def("add", &add, "isa"_a, "x"_a.noconvert(), "y"_a.noconvert(), "x + y, float32 [n].");
    m.def("scale", &scale, "isa"_a, "x"_a.noconvert(), "factor"_a, "x * factor, float32 [n].");
    m.def("softcap", &softcap, "isa"_a, "x"_a.noconvert(), "cap"_a, "cap * tanh(x / cap), float32 [n].");
    m.def("exp", &exp_of, "isa"_a, "x"_a.noconvert(),
          "exp(x), float32 [n]: exactly 0 below -87.33654, inf above 88.72283.");
    m.def("rope", &rope, "isa"_a, "x"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert(),
          "x float32 [heads, head_dim] with pairs (i, i + n) turned by the n angles whose cos and sin are given.");
}
