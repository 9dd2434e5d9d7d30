// Linear layers of a few rows, with norm, gate and residual, over weights of 4 to 8, 16 or 32 bits;
// and of many rows, as of prompts, which are bound by arithmetic, not by memory.

#pragma once

#include "attention.h"
#include "quantized.h"

namespace {

// A linear layer; weights (N, E) are plain numbers, or as `quantized.h` says.
struct LinearArguments {
    const void* x;     // (R, E)
    const void* norm;  // (E): x passes through an RMSNorm first; or null
    const void* weights;
    const void* bias;      // (N) or null
    const void* residual;  // (R, outputs) or null, added last to `scale` times the product
    void* out;             // (R, outputs)
    int64_t R, E, N;
    int64_t stride;    // from a row of the residual and of out to the next
    int64_t is_gated;  // outputs N / 2: silu(first half) * second half
    int64_t is_wide;   // out is float32, whatever x is
    double eps, scale;
};

constexpr int64_t CHUNK = PANEL;         // outputs that are finished together
constexpr int64_t TASKS_PER_THREAD = 4;  // so that a late thread delays the others little
constexpr int64_t PREFETCH = 8192;       // bytes that plain weights are fetched ahead

// Rows of x as units, padded with zeros to a multiple of 64 numbers.
template <class Unit> struct Rows {
    const Unit* x;
    int64_t stride;    // from a row to the next
    int64_t step = 1;  // from a unit of a row to its next
    Rows from(int64_t r) const { return {x + r * stride, stride, step}; }
};

// GROUP inputs as pairs of int16, in units of a scale: their largest magnitude is 32,767.
struct ShortGroup {
    uint32_t pairs[GROUP / 2];
    float scale, sum;        // of the inputs
    int32_t corrections[2];  // -32 times the sum of a half's numbers, for q from which 32 is taken
};

// Operand of products with quantized weights. Sums of a group are exact integers. Units of rows
// alternate, so that the groups that meet the same weights stand together.
template <class T> struct ShortPairs {
    using Stored = T;
    using Unit = ShortGroup;
    static constexpr int STEP = GROUP;
};

// Weights that are plain numbers of the operand's type.
template <class Op> struct Plain {
    using Operand = Op;
    static constexpr int ROWS = TILE_ROWS, OUTPUTS = 4;  // of a tile
    using T = typename Op::Stored;
    const T* weights;
    int64_t E;
    Columns<Op> columns{};  // x, if a matrix unit multiplies

    // Packs x for a matrix unit, padded with zero rows to a multiple of 16, where it fits E.
    Plain(const LinearArguments& a, const Rows<typename Op::Unit>& rows, bool)
        : weights(static_cast<const T*>(a.weights)), E(a.E) {
        static thread_local Scratch<typename Op::Unit> memory;
        if (MatrixUnit<Op>::ROWS == 0 || E % (LANES * Op::STEP)) return;
        const int64_t panel = rows.stride * LANES, num = ceil_div(a.R, LANES) * panel;
        auto* to = memory.get(num);
        std::fill(to, to + num, 0);
        for (int64_t r = 0; r < a.R; ++r)
            for (int64_t k = 0; k < rows.stride; ++k)
                to[r / LANES * panel + k * LANES + r % LANES] = rows.from(r).x[k];
        columns = {to, LANES, panel};
    }

    // `multiply` of CHUNK outputs by a matrix unit: weights are its rows (M = 16), x its columns.
    void multiply_by_unit(int64_t R, int64_t first, float* out) const {
        static thread_local Scratch<float> memory;
        const int num_columns = int(round_up(R, LANES)), steps = int(E) / Op::STEP;
        const auto* rows = reinterpret_cast<const typename Op::Unit*>(weights + first * E);
        float* sums = memory.get(LANES * num_columns);
        MatrixUnit<Op>::multiply(rows, steps, columns, num_columns, steps, sums, true,
                                 LANES * steps);
        for (int64_t r = 0; r < R; ++r)
            for (int64_t o = 0; o < CHUNK; ++o) out[r * CHUNK + o] = sums[o * num_columns + r];
    }

    template <int M, int N>
    void dots(const Rows<typename Op::Unit>& rows, int64_t first, int count, float* out) const {
        constexpr int WIDTH = LANES * Op::STEP;
        constexpr int LINE = std::max(WIDTH, 64 / int(sizeof(T)));  // of a cache
        const T* w[N];
        for (int o = 0; o < N; ++o) w[o] = weights + (first + std::min(o, count - 1)) * E;
        Vec sum[M][N] = {};
        auto multiply_line = [&](const T* const* line, int64_t e) {
            for (int i = 0; i < LINE; i += WIDTH) {
                FOR_TILE(M, N)
                sum[m][o] =
                    Op::dot(sum[m][o], line[o] + i, rows.x + m * rows.stride + (e + i) / Op::STEP);
            }
        };
        // About PREFETCH bytes for all outputs: later in a row, or, of short rows, in a next tile.
        constexpr int64_t FAR = PREFETCH / sizeof(T);
        const int64_t ahead = 2 * E > FAR ? FAR / OUTPUTS : round_up(FAR, OUTPUTS * E);
        const T* line[N];
        int64_t e = 0;
        for (; e + LINE <= E; e += LINE) {
            for (int o = 0; o < N; ++o) {
                line[o] = w[o] + e;
                __builtin_prefetch(line[o] + ahead, 0, L2);
            }
            multiply_line(line, e);
        }
        if (e < E) {
            T rest[N][LINE] = {};
            for (int o = 0; o < N; ++o) {
                std::copy(w[o] + e, w[o] + E, rest[o]);
                line[o] = rest[o];
            }
            multiply_line(line, e);
        }
        for (int m = 0; m < M; ++m)
            for (int o = 0; o < count; ++o) out[m * CHUNK + o] = sum_lanes(sum[m][o]);
    }

    // out (R, CHUNK) = R rows of x times `count` rows of the weights from `first` on.
    void multiply(const Rows<typename Op::Unit>& rows, int64_t R, int64_t first, int64_t count,
                  float* out) const {
        if (columns.at && count == CHUNK) return multiply_by_unit(R, first, out);
        const int64_t together = part_of(R, ROWS);
        for (int64_t o = 0; o < count; o += OUTPUTS) {
            for (int64_t r = 0; r < R; r += together) {
                with_constant<ROWS>(int(std::min(together, R - r)), [&](auto M) {
                    constexpr int N = tile_vectors(M);
                    for (int64_t n = o; n < std::min(o + OUTPUTS, count); n += N) {
                        const int some = int(std::min<int64_t>(N, count - n));
                        dots<M, N>(rows.from(r), first + n, some, out + r * CHUNK + n);
                    }
                });
            }
        }
    }
};

// Weights of 4 to 8 bits. Each row of a panel has a lane of its own.
template <class T, int BITS> struct Quantized : Layout<BITS> {
    using Operand = ShortPairs<T>;
    using Form = Layout<BITS>;
    static constexpr int ROWS = REGISTERS / 4;  // of a tile
    static constexpr int ALL = Form::ALL;
    static constexpr int64_t TOGETHER = 8;  // groups that are unpacked at once, for many rows
    // Bytes that weights are fetched ahead: a panel if it is short, else 24 KB. Measured on AVX2.
    int64_t far = Form::panel_bytes < 8192 ? Form::panel_bytes : 24576;
    Quantized(const LinearArguments& a, const Rows<ShortGroup>&, bool is_nested)
        : Form(a.weights, a.E, is_nested) {}

    // total (M rows, V vectors of a panel from `first` on) += the products of a group.
    template <int M, int V, class Group>
    static void add(const ShortGroup* x, const Group& group, int first, Vec total[M][V]) {
        constexpr int HALF = Form::PAIRS / Form::SCALES;
#pragma GCC unroll 2
        for (int part = 0; part < Form::SCALES; ++part) {
            Ints sum[M][V] = {};
            if (BITS == 6) FOR_TILE(M, V) sum[m][o] += x[m].corrections[part];
#pragma GCC unroll 16
            for (int pair = part * HALF; pair < (part + 1) * HALF; ++pair) {
                Shorts q[V];
                for (int v = 0; v < V; ++v) q[v] = group.q(pair, first + v);
                FOR_TILE(M, V) sum[m][o] = multiply_pairs(sum[m][o], q[o], x[m].pairs[pair]);
            }
            FOR_TILE(M, V)
            total[m][o] += group.factor(part, first + o) * x[m].scale * as_floats(sum[m][o]);
        }
        if (!Form::HAS_OFFSETS) return;
        FOR_TILE(M, V) total[m][o] += group.factor(Form::SCALES, first + o) * x[m].sum;
    }

    // out (R, CHUNK) = R rows of x times the panel of row `row`, with the same bits for any R. For
    // many rows weights are unpacked before, else when they are used.
    __attribute__((flatten)) void multiply(const Rows<ShortGroup>& rows, int64_t R, int64_t row,
                                           int64_t, float* out) const {
        const bool is_many = R > 2 * ROWS;
        const uint8_t* panel = Form::panel_of(row);
        const int64_t group_bytes = Form::panel_bytes / Form::groups;
        const int64_t together = is_many ? TOGETHER : Form::groups;
        typename Form::Unpacked ready[TOGETHER];
        for (int64_t from = 0; from < Form::groups; from += together) {
            const int64_t to = std::min(from + together, Form::groups);
            for (int64_t g = from; is_many && g < to; ++g)
                Form::unpack({*this, panel, g}, ready[g - from]);
            for (int64_t r = 0; r < R; r += ROWS) {
                with_constant<ROWS>(int(std::min<int64_t>(ROWS, R - r)), [&](auto M) {
                    constexpr int V = M * ALL <= REGISTERS / 2 ? ALL : 1;  // vectors at once
                    for (int first = 0; first < ALL; first += V) {
                        float* at = out + r * CHUNK + first * LANES;
                        Vec total[M][V] = {};
                        if (from) FOR_TILE(M, V) total[m][o] = load(at + m * CHUNK + o * LANES);
                        for (int64_t g = from; g < to; ++g) {
                            const ShortGroup* x = rows.x + g * rows.step + r;
                            if (is_many) {
                                add<M, V>(x, ready[g - from], first, total);
                                continue;
                            }
                            for (int line = 0; line <= BITS; ++line)
                                __builtin_prefetch(panel + g * group_bytes + far + line * 64, 0,
                                                   L2);
                            const typename Form::Packed group{*this, panel, g};
                            add<M, V>(x, group, first, total);
                        }
                        FOR_TILE(M, V) store(at + m * CHUNK + o * LANES, total[m][o]);
                    }
                });
            }
        }
    }
};

inline Vec silu(Vec x) {
    const Vec e = power_of_2((x > 0.0f ? -x : x) * LOG2_E);
    return x * (x > 0.0f ? splat(1.0f) : e) / (e + 1.0f);
}

// RMSNorm of E numbers, padded with zeros to whole vectors.
template <class T> inline void norm_row(float* wide, const T* weight, int64_t E, double eps) {
    Vec squares{};
    for (int64_t e = 0; e < E; e += LANES) squares += load(wide + e) * load(wide + e);
    const float factor = 1.0f / std::sqrt(sum_lanes(squares) / float(E) + float(eps));
    for (int64_t e = 0; e < E; ++e) wide[e] = wide[e] * factor * widen(weight[e]);
}

// A row of x as groups, `step` of them from one to the next.
inline void quantize_row(const float* x, int64_t num_groups, ShortGroup* to, int64_t step) {
    for (int64_t g = 0; g < num_groups; ++g, x += GROUP, to += step) {
        Vec most{}, none{};  // none: 0, or NaN if a number is infinite or NaN
        for (int i = 0; i < GROUP; i += LANES) {
            most = maximum(most, maximum(load(x + i), -load(x + i)));
            none += 0.0f * load(x + i);
        }
        const float largest = max_lanes(most);
        const float factor = largest > 1e-30f ? 32767 / largest : 0.0f;
        uint32_t q[GROUP], sums[2] = {};  // unsigned: those of NaN wrap around
        for (int i = 0; i < GROUP; i += LANES) {
            const Vec shifted = factor * load(x + i) + 12582912.0f;  // 1.5 * 2^23: rounds
            *reinterpret_cast<Bits*>(q + i) = (Bits)shifted - 0x4b400000;
        }
        for (int i = 0; i < GROUP / 2; ++i) {
            sums[0] += q[i];
            sums[1] += q[GROUP / 2 + i];
            to->pairs[i] = (q[2 * i] & 0xffff) | q[2 * i + 1] << 16;
        }
        to->scale = largest / 32767 + sum_lanes(none);
        to->sum = to->scale * float(int32_t(sums[0] + sums[1]));
        for (int part = 0; part < 2; ++part) to->corrections[part] = -32 * sums[part];
    }
}

// Rows of x as operands, after an RMSNorm if there is one.
template <class Op> Rows<typename Op::Unit> prepare_rows(const LinearArguments& a) {
    using T = typename Op::Stored;
    constexpr bool IN_GROUPS = std::is_same<Op, ShortPairs<T>>::value;
    static thread_local Scratch<typename Op::Unit> row_memory;
    const int64_t padded = round_up(a.E, 64), units = padded / Op::STEP;
    auto* x = row_memory.get(a.R * units);
    Pool::get().run(a.R, a.R * a.E, [&](int64_t r) {
        static thread_local Scratch<float> wide_memory;
        float* wide = wide_memory.get(padded);
        const T* from = static_cast<const T*>(a.x) + r * a.E;
        std::fill(wide, wide + padded, 0.0f);
        for (int64_t e = 0; e < a.E; ++e) wide[e] = widen(from[e]);
        if (a.norm != nullptr) norm_row(wide, static_cast<const T*>(a.norm), a.E, a.eps);
        if constexpr (IN_GROUPS) quantize_row(wide, units, x + r, a.R);
        else Op::from_floats(wide, int(padded), x + r * units);
    });
    return IN_GROUPS ? Rows<typename Op::Unit>{x, 1, a.R} : Rows<typename Op::Unit>{x, units};
}

// Writes `count` outputs from `first` on of all rows, from sums (R, width) without bias, residual.
template <class T>
void write_outputs(const LinearArguments& a, const float* sums, int64_t width, int64_t first,
                   int64_t count) {
    for (int64_t r = 0; r < a.R; ++r) {
        for (int64_t i = 0; i < count; ++i) {
            const int64_t at = r * a.stride + first + i;
            float y = sums[r * width + i];
            if (a.bias) y += widen(static_cast<const T*>(a.bias)[first + i]);
            if (a.residual) y = y * a.scale + widen(static_cast<const T*>(a.residual)[at]);
            if (a.is_wide) static_cast<float*>(a.out)[at] = y;
            else narrow(y, static_cast<T*>(a.out) + at);
        }
    }
}

template <class Weights> void linear(const LinearArguments& a, bool is_nested) {
    using Op = typename Weights::Operand;
    using T = typename Op::Stored;
    const auto rows = prepare_rows<Op>(a);
    const Weights weights(a, rows, is_nested);
    const int64_t outputs = a.is_gated ? a.N / 2 : a.N;
    const int64_t num_chunks = ceil_div(outputs, CHUNK);
    const int64_t per_task =
        std::max<int64_t>(1, num_chunks / (TASKS_PER_THREAD * Pool::num_threads));
    Pool::get().run(ceil_div(num_chunks, per_task), a.N * a.E, [&](int64_t task) {
        static thread_local Scratch<float> memory;
        float *sums = memory.get(2 * a.R * CHUNK), *gates = sums + a.R * CHUNK;
        const int64_t last = std::min(num_chunks, (task + 1) * per_task);
        if (MatrixUnit<Op>::ROWS) MatrixUnit<Op>::use(LANES);
        for (int64_t chunk = task * per_task; chunk < last; ++chunk) {
            const int64_t first = chunk * CHUNK, count = std::min(CHUNK, outputs - first);
            weights.multiply(rows, a.R, first, count, a.is_gated ? gates : sums);
            if (a.is_gated) {
                weights.multiply(rows, a.R, outputs + first, count, sums);
                for (int64_t i = 0; i < a.R * CHUNK; i += LANES)
                    store(sums + i, silu(load(gates + i)) * load(sums + i));
            }
            write_outputs<T>(a, sums, CHUNK, first, count);
        }
    });
}

template <class Op> void linear_of(int form, const LinearArguments& a) {
    if (form == PLAIN) return linear<Plain<Op>>(a, false);
    by_bits(form, [&](auto b) { linear<Quantized<typename Op::Stored, b>>(a, form >= NESTED); });
}

constexpr int64_t PRODUCT_ROWS = 512;   // that meet weights at a time, which are unpacked once
constexpr int64_t PRODUCT_STEPS = 384;  // inputs whose columns fit a cache

// Linear layer of R rows over plain weights, without norm and residual. Each number of the result
// is one sum over E, in order, whatever R is.
template <class T> void product(const LinearArguments& a) {
    const auto rows = prepare_rows<Widened<T>>(a);
    const int64_t num_chunks = ceil_div(a.N, BLOCK);
    Pool::get().run(num_chunks, a.R * a.E * a.N, [&](int64_t task) {
        static thread_local Scratch<float> memory, sum_memory;
        const int64_t first = task * BLOCK, count = std::min<int64_t>(BLOCK, a.N - first);
        const T* weights = static_cast<const T*>(a.weights) + first * a.E;
        float* columns = memory.get(PRODUCT_STEPS * BLOCK);
        float* sums = sum_memory.get(a.R * BLOCK);
        for (int64_t k = 0; k < a.E; k += PRODUCT_STEPS) {
            const int here = int(std::min<int64_t>(PRODUCT_STEPS, a.E - k));
            Widened<T>::transpose(weights + k, a.E, int(count), here, columns);
            for (int64_t r = 0; r < a.R; r += TILE_ROWS) {
                const int M = int(std::min<int64_t>(TILE_ROWS, a.R - r));
                multiply<Widened<T>>(M, rows.from(r).x + k, rows.stride,
                                     Columns<Widened<T>>{columns, BLOCK}, BLOCK, here,
                                     sums + r * BLOCK, k == 0);
            }
        }
        write_outputs<T>(a, sums, BLOCK, first, count);
    });
}

// The product, PRODUCT_ROWS rows at a time. With quantized weights `linear` is for many rows, too.
template <class T> void product_of(int form, const LinearArguments& a) {
    LinearArguments some = a;
    for (int64_t r = 0; r < a.R; r += PRODUCT_ROWS) {
        some.R = std::min(PRODUCT_ROWS, a.R - r);
        some.x = static_cast<const T*>(a.x) + r * a.E;
        some.out = static_cast<T*>(a.out) + r * a.N;
        if (form == PLAIN) product<T>(some);
        else by_bits(form, [&](auto b) { linear<Quantized<T, b>>(some, form >= NESTED); });
    }
}

}  // namespace
