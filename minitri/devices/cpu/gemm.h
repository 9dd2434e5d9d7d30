// Products of a few rows with packed columns: sums (M, N) += rows (M, K) x columns (K, N).
//
// M is 1 to TILE_ROWS rows of units, contiguous in K, `row_stride` units apart. N, a multiple of
// PANEL, is `num_columns`. K is `steps` units. Columns are packed: PANEL neighbours in N lie
// together, the next panel is `panel` units further, the next step `step`. Sums are float32 (M, N),
// row-major. Tiles of M rows and V vectors of columns are kept in registers for all K, and each
// number of the result is one chain of additions in order of K, whatever M and N are: products are
// row-invariant.

#pragma once

#include "bf16.h"

namespace {

constexpr int L2 = 2;  // prefetch to the second cache: few reads to the first can be in flight

// Loops over a tile of M rows and N outputs (or vectors of them), unrolled.
#define FOR_TILE(M, N)                                  \
    _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) \
        _Pragma("GCC unroll 8") for (int o = 0; o < N; ++o)

// Packed columns (steps, num_columns). If there is a `next` block of columns, as stored, the
// product prefetches it.
template <class Op, class Number = typename Op::Unit> struct Columns {
    const Number* at;
    int64_t step, panel = PANEL;
    const typename Op::Stored* next = nullptr;
    int64_t vector(int v) const { return v * LANES / PANEL * panel + v * LANES % PANEL; }
    void advance(int64_t units) {
        at += units;
        if (next) next += units * Op::STEP;
    }
};

// sums (M, V vectors) += rows (M, steps) x columns, with sums in registers.
template <class Op, int M, int V, class Number>
inline void multiply_tile(const typename Op::Unit* rows, int64_t row_stride,
                          Columns<Op, Number> columns, int steps, float* sums, int64_t sum_stride,
                          bool from_zero) {
    constexpr int LINE_VECTORS =
        std::clamp(64 / int(LANES * Op::STEP * sizeof(typename Op::Stored)), 1, PANEL / LANES);
    Vec sum[M][V];
    FOR_TILE(M, V) sum[m][o] = from_zero ? Vec{} : load(sums + m * sum_stride + o * LANES);
    for (int k = 0; k < steps; ++k, columns.advance(columns.step)) {
#pragma GCC unroll 4
        for (int v = 0; columns.next && v < V; v += LINE_VECTORS)
            __builtin_prefetch(columns.next + columns.vector(v) * Op::STEP, 0, L2);
        FOR_TILE(M, V)
        sum[m][o] =
            Op::multiply(sum[m][o], rows + m * row_stride + k, columns.at + columns.vector(o));
    }
    FOR_TILE(M, V) store(sums + m * sum_stride + o * LANES, sum[m][o]);
}

constexpr int TILE_ROWS = 6;
// Calls `work` with M, from 1 to MOST, as a constant.
template <int MOST, class Work> inline void with_constant(int M, Work&& work) {
    if constexpr (MOST > 1) {
        if (M < MOST) return with_constant<MOST - 1>(M, work);
    }
    work(std::integral_constant<int, MOST>());
}
// Vectors of a tile, 4 or 2: sums of M rows take at most three quarters of the registers.
constexpr int tile_vectors(int M) { return 4 * M <= REGISTERS * 3 / 4 ? 4 : 2; }

// sums (M, num_columns) += rows (M, steps) x columns, tile by tile.
template <class Op, class Number>
void multiply(int M, const typename Op::Unit* rows, int64_t row_stride, Columns<Op, Number> columns,
              int num_columns, int steps, float* sums, bool from_zero) {
    int v = 0;
    auto add = [&](int V, auto tile) {
        for (; v + V <= num_columns / LANES; v += V) {
            auto some = columns;
            some.advance(columns.vector(v));
            tile(rows, row_stride, some, steps, sums + v * LANES, num_columns, from_zero);
        }
    };
    with_constant<TILE_ROWS>(M, [&](auto m) {
        constexpr int V = tile_vectors(m);
        add(V, multiply_tile<Op, m, V, Number>);
        add(1, multiply_tile<Op, m, 1, Number>);
    });
}

}  // namespace
