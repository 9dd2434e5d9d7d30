// Products by the matrix unit (AMX): sums (M, N) += rows (M, K) x columns (K, N) in bfloat16 pairs.
//
// As in `gemm.h`, but M is at most 16, one row of a tile register each, and K is a multiple of 16
// pairs. A tile register is 16 rows of 64 bytes: 16 x 16 float32 sums (registers 0 to 3, for up to
// four panels of N), 16 rows x 16 pairs of K (register 4), or 16 pairs of K x 16 columns (5).
// Layout of columns: a panel of PANEL = 16 pairs is a row of register 5, the next step is `step`
// further. A row's bits do not depend on other rows. A process has to ask Linux for the registers.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>
#include "gemm.h"

namespace {

// Stand-in where there is no matrix unit: ROWS is 0, and no function is called.
template <class Op> struct MatrixUnit {
    static constexpr int ROWS = 0;
    static void use(int) {}
    template <class... Arguments> static void multiply(Arguments...) {}
};

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(HAS_BF16_PAIRS)
template <> struct MatrixUnit<Pairs> {
    static constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    inline static const int ROWS = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0 ? 16 : 0;

    // Prepares this thread for products of M rows.
    static void use(int M) {
        uint8_t form[64] = {1};  // the palette; from 16 on bytes of rows, from 48 on rows
        for (int i = 0; i < 6; ++i) {
            form[16 + 2 * i] = 4 * LANES;
            form[48 + i] = uint8_t(i < 5 ? M : LANES);  // 0 to 3: sums, 4: rows, 5: columns
        }
        asm volatile("ldtilecfg %0" : : "m"(form));  // `_tile_loadconfig` tells GCC of 8 bytes
    }

    // As `multiply` of gemm.h, for the M of `use`. Prefetches rows `ahead` units further, if not 0.
    static void multiply(const uint32_t* rows, int64_t row_stride, Columns<Pairs> panels,
                         int num_columns, int steps, float* sums, bool from_zero, int64_t ahead) {
#define FOR_PANELS(DO)    \
    {                     \
        DO(0);            \
        if (V > 1) DO(1); \
        if (V > 2) DO(2); \
        if (V > 3) DO(3); \
    }
#define LOAD_SUMS(i) _tile_loadd(i, at + i * LANES, 4 * num_columns)
#define STORE_SUMS(i) _tile_stored(i, at + i * LANES, 4 * num_columns)
#define ADD_PRODUCTS(i)                                                   \
    {                                                                     \
        _tile_loadd(5, columns.at + i * columns.panel, 4 * columns.step); \
        _tile_dpbf16ps(i, 4, 5);                                          \
    }
        asm volatile("" ::: "memory");  // compilers do not know that tiles are read from memory
        for (int n = 0; n < num_columns; n += 4 * LANES, panels.advance(4 * panels.panel)) {
            const int V = std::min(4, (num_columns - n) / LANES);
            float* at = sums + n;
            Columns<Pairs> columns = panels;
            if (from_zero) FOR_PANELS(_tile_zero)
            else FOR_PANELS(LOAD_SUMS)
            for (int k = 0; k < steps; k += LANES, columns.advance(LANES * columns.step)) {
                for (int i = 0; columns.next && i < V * LANES; ++i) {
                    const int64_t place = i % LANES * columns.step + i / LANES * columns.panel;
                    __builtin_prefetch(columns.next + place * Pairs::STEP);
                }
                for (int m = 0; ahead && m < LANES; ++m)
                    __builtin_prefetch(rows + ahead + (k + m) * LANES, 0, L2);
                _tile_loadd(4, rows + k, 4 * row_stride);
                FOR_PANELS(ADD_PRODUCTS)
            }
            FOR_PANELS(STORE_SUMS)
        }
        asm volatile("" ::: "memory");
    }
};
#endif

// Multiplies M contiguous rows with packed columns, by the matrix unit if there is one.
template <class Op, class Number>
void multiply_packed(int M, const typename Op::Unit* rows, int steps, Columns<Op, Number> columns,
                     int num_columns, float* sums, bool from_zero) {
    if (MatrixUnit<Op>::ROWS)
        MatrixUnit<Op>::multiply(rows, steps, columns, num_columns, steps, sums, from_zero, 0);
    else multiply<Op>(M, rows, steps, columns, num_columns, steps, sums, from_zero);
}

}  // namespace
