// Products by the matrix unit (AMX): sums (M, N) += rows (M, K) x columns (K, N) in bfloat16 pairs.
//
// As in `gemm.h`, but M is at most 16, one row of a tile register each, and K is a multiple of 16
// pairs. A tile register is 16 rows of 64 bytes: 16 x 16 float32 sums (registers 0 to 3, for up to
// four panels of N), 16 rows x 16 pairs of K (register 4), or 16 pairs of K x 16 columns (5).
// Layout of columns: a panel of PANEL = 16 pairs is a row of register 5, the next step is `step`
// further. A row's bits do not depend on other rows. A process has to ask Linux for the registers.

#pragma once

#include "gemm.h"
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(HAS_BF16_PAIRS)
#define HAS_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Stand-in where there is no matrix unit: ROWS is 0, and no function is called.
template <class Op> struct MatrixUnit {
    static constexpr int ROWS = 0;
    static void use(int) {}
    static void multiply(const typename Op::Unit*, int64_t, Columns<Op>, int, int, float*, bool,
                         int64_t) {}
};

#ifdef HAS_MATRIX_UNIT
template <> struct MatrixUnit<Pairs> {
    inline static const bool IS_ALLOWED = [] {
        constexpr long REQUEST = 0x1023, TILE_DATA = 18;
        return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }();
    inline static const int ROWS = IS_ALLOWED ? 16 : 0;

    // Prepares this thread for products of M rows.
    static void use(int M) {
        struct {
            uint8_t palette = 1, start = 0, none[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } form;
        for (int i = 0; i < 6; ++i) {
            form.bytes[i] = 4 * LANES;
            form.rows[i] = uint8_t(i < 5 ? M : LANES);  // 0 to 3: sums, 4: rows, 5: columns
        }
        _tile_loadconfig(&form);
    }

    // As the function `multiply` of gemm.h, for the M of `use`. Prefetches rows that are `ahead`
    // units further, unless that is 0.
    static void multiply(const uint32_t* rows, int64_t row_stride, Columns<Pairs> columns,
                         int num_columns, int steps, float* sums, bool from_zero, int64_t ahead) {
        int v = 0;
        auto call = [&](int V, auto product) {
            for (; v + V * LANES <= num_columns; v += V * LANES, columns.advance(V * columns.panel))
                product(rows, row_stride, columns, steps, sums + v, num_columns, from_zero, ahead);
        };
        asm volatile("" ::: "memory");  // compilers do not know that tiles are read from memory
        call(4, multiply_tiles<4>);
        call(1, multiply_tiles<1>);
        asm volatile("" ::: "memory");
    }

    template <int V>
    static void multiply_tiles(const uint32_t* rows, int64_t row_stride, Columns<Pairs> columns,
                               int steps, float* sums, int64_t sum_stride, bool from_zero,
                               int64_t ahead) {
#define FOR_SUMS(DO) DO(0) if constexpr (V == 4){DO(1) DO(2) DO(3)}
#define START(i)                  \
    if (from_zero) _tile_zero(i); \
    else _tile_loadd(i, sums + i * LANES, 4 * sum_stride);
#define ADD(i)                                                        \
    _tile_loadd(5, columns.at + i * columns.panel, 4 * columns.step); \
    _tile_dpbf16ps(i, 4, 5);
#define FINISH(i) _tile_stored(i, sums + i * LANES, 4 * sum_stride);
        FOR_SUMS(START)
        for (int k = 0; k < steps; k += LANES, columns.advance(LANES * columns.step)) {
            for (int i = 0; columns.next && i < V * LANES; ++i) {
                __builtin_prefetch(columns.next +
                                   (i % LANES * columns.step + i / LANES * columns.panel) *
                                       Pairs::STEP);
            }
            for (int m = 0; ahead && m < LANES; ++m)
                __builtin_prefetch(rows + ahead + (k + m) * LANES, 0, 2);
            _tile_loadd(4, rows + k, 4 * row_stride);
            FOR_SUMS(ADD)
        }
        FOR_SUMS(FINISH)
#undef FOR_SUMS
#undef START
#undef ADD
#undef FINISH
    }
};
#endif

// Multiplies M contiguous rows with packed columns, by the matrix unit if there is one.
template <class Op, class Number>
void multiply_packed(int M, const typename Op::Unit* rows, int steps, Columns<Op, Number> columns,
                     int num_columns, float* sums, bool from_zero) {
    if constexpr (std::is_same<Number, typename Op::Unit>::value) {
        if (MatrixUnit<Op>::ROWS)
            return MatrixUnit<Op>::multiply(rows, steps, columns, num_columns, steps, sums,
                                            from_zero, 0);
    }
    multiply<Op>(M, rows, steps, columns, num_columns, steps, sums, from_zero);
}

}  // namespace
