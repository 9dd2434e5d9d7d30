// Kernels of a short forward pass on a CPU: attention, linear layers, RoPE, filters, verdicts.
//
// Decoding is bound by memory, so each kernel reads weights, K and V once, in the layout they have,
// for all rows of the block. Row invariance: every number of a row's result is computed by the same
// operations in the same order, whatever the other rows and the number of threads are. Lanes of a
// vector hold fixed elements, keys are cut into BLOCKs and PIECEs at absolute slots, and masked
// slots add exact zeros.
//
// `build.py` compiles this file, `kernels.py` calls it, and `abi.py` has the structs of arguments.
// Vectors and numbers: numbers.h; Pool: threads.h; Scratch: attention.h; formats: quantized.h.
//
// Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens of a
// row, R rows of a matrix, N outputs of a linear layer, E its inputs; Op: see widened.h.

#include <string_view>
#include <system_error>

#include "attention.h"
#include "linear.h"
#include "sampling.h"

namespace {

// RoPE of one head: (x1, x2) cos + (x2, x1) sin, the sine negative in the first half; or a copy.
template <class T>
inline void rotate_head(const T* x, const float* cos, const float* sin, T* out, int64_t D) {
    const int64_t half = D / 2;
    if (cos == nullptr) std::copy(x, x + D, out);
    for (int64_t d = 0; cos && d < half; ++d) {
        const float first = widen(x[d]), second = widen(x[half + d]);
        narrow(first * cos[d] + second * sin[d], out + d);
        narrow(second * cos[half + d] + first * sin[half + d], out + half + d);
    }
}

// RMSNorm of one head, in place.
template <class T> inline void norm_head(T* x, const void* norm, double eps, int64_t D) {
    const T* weight = static_cast<const T*>(norm);
    float sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += widen(x[d]) * widen(x[d]);
    const float scale = 1 / std::sqrt(sum / D + float(eps));
    for (int64_t d = 0; d < D; ++d) narrow(widen(x[d]) * scale * widen(weight[d]), x + d);
}

// Weights (N, E) and bias (N) of a linear layer.
struct Matrix {
    const void *weights, *bias;
    int64_t N, E, form;  // see `Form` in quantized.py
};

struct LayerWeights {
    const void *input_norm, *post_norm;
    const void *q_norm, *k_norm;  // (D): of every head of q and of k before RoPE; or null
    int64_t is_unrotated;         // without RoPE
    Matrix qkv[3];  // q, k and v where their forms differ; else the fused one, and two empty ones
    Matrix o, gate_up, down;
};

struct PassArguments : AttentionArguments {  // keys and values of all layers; no q and out
    const LayerWeights* layers;
    void* x;                 // (R, E) with R = B T: the residual stream, in place
    const float *cos, *sin;  // (R, D)
    void* raw_keys;          // keys before RoPE, in the same layout; or null
    void* queries;  // (L, B, W, H, D) for the rotated queries of the last W tokens; or null
    int64_t L, W, E, first;
    int64_t kv_layer, queries_layer;  // strides, in numbers
    double eps, scale;                // of norms; of what attention and MLP add
};

// Applies RoPE to the queries and keys of a layer, and writes K and V into the cache.
template <class Op, class T = typename Op::Stored>
void rotate_and_write(const PassArguments& p, int64_t i, T* qkv, T* queries) {
    const LayerWeights& layer = p.layers[i];
    const int64_t D = p.D, width = (p.H + 2 * p.K) * D;
    for (int64_t row = 0; row < p.B * p.T; ++row, qkv += width) {
        const int64_t b = row / p.T, t = row % p.T;
        const float *cos = layer.is_unrotated ? nullptr : p.cos + row * D, *sin = p.sin + row * D;
        for (int64_t h = 0; layer.q_norm && h < p.H + p.K; ++h)
            norm_head<T>(qkv + h * D, h < p.H ? layer.q_norm : layer.k_norm, p.eps, D);
        T* q = queries + row * p.H * D;
        for (int64_t h = 0; h < p.H; ++h) rotate_head(qkv + h * D, cos, sin, q + h * D, D);
        if (p.queries && t + p.W >= p.T) {
            const int64_t place = b * p.W + t - std::max<int64_t>(p.T - p.W, 0);
            T* to = static_cast<T*>(p.queries) + i * p.queries_layer + place * p.H * D;
            std::copy(q, q + p.H * D, to);
        }
        for (int64_t k = 0; k < p.K; ++k) {
            const T *key = qkv + (p.H + k) * D, *value = key + p.K * D;
            const int64_t slot = p.lengths[b] + t;
            const int64_t at = i * p.kv_layer + b * p.kv_batch + k * p.kv_head;
            T *keys = static_cast<T*>(p.keys) + at, *values = static_cast<T*>(p.values) + at;
            T rotated[MAX_WIDTH];
            rotate_head(key, cos, sin, rotated, D);
            for (int64_t d = 0; p.is_tiled && d < D; ++d) {
                keys[place_in_tiles(slot, d, D, PANEL, Op::STEP)] = rotated[d];
                values[place_in_tiles(slot, d, D, Op::STEP, 1)] = value[d];
            }
            if (p.is_tiled) continue;
            std::copy(rotated, rotated + D, keys + slot * p.kv_slot);
            std::copy(value, value + D, values + slot * p.kv_slot);
            T* raw_keys = static_cast<T*>(p.raw_keys) + at;
            if (p.raw_keys) std::copy(key, key + D, raw_keys + slot * p.kv_slot);
        }
    }
}

// All layers of a model over a short block; or layer `first` alone, so that one who reads a long
// prompt can be interrupted in between.
template <class Op> void pass(const PassArguments& p, bool is_short) {
    using T = typename Op::Stored;
    static thread_local Scratch<T> memory;
    const int64_t R = p.B * p.T, width = (p.H + 2 * p.K) * p.D, heads = p.H * p.D;
    T* qkv = memory.get(R * (width + 2 * heads + p.layers[0].down.E));
    T *queries = qkv + R * width, *mixed = queries + R * heads, *inner = mixed + R * heads;
    auto project = [&](const void* x, const void* norm, const Matrix& m, const void* residual,
                       void* out, int64_t stride, bool is_gated) {
        linear_of<Op>(int(m.form), {x, norm, m.weights, m.bias, residual, out, R, m.E, m.N, stride,
                                    is_gated, false, p.eps, p.scale});
    };
    for (int64_t i = p.first; i < (is_short ? p.L : p.first + 1); ++i) {
        const LayerWeights& layer = p.layers[i];
        T* part = qkv;
        for (const Matrix& m : layer.qkv) {
            if (m.N > 0) project(p.x, layer.input_norm, m, nullptr, part, width, false);
            part += m.N;
        }
        rotate_and_write<Op>(p, i, qkv, queries);
        AttentionArguments a = p;
        a.q = queries;
        a.out = mixed;
        a.keys = static_cast<T*>(p.keys) + i * p.kv_layer;
        a.values = static_cast<T*>(p.values) + i * p.kv_layer;
        attention<Op>(a, is_short);
        project(mixed, nullptr, layer.o, p.x, p.x, p.E, false);
        project(p.x, layer.post_norm, layer.gate_up, nullptr, inner, layer.down.E, true);
        project(inner, nullptr, layer.down, p.x, p.x, p.E, false);
    }
}

struct RoundArguments {
    PassArguments first;             // over the block; later passes, of a token a row, overwrite x
    const int64_t* block;            // (4, B, T): see `pack_block` in core/model/block.py
    const float *cos, *sin;          // (positions, D)
    const void* norm;                // (E)
    Matrix table, head;              // embeddings; LM head
    const int64_t* ids;              // (2, head.N): tokens of a partial head, and sorted; or null
    const FilterArguments* filters;  // (B), for probs; without pointers
    const void* numbers;             // (B, N): uniforms, or keys of Gumbel noise if is_coupled
    int64_t* tokens;                 // (B, N): a sample after each pass; or null
    float *logits, *probs;    // (B, N P, width), minus infinity and 0 from token V on; or null
    VerifyArguments guesses;  // which come last in the block; verdicts may be null
    int64_t N, P, positions, V, width, is_coupled;  // N passes, P outputs a row: N or P is 1
};

// The place in row b's block of one of its outputs, the first after its last token before guesses.
inline int64_t output_place(const RoundArguments& a, int64_t b, int64_t o) {
    return std::clamp<int64_t>(a.block[(3 * a.first.B + b) * a.first.T + o], 0, a.first.T - 1);
}

// Prepares the i-th pass of a round: embeddings and rotations (cos, sin) of all rows.
template <class T>
void read_tokens(const RoundArguments& a, const PassArguments& p, int64_t i, float* cos,
                 float* sin) {
    for (int64_t r = 0; r < p.B * p.T; ++r) {
        const int64_t b = r / p.T, last = output_place(a, b, 0), t = i == 0 ? r % p.T : last;
        const int64_t at = b * a.first.T + t, position = a.block[p.B * a.first.T + at] + i;
        int64_t token = a.block[at];
        if (i > 0) token = a.tokens[b * a.N + i - 1];
        else if (last < t && t <= last + a.guesses.N)
            token = a.guesses.tokens[b * a.guesses.N + t - last - 1];
        const int64_t row = std::clamp<int64_t>(token, 0, a.table.N - 1);
        T* x = static_cast<T*>(p.x) + r * p.E;
        const auto [table, _, N, E, form] = a.table;
        if (form != PLAIN) dequantize_of<T>(int(form), {table, &row, x, 1, E});
        else std::copy_n(static_cast<const T*>(table) + row * E, E, x);
        const int64_t turn = std::clamp<int64_t>(position, 0, a.positions - 1) * p.D;
        std::copy_n(a.cos + turn, p.D, cos + r * p.D);
        std::copy_n(a.sin + turn, p.D, sin + r * p.D);
    }
}

// Distributions after a block's last token and guesses, and a verdict about these; or after the
// block and N - 1 samples that follow it, one after the other.
template <class Op> void round(const RoundArguments& a, bool is_block) {
    using T = typename Op::Stored;
    static thread_local Scratch<T> memory;
    static thread_local Scratch<float> float_memory;
    PassArguments p = a.first;
    const int64_t B = p.B, E = p.E, R = B * a.P, turns = B * p.T * p.D, outputs = a.head.N;
    T* hidden = memory.get(R * E);
    float* cos = float_memory.get(2 * turns + R * outputs);
    float *sin = cos + turns, *logits = sin + turns;
    std::vector<int64_t> lengths(p.lengths, p.lengths + B);
    p.lengths = lengths.data();
    p.cos = cos;
    p.sin = sin;
    for (int64_t i = 0; i < a.N; ++i, p.T = 1) {
        read_tokens<T>(a, p, i, cos, sin);
        pass<Op>(p, true);
        for (int64_t r = 0; r < R; ++r) {
            const int64_t place = std::min(output_place(a, r / a.P, r % a.P), p.T - 1);
            std::copy_n(static_cast<T*>(p.x) + (r / a.P * p.T + place) * E, E, hidden + r * E);
        }
        for (int64_t b = 0; b < B; ++b) lengths[b] += i == 0 ? output_place(a, b, 0) + 1 : 1;
        linear_of<Op>(int(a.head.form), {hidden, a.norm, a.head.weights, a.head.bias, nullptr,
                                         logits, R, E, outputs, outputs, false, true, p.eps, 1});
        Pool::get().run(R, R * a.V, [&](int64_t r) {
            static thread_local Scratch<float> row_memory;
            const int64_t b = r / a.P, at = b * a.N * a.P + i + r % a.P, now = b * a.N + i;
            const int64_t V = a.V, most = std::max(a.table.N, a.width) + LANES;
            float* row = row_memory.get(most);
            std::fill(row, row + most, MINUS_INFINITY);
            if (a.ids == nullptr) std::copy_n(logits + r * outputs, V, row);
            for (int64_t n = 0; a.ids && n < outputs; ++n) row[a.ids[n]] = logits[r * outputs + n];
            std::fill(row + V, row + most, MINUS_INFINITY);
            if (a.logits) std::copy_n(row, a.width, a.logits + at * a.width);
            if (a.probs == nullptr) return;
            filter_row(a.filters[b], row, round_up(V, LANES));
            std::fill(row + V, row + most, 0.0f);
            std::copy_n(row, a.width, a.probs + at * a.width);
            const int64_t* rising = a.ids ? a.ids + outputs : nullptr;
            if (a.tokens && a.is_coupled)
                a.tokens[now] =
                    sample_coupled(row, V, static_cast<const uint64_t*>(a.numbers)[now]);
            else if (a.tokens)
                a.tokens[now] = sample_row(row, rising, outputs,
                                           static_cast<const double*>(a.numbers)[now], a.width - 1);
        });
    }
    if (a.guesses.verdicts) verify(a.guesses, is_block);
}

// Calls `work` with the operand of a number type, by the numbers of `kernels.py:DTYPES`. Returns an
// error code: 0, 1 without memory, 2 without a thread. No exception leaves the library.
template <class Work> int by_type(int dtype, Work&& work) {
    try {
        if (dtype == 0) work(Widened<float>());
        if (dtype == 1) work(BFloat16Operand());
        if (dtype == 2) work(Widened<Float16>());
        return 0;
    } catch (const std::system_error&) {  // a thread does not start
        return 2;
    } catch (...) {  // std::bad_alloc: nothing else is thrown
        return 1;
    }
}

}  // namespace

extern "C" {

const char* minitri_instructions() {
    if (MatrixUnit<BFloat16Operand>::ROWS) return "AVX-512 BF16, AMX";
    return BFloat16Operand::STEP == 2 ? "AVX-512 BF16" : INSTRUCTIONS;
}

// Bytes of a struct, or 0 for an unknown name: `abi.py` compares them when it loads this library.
int64_t minitri_sizeof(const char* name) {
#define SIZE(Struct) (std::string_view(name) == #Struct) * sizeof(Struct)
    return SIZE(AttentionArguments) + SIZE(LinearArguments) + SIZE(ConvertArguments) +
           SIZE(FilterArguments) + SIZE(Matrix) + SIZE(LayerWeights) + SIZE(PassArguments) +
           SIZE(RoundArguments) + SIZE(VerifyArguments);
}

// A kernel takes a dtype's number, for its operand `Op`, an option, threads, and its arguments.
#define KERNEL(name, Arguments, work)                                                \
    int minitri_##name(int dtype, int option, int num_threads, const Arguments* a) { \
        Pool::num_threads = num_threads;                                             \
        return by_type(dtype, [&](auto op) {                                         \
            using Op = decltype(op);                                                 \
            using T = typename Op::Stored;                                           \
            work;                                                                    \
        });                                                                          \
    }
KERNEL(attention, AttentionArguments, attention<Op>(*a, option))
KERNEL(linear, LinearArguments, linear_of<Op>(option, *a))
KERNEL(product, LinearArguments, product_of<T>(option, *a))
KERNEL(dequantize, ConvertArguments, dequantize_of<T>(option, *a))
KERNEL(pass, PassArguments, pass<Op>(*a, !option))
KERNEL(round, RoundArguments, round<Op>(*a, option))
KERNEL(filter, FilterArguments, filter(*a))
KERNEL(verify, VerifyArguments, verify(*a, option))
KERNEL(repack, ConvertArguments,
       by_bits(option, [&](auto bits) { repack<bits>(option >= NESTED, *a); }))
}
