// Linear layers of many rows, as of prompts: bound by arithmetic, not by memory.

#pragma once

#include "linear.h"

namespace {

constexpr int64_t PRODUCT_ROWS = 512;        // rows of a task, which transposes weights once
constexpr int64_t MOST_PRODUCT_ROWS = 1024;  // rows that are widened at a time
constexpr int64_t PRODUCT_STEPS = 384;       // inputs whose columns fit a cache

// Columns (count, BLOCK) of a product: inputs of BLOCK outputs, widened from plain weights.
template <class T> struct PlainColumns {
    const T* weights;
    int64_t E;
    void fill(int64_t first, int num_outputs, int64_t input, int count, float* columns) const {
        const T* from = weights + first * E + input;
        Widened<T>::transpose(from, E, num_outputs, count, columns);
    }
};

// The same from quantized weights, whose layout has outputs in lanes already.
template <int BITS> struct QuantizedColumns : Layout<BITS> {
    using Layout<BITS>::Layout;
    void fill(int64_t first, int num_outputs, int64_t input, int count, float* columns) const {
        for (int n = 0; n < num_outputs; n += LANES) {
            const uint8_t* panel = this->panel_of(first + n);
            for (int64_t i = 0; i < count; i += GROUP) {
                Vec numbers[GROUP];
                this->dequantize(panel, (input + i) / GROUP, n % PANEL, numbers);
                for (int e = 0; e < GROUP; ++e) store(columns + (i + e) * BLOCK + n, numbers[e]);
            }
        }
    }
};

// Linear layer of R rows, without norm and residual. Each number of the result is one sum over E, in order, whatever R is.
template <class T, class Weights> void product(const LinearArguments& a, const Weights& weights) {
    if (a.R > MOST_PRODUCT_ROWS) {
        LinearArguments some = a;
        for (int64_t r = 0; r < a.R; r += MOST_PRODUCT_ROWS) {
            some.R = std::min(MOST_PRODUCT_ROWS, a.R - r);
            some.x = static_cast<const T*>(a.x) + r * a.E;
            some.out = static_cast<T*>(a.out) + r * a.N;
            product<T>(some, weights);
        }
        return;
    }
    static thread_local Scratch<float> row_memory;
    float* rows = row_memory.get(a.R * a.E);
    Pool::get().run((a.R + BLOCK - 1) / BLOCK, a.R * a.E, a.num_threads, [&](int64_t task) {
        const int64_t first = task * BLOCK, last = std::min(a.R, first + BLOCK);
        for (int64_t i = first * a.E; i < last * a.E; ++i)
            rows[i] = widen(static_cast<const T*>(a.x)[i]);
    });
    const int64_t num_chunks = (a.N + BLOCK - 1) / BLOCK,
                  num_parts = (a.R + PRODUCT_ROWS - 1) / PRODUCT_ROWS;
    Pool::get().run(num_chunks * num_parts, a.R * a.E * a.N, a.num_threads, [&](int64_t task) {
        static thread_local Scratch<float> memory, sum_memory;
        const int64_t first = task % num_chunks * BLOCK, part = task / num_chunks * PRODUCT_ROWS;
        const int64_t count = std::min<int64_t>(BLOCK, a.N - first),
                      last = std::min(a.R, part + PRODUCT_ROWS);
        float* columns = memory.get(PRODUCT_STEPS * BLOCK);
        float* sums = sum_memory.get((last - part) * BLOCK);
        for (int64_t k = 0; k < a.E; k += PRODUCT_STEPS) {
            const int here = int(std::min<int64_t>(PRODUCT_STEPS, a.E - k));
            weights.fill(first, int(count), k, here, columns);
            for (int64_t r = part; r < last; r += TILE_ROWS) {
                const int M = int(std::min<int64_t>(TILE_ROWS, last - r));
                multiply<Widened<T>>(M, rows + r * a.E + k, a.E,
                                     Columns<Widened<T>>{columns, BLOCK}, BLOCK, here,
                                     sums + (r - part) * BLOCK, k == 0);
            }
        }
        for (int64_t r = part; r < last; ++r) {
            for (int64_t i = 0; i < count; ++i) {
                float y = sums[(r - part) * BLOCK + i];
                if (a.bias) y += widen(static_cast<const T*>(a.bias)[first + i]);
                narrow(y, static_cast<T*>(a.out) + r * a.N + first + i);
            }
        }
    });
}

template <class T> void product_of(int form, const LinearArguments& a) {
    if (form == PLAIN) return product<T>(a, PlainColumns<T>{static_cast<const T*>(a.weights), a.E});
    by_bits(form, [&](auto bits) {
        product<T>(a, QuantizedColumns<bits>(a.weights, a.E, form >= NESTED));
    });
}

}  // namespace
