// Linear layers of many rows, as of prompts: bound by arithmetic, not by memory.

#pragma once

#include "linear.h"

namespace {

constexpr int64_t PRODUCT_ROWS = 512;   // that meet weights at a time, which are unpacked once
constexpr int64_t PRODUCT_STEPS = 384;  // inputs whose columns fit a cache

// Linear layer of R rows over plain weights, without norm and residual. Each number of the result
// is one sum over E, in order, whatever R is.
template <class T> void product(const LinearArguments& a) {
    static thread_local Scratch<float> row_memory;
    float* rows = row_memory.get(a.R * a.E);
    Pool::get().run(a.R, a.R * a.E, [&](int64_t r) {
        const T* from = static_cast<const T*>(a.x) + r * a.E;
        for (int64_t e = 0; e < a.E; ++e) rows[r * a.E + e] = widen(from[e]);
    });
    const int64_t num_chunks = (a.N + BLOCK - 1) / BLOCK;
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
                multiply<Widened<T>>(M, rows + r * a.E + k, a.E,
                                     Columns<Widened<T>>{columns, BLOCK}, BLOCK, here,
                                     sums + r * BLOCK, k == 0);
            }
        }
        for (int64_t r = 0; r < a.R; ++r) {
            for (int64_t i = 0; i < count; ++i) {
                float y = sums[r * BLOCK + i];
                if (a.bias) y += widen(static_cast<const T*>(a.bias)[first + i]);
                narrow(y, static_cast<T*>(a.out) + r * a.N + first + i);
            }
        }
    });
}

// The same in parts of rows. Quantized weights meet few and many rows in the same arithmetic.
template <class T> void product_of(int form, const LinearArguments& a) {
    LinearArguments some = a;
    for (int64_t r = 0; r < a.R; r += PRODUCT_ROWS) {
        some.R = std::min(PRODUCT_ROWS, a.R - r);
        some.x = static_cast<const T*>(a.x) + r * a.E;
        some.out = static_cast<T*>(a.out) + r * a.N;
        if (form == PLAIN) product<T>(some);
        by_bits(form, [&](auto b) { linear(Quantized<T, b>(some, form >= NESTED), some); });
    }
}

}  // namespace
