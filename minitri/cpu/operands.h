// Operands: a type of numbers as the inner loops multiply it.

#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include "numbers.h"
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(HAS_BF16_PAIRS)
#define HAS_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Plain: numbers are widened to float32, one per lane and step.
template <class T>
struct Widened {
    using Stored = T;
    using Unit = float;           // what one row contributes to one step
    static constexpr int STEP = 1;  // numbers per lane and step
    static constexpr bool AS_STORED = sizeof(T) == sizeof(Unit);
    static Vec multiply(Vec sum, const Unit* rows, const Unit* columns) {
        return sum + *rows * load(columns);
    }
    // BLOCK rows of D numbers as (D, BLOCK): lanes are rows. Rows after the n-th are zeros, never read.
    static void transpose(const T* rows, int64_t stride, int n, int D, Unit* to) {
        for (int s = 0; s < BLOCK; ++s) {
            for (int d = 0; d < D; ++d) to[d * BLOCK + s] = s < n ? widen(rows[s * stride + d]) : 0.0f;
        }
    }
    // The same as (BLOCK, width): lanes are columns, a step is a row.
    static void interleave(const T* rows, int64_t stride, int n, int D, int width, Unit* to) {
        for (int s = 0; s < BLOCK; ++s, to += width) {
            if (s >= n) { std::fill(to, to + D, 0.0f); continue; }
            int d = 0;
            for (; d + LANES <= D; d += LANES) store(to + d, load(rows + s * stride + d));
            for (; d < D; ++d) to[d] = widen(rows[s * stride + d]);
        }
    }
    static void from_floats(const float* x, int n, Unit* to) { std::copy(x, x + n, to); }
    static void to_floats(const Unit* x, int n, float* to) { std::copy(x, x + n, to); }
    static Vec dot(Vec sum, const T* weights, const Unit* x) { return sum + load(weights) * load(x); }
    static Vec weight(Vec x) { return power_of_2(x); }  // of a value, in attention

    struct Quants { Vec low, high; };  // a group
    template <int BITS>  // two groups from the parts of a row, see `quantized.h`; of `high` from bit `at` on
    static void unpack(const uint8_t* low, const uint8_t* high, int at, Quants w[2]) {
        constexpr int OTHERS = BITS - 4;
        for (int i = 0; i < 4; ++i) {
            Vec& to = i % 2 ? w[i / 2].high : w[i / 2].low;
            if (BITS == 8) {
                to = ::as_floats(load_bytes<int8_t>(low + i * LANES));
                continue;
            }
            const Ints two = load_bytes<uint8_t>(low + i % 2 * LANES);
            Ints q = i < 2 ? two & 15 : two >> 4;
            if (OTHERS > 0) {
                const Ints others = load_bytes<uint8_t>(high + i % 2 * LANES);
                q |= (others >> (at + i / 2 * OTHERS) & ((1 << OTHERS) - 1)) << 4;
            }
            to = as_floats(BITS == 6 ? q - 32 : q);
        }
    }
    template <int SCALES>  // of a group: one, or one for each half
    static Vec dot_quants(const Quants& w, const Unit* x, const float* scale) {
        if (SCALES == 1) return (w.low * load(x) + w.high * load(x + LANES)) * *scale;
        return w.low * load(x) * scale[0] + w.high * load(x + LANES) * scale[1];
    }
};

#ifdef HAS_BF16_PAIRS
// What q of few bits stand for in bfloat16: those of 4 bits twice, so that a fifth bit does not count.
template <int BITS>
struct Numbers {
    alignas(64) inline static const auto table = [] {
        std::array<BFloat16, 64> all;
        for (int i = 0; i < 64; ++i) narrow(BITS == 6 ? i - 32.0f : float(i % (1 << BITS)), &all[i]);
        return all;
    }();
};

// Pairs of bfloat16: a lane holds two neighbours, whose products are added in one instruction.
struct Pairs {
    using Stored = BFloat16;
    using Unit = uint32_t;
    static constexpr int STEP = 2;
    static constexpr bool AS_STORED = true;
    static Vec multiply(Vec sum, const Unit* rows, const Unit* columns) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(*rows)),
                                     (__m512bh)_mm512_loadu_si512(columns));
    }
    static void transpose(const BFloat16* rows, int64_t stride, int n, int D, Unit* to);
    static void interleave(const BFloat16* rows, int64_t stride, int n, int D, int width, Unit* to);
    static void from_floats(const float* x, int n, Unit* to) {
        for (int i = 0; i < n; i += 2 * LANES) {
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(x + i + LANES), (__m512)load(x + i));
            _mm512_storeu_si512(to + i / 2, (__m512i)both);
        }
    }
    static void to_floats(const Unit* x, int n, float* to) {
        for (int i = 0; i < n; ++i) to[i] = widen(reinterpret_cast<const BFloat16*>(x)[i]);
    }
    static Vec dot(Vec sum, const BFloat16* weights, const Unit* x) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(weights),
                                     (__m512bh)_mm512_loadu_si512(x));
    }

    // With a relative error of 3e-6, since it is rounded to bfloat16; minimax polynomial.
    static Vec weight(Vec x) {
        const Vec r = (Vec)_mm512_reduce_ps((__m512)x, 1);  // x less the whole number below it
        Vec e = splat(1.3534171e-2f) * r + 5.2011463e-2f;
        e = e * r + 2.4144275e-1f;
        e = e * r + 6.9300384e-1f;
        e = e * r + 1.0000026f;
        return (Vec)_mm512_scalef_ps((__m512)e, (__m512)x);
    }

    using Quants = __m512bh;  // a group
    template <int BITS>
    static void unpack(const uint8_t* low, const uint8_t* high, int at, Quants w[2]) {
        if (BITS == 8) {
            for (int half = 0; half < 2; ++half) {
                const __m128i* from = (const __m128i*)(low + half * 32);
                __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
                __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
                w[half] = _mm512_cvtne2ps_pbh(second, first);
            }
            return;
        }
        const __m256i both = _mm256_loadu_si256((const __m256i*)low);
        __m512i indices[2];  // bits above those of an index do not count
        if (BITS == 4) {
            indices[0] = _mm512_cvtepu8_epi16(both);
            indices[1] = _mm512_srli_epi16(indices[0], 4);
        } else {
            const __m256i others = _mm256_loadu_si256((const __m256i*)high);
            for (int half = 0; half < 2; ++half) {
                const __m256i four = half ? _mm256_srli_epi16(both, 4) : both;
                const __m256i more = _mm256_rorv_epi32(others, _mm256_set1_epi32(at + half * (BITS - 4) - 4));
                indices[half] = _mm512_cvtepu8_epi16(  // the low four bits of one, the others of the other
                    _mm256_ternarylogic_epi32(_mm256_set1_epi8(15), four, more, 0xca));
            }
        }
        const __m512i table = _mm512_load_si512(Numbers<BITS>::table.data());
        for (int half = 0; half < 2; ++half) {
            w[half] = (__m512bh)_mm512_permutexvar_epi16(indices[half], table);
            if (BITS != 6) continue;
            const __m512i upper = _mm512_load_si512(Numbers<BITS>::table.data() + 32);
            w[half] = (__m512bh)_mm512_permutex2var_epi16(table, indices[half], upper);
        }
    }
    template <int SCALES>
    static Vec dot_quants(Quants w, const Unit* x, const float* scale) {
        const __m512 sum = _mm512_dpbf16_ps(_mm512_setzero_ps(), w, (__m512bh)_mm512_loadu_si512(x));
        const __m512 first = _mm512_set1_ps(*scale);
        if (SCALES == 1) return (Vec)sum * (Vec)first;
        return (Vec)sum * (Vec)_mm512_mask_broadcastss_ps(first, 0xff00, _mm_load_ss(scale + 1));
    }
};

// 16 x 16 numbers of 32 bits, rows to columns.
inline void transpose_16(__m512i r[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

void Pairs::transpose(const BFloat16* rows, int64_t stride, int n, int D, Unit* to) {
    for (int d = 0; d < D; d += 2 * LANES) {
        int pairs = std::min(LANES, (D - d) / 2);
        __mmask32 some = pairs == LANES ? ~0u : (1u << 2 * pairs) - 1;
        for (int s = 0; s < BLOCK; s += LANES) {
            __m512i r[LANES];
            for (int i = 0; i < LANES; ++i) {
                const BFloat16* row = rows + (s + i) * stride + d;
                __builtin_prefetch(row + BLOCK * stride);
                r[i] = s + i < n ? _mm512_maskz_loadu_epi16(some, row) : _mm512_setzero_si512();
            }
            transpose_16(r);
            for (int i = 0; i < pairs; ++i) _mm512_storeu_si512(to + (d / 2 + i) * BLOCK + s, r[i]);
        }
    }
}

void Pairs::interleave(const BFloat16* rows, int64_t stride, int n, int D, int width, Unit* to) {
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35,
        3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int s = 0; s < BLOCK; s += 2, to += width) {
        for (int d = 0; d < D; d += 2 * LANES) {
            int left = D - d;
            __mmask32 some = left >= 32 ? ~0u : (1u << left) - 1;
            const BFloat16* row = rows + s * stride + d;
            __builtin_prefetch(row + BLOCK * stride);
            __builtin_prefetch(row + (BLOCK + 1) * stride);
            __m512i a = _mm512_setzero_si512(), b = a;
            if (s < n) a = _mm512_maskz_loadu_epi16(some, row);
            if (s + 1 < n) b = _mm512_maskz_loadu_epi16(some, row + stride);
            _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, low, b));
            if (left > LANES) {
                _mm512_storeu_si512(to + d + LANES, _mm512_permutex2var_epi16(a, high, b));
            }
        }
    }
}
using BFloat16Operand = Pairs;
#else
using BFloat16Operand = Widened<BFloat16>;
#endif

constexpr int L2 = 2;  // of a prefetch: to the second cache, since few reads of the first can be under way

// Columns (steps, 16 V) of a product, as units: a vector of 16 of them every `vector` units, the next
// step every `step`. What lies `ahead` is fetched on the way; 0: nothing.
template <class Op>
struct Columns {
    const typename Op::Unit* at;
    int64_t step, vector = LANES, ahead = 0;
};

// sums (M, 16 V) += rows (M, steps) x columns, all in registers but for the operands.
template <class Op, int M, int V>
inline void multiply_tile(const typename Op::Unit* rows, int64_t row_stride, Columns<Op> columns,
                          int steps, float* sums, int64_t sum_stride, bool from_zero) {
    Vec sum[M][V];
    for (int m = 0; m < M; ++m) {
        for (int v = 0; v < V; ++v) {
            sum[m][v] = from_zero ? Vec{} : load(sums + m * sum_stride + v * LANES);
        }
    }
    for (int k = 0; k < steps; ++k, columns.at += columns.step) {
        if (columns.ahead) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) __builtin_prefetch(columns.at + v * columns.vector + columns.ahead, 0, L2);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                sum[m][v] = Op::multiply(sum[m][v], rows + m * row_stride + k, columns.at + v * columns.vector);
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int v = 0; v < V; ++v) store(sums + m * sum_stride + v * LANES, sum[m][v]);
    }
}

constexpr int TILE_ROWS = 6;  // times 4 vectors: 24 sums in registers

template <class Op, int V>
void multiply_columns(int M, const typename Op::Unit* rows, int64_t row_stride, Columns<Op> columns,
                      int steps, float* sums, int64_t sum_stride, bool from_zero) {
    auto call = [&](auto tile) {
        tile(rows, row_stride, columns, steps, sums, sum_stride, from_zero);
    };
    switch (M) {
        case 1: return call(multiply_tile<Op, 1, V>);
        case 2: return call(multiply_tile<Op, 2, V>);
        case 3: return call(multiply_tile<Op, 3, V>);
        case 4: return call(multiply_tile<Op, 4, V>);
        case 5: return call(multiply_tile<Op, 5, V>);
        default: return call(multiply_tile<Op, 6, V>);
    }
}

// For any number of columns that is a multiple of 16.
template <class Op>
void multiply(int M, const typename Op::Unit* rows, int64_t row_stride, Columns<Op> columns,
              int num_columns, int steps, float* sums, bool from_zero) {
    int v = 0;
    for (; v + 4 * LANES <= num_columns; v += 4 * LANES, columns.at += 4 * columns.vector) {
        multiply_columns<Op, 4>(M, rows, row_stride, columns, steps, sums + v, num_columns, from_zero);
    }
    for (; v < num_columns; v += LANES, columns.at += columns.vector) {
        multiply_columns<Op, 1>(M, rows, row_stride, columns, steps, sums + v, num_columns, from_zero);
    }
}

// Products by a matrix unit (AMX): of up to 16 rows at a time, each as it would be alone.
template <class Op>
struct MatrixUnit {
    static constexpr int ROWS = 0;  // none
    static void use(int) {}
    static void multiply(const typename Op::Unit*, int64_t, Columns<Op>, int, int, float*, bool, int64_t) {}
};

#ifdef HAS_MATRIX_UNIT
template <>
struct MatrixUnit<Pairs> {
    inline static const bool IS_ALLOWED = [] {  // a process has to ask for its registers
        constexpr long REQUEST = 0x1023, TILE_DATA = 18;
        return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    }();
    inline static const int ROWS = IS_ALLOWED ? 16 : 0;

    // Prepares this thread for products of M rows.
    static void use(int M) {
        struct { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } form;
        for (int i = 0; i < 6; ++i) {
            form.bytes[i] = 4 * LANES;
            form.rows[i] = uint8_t(i < 5 ? M : LANES);  // 0 to 3: sums, 4: rows, 5: columns
        }
        _tile_loadconfig(&form);
    }

    // As the function `multiply`, of as many rows and of a multiple of 16 steps. What lies `ahead` of
    // 16 rows is fetched on the way; 0: nothing.
    static void multiply(const uint32_t* rows, int64_t row_stride, Columns<Pairs> columns, int num_columns,
                         int steps, float* sums, bool from_zero, int64_t ahead) {
        int v = 0;
        auto call = [&](int V, auto product) {
            for (; v + V * LANES <= num_columns; v += V * LANES, columns.at += V * columns.vector) {
                product(rows, row_stride, columns, steps, sums + v, num_columns, from_zero, ahead);
            }
        };
        asm volatile("" ::: "memory");  // compilers do not know that tiles are read from memory
        call(4, multiply_tiles<4>);
        call(1, multiply_tiles<1>);
        asm volatile("" ::: "memory");
    }

    template <int V>
    static void multiply_tiles(const uint32_t* rows, int64_t row_stride, Columns<Pairs> columns, int steps,
                               float* sums, int64_t sum_stride, bool from_zero, int64_t ahead) {
#define FOR_SUMS(DO) DO(0) if constexpr (V == 4) { DO(1) DO(2) DO(3) }
#define START(i) if (from_zero) _tile_zero(i); else _tile_loadd(i, sums + i * LANES, 4 * sum_stride);
#define ADD(i)                                                              \
    _tile_loadd(5, columns.at + i * columns.vector, 4 * columns.step);      \
    _tile_dpbf16ps(i, 4, 5);
#define FINISH(i) _tile_stored(i, sums + i * LANES, 4 * sum_stride);
        FOR_SUMS(START)
        for (int k = 0; k < steps; k += LANES, columns.at += LANES * columns.step) {
            for (int i = 0; columns.ahead && i < V * LANES; ++i) {
                __builtin_prefetch(columns.at + i % LANES * columns.step + i / LANES * columns.vector + columns.ahead);
            }
            for (int m = 0; ahead && m < LANES; ++m) __builtin_prefetch(rows + ahead + (k + m) * LANES, 0, 2);
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

// M rows, one right after the other, by the matrix unit if there is one that is in use.
template <class Op>
void multiply_packed(int M, const typename Op::Unit* rows, int steps, Columns<Op> columns, int num_columns,
                     float* sums, bool from_zero) {
    if (MatrixUnit<Op>::ROWS) return MatrixUnit<Op>::multiply(rows, steps, columns, num_columns, steps, sums, from_zero, 0);
    multiply<Op>(M, rows, steps, columns, num_columns, steps, sums, from_zero);
}

}  // namespace
