// Operand of products in float32: numbers of any type are widened, one per lane and step.
//
// An operand says how the inner loops multiply rows (M, K) with columns (K, N):
//   Stored   the number type of the inputs
//   Unit     what a row contributes to one step; STEP numbers of K
//   Column   what a column holds per step, where it is multiplied as stored
// Rows are units (M, K / STEP), contiguous in K. Columns are units (K / STEP, N), contiguous in N,
// so that the lanes of a vector are columns. For attention M are queries, and N slots (K = D
// numbers of a key) or numbers of a value (K slots). For linear layers by panels the lanes are rows
// of weights.

#pragma once

#include <utility>

#include "numbers.h"

namespace {

// Interleaves lanes of two vectors, beginning with lane FIRST of both.
template <int FIRST, int... I> inline Vec zip(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return Vec{(I % 2 ? b : a)[FIRST + I / 2]...};
}

// Transposes LANES x LANES numbers in place: interleaves halves, log2(LANES) times.
inline void transpose_square(Vec r[LANES]) {
    constexpr std::make_integer_sequence<int, LANES> all{};
    for (int size = 1; size < LANES; size *= 2) {
        Vec t[LANES];
        for (int i = 0; i < LANES / 2; ++i) {
            t[2 * i] = zip<0>(r[i], r[i + LANES / 2], all);
            t[2 * i + 1] = zip<LANES / 2>(r[i], r[i + LANES / 2], all);
        }
        // A template of the library would forget that these vectors need not be aligned.
        for (int i = 0; i < LANES; ++i) r[i] = t[i];
    }
}

// The operand of number type T: numbers are widened to float32, one per lane and step.
template <class T> struct Widened {
    using Stored = T;
    using Unit = float;
    using Column = T;
    static constexpr int STEP = 1;
    template <class Number> static Vec multiply(Vec sum, const Unit* rows, const Number* columns) {
        return sum + *rows * load(columns);
    }
    // Keys (n, D) as columns (D, BLOCK): lanes are slots; after the n-th they are 0, and unused.
    static void transpose(const T* rows, int64_t stride, int n, int D, Unit* to) {
        for (int s = 0; s < BLOCK; s += LANES) {
            for (int d = 0; d < D; d += LANES) {
                Vec square[LANES];
                for (int i = 0; i < LANES; ++i) {
                    const T* row = rows + (s + i) * stride + d;
                    __builtin_prefetch(row + BLOCK * stride);
                    square[i] = s + i < n ? some(row, D - d) : Vec{};
                }
                transpose_square(square);
                for (int i = 0; i < std::min(LANES, D - d); ++i)
                    store(to + (d + i) * BLOCK + s, square[i]);
            }
        }
    }
    // Values (n, D) as columns (BLOCK, width): lanes are numbers of a slot, a step is a slot.
    static void interleave(const T* rows, int64_t stride, int n, int D, int width, Unit* to) {
        for (int s = 0; s < BLOCK; ++s, to += width)
            for (int d = 0; d < D; d += LANES)
                store(to + d, s < n ? some(rows + s * stride + d, D - d) : Vec{});
    }
    static void from_floats(const float* x, int n, Unit* to) { std::copy(x, x + n, to); }
    static Vec dot(Vec sum, const T* weights, const Unit* x) {
        return sum + load(weights) * load(x);
    }
    static Vec weight(Vec x) { return power_of_2(x); }  // of attention, from a score
};

}  // namespace
