// The row ops: each is one kernel call, or a few, on one row.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "phases.h"

namespace headrace {
namespace {

struct Embed : RowOp {
    std::vector<std::pair<const Packed*, int>> table;  // and the first row of each
    float scale;
    View out;
    Embed(std::vector<std::pair<const Packed*, int>> table, float scale, View out)
        : table(std::move(table)), scale(scale), out(out) {}
    void run(const Here& here, int row) const override {
        const int token = here.live.step->tokens[row];
        size_t part = table.size() - 1;
        while (token < table[part].second) part--;
        table[part].first->unpack_row(token - table[part].second, out.row(row));
        if (scale != 1) here.kernels().scale(out.row(row), scale, out.width, out.row(row));
    }
};

struct Norm : RowOp {
    View x;
    std::vector<float> weight;
    int heads;
    float eps;
    View out;
    Norm(View x, std::vector<float> weight, int heads, float eps, View out)
        : x(x), weight(std::move(weight)), heads(heads), eps(eps), out(out) {}
    void run(const Here& here, int row) const override {
        const int n = static_cast<int>(weight.size());
        for (int h = 0; h < heads; h++)
            here.kernels().norm(x.row(row) + h * n, weight.data(), n, eps, out.row(row) + h * n);
    }
};

struct NormInto : RowOp {
    View x;
    std::vector<float> weight;
    float eps;
    const Prepared* into;
    NormInto(View x, std::vector<float> weight, float eps, const Prepared* into)
        : x(x), weight(std::move(weight)), eps(eps), into(into) {}
    void run(const Here& here, int row) const override {
        here.kernels().norm_into(x.row(row), weight.data(), x.width, eps, row, into->buffers);
    }
};

struct Prepare : RowOp {
    View x;
    const Prepared* into;
    const Slots* slots;
    Prepare(View x, const Prepared* into, const Slots* slots) : x(x), into(into), slots(slots) {}
    void run(const Here& here, int row) const override {
        const float* from = x.row(slots ? slots->source[row] : row);
        into->fill(here.kernels(), from, x.width, row, 0);
    }
};

struct Glu : RowOp {
    View x;
    int activation;
    View out;
    Glu(View x, int activation, View out) : x(x), activation(activation), out(out) {}
    void run(const Here& here, int row) const override {
        here.kernels().glu(x.row(row), x.row(row) + out.width, out.width, activation, out.row(row));
    }
};

struct Add : RowOp {
    View x, y, out;
    Add(View x, View y, View out) : x(x), y(y), out(out) {}
    void run(const Here& here, int row) const override {
        here.kernels().add(x.row(row), y.row(row), out.width, out.row(row));
    }
};

struct Bias : RowOp {
    View x;
    std::vector<float> bias;
    View out;
    Bias(View x, std::vector<float> bias, View out) : x(x), bias(std::move(bias)), out(out) {}
    void run(const Here& here, int row) const override {
        here.kernels().add(x.row(row), bias.data(), out.width, out.row(row));
    }
};

struct Scale : RowOp {
    View x;
    float factor;
    View out;
    Scale(View x, float factor, View out) : x(x), factor(factor), out(out) {}
    void run(const Here& here, int row) const override {
        here.kernels().scale(x.row(row), factor, out.width, out.row(row));
    }
};

struct Softcap : RowOp {
    View x;
    float cap;
    View out;
    Softcap(View x, float cap, View out) : x(x), cap(cap), out(out) {}
    void run(const Here& here, int row) const override {
        here.kernels().softcap(x.row(row), cap, out.width, out.row(row));
    }
};

struct Rope : RowOp {
    View x;
    int head_dim, rotary;
    const float *cos, *sin;  // [positions][rotary / 2]
    View out;
    Rope(View x, int head_dim, int rotary, const float* cos, const float* sin, View out)
        : x(x), head_dim(head_dim), rotary(rotary), cos(cos), sin(sin), out(out) {}
    void run(const Here& here, int row) const override {
        if (out.data != x.data) memcpy(out.row(row), x.row(row), sizeof(float) * x.width);
        const size_t at = size_t(here.live.step->positions[row]) * (rotary / 2);
        here.kernels().rope(out.row(row), x.width / head_dim, head_dim, rotary, cos + at, sin + at);
    }
};

struct Write : RowOp {
    View k, v;
    Layer layer;
    std::vector<float> shift;  // of keys
    Write(View k, View v, Layer layer, std::vector<float> shift) : k(k), v(v), layer(layer), shift(std::move(shift)) {}
    void run(const Here& here, int row) const override {
        const StepArrays& s = *here.live.step;
        const int position = s.positions[row];
        const int page = s.table(here.live.sequence_of[row], layer.windowed)[position / kPageTokens];
        const auto write = here.kernels().write_kv[static_cast<int>(layer.format)];
        float shifted[kMaxHeadDim];
        for (int h = 0, n = layer.head_dim; h < layer.kv_heads; h++) {
            const float* key = k.row(row) + h * n;
            if (!shift.empty()) {
                here.kernels().add(key, shift.data() + h * n, n, shifted);
                key = shifted;
            }
            write(key, v.row(row) + h * n, n, position % kPageTokens, layer.head(h) + size_t(page) * layer.page_stride);
        }
    }
};

struct Gather : RowOp {
    View x, out;
    Gather(View x, View out) : x(x), out(out) {}
    void run(const Here& here, int row) const override {
        memcpy(out.row(row), x.row(here.live.step->logit_rows[here.first + row]), sizeof(float) * out.width);
    }
};

struct Choose : RowOp {
    View logits;
    int k;
    bool renormalise;
    View out;
    Choose(View logits, int k, bool renormalise, View out) : logits(logits), k(k), renormalise(renormalise), out(out) {}
    void run(const Here& here, int row) const override {
        float* z = logits.row(row);
        const int n = logits.width;
        const float most = *std::max_element(z, z + n);
        for (int i = 0; i < n; i++) z[i] -= most;
        here.kernels().exp(z, n, z);
        float sum = 0;
        for (int i = 0; i < n; i++) sum += z[i];
        float* chosen = out.row(row);
        float kept = 0;
        for (int j = 0; j < k; j++) {
            int best = 0;
            for (int i = 1; i < n; i++)
                if (z[i] > z[best] || z[best] < 0) best = i;
            chosen[j] = static_cast<float>(best);
            chosen[k + j] = z[best] / sum;
            kept += chosen[k + j];
            z[best] = -1;
        }
        if (renormalise)
            for (int j = 0; j < k; j++) chosen[k + j] /= kept;
    }
};

struct Combine : RowOp {
    View y, routing;
    const Slots* slots;
    View out;
    Combine(View y, View routing, const Slots* slots, View out) : y(y), routing(routing), slots(slots), out(out) {}
    void run(const Here&, int row) const override {
        float* o = out.row(row);
        std::fill(o, o + out.width, 0.0f);
        for (int j = 0; j < slots->choices; j++) {
            const float* from = y.row(slots->place[row * slots->choices + j]);
            const float weight = routing.row(row)[slots->choices + j];
            for (int i = 0; i < out.width; i++) o[i] += weight * from[i];
        }
    }
};

struct Keep : RowOp {
    View logits;
    explicit Keep(View logits) : logits(logits) {}
    void run(const Here& here, int row) const override {
        if (float* to = here.live.outcome->logits)
            memcpy(to + size_t(here.first + row) * logits.width, logits.row(row), sizeof(float) * logits.width);
    }
};

}  // namespace

std::unique_ptr<RowOp> embed_op(std::vector<std::pair<const Packed*, int>> table, float scale, View out) {
    return std::make_unique<Embed>(std::move(table), scale, out);
}
std::unique_ptr<RowOp> norm_op(View x, std::vector<float> weight, int heads, float eps, View out) {
    return std::make_unique<Norm>(x, std::move(weight), heads, eps, out);
}
std::unique_ptr<RowOp> norm_into_op(View x, std::vector<float> weight, float eps, const Prepared* into) {
    return std::make_unique<NormInto>(x, std::move(weight), eps, into);
}
std::unique_ptr<RowOp> prepare_op(View x, const Prepared* into, const Slots* slots) {
    return std::make_unique<Prepare>(x, into, slots);
}
std::unique_ptr<RowOp> glu_op(View x, int activation, View out) { return std::make_unique<Glu>(x, activation, out); }
std::unique_ptr<RowOp> add_op(View x, View y, View out) { return std::make_unique<Add>(x, y, out); }
std::unique_ptr<RowOp> bias_op(View x, std::vector<float> bias, View out) {
    return std::make_unique<Bias>(x, std::move(bias), out);
}
std::unique_ptr<RowOp> scale_op(View x, float factor, View out) { return std::make_unique<Scale>(x, factor, out); }
std::unique_ptr<RowOp> softcap_op(View x, float cap, View out) { return std::make_unique<Softcap>(x, cap, out); }
std::unique_ptr<RowOp> rope_op(View x, int head_dim, int rotary, const float* cos, const float* sin, View out) {
    return std::make_unique<Rope>(x, head_dim, rotary, cos, sin, out);
}
std::unique_ptr<RowOp> write_op(View k, View v, Layer layer, std::vector<float> shift) {
    return std::make_unique<Write>(k, v, layer, std::move(shift));
}
std::unique_ptr<RowOp> gather_op(View x, View out) { return std::make_unique<Gather>(x, out); }
std::unique_ptr<RowOp> choose_op(View logits, int k, bool renormalise, View out) {
    return std::make_unique<Choose>(logits, k, renormalise, out);
}
std::unique_ptr<RowOp> combine_op(View y, View routing, const Slots* slots, View out) {
    return std::make_unique<Combine>(y, routing, slots, out);
}
std::unique_ptr<RowOp> keep_op(View logits) { return std::make_unique<Keep>(logits); }

}  // namespace headrace
