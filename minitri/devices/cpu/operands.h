// Operands: a type of numbers as the inner loops multiply it.

#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>
#include "numbers.h"
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(HAS_BF16_PAIRS)
#define HAS_MATRIX_UNIT 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int L2 = 2;  // of a prefetch: to the second cache, since few reads of the first can be under way

// Lanes of two vectors in turns, from one of both on.
template <int FIRST, int... I>
inline Vec zip(Vec a, Vec b, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, (FIRST + I / 2 + I % 2 * LANES)...);
#else
    return __builtin_shuffle(a, b, Ints{(FIRST + I / 2 + I % 2 * LANES)...});
#endif
}

// LANES x LANES numbers, rows to columns: halves are zipped, again and again.
inline void transpose_square(Vec r[LANES]) {
    constexpr std::make_integer_sequence<int, LANES> all{};
    for (int size = 1; size < LANES; size *= 2) {
        Vec t[LANES];
        for (int i = 0; i < LANES / 2; ++i) {
            t[2 * i] = zip<0>(r[i], r[i + LANES / 2], all);
            t[2 * i + 1] = zip<LANES / 2>(r[i], r[i + LANES / 2], all);
        }
        std::copy(t, t + LANES, r);
    }
}

// Plain: numbers are widened to float32, one per lane and step.
template <class T>
struct Widened {
    using Stored = T;
    using Unit = float;           // what one row contributes to one step
    static constexpr int STEP = 1;  // numbers per lane and step
    using Column = T;             // and a column that is multiplied as it is stored
    template <class Number>
    static Vec multiply(Vec sum, const Unit* rows, const Number* columns) {
        return sum + *rows * load(columns);
    }
    // BLOCK rows of D numbers as (D, BLOCK): lanes are rows. Rows after the n-th are zeros, never read.
    static void transpose(const T* rows, int64_t stride, int n, int D, Unit* to) {
        for (int s = 0; s < BLOCK; s += LANES) {
            for (int d = 0; d < D; d += LANES) {
                Vec square[LANES];
                for (int i = 0; i < LANES; ++i) {
                    square[i] = s + i < n ? some(rows + (s + i) * stride + d, D - d) : Vec{};
                }
                transpose_square(square);
                for (int i = 0; i < std::min(LANES, D - d); ++i) store(to + (d + i) * BLOCK + s, square[i]);
            }
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
    // Keys of a BLOCK, as they lie in tiles; and values, zeros after the n-th.
    static void copy_keys(const T* tiles, int D, Unit* to) {
        for (int i = 0; i < BLOCK * D; i += LANES) store(to + i, load(tiles + i));
    }
    static void copy_values(const T* tiles, int n, int D, Unit* to) { interleave(tiles, D, n, D, D, to); }
    static void from_floats(const float* x, int n, Unit* to) { std::copy(x, x + n, to); }
    static void to_floats(const Unit* x, int n, float* to) { std::copy(x, x + n, to); }
    static Vec dot(Vec sum, const T* weights, const Unit* x) { return sum + load(weights) * load(x); }
    static Vec weight(Vec x) { return power_of_2(x); }  // of a value, in attention

    using Quants = Vec;
    template <int BITS, class Use>  // see `Layout` in quantized.h
    static void unpack(const uint8_t* low, const uint8_t* high, int word, Use&& use) {
        constexpr int LOW = BITS == 8 ? 8 : 4, OTHERS = BITS - LOW, PAIRS = 16 / LOW;
        const Bits bits = load_words(low);
#pragma GCC unroll 8
        for (int i = 0; i < 2 * PAIRS; ++i) {
            const int place = PAIRS * word + i / 2, half = i % 2 * 16, at = place * OTHERS;
            const int first = half + i / 2 * LOW;  // bit
            if (BITS == 8) {
                use(2 * place + i % 2, as_floats(Ints(bits << (24 - first)) >> 24));
                continue;
            }
            Ints q = Ints(bits >> first & 15);
            if (OTHERS > 0) {
                const Bits others = load_words(high + at / 16 * PANEL * 4) >> (half + at % 16);
                q |= Ints(others & ((1 << OTHERS) - 1)) << 4;
            }
            use(2 * place + i % 2, as_floats(BITS == 6 ? q - 32 : q));
        }
    }
    static Vec multiply_quants(Vec sum, const Unit* x, Quants w) { return sum + *x * w; }
};

#ifdef HAS_BF16_PAIRS
// What the low bits of an index stand for in bfloat16, those above them do not count: q; or of q of 8
// bits the low four, and after these the high ones, signed, 16 times.
template <int BITS>
struct Numbers {
    alignas(64) inline static const auto table = [] {
        std::array<BFloat16, 64> all;
        for (int i = 0; i < 64; ++i) {
            const int q = BITS == 8 ? (i < 32 ? i % 16 : 16 * ((i % 16 ^ 8) - 8)) : BITS == 6 ? i - 32 : i % (1 << BITS);
            narrow(float(q), &all[i]);
        }
        return all;
    }();
};

// Pairs of bfloat16: a lane holds two neighbours, whose products are added in one instruction.
struct Pairs {
    using Stored = BFloat16;
    using Unit = uint32_t;
    static constexpr int STEP = 2;
    using Column = Unit;
    static Vec multiply(Vec sum, const Unit* rows, const Unit* columns) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(*rows)),
                                     (__m512bh)_mm512_loadu_si512(columns));
    }
    static void transpose(const BFloat16* rows, int64_t stride, int n, int D, Unit* to);
    static void interleave(const BFloat16* rows, int64_t stride, int n, int D, int width, Unit* to);
    static void copy_keys(const BFloat16* tiles, int D, Unit* to) { std::memcpy(to, tiles, BLOCK * D * sizeof(*tiles)); }
    static void copy_values(const BFloat16* tiles, int n, int D, Unit* to) {
        std::memcpy(to, tiles, (n + 1) / 2 * D * sizeof(*to));
        std::fill(to + (n + 1) / 2 * D, to + BLOCK / 2 * D, 0);
        for (int d = 0; n % 2 && d < D; ++d) to[n / 2 * D + d] &= 0xffff;  // without the second of the pair
    }
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

    using Quants = __m512i;
    template <int BITS, class Use>
    static void unpack(const uint8_t* low, const uint8_t* high, int word, Use&& use) {
        constexpr int OTHERS = BITS - 4;
        const __m512i table = _mm512_load_si512(Numbers<BITS>::table.data());
        const __m512i upper = _mm512_load_si512(Numbers<BITS>::table.data() + 32);
        const __m512i bits = _mm512_loadu_si512(low);
        __m512i others{};  // above the low four, from those of this word on
        if (BITS == 5 || BITS == 6) {
            const int at = 4 * word * OTHERS;
            others = _mm512_srl_epi16(_mm512_loadu_si512(high + at / 16 * PANEL * 4), _mm_cvtsi32_si128(at % 16));
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            __m512i index = _mm512_srli_epi16(bits, 4 * i);
            if (BITS == 8) {
                use(2 * word + i / 2, _mm512_permutexvar_epi16(index, i % 2 ? upper : table));
                continue;
            }
            if (OTHERS > 0) {
                const int from = i * OTHERS;  // to 4
                const __m512i placed = from < 4 ? _mm512_slli_epi16(others, 4 - from) : _mm512_srli_epi16(others, from - 4);
                index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), index, placed, 0xca);
            }
            if (BITS == 6) use(4 * word + i, _mm512_permutex2var_epi16(table, index, upper));
            else use(4 * word + i, _mm512_permutexvar_epi16(index, table));
        }
    }
    static Vec multiply_quants(Vec sum, const Unit* x, Quants w) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(int(*x)));
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

// Columns (steps, num_columns) of a product, as units: PANEL of them lie together, the next ones `panel`
// further on, the next step `step`. If there are `next` ones, as stored, they are fetched on the way.
template <class Op, class Number = typename Op::Unit>
struct Columns {
    const Number* at;
    int64_t step, panel = PANEL;
    const typename Op::Stored* next = nullptr;
    int64_t vector(int v) const { return v * LANES / PANEL * panel + v * LANES % PANEL; }
    void advance(int64_t units) {
        at += units;
        if (next) next += units * Op::STEP;
    }
};

// sums (M, V vectors) += rows (M, steps) x columns, all in registers but for the operands.
template <class Op, int M, int V, class Number>
inline void multiply_tile(const typename Op::Unit* rows, int64_t row_stride, Columns<Op, Number> columns,
                          int steps, float* sums, int64_t sum_stride, bool from_zero) {
    constexpr int LINE_VECTORS = std::clamp(64 / int(LANES * Op::STEP * sizeof(typename Op::Stored)), 1, PANEL / LANES);
    Vec sum[M][V];
    for (int m = 0; m < M; ++m) {
        for (int v = 0; v < V; ++v) {
            sum[m][v] = from_zero ? Vec{} : load(sums + m * sum_stride + v * LANES);
        }
    }
    for (int k = 0; k < steps; ++k, columns.advance(columns.step)) {
        if (columns.next) {
#pragma GCC unroll 4
            for (int v = 0; v < V; v += LINE_VECTORS) __builtin_prefetch(columns.next + columns.vector(v) * Op::STEP, 0, L2);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                sum[m][v] = Op::multiply(sum[m][v], rows + m * row_stride + k, columns.at + columns.vector(v));
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int v = 0; v < V; ++v) store(sums + m * sum_stride + v * LANES, sum[m][v]);
    }
}

constexpr int TILE_ROWS = 6;
// Vectors of a tile, of up to four, whose sums with M rows take at most three quarters of the registers.
constexpr int tile_vectors(int M) { return 4 * M <= REGISTERS * 3 / 4 ? 4 : 2; }

// For any number of columns that is a multiple of PANEL.
template <class Op, int M, class Number>
void multiply_rows(const typename Op::Unit* rows, int64_t row_stride, Columns<Op, Number> columns,
                   int num_columns, int steps, float* sums, bool from_zero) {
    constexpr int V = tile_vectors(M);
    auto call = [&](int v, auto tile) {
        auto some = columns;
        some.advance(columns.vector(v));
        tile(rows, row_stride, some, steps, sums + v * LANES, num_columns, from_zero);
    };
    int v = 0;
    for (; v + V <= num_columns / LANES; v += V) call(v, multiply_tile<Op, M, V, Number>);
    for (; v < num_columns / LANES; ++v) call(v, multiply_tile<Op, M, 1, Number>);
}

template <class Op, class Number>
void multiply(int M, const typename Op::Unit* rows, int64_t row_stride, Columns<Op, Number> columns,
              int num_columns, int steps, float* sums, bool from_zero) {
    auto call = [&](auto multiply) { multiply(rows, row_stride, columns, num_columns, steps, sums, from_zero); };
    switch (M) {
        case 1: return call(multiply_rows<Op, 1, Number>);
        case 2: return call(multiply_rows<Op, 2, Number>);
        case 3: return call(multiply_rows<Op, 3, Number>);
        case 4: return call(multiply_rows<Op, 4, Number>);
        case 5: return call(multiply_rows<Op, 5, Number>);
        default: return call(multiply_rows<Op, 6, Number>);
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
            for (; v + V * LANES <= num_columns; v += V * LANES, columns.advance(V * columns.panel)) {
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
    _tile_loadd(5, columns.at + i * columns.panel, 4 * columns.step);      \
    _tile_dpbf16ps(i, 4, 5);
#define FINISH(i) _tile_stored(i, sums + i * LANES, 4 * sum_stride);
        FOR_SUMS(START)
        for (int k = 0; k < steps; k += LANES, columns.advance(LANES * columns.step)) {
            for (int i = 0; columns.next && i < V * LANES; ++i) {
                __builtin_prefetch(columns.next + (i % LANES * columns.step + i / LANES * columns.panel) * Pairs::STEP);
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
template <class Op, class Number>
void multiply_packed(int M, const typename Op::Unit* rows, int steps, Columns<Op, Number> columns, int num_columns,
                     float* sums, bool from_zero) {
    if constexpr (std::is_same<Number, typename Op::Unit>::value) {
        if (MatrixUnit<Op>::ROWS) return MatrixUnit<Op>::multiply(rows, steps, columns, num_columns, steps, sums, from_zero, 0);
    }
    multiply<Op>(M, rows, steps, columns, num_columns, steps, sums, from_zero);
}

}  // namespace
