// Distributions of logits, samples and verdicts, as `core/decoding` defines them.

#pragma once

#include <iterator>
#include <vector>
#include "attention.h"

namespace {

typedef double Doubles __attribute__((vector_size(8 * LANES), aligned(8)));

struct FilterArguments {
    const float* logits;  // (N, V)
    float* probs;         // (N, V)
    int64_t N, V, top_k;  // top_k 0, or V: all
    double temperature;   // 0: the likeliest token
    double top_p, log_min_p;
};

struct Mass {
    double sum = 0;
    int64_t count = 0;
};

// Sum and count of those of n numbers that are at least `least`; n is a multiple of LANES.
inline Mass mass_from(const float* x, int64_t n, float least) {
    Doubles sums{};
    Ints counts{};
    const float below = std::nextafter(least, 0.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        const Vec v = load(x + i);
        if (!any_above(v, below)) continue;
        const Ints is_in = v >= least;
        sums += __builtin_convertvector((Vec)((Ints)v & is_in), Doubles);
        counts -= is_in;
    }
    Mass mass;
    for (int i = 0; i < LANES; ++i) {
        mass.sum += sums[i];
        mass.count += counts[i];
    }
    return mass;
}

// Takes the largest of n numbers from 0 to 1 until these are enough, and returns the last of them.
// Numbers far below the result are not sorted.
template <class Enough> float cutoff(const float* x, int64_t n, Enough&& is_enough) {
    constexpr float SMALLEST = 0x1p-126f;
    static thread_local std::vector<float> some;
    float least = 1.0f, above = 2.0f;
    Mass before, mass = mass_from(x, n, least);
    while (!is_enough(mass) && least > SMALLEST) {
        before = mass;
        above = least;
        least = std::max(least / 4, SMALLEST);
        mass = mass_from(x, n, least);
    }
    some.clear();
    const float below = std::nextafter(least, 0.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        if (!any_above(load(x + i), below)) continue;
        std::copy_if(x + i, x + i + LANES, std::back_inserter(some),
                     [&](float number) { return number >= least && number < above; });
    }
    std::make_heap(some.begin(), some.end());
    for (auto end = some.end(); end > some.begin(); --end) {
        before.sum += some.front();
        before.count += 1;
        if (is_enough(before)) return some.front();
        std::pop_heap(some.begin(), end);
    }
    return least;
}

// Replaces n logits by probabilities: temperature, then top-k, top-p, min-p, each of what is kept.
inline void keep_by_filters(const FilterArguments& a, float* x, int64_t n, float top) {
    const float temperature = float(a.temperature);
    for (int64_t i = 0; i < n; i += LANES)  // the best is 1
        store(x + i, power_of_2((load(x + i) - top) / temperature * LOG2_E));
    float least = 0.0f;
    if (0 < a.top_k && a.top_k < a.V)
        least = cutoff(x, n, [&](const Mass& mass) { return mass.count >= a.top_k; });
    if (a.top_p < 1) {
        const double wanted = a.top_p * mass_from(x, n, least).sum;
        least = std::max(least, cutoff(x, n, [&](const Mass& mass) { return mass.sum >= wanted; }));
    }
    least = std::max(least, power_of_2(splat(float(a.log_min_p) * LOG2_E))[0]);
    const float total = float(mass_from(x, n, least).sum);
    for (int64_t i = 0; i < n; i += LANES) {
        const Vec v = load(x + i);
        store(x + i, (Vec)((Ints)v & (v >= least)) / total);
    }
}

// Turns a row of logits, padded with minus infinity to n numbers, into a distribution; into NaN if
// a logit is NaN or the highest is infinite.
inline void filter_row(const FilterArguments& a, float* x, int64_t n) {
    Vec highest = splat(MINUS_INFINITY);
    Ints are_nan{};
    for (int64_t i = 0; i < n; i += LANES) {
        highest = maximum(highest, load(x + i));
        are_nan |= load(x + i) != load(x + i);
    }
    const float top = max_lanes(highest);
    if (!std::isfinite(top) || sum_lanes(as_floats(are_nan)) != 0) {
        std::fill(x, x + n, NAN);
    } else if (a.temperature == 0) {
        float* first = std::find(x, x + n, top);  // of equal ones
        std::fill(x, x + n, 0.0f);
        *first = 1.0f;
    } else {
        keep_by_filters(a, x, n, top);
    }
}

// Samples a token by inverse CDF, with the bits of `sampling.py:sample`. The n possible tokens are
// `ids`, sorted, or the first n; `last` if none has a probability, as with NaN.
inline int64_t sample_row(const float* x, const int64_t* ids, int64_t n, double uniform,
                          int64_t last) {
    // The first token at which the running sum is above `target`; none if that is infinite. Blocks
    // of zeros, most of a filtered distribution, are skipped.
    auto run_to = [&](double target, double& sum) {
        for (int64_t start = 0; start < n; start += LANES) {
            const int64_t end = std::min(start + LANES, n);
            if (!ids && end - start == LANES && !any_above(load(x + start), 0.0f)) continue;
            for (int64_t i = start; i < end; ++i) {
                const int64_t id = ids ? ids[i] : i;
                sum += x[id];
                if (sum > target) return id;
            }
        }
        return last;
    };
    double total = 0, sum = 0;
    run_to(INFINITY, total);
    return run_to(uniform * total, sum);
}

// Samples a token by Gumbel noise of a key, as `sampling.py:gumbel_argmax`, but for rounding.
inline int64_t sample_coupled(const float* x, int64_t n, uint64_t key) {
    int64_t best = 0;
    double most = 0;
    for (int64_t i = 0; i < n; ++i) {
        if (!(x[i] > 0)) continue;
        uint64_t bits = key + (i + 1) * 0x9E3779B97F4A7C15;  // SplitMix64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
        const double uniform = (double((bits ^ bits >> 31) >> 12) + 0.5) * 0x1p-52;
        const double score = x[i] / -std::log(uniform);  // rises with log p + Gumbel noise
        if (score > most) best = i;
        most = std::max(most, score);
    }
    return best;
}

inline void filter(const FilterArguments& a) {
    const int64_t padded = round_up(a.V, LANES);
    Pool::get().run(a.N, a.N * a.V, [&](int64_t row) {
        static thread_local Scratch<float> memory;
        float* x = memory.get(padded);
        std::copy(a.logits + row * a.V, a.logits + (row + 1) * a.V, x);
        std::fill(x + a.V, x + padded, MINUS_INFINITY);
        filter_row(a, x, padded);
        std::copy(x, x + a.V, a.probs + row * a.V);
    });
}

struct VerifyArguments {
    const float *p, *q;              // (B, N + 1, V), (B, N, V)
    const double* uniforms;          // (B, N + 1)
    const int64_t *tokens, *counts;  // (B, N), (B): guesses, and how many each row has
    int64_t* verdicts;               // (B, 3): accepted guesses, next token, whether all is finite
    int64_t B, N, V;
};

inline bool are_finite(const float* x, int64_t n) {
    Vec zeros{};
    for (int64_t i = 0; i < n; i += LANES) zeros += some(x + i, n - i) * 0.0f;
    return sum_lanes(zeros) == 0;
}

// Block or token verification. NaN in p or q stays in w. w[i] is the probability to keep the first
// i guesses; 1 or 0 if not is_block. Backwards from the last guess, the first that passes its test
// is the last accepted; the next token comes from max(w[i] p - q, 0).
inline void verify(const VerifyArguments& a, bool is_block) {
    Pool::get().run(a.B, a.B * a.N * a.V, [&](int64_t b) {
        static thread_local Scratch<float> memory;
        const int64_t V = a.V, padded = round_up(V, LANES), n = a.counts[b];
        const float *p = a.p + b * (a.N + 1) * V, *q = a.q + b * a.N * V;
        const double* uniforms = a.uniforms + b * (a.N + 1);
        float* left = memory.get(padded);
        std::vector<double> w{1};
        for (int64_t i = 0; i < n; ++i) {
            const int64_t at = i * V + std::clamp<int64_t>(a.tokens[b * a.N + i], 0, V - 1);
            const double p_i = p[at], q_i = q[at], ratio = q_i > 0 ? p_i / q_i : NAN;
            w.push_back(std::min(w[i] * (is_block ? ratio : uniforms[i] * q_i < p_i), 1.0));
        }
        int64_t kept = n;
        double mass = 0, chance = w[n];
        while (kept > 0 && !(uniforms[kept - 1] < chance)) {
            --kept;
            const float *p_V = p + kept * V, *q_V = q + kept * V, w_i = w[kept];
            for (int64_t i = 0; i < V; i += LANES)
                store(left + i, maximum(w_i * some(p_V + i, V - i) - some(q_V + i, V - i), Vec{}));
            mass = mass_from(left, padded, 0.0f).sum;
            chance = w[kept] < 1 ? mass / (mass + 1 - w[kept]) : w[kept];
        }
        const float* next = mass > 0 ? left : p + kept * V;
        int64_t* verdict = a.verdicts + 3 * b;
        verdict[0] = kept;
        verdict[1] = sample_row(next, nullptr, V, uniforms[a.N], V - 1);
        verdict[2] = are_finite(p, (n + 1) * V) && are_finite(q, n * V);
    });
}

}  // namespace
