// Linear layers of a few rows, with norm, gate and residual, over weights of 4 to 8, 16 or 32 bits.

#pragma once

#include "attention.h"
#include "quantized.h"

namespace {

// A linear layer of a few rows; weights (N, E) are plain numbers, or as `quantized.h` says.
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

// Loops over a tile of M rows and N outputs (or vectors of them), unrolled.
#define FOR_TILE(M, N)                                  \
    _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) \
        _Pragma("GCC unroll 8") for (int o = 0; o < N; ++o)

// Weights that are plain numbers of the operand's type.
template <class Op> struct Plain {
    using Operand = Op;
    static constexpr bool IS_PLAIN = true;
    static constexpr int ROWS = TILE_ROWS, OUTPUTS = 4;  // of a tile
    using T = typename Op::Stored;
    const T* weights;
    int64_t E;
    explicit Plain(const LinearArguments& a) : weights(static_cast<const T*>(a.weights)), E(a.E) {}

    template <int M, int N>
    void dots(const Rows<typename Op::Unit>& rows, int64_t first, int count, Vec sum[M][N]) const {
        constexpr int WIDTH = LANES * Op::STEP;
        constexpr int LINE = std::max(WIDTH, 64 / int(sizeof(T)));  // of a cache
        const T* w[N];
        for (int o = 0; o < N; ++o) w[o] = weights + (first + std::min(o, count - 1)) * E;
        Vec local[M][N] = {};
        auto multiply_line = [&](const T* const* line, int64_t e) {
#pragma GCC unroll 4
            for (int i = 0; i < LINE; i += WIDTH) {
                FOR_TILE(M, N)
                local[m][o] = Op::dot(local[m][o], line[o] + i,
                                      rows.x + m * rows.stride + (e + i) / Op::STEP);
            }
        };
        // About PREFETCH bytes for all outputs: later in their rows, or in a next tile of short
        // rows.
        constexpr int64_t FAR = PREFETCH / sizeof(T);
        const int64_t ahead =
            2 * E > FAR ? FAR / OUTPUTS : (FAR + OUTPUTS * E - 1) / (OUTPUTS * E) * OUTPUTS * E;
        int64_t e = 0;
        for (; e + LINE <= E; e += LINE) {
            const T* line[N];
#pragma GCC unroll 8
            for (int o = 0; o < N; ++o) {
                line[o] = w[o] + e;
                __builtin_prefetch(line[o] + ahead, 0, L2);
            }
            multiply_line(line, e);
        }
        if (e < E) {
            T rest[N][LINE] = {};
            const T* line[N];
            for (int o = 0; o < N; ++o) {
                std::copy(w[o] + e, w[o] + E, rest[o]);
                line[o] = rest[o];
            }
            multiply_line(line, e);
        }
        FOR_TILE(M, N) sum[m][o] = local[m][o];
    }

    // out (R, count) = R rows of x times `count` rows of the weights from `first` on.
    void multiply(const Rows<typename Op::Unit>& rows, int64_t R, int64_t first, int64_t count,
                  float* out, int64_t stride) const {
        const int64_t num_parts = std::max<int64_t>(1, (R + ROWS - 1) / ROWS);
        const int64_t together = (R + num_parts - 1) / num_parts;
        for (int64_t o = 0; o < count; o += OUTPUTS) {
            for (int64_t r = 0; r < R; r += together) {
                with_constant<ROWS>(int(std::min(together, R - r)), [&](auto M) {
                    constexpr int N = tile_vectors(M);
                    for (int64_t n = o; n < std::min(o + OUTPUTS, count); n += N) {
                        Vec sum[M][N];
                        const int some = int(std::min<int64_t>(N, count - n));
                        dots<M, N>(rows.from(r), first + n, some, sum);
                        for (int m = 0; m < M; ++m)
                            for (int i = 0; i < some; ++i)
                                out[(r + m) * stride + n + i] = sum_lanes(sum[m][i]);
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
    static constexpr bool IS_PLAIN = false;
    static constexpr int ROWS = REGISTERS / 4;  // of a tile
    static constexpr int PAIRS = GROUP / 2, ALL = PANEL / LANES;
    static constexpr int64_t FAR = 32768;   // bytes that weights are fetched ahead
    static constexpr int64_t TOGETHER = 8;  // groups that are unpacked at once, for many rows
    Quantized(const LinearArguments& a, bool is_nested) : Form(a.weights, a.E, is_nested) {}

    // total (M rows, V vectors of a panel from `first` on) += the products of group g. `unpack`
    // gives q of a pair of inputs; `factor` scales of a part of the group, after them offsets.
    template <int M, int V, class Unpack, class Factor>
    static void add(const ShortGroup* x, int64_t g, int first, Vec total[M][V], Unpack&& unpack,
                    Factor&& factor) {
        constexpr int HALF = PAIRS / Form::SCALES;
#pragma GCC unroll 2
        for (int part = 0; part < Form::SCALES; ++part) {
            Ints sum[M][V] = {};
            if (BITS == 6) FOR_TILE(M, V) sum[m][o] += x[m].corrections[part];
#pragma GCC unroll 16
            for (int pair = part * HALF; pair < (part + 1) * HALF; ++pair) {
                Shorts q[V];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) q[v] = unpack(g, pair, first + v);
                FOR_TILE(M, V) sum[m][o] = multiply_pairs(sum[m][o], q[o], x[m].pairs[pair]);
            }
            FOR_TILE(M, V)
            total[m][o] += factor(g, part, first + o) * x[m].scale * as_floats(sum[m][o]);
        }
        if (!Form::HAS_OFFSETS) return;
        FOR_TILE(M, V) total[m][o] += factor(g, Form::SCALES, first + o) * x[m].sum;
    }

    // out (R, PANEL) = R rows of x times the panel of row `row`, with the same bits for any R. For
    // many rows weights are unpacked before, else when they are used.
    __attribute__((flatten)) void multiply(const Rows<ShortGroup>& rows, int64_t R, int64_t row,
                                           int64_t, float* out, int64_t stride) const {
        const bool is_many = R > 2 * ROWS;
        const uint8_t* panel = Form::panel_of(row);
        const int64_t group_bytes = Form::panel_bytes / Form::groups;
        const int64_t together = is_many ? TOGETHER : Form::groups;
        Shorts qs[TOGETHER][PAIRS][ALL];
        Vec factors[TOGETHER][Form::SCALES + 1][ALL];
        auto unpack = [&](int64_t g, int pair, int v) {
            return Form::unpack(Form::words_of(panel, g, v * LANES), pair);
        };
        auto factor = [&](int64_t g, int part, int v) {
            return Form::factor(panel, g, part, v * LANES);
        };
        auto ready = [&](int64_t g, int pair, int v) { return pinned(qs[g % TOGETHER][pair][v]); };
        auto ready_factor = [&](int64_t g, int p, int v) { return factors[g % TOGETHER][p][v]; };
        for (int64_t from = 0; from < Form::groups; from += together) {
            const int64_t to = std::min(from + together, Form::groups);
            for (int64_t g = from; is_many && g < to; ++g) {
                for (int v = 0; v < ALL; ++v) {
#pragma GCC unroll 16
                    for (int pair = 0; pair < PAIRS; ++pair)
                        qs[g % TOGETHER][pair][v] = unpack(g, pair, v);
                    for (int part = 0; part < Form::SCALES + Form::HAS_OFFSETS; ++part)
                        factors[g % TOGETHER][part][v] = factor(g, part, v);
                }
            }
            for (int64_t r = 0; r < R; r += ROWS) {
                with_constant<ROWS>(int(std::min<int64_t>(ROWS, R - r)), [&](auto M) {
                    constexpr int V = M * ALL <= REGISTERS / 2 ? ALL : 1;  // vectors at once
                    for (int first = 0; first < ALL; first += V) {
                        float* at = out + r * stride + first * LANES;
                        Vec total[M][V] = {};
                        if (from) FOR_TILE(M, V) total[m][o] = load(at + m * stride + o * LANES);
                        for (int64_t g = from; g < to; ++g) {
                            const ShortGroup* x = rows.x + g * rows.step + r;
                            if (is_many) {
                                add<M, V>(x, g, first, total, ready, ready_factor);
                                continue;
                            }
#pragma GCC unroll 9
                            for (int line = 0; line <= BITS; ++line)
                                __builtin_prefetch(panel + g * group_bytes + FAR + line * 64, 0,
                                                   L2);
                            add<M, V>(x, g, first, total, unpack, factor);
                        }
                        FOR_TILE(M, V) store(at + m * stride + o * LANES, total[m][o]);
                    }
                });
            }
        }
    }
};

// Rows of x as packed columns of a matrix unit, padded with zero rows to a multiple of 16.
template <class Op> Columns<Op> columns_of(const Rows<typename Op::Unit>& rows, int64_t R) {
    using Unit = typename Op::Unit;
    static thread_local Scratch<Unit> memory;
    const int64_t num = (R + LANES - 1) / LANES * rows.stride * LANES;
    Unit* to = memory.get(num);
    std::fill(to, to + num, Unit{});
    for (int64_t r = 0; r < R; ++r) {
        Unit* column = to + r / LANES * rows.stride * LANES + r % LANES;
        for (int64_t k = 0; k < rows.stride; ++k) column[k * LANES] = rows.x[r * rows.stride + k];
    }
    return {to, LANES, rows.stride * LANES};
}

// `multiply` by a matrix unit: weights are its rows (M = 16), x its columns. Weights are read
// in place unless there are fewer than 16 rows or E is no multiple of 32.
template <class Op>
void multiply_by_unit(const Plain<Op>& w, const Columns<Op>& columns, int64_t R, int64_t first,
                      int64_t count, float* out, int64_t stride) {
    using Unit = typename Op::Unit;
    static thread_local Scratch<Unit> padded_memory;
    static thread_local Scratch<float> sum_memory;
    constexpr int64_t WIDTH = LANES * Op::STEP;
    const int64_t steps = (w.E + WIDTH - 1) / WIDTH * LANES, bytes = w.E * sizeof(*w.weights);
    const int num_columns = int(R + LANES - 1) / LANES * LANES;
    const auto* weights = w.weights + first * w.E;
    auto* rows = reinterpret_cast<const Unit*>(weights);
    if (count < LANES || w.E % WIDTH) {
        Unit* padded = padded_memory.get(LANES * steps);
        std::fill(padded, padded + LANES * steps, Unit(0));
        for (int64_t o = 0; o < count; ++o)
            std::memcpy(padded + o * steps, weights + o * w.E, bytes);
        rows = padded;
    }
    float* sums = sum_memory.get(LANES * num_columns);
    MatrixUnit<Op>::multiply(rows, steps, columns, num_columns, int(steps), sums, true,
                             LANES * steps);
    for (int64_t r = 0; r < R; ++r)
        for (int64_t o = 0; o < count; ++o) out[r * stride + o] = sums[o * num_columns + r];
}

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

struct NormArguments {
    const void *x, *weight;  // (R, E), (E)
    void* out;               // (R, E)
    int64_t R, E;
    double eps;
};

template <class T> void norm(const NormArguments& a) {
    static thread_local Scratch<float> memory;
    float* wide = memory.get(a.E + LANES);
    std::fill(wide + a.E, wide + a.E + LANES, 0.0f);
    for (int64_t at = 0; at < a.R * a.E; at += a.E) {
        const T* x = static_cast<const T*>(a.x) + at;
        for (int64_t e = 0; e < a.E; ++e) wide[e] = widen(x[e]);
        norm_row(wide, static_cast<const T*>(a.weight), a.E, a.eps);
        for (int64_t e = 0; e < a.E; ++e) narrow(wide[e], static_cast<T*>(a.out) + at + e);
    }
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
    const int64_t padded = (a.E + 63) / 64 * 64, units = padded / Op::STEP;
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

template <class Weights> void linear(const Weights& weights, const LinearArguments& a) {
    using Op = typename Weights::Operand;
    using T = typename Op::Stored;
    const auto rows = prepare_rows<Op>(a);
    const bool by_unit = Weights::IS_PLAIN && MatrixUnit<Op>::ROWS;
    const auto columns = by_unit ? columns_of<Op>(rows, a.R) : Columns<Op>{};
    const int64_t outputs = a.is_gated ? a.N / 2 : a.N;
    constexpr int64_t CHUNK = PANEL;  // outputs that are finished together
    const int64_t num_chunks = (outputs + CHUNK - 1) / CHUNK;
    const int64_t per_task =
        std::max<int64_t>(1, num_chunks / (TASKS_PER_THREAD * Pool::num_threads));
    Pool::get().run((num_chunks + per_task - 1) / per_task, a.N * a.E, [&](int64_t task) {
        static thread_local Scratch<float> memory;
        float *sums = memory.get(2 * a.R * CHUNK), *gates = sums + a.R * CHUNK;
        const int64_t last = std::min(num_chunks, (task + 1) * per_task);
        auto multiply = [&](int64_t first, int64_t count, float* out) {
            if constexpr (Weights::IS_PLAIN)
                if (by_unit)
                    return multiply_by_unit(weights, columns, a.R, first, count, out, CHUNK);
            weights.multiply(rows, a.R, first, count, out, CHUNK);
        };
        if (by_unit) MatrixUnit<Op>::use(LANES);
        for (int64_t chunk = task * per_task; chunk < last; ++chunk) {
            const int64_t first = chunk * CHUNK, count = std::min(CHUNK, outputs - first);
            multiply(first, count, a.is_gated ? gates : sums);
            if (a.is_gated) {
                multiply(outputs + first, count, sums);
                for (int64_t i = 0; i < a.R * CHUNK; i += LANES)
                    store(sums + i, silu(load(gates + i)) * load(sums + i));
            }
            for (int64_t r = 0; r < a.R; ++r) {
                for (int64_t i = 0; i < count; ++i) {
                    const int64_t at = r * a.stride + first + i;
                    float y = sums[r * CHUNK + i];
                    if (a.bias) y += widen(static_cast<const T*>(a.bias)[first + i]);
                    if (a.residual) y = y * a.scale + widen(static_cast<const T*>(a.residual)[at]);
                    if (a.is_wide) static_cast<float*>(a.out)[at] = y;
                    else narrow(y, static_cast<T*>(a.out) + at);
                }
            }
        }
    });
}

template <class Op> void linear_of(int form, const LinearArguments& a) {
    if (form == PLAIN) return linear(Plain<Op>(a), a);
    by_bits(form,
            [&](auto bits) { linear(Quantized<typename Op::Stored, bits>(a, form >= NESTED), a); });
}

}  // namespace
