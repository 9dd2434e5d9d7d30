// The kernels of a short forward pass on a CPU: attention, linear layers, RoPE.
//
// Decoding is bound by memory, so each kernel reads weights, K and V once, as they lie, for all rows
// of the block. Row invariance: every number of a row's result is computed by the same operations in
// the same order, whatever rows stand beside it and however many threads there are. Lanes of a
// vector hold fixed elements, keys are cut into BLOCKs and PIECEs at absolute slots, and what is
// masked adds exact zeros.
//
// `build.py` compiles this file for the machine it runs on and `kernels.py` calls it. Vectors have
// 16 floats: compilers map them to whatever the processor has. Where it multiplies pairs of bfloat16
// (AVX-512 BF16) these replace the conversion to float32.
//
// Legend: B batch, S slots, K KV heads, H query heads, G = H / K, D head dim, T new tokens of a row,
// R rows of a matrix, N outputs of a linear layer, E its inputs.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <pthread.h>
#include <thread>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define HAS_BF16_PAIRS 1
#endif

namespace {

// ---- Threads -----------------------------------------------------------------------------------

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Runs tasks 0..n-1 on all threads, the caller's included; whoever is free takes the next one. A
// worker that finds nothing to do spins for a moment, since the next kernel of a pass follows
// within microseconds, and then sleeps: waiting threads leave the cores to others.
class Pool {
public:
    static Pool& get() { return *the_one(); }

    void resize(int num_threads) { num_wanted = std::max(1, num_threads); }

    int num_threads() const { return num_wanted; }

    // `num_numbers`: how many are read in all. For few, the caller alone is faster than waking.
    void run(int64_t n, int64_t num_numbers, const std::function<void(int64_t)>& task) {
        std::lock_guard<std::mutex> only_one(calls);
        if (num_wanted == 1 || n == 1 || num_numbers < WORTH_WAKING) {
            for (int64_t i = 0; i < n; ++i) task(i);
            return;
        }
        num_needed = num_wanted - 1;
        while (num_workers < num_needed) {
            std::thread(&Pool::work, this, num_workers++, round.load()).detach();
        }
        current = &task;
        num_tasks = n;
        next.store(0, std::memory_order_relaxed);
        num_busy.store(num_workers, std::memory_order_relaxed);
        round.fetch_add(1, std::memory_order_seq_cst);
        if (num_sleeping.load(std::memory_order_seq_cst) > 0) {
            std::lock_guard<std::mutex> hold(sleep);
            wake.notify_all();
        }
        take_tasks();
        for (int spins = 0; num_busy.load(std::memory_order_acquire) > 0; ++spins) {
            if (spins < SPINS) pause_cpu();
            else std::this_thread::yield();
        }
        num_workers = std::min(num_workers, num_needed);
    }

private:
    static Pool*& the_one() {
        static Pool* pool = [] {
            // A forked process has none of the threads.
            pthread_atfork(nullptr, nullptr, [] {
                const int num_threads = get().num_threads();
                the_one() = new Pool;
                get().resize(num_threads);
            });
            return new Pool;  // never destroyed: its threads end with the process
        }();
        return pool;
    }

    static constexpr int64_t WORTH_WAKING = 32768;
    static constexpr int SPINS = 4000;  // some 50 to 100 microseconds

    void take_tasks() {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) {
            (*current)(i);
        }
    }

    void work(int number, uint64_t seen) {
        for (;; ++seen) {
            for (int i = 0; i < SPINS && round.load(std::memory_order_acquire) == seen; ++i) {
                pause_cpu();
            }
            if (round.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> hold(sleep);
                num_sleeping.fetch_add(1, std::memory_order_seq_cst);
                wake.wait(hold, [&] { return round.load(std::memory_order_seq_cst) != seen; });
                num_sleeping.fetch_sub(1, std::memory_order_seq_cst);
            }
            const bool is_needed = number < num_needed;
            if (is_needed) take_tasks();
            num_busy.fetch_sub(1, std::memory_order_release);
            if (!is_needed) return;
        }
    }

    std::mutex calls, sleep;
    std::condition_variable wake;
    const std::function<void(int64_t)>* current = nullptr;
    int64_t num_tasks = 0;
    std::atomic<int> num_wanted{1};
    int num_workers = 0, num_needed = 0;
    alignas(64) std::atomic<uint64_t> round{0};
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int> num_busy{0};
    alignas(64) std::atomic<int> num_sleeping{0};
};

// ---- Numbers -----------------------------------------------------------------------------------

typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));
constexpr int LANES = 16;

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

inline Vec load(const BFloat16* p) {
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Bits) << 16);
}

inline Vec load(const Float16* p) {
    Bits half = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Bits);
    Vec scaled = (Vec)((half & 0x7fff) << 13) * 0x1p112f;  // the exponent of float32 has another bias
    Bits infinite = (Bits)((half & 0x7c00) == 0x7c00) & 0x7f800000;
    return (Vec)((Bits)scaled | infinite | ((half & 0x8000) << 16));
}

inline Vec splat(float x) { return Vec{} + x; }

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
inline float widen(Float16 x) {
    Float16 all[LANES] = {x};
    return load(all)[0];
}

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bool is_nan = x != x;
    to->bits = is_nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, Float16* to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= 0x47800000) {  // at least 65536, infinite or NaN
        to->bits = uint16_t(sign | (rest > 0x7f800000 ? 0x7e00 : 0x7c00));
    } else if (rest < 0x38800000) {  // denormal: adding 0.5 shifts the fraction where it belongs
        float shifted = std::fabs(x) + 0.5f;
        std::memcpy(&bits, &shifted, 4);
        to->bits = uint16_t(sign | (bits - 0x3f000000));
    } else {
        to->bits = uint16_t(sign | ((rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13));
    }
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// The order in which 16 lanes are added is the same everywhere: halves, again and again.
inline float sum_lanes(Vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
    }
    return x[0];
}

inline float max_lanes(Vec v) {
#ifdef __AVX512F__
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) x[i] = std::max(x[i], x[i + width]);
    }
    return x[0];
}

inline bool any_above(Vec v, float limit) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#endif
    return max_lanes(v) > limit;
}

// 2^x, with a relative error of 1e-7; exactly 0 below -126, so also for minus infinity.
// NaN stays NaN: damaged weights must not pass for a text.
inline Vec power_of_2(Vec x) {
    Vec clamped = x < -126.0f ? splat(-126.0f) : x;
    Vec shifted = clamped + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    Vec r = clamped - (shifted - 12582912.0f);  // from -0.5 to 0.5; polynomial of Cephes' exp2f
    Vec e = splat(1.535336188319500e-4f) * r + 1.339887440266574e-3f;
    e = e * r + 9.618437357674640e-3f;
    e = e * r + 5.550332471162809e-2f;
    e = e * r + 2.402264791363012e-1f;
    e = e * r + 6.931472028550421e-1f;
    e = e * r + 1.0f;
    Vec power = (Vec)(((Ints)shifted + 127) << 23);
    return x < -126.0f ? Vec{} : e * power;
}

constexpr float LOG2_E = 1.44269504f;

constexpr int BLOCK = 64;  // slots whose scores are computed at once

// ---- Operands: a type of numbers as the inner loops multiply it -----------------------------------

// Plain: numbers are widened to float32, one per lane and step.
template <class T>
struct Widened {
    using Stored = T;
    using Unit = float;           // what one row contributes to one step
    static constexpr int STEP = 1;  // numbers per lane and step
    static Vec multiply(Vec sum, const Unit* rows, const Unit* columns) {
        return sum + *rows * load(columns);
    }
    // BLOCK rows of D numbers as (D, BLOCK): lanes are rows. Rows behind n are zeros, never read.
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
    template <int BITS>
    static void unpack(const uint8_t* packed, Quants w[2]) {
        typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
        typedef int8_t Signed __attribute__((vector_size(16), aligned(1), may_alias));
        for (int i = 0; i < 4; ++i) {
            Vec& to = i % 2 ? w[i / 2].high : w[i / 2].low;
            if (BITS == 4) {
                const Ints two = __builtin_convertvector(*(const Bytes*)(packed + i % 2 * LANES), Ints);
                to = __builtin_convertvector(i < 2 ? two & 15 : two >> 4, Vec);
            } else {
                to = __builtin_convertvector(*(const Signed*)(packed + i * LANES), Vec);
            }
        }
    }
    static Vec dot_quants(const Quants& w, const Unit* x) {
        return w.low * load(x) + w.high * load(x + LANES);
    }
};

#ifdef HAS_BF16_PAIRS
// Pairs of bfloat16: a lane holds two neighbours, whose products are added in one instruction.
struct Pairs {
    using Stored = BFloat16;
    using Unit = uint32_t;
    static constexpr int STEP = 2;
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
    static void unpack(const uint8_t* packed, Quants w[2]) {
        if (BITS == 4) {
            // bfloat16 of 0 to 15, twice: the fifth bit of an index is the other half's.
            alignas(64) static const uint16_t NUMBERS[32] = {
                0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170,
                0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};
            const __m512i numbers = _mm512_load_si512(NUMBERS);
            const __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)packed));
            w[0] = (__m512bh)_mm512_permutexvar_epi16(both, numbers);
            w[1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), numbers);
            return;
        }
        for (int half = 0; half < 2; ++half) {
            const __m128i* from = (const __m128i*)(packed + half * 32);
            __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
            __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
            w[half] = _mm512_cvtne2ps_pbh(high, low);
        }
    }
    static Vec dot_quants(Quants w, const Unit* x) {
        return (Vec)_mm512_dpbf16_ps(_mm512_setzero_ps(), w, (__m512bh)_mm512_loadu_si512(x));
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

// sums (M, 16 V) += rows (M, steps) x columns (steps, 16 V), all in registers but for the operands.
template <class Op, int M, int V>
inline void multiply_tile(const typename Op::Unit* rows, int64_t row_stride,
                          const typename Op::Unit* columns, int64_t column_stride, int steps,
                          float* sums, int64_t sum_stride, bool from_zero) {
    Vec sum[M][V];
    for (int m = 0; m < M; ++m) {
        for (int v = 0; v < V; ++v) {
            sum[m][v] = from_zero ? Vec{} : load(sums + m * sum_stride + v * LANES);
        }
    }
    for (int k = 0; k < steps; ++k) {
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                sum[m][v] = Op::multiply(sum[m][v], rows + m * row_stride + k,
                                         columns + k * column_stride + v * LANES);
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int v = 0; v < V; ++v) store(sums + m * sum_stride + v * LANES, sum[m][v]);
    }
}

constexpr int TILE_ROWS = 6;  // times 4 vectors: 24 sums in registers

template <class Op, int V>
void multiply_columns(int M, const typename Op::Unit* rows, int64_t row_stride,
                      const typename Op::Unit* columns, int64_t column_stride, int steps, float* sums,
                      int64_t sum_stride, bool from_zero) {
    auto call = [&](auto tile) {
        tile(rows, row_stride, columns, column_stride, steps, sums, sum_stride, from_zero);
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
void multiply(int M, const typename Op::Unit* rows, int64_t row_stride,
              const typename Op::Unit* columns, int num_columns, int steps, float* sums,
              bool from_zero) {
    int v = 0;
    for (; v + 4 * LANES <= num_columns; v += 4 * LANES) {
        multiply_columns<Op, 4>(M, rows, row_stride, columns + v, num_columns, steps, sums + v,
                                num_columns, from_zero);
    }
    for (; v < num_columns; v += LANES) {
        multiply_columns<Op, 1>(M, rows, row_stride, columns + v, num_columns, steps, sums + v,
                                num_columns, from_zero);
    }
}

// ---- Attention -----------------------------------------------------------------------------------

constexpr int PIECE = 512;   // slots of a task, for short blocks: a multiple of BLOCK
constexpr int TILE = 192;    // rows of a task
constexpr int MAX_WIDTH = 1024;  // largest head dim
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct AttentionArguments {
    const void *q, *keys, *values;
    void* out;                // (B, T, H, D)
    const int64_t* lengths;   // prefix per sequence
    const uint8_t* rule;      // (T, T), or null: causal
    int64_t B, T, H, K, D;
    int64_t q_batch, q_token, q_head;         // strides, in numbers
    int64_t kv_batch, kv_head, kv_slot;
};

template <class Number>
struct Scratch {  // 64-byte aligned memory of a thread, kept from call to call
    Number* get(size_t n) {
        if (memory.size() < n + 64 / sizeof(Number)) memory.resize(n + 64 / sizeof(Number));
        auto address = reinterpret_cast<uintptr_t>(memory.data());
        return reinterpret_cast<Number*>((address + 63) / 64 * 64);
    }
    std::vector<Number> memory;
};

// What a task leaves for a merge: sums (rows, width), scores near the largest that they are relative
// to (rows), totals (rows, LANES).
struct Part {
    float *sums, *largest, *totals;
    static int64_t num_floats(int64_t rows, int64_t width) { return rows * (width + 1 + LANES); }
    Part(float* memory, int64_t rows, int64_t width)
        : sums(memory), largest(memory + rows * width), totals(largest + rows) {}
};

// The queries of rows [first, first + R) of one KV head as operands, padded with zeros. Row r is token
// r / G, head r % G.
template <class Op>
void copy_queries(const AttentionArguments& a, int64_t b, int64_t k, int64_t first, int R, int width,
                  typename Op::Unit* to) {
    const int64_t G = a.H / a.K;
    alignas(64) float wide[MAX_WIDTH] = {};
    for (int64_t row = first; row < first + R; ++row, to += width / Op::STEP) {
        const auto* q = static_cast<const typename Op::Stored*>(a.q) + b * a.q_batch +
                        row / G * a.q_token + (k * G + row % G) * a.q_head;
        for (int64_t d = 0; d < a.D; ++d) wide[d] = widen(q[d]);
        Op::from_floats(wide, width, to);
    }
}

// Hides, in the scores of BLOCK slots from `s` on, those that token t does not see.
inline void mask_scores(const AttentionArguments& a, int64_t b, int64_t t, int64_t s, int64_t end,
                        float* scores) {
    const int64_t block = a.lengths[b] - s;  // where the block's tokens begin
    const int64_t first = std::max<int64_t>(a.rule ? block : block + t + 1, 0);
    for (int64_t j = first; j < BLOCK; ++j) {
        const bool is_seen = a.rule && s + j < end && a.rule[t * a.T + j - block];
        if (!is_seen) scores[j] = MINUS_INFINITY;
    }
}

constexpr float SLACK = 8.0f;  // powers of 2

// Turns BLOCK scores of row r into exponentials (as powers of 2) of what they are above a number near
// the largest. Where one is far above that of the row so far, rescales what the row has summed.
template <class Op>
void update_softmax(float* scores, float scale, const Part& part, int64_t r, int width) {
    Vec top = load(scores);
    for (int i = LANES; i < BLOCK; i += LANES) top = maximum(top, load(scores + i));
    const float old = part.largest[r];
    const float now = any_above(top * scale, old + SLACK) ? max_lanes(top) * scale : old;
    // Where nothing was seen so far, everything stays 0.
    const float subtracted = now == MINUS_INFINITY ? 0.0f : now;
    Vec total = load(part.totals + r * LANES);
    if (now > old) {
        const float shrink = power_of_2(splat(old - now))[0];
        total *= shrink;
        for (int d = 0; d < width; d += LANES) {
            float* sums = part.sums + r * width + d;
            store(sums, load(sums) * shrink);
        }
        part.largest[r] = now;
    }
    for (int i = 0; i < BLOCK; i += LANES) {
        const Vec e = Op::weight(load(scores + i) * scale - subtracted);
        store(scores + i, e);
        total += e;
    }
    store(part.totals + r * LANES, total);
}

// Rows [first, first + R) of one KV head over the slots [begin, end).
template <class Op>
void attend_slots(const AttentionArguments& a, int64_t b, int64_t k, int64_t first, int R,
                  int64_t begin, int64_t end, int width, const Part& part) {
    using T = typename Op::Stored;
    using Unit = typename Op::Unit;
    static thread_local Scratch<Unit> memory;
    const int steps = width / Op::STEP, prob_steps = BLOCK / Op::STEP;
    const int G = int(a.H / a.K), D = int(a.D);
    const float scale = LOG2_E / std::sqrt(float(D));
    const size_t block_units = size_t(steps) * BLOCK;
    Unit* block_keys = memory.get(2 * block_units + size_t(R) * steps);
    Unit *block_values = block_keys + block_units, *queries = block_values + block_units;
    copy_queries<Op>(a, b, k, first, R, width, queries);
    if (width > D) std::memset(block_keys, 0, 2 * block_units * sizeof(Unit));  // what pads a head
    std::fill(part.sums, part.sums + int64_t(R) * width, 0.0f);
    std::fill(part.largest, part.largest + R, MINUS_INFINITY);
    std::fill(part.totals, part.totals + R * LANES, 0.0f);
    for (int64_t s = begin; s < end; s += BLOCK) {
        const int n = int(std::min<int64_t>(BLOCK, end - s));
        const int64_t at = b * a.kv_batch + k * a.kv_head + s * a.kv_slot;
        Op::transpose(static_cast<const T*>(a.keys) + at, a.kv_slot, n, D, block_keys);
        Op::interleave(static_cast<const T*>(a.values) + at, a.kv_slot, n, D, width, block_values);
        for (int r = 0; r < R; r += TILE_ROWS) {
            const int M = std::min(TILE_ROWS, R - r);
            alignas(64) float scores[TILE_ROWS * BLOCK];
            alignas(64) Unit probs[TILE_ROWS * BLOCK];
            multiply<Op>(M, queries + r * steps, steps, block_keys, BLOCK, steps, scores, true);
            for (int m = 0; m < M; ++m) {
                float* row = scores + m * BLOCK;
                if (s + BLOCK > a.lengths[b]) mask_scores(a, b, (first + r + m) / G, s, end, row);
                update_softmax<Op>(row, scale, part, r + m, width);
                Op::from_floats(row, BLOCK, probs + m * prob_steps);
            }
            multiply<Op>(M, probs, prob_steps, block_values, width, prob_steps,
                         part.sums + int64_t(r) * width, false);
        }
    }
}

// A short block is cut in pieces along its keys, a long one in tiles along its rows only.
template <class Op>
void attention(const AttentionArguments& a, bool is_short) {
    using T = typename Op::Stored;
    // A head is padded to whole vectors of pairs.
    const int64_t G = a.H / a.K, width = (a.D + 2 * LANES - 1) / (2 * LANES) * 2 * LANES;
    const int64_t rows = a.T * G, tile_rows = std::min<int64_t>(rows, TILE);
    const int64_t num_tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t longest = *std::max_element(a.lengths, a.lengths + a.B) + a.T;
    const int64_t num_pieces = is_short ? (longest + PIECE - 1) / PIECE : 1;
    const int64_t num_groups = a.B * a.K * num_tiles;
    const int64_t part_floats = Part::num_floats(tile_rows, width);
    static thread_local Scratch<float> part_memory;
    float* parts = part_memory.get(num_pieces > 1 ? num_groups * num_pieces * part_floats : 0);
    std::vector<std::atomic<int>> num_done(num_groups);
    for (auto& counter : num_done) counter = 0;

    auto finish = [&](int64_t b, int64_t k, int64_t row, const float* sums, float total) {
        T* out = static_cast<T*>(a.out) + ((b * a.T + row / G) * a.H + k * G + row % G) * a.D;
        for (int64_t d = 0; d < a.D; ++d) narrow(sums[d] / total, out + d);
    };
    auto merge = [&](int64_t b, int64_t k, int64_t row, const float* memory, int64_t r) {
        float merged[MAX_WIDTH] = {}, total = 0.0f, top = MINUS_INFINITY;
        auto part = [&](int64_t p) {
            return Part(const_cast<float*>(memory) + p * part_floats, tile_rows, width);
        };
        for (int64_t p = 0; p < num_pieces; ++p) top = std::max(top, part(p).largest[r]);
        for (int64_t p = 0; p < num_pieces; ++p) {
            const float weight = power_of_2(splat(part(p).largest[r] - top))[0];
            total += sum_lanes(load(part(p).totals + r * LANES)) * weight;
            const float* sums = part(p).sums + r * width;
            for (int64_t d = 0; d < width; ++d) merged[d] += sums[d] * weight;
        }
        finish(b, k, row, merged, total);
    };
    const int64_t num_numbers = a.B * a.K * longest * a.D * a.T;
    Pool::get().run(num_groups * num_pieces, num_numbers, [&](int64_t task) {
        const int64_t group = task / num_pieces, piece = task % num_pieces;
        // Later tiles of a long block see more, so they come first: nobody waits for them.
        const int64_t tile = num_tiles - 1 - group % num_tiles, k = group / num_tiles % a.K;
        const int64_t b = group / num_tiles / a.K, first = tile * tile_rows;
        const int R = int(std::min(tile_rows, rows - first));
        static thread_local Scratch<float> own_memory;
        float* memory = num_pieces > 1 ? parts + task * part_floats : own_memory.get(part_floats);
        const Part part(memory, tile_rows, width);
        const int64_t last_token = a.rule ? a.T - 1 : (first + R - 1) / G;
        const int64_t visible = a.lengths[b] + last_token + 1, begin = piece * PIECE;
        const int64_t end = is_short ? std::min(visible, begin + PIECE) : visible;
        attend_slots<Op>(a, b, k, first, R, begin, end, int(width), part);
        if (num_pieces == 1) {
            for (int r = 0; r < R; ++r) {
                finish(b, k, first + r, part.sums + r * width, sum_lanes(load(part.totals + r * LANES)));
            }
        } else if (num_done[group].fetch_add(1, std::memory_order_acq_rel) + 1 == num_pieces) {
            // The last to finish merges, in the order of the pieces.
            for (int r = 0; r < R; ++r) {
                merge(b, k, first + r, parts + group * num_pieces * part_floats, r);
            }
        }
    });
}

// ---- Linear layers -------------------------------------------------------------------------------

// Weights (N, E) in one of three forms, by rows: plain numbers; or groups of 32 numbers, number =
// scale q + offset, with q of 4 or 8 bits. A quantized row holds the q of all groups, padded to whole
// pairs of groups; the groups' scales and, in 4 bits, their offsets, as float16. In 4 bits byte i
// of 32 holds q number i of a group in its low half, and of the next group in its high one.
struct LinearArguments {
    const void* x;            // (R, E)
    const void* norm;         // (E): x passes through an RMSNorm first; or null
    const void* weights;
    const void* bias;         // (N) or null
    const void* residual;     // (R, outputs) or null, added last
    void* out;                // (R, outputs)
    int64_t R, E, N;
    int64_t is_gated;         // outputs N / 2: silu(first half) * second half
    int64_t is_wide;          // out is float32, whatever x is
    double eps;
};

constexpr int GROUP = 32;     // numbers that share a scale
constexpr int64_t TASKS_PER_THREAD = 8;  // so that whoever is late holds nobody up for long
constexpr int64_t PREFETCH = 4096;  // bytes
constexpr int OUTPUTS = 4;    // outputs of a tile, with TILE_ROWS rows: 24 sums in registers

// What `dots` multiplies weights with: rows of x, padded with zeros to whole steps of 64 numbers.
template <class Unit>
struct Rows {
    const Unit* x;
    const float* group_sums;  // (R, groups), each row padded to whole vectors
    int64_t stride, group_stride;
};

// How many bytes ahead each row of a tile is fetched, in all about PREFETCH: further on in the row,
// or, where rows are short, in one of the next tiles.
inline int64_t prefetch_distance(int64_t row_bytes) {
    const int64_t tile = OUTPUTS * row_bytes;
    return row_bytes > PREFETCH / 2 ? PREFETCH / OUTPUTS : (PREFETCH + tile - 1) / tile * tile;
}

// sums (M, OUTPUTS): rows times weights, each in one vector of lanes.
#define FOR_TILE(M)                       \
    _Pragma("GCC unroll 8")               \
    for (int m = 0; m < M; ++m)           \
        _Pragma("GCC unroll 8")           \
        for (int o = 0; o < OUTPUTS; ++o)

// Plain weights.
template <class Op>
struct Plain {
    using Operand = Op;
    static constexpr bool HAS_OFFSETS = false;
    using T = typename Op::Stored;
    const T* weights;
    int64_t E;
    explicit Plain(const LinearArguments& a) : weights(static_cast<const T*>(a.weights)), E(a.E) {}

    template <int M>
    void dots(const Rows<typename Op::Unit>& rows, int64_t first, int count, Vec sum[][OUTPUTS]) const {
        constexpr int WIDTH = LANES * Op::STEP;
        const T* w[OUTPUTS];
        for (int o = 0; o < OUTPUTS; ++o) w[o] = weights + (first + std::min(o, count - 1)) * E;
        Vec local[M][OUTPUTS] = {};
        const int64_t ahead = prefetch_distance(E * int64_t(sizeof(T))) / int64_t(sizeof(T));
        int64_t e = 0;
        for (; e + WIDTH <= E; e += WIDTH) {
#pragma GCC unroll 8
            for (int o = 0; o < OUTPUTS; ++o) __builtin_prefetch(w[o] + e + ahead);
            FOR_TILE(M) local[m][o] = Op::dot(local[m][o], w[o] + e, rows.x + m * rows.stride + e / Op::STEP);
        }
        if (e < E) {
            T rest[OUTPUTS][WIDTH] = {};
            for (int o = 0; o < OUTPUTS; ++o) std::copy(w[o] + e, w[o] + E, rest[o]);
            FOR_TILE(M) local[m][o] = Op::dot(local[m][o], rest[o], rows.x + m * rows.stride + e / Op::STEP);
        }
        FOR_TILE(M) sum[m][o] = local[m][o];
    }
};

// Numbers of 4 or 8 bits.
template <class Op, int BITS>
struct Quantized {
    using Operand = Op;
    static constexpr bool HAS_OFFSETS = BITS == 4;
    const uint8_t* weights;
    int64_t groups, quant_bytes, row_bytes;
    explicit Quantized(const LinearArguments& a)
        : weights(static_cast<const uint8_t*>(a.weights)), groups(a.E / GROUP),
          quant_bytes((a.E + 63) / 64 * 64 * BITS / 8),
          row_bytes(quant_bytes + groups * 2 * (BITS == 4 ? 2 : 1)) {}

    static Vec some(const Float16* p, int64_t n) {
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
        const __mmask16 known = n >= LANES ? 0xffff : (1u << n) - 1;
        return (Vec)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(known, p));
#endif
        if (n >= LANES) return load(p);
        Float16 padded[LANES] = {};
        std::copy(p, p + n, padded);
        return load(padded);
    }

    template <int M>
    void dots(const Rows<typename Op::Unit>& rows, int64_t first, int count, Vec sum[][OUTPUTS]) const {
        Vec local[M][OUTPUTS] = {};
        const uint8_t* row[OUTPUTS];
        for (int o = 0; o < OUTPUTS; ++o) row[o] = weights + (first + std::min(o, count - 1)) * row_bytes;
        const int64_t ahead = prefetch_distance(row_bytes);
        for (int64_t g = 0; g < groups; g += LANES) {
            const int64_t here = std::min<int64_t>(LANES, groups - g);
            alignas(64) float scale[OUTPUTS][LANES];
#pragma GCC unroll 8
            for (int o = 0; o < OUTPUTS; ++o) {
                const auto* scales = reinterpret_cast<const Float16*>(row[o] + quant_bytes) + g;
                store(scale[o], some(scales, here));
                if (BITS != 4) continue;
                const Vec offset = some(scales + groups, here);
#pragma GCC unroll 8
                for (int m = 0; m < M; ++m) {
                    local[m][o] += offset * load(rows.group_sums + m * rows.group_stride + g);
                }
            }
            for (int64_t i = 0; i < here; i += 2) {
                const auto* x = rows.x + (g + i) * GROUP / Op::STEP;
#pragma GCC unroll 8
                for (int o = 0; o < OUTPUTS; ++o) {
                    const uint8_t* packed = row[o] + (g + i) * GROUP * BITS / 8;
                    __builtin_prefetch(packed + ahead);
                    typename Op::Quants w[2];
                    Op::template unpack<BITS>(packed, w);
#pragma GCC unroll 8
                    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
                        for (int half = 0; half < 2; ++half) {
                            Vec part = Op::dot_quants(w[half], x + m * rows.stride + half * GROUP / Op::STEP);
                            local[m][o] += part * scale[o][i + half];  // behind the last group: 0
                        }
                    }
                }
            }
        }
        FOR_TILE(M) sum[m][o] = local[m][o];
    }
};

template <class Weights, int M>
void linear_tile(const Weights& w, const Rows<typename Weights::Operand::Unit>& rows, int64_t first,
                 int count, float* out, int64_t stride) {
    Vec sum[M][OUTPUTS];
    w.template dots<M>(rows, first, count, sum);
    for (int m = 0; m < M; ++m) {
        for (int o = 0; o < count; ++o) out[m * stride + o] = sum_lanes(sum[m][o]);
    }
}

template <class Weights>
void linear_rows(const Weights& w, const Rows<typename Weights::Operand::Unit>& rows, int M,
                 int64_t first, int count, float* out, int64_t stride) {
    auto call = [&](auto tile) { tile(w, rows, first, count, out, stride); };
    switch (M) {
        case 1: return call(linear_tile<Weights, 1>);
        case 2: return call(linear_tile<Weights, 2>);
        case 3: return call(linear_tile<Weights, 3>);
        case 4: return call(linear_tile<Weights, 4>);
        case 5: return call(linear_tile<Weights, 5>);
        default: return call(linear_tile<Weights, 6>);
    }
}

// out (R, count) = x times `count` rows of the weights from `first` on.
template <class Weights>
void linear_chunk(const Weights& w, Rows<typename Weights::Operand::Unit> rows, int64_t R,
                  int64_t first, int64_t count, float* out, int64_t stride) {
    for (int64_t o = 0; o < count; o += OUTPUTS) {
        for (int64_t r = 0; r < R; r += TILE_ROWS) {
            auto some = rows;
            some.x += r * rows.stride;
            some.group_sums += r * rows.group_stride;
            linear_rows(w, some, int(std::min<int64_t>(TILE_ROWS, R - r)), first + o,
                        int(std::min<int64_t>(OUTPUTS, count - o)), out + r * stride + o, stride);
        }
    }
}

inline Vec silu(Vec x) {
    const Vec e = power_of_2((x > 0.0f ? -x : x) * LOG2_E);
    return x * (x > 0.0f ? splat(1.0f) : e) / (e + 1.0f);
}

// Rows of x as operands, behind an RMSNorm if there is one, and the sums of their groups.
template <class Op>
Rows<typename Op::Unit> prepare_rows(const LinearArguments& a, bool has_offsets) {
    using T = typename Op::Stored;
    static thread_local Scratch<typename Op::Unit> row_memory;
    static thread_local Scratch<float> wide_memory, sum_memory;
    const int64_t padded = (a.E + 63) / 64 * 64, stride = padded / Op::STEP;
    const int64_t groups = padded / GROUP, group_stride = (groups + LANES - 1) / LANES * LANES;
    auto* x = row_memory.get(a.R * stride);
    float *wide = wide_memory.get(padded), *sums = sum_memory.get(a.R * group_stride);
    std::fill(sums, sums + a.R * group_stride, 0.0f);
    for (int64_t r = 0; r < a.R; ++r) {
        const T* from = static_cast<const T*>(a.x) + r * a.E;
        std::fill(wide, wide + padded, 0.0f);
        for (int64_t e = 0; e < a.E; ++e) wide[e] = widen(from[e]);
        if (a.norm != nullptr) {
            const T* weight = static_cast<const T*>(a.norm);
            Vec squares{};
            for (int64_t e = 0; e < padded; e += LANES) squares += load(wide + e) * load(wide + e);
            const float factor = 1.0f / std::sqrt(sum_lanes(squares) / float(a.E) + float(a.eps));
            for (int64_t e = 0; e < a.E; ++e) wide[e] = wide[e] * factor * widen(weight[e]);
        }
        Op::from_floats(wide, int(padded), x + r * stride);
        if (!has_offsets) continue;
        Op::to_floats(x + r * stride, int(padded), wide);  // as rounded
        for (int64_t g = 0; g < groups; ++g) {
            sums[r * group_stride + g] = sum_lanes(load(wide + g * GROUP) + load(wide + g * GROUP + LANES));
        }
    }
    return {x, sums, stride, group_stride};
}

template <class Weights>
void linear(const LinearArguments& a) {
    using Op = typename Weights::Operand;
    using T = typename Op::Stored;
    const Weights weights(a);
    const auto rows = prepare_rows<Op>(a, Weights::HAS_OFFSETS);
    const int64_t outputs = a.is_gated ? a.N / 2 : a.N;
    constexpr int64_t CHUNK = LANES;  // outputs that are finished together
    const int64_t num_chunks = (outputs + CHUNK - 1) / CHUNK;
    const int64_t per_task =
        std::max<int64_t>(1, num_chunks / (TASKS_PER_THREAD * Pool::get().num_threads()));
    Pool::get().run((num_chunks + per_task - 1) / per_task, a.N * a.E, [&](int64_t task) {
        static thread_local Scratch<float> memory;
        float *sums = memory.get(2 * a.R * CHUNK), *gates = sums + a.R * CHUNK;
        const int64_t last = std::min(num_chunks, (task + 1) * per_task);
        for (int64_t chunk = task * per_task; chunk < last; ++chunk) {
            const int64_t first = chunk * CHUNK, count = std::min(CHUNK, outputs - first);
            linear_chunk(weights, rows, a.R, first, count, a.is_gated ? gates : sums, CHUNK);
            if (a.is_gated) {
                linear_chunk(weights, rows, a.R, outputs + first, count, sums, CHUNK);
                for (int64_t i = 0; i < a.R * CHUNK; i += LANES) {
                    store(sums + i, silu(load(gates + i)) * load(sums + i));
                }
            }
            for (int64_t r = 0; r < a.R; ++r) {
                for (int64_t i = 0; i < count; ++i) {
                    const int64_t at = r * outputs + first + i;
                    float y = sums[r * CHUNK + i];
                    if (a.bias) y += widen(static_cast<const T*>(a.bias)[first + i]);
                    if (a.residual) y += widen(static_cast<const T*>(a.residual)[at]);
                    if (a.is_wide) static_cast<float*>(a.out)[at] = y;
                    else narrow(y, static_cast<T*>(a.out) + at);
                }
            }
        }
    });
}

template <class Op>
void linear_of(int bits, const LinearArguments& a) {
    if (bits == 4) linear<Quantized<Op, 4>>(a);
    else if (bits == 8) linear<Quantized<Op, 8>>(a);
    else linear<Plain<Op>>(a);
}

// ---- RoPE ----------------------------------------------------------------------------------------

// One head: (x1, x2) cos + (x2, x1) sin, where the sine is negative in the first half.
template <class T>
inline void rotate_head(const T* x, const float* cos, const float* sin, T* out, int64_t D) {
    const int64_t half = D / 2;
    for (int64_t d = 0; d < half; ++d) {
        const float first = widen(x[d]), second = widen(x[half + d]);
        narrow(first * cos[d] + second * sin[d], out + d);
        narrow(second * cos[half + d] + first * sin[half + d], out + half + d);
    }
}

// One head through an RMSNorm, in place.
template <class T>
inline void norm_head(T* x, const T* weight, double eps, int64_t D) {
    float sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += widen(x[d]) * widen(x[d]);
    const float scale = 1 / std::sqrt(sum / D + float(eps));
    for (int64_t d = 0; d < D; ++d) narrow(widen(x[d]) * scale * widen(weight[d]), x + d);
}

// Rotates the first `heads` of each row (total heads, D): out (R, heads, D); cos and sin (R, D).
template <class T>
void rotate(const T* x, const float* cos, const float* sin, T* out, int64_t R, int64_t total,
            int64_t heads, int64_t D) {
    for (int64_t r = 0; r < R; ++r, cos += D, sin += D) {
        for (int64_t h = 0; h < heads; ++h) {
            rotate_head(x + (r * total + h) * D, cos, sin, out + (r * heads + h) * D, D);
        }
    }
}

// ---- A pass --------------------------------------------------------------------------------------

struct Matrix {
    const void *weights, *bias;
    int64_t N, E, bits;       // as in `LinearArguments`
};

struct LayerWeights {
    const void *input_norm, *post_norm;
    const void *q_norm, *k_norm;  // (D): of every head of q and of k before RoPE; or null
    Matrix qkv, o, gate_up, down;
};

struct PassArguments {
    const LayerWeights* layers;
    void* x;                  // (R, E) with R = B T: the residual stream, in place
    const float *cos, *sin;   // (R, D)
    void *keys, *values;      // of the cache, all layers
    void* raw_keys;           // alike, for keys before RoPE; or null
    void* queries;            // (L, B, W, H, D) for the rotated queries of the last W tokens; or null
    const int64_t* lengths;   // prefix per sequence
    const uint8_t* rule;      // (T, T), or null: causal
    int64_t L, B, T, W, E, H, K, D;
    int64_t kv_layer, kv_batch, kv_head, kv_slot;  // strides, in numbers
    double eps;
    double* seconds;          // of linear layers and of attention, added up; or null
};

// Queries and keys of a layer turned by their positions, K and V written into the cache.
template <class T>
void rotate_and_write(const PassArguments& p, int64_t layer, T* qkv, T* queries) {
    const T *q_norm = static_cast<const T*>(p.layers[layer].q_norm);
    const T *k_norm = static_cast<const T*>(p.layers[layer].k_norm);
    const int64_t D = p.D, width = (p.H + 2 * p.K) * D;
    for (int64_t row = 0; row < p.B * p.T; ++row, qkv += width) {
        const int64_t b = row / p.T, t = row % p.T;
        const float *cos = p.cos + row * D, *sin = p.sin + row * D;
        for (int64_t h = 0; q_norm && h < p.H + p.K; ++h) {
            norm_head(qkv + h * D, h < p.H ? q_norm : k_norm, p.eps, D);
        }
        T* q = queries + row * p.H * D;
        for (int64_t h = 0; h < p.H; ++h) rotate_head(qkv + h * D, cos, sin, q + h * D, D);
        if (p.queries && t + p.W >= p.T) {
            const int64_t place = (layer * p.B + b) * p.W + t - std::max<int64_t>(p.T - p.W, 0);
            std::copy(q, q + p.H * D, static_cast<T*>(p.queries) + place * p.H * D);
        }
        for (int64_t k = 0; k < p.K; ++k) {
            const T *key = qkv + (p.H + k) * D, *value = key + p.K * D;
            const int64_t at = layer * p.kv_layer + b * p.kv_batch + k * p.kv_head +
                               (p.lengths[b] + t) * p.kv_slot;
            rotate_head(key, cos, sin, static_cast<T*>(p.keys) + at, D);
            std::copy(value, value + D, static_cast<T*>(p.values) + at);
            if (p.raw_keys) std::copy(key, key + D, static_cast<T*>(p.raw_keys) + at);
        }
    }
}

// All layers of a model over a short block.
template <class Op>
void pass(const PassArguments& p) {
    using T = typename Op::Stored;
    static thread_local Scratch<T> memory;
    const int64_t R = p.B * p.T, width = (p.H + 2 * p.K) * p.D, heads = p.H * p.D;
    T* qkv = memory.get(R * (width + 2 * heads + p.layers[0].down.E));
    T *queries = qkv + R * width, *mixed = queries + R * heads, *inner = mixed + R * heads;
    auto timed = [&](int part, auto&& work) {
        if (p.seconds == nullptr) return work();
        const auto started = std::chrono::steady_clock::now();
        work();
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
        p.seconds[part] += taken.count();
    };
    auto project = [&](const void* x, const void* norm, const Matrix& m, const void* residual,
                       void* out, bool is_gated) {
        timed(0, [&] {
            linear_of<Op>(int(m.bits), {x, norm, m.weights, m.bias, residual, out, R, m.E, m.N,
                                        is_gated, false, p.eps});
        });
    };
    for (int64_t i = 0; i < p.L; ++i) {
        const LayerWeights& layer = p.layers[i];
        project(p.x, layer.input_norm, layer.qkv, nullptr, qkv, false);
        rotate_and_write(p, i, qkv, queries);
        const T *keys = static_cast<T*>(p.keys) + i * p.kv_layer;
        const T *values = static_cast<T*>(p.values) + i * p.kv_layer;
        timed(1, [&] {
            attention<Op>({queries, keys, values, mixed, p.lengths, p.rule, p.B, p.T, p.H, p.K, p.D,
                           p.T * heads, heads, p.D, p.kv_batch, p.kv_head, p.kv_slot}, true);
        });
        project(mixed, nullptr, layer.o, p.x, p.x, false);
        project(p.x, layer.post_norm, layer.gate_up, nullptr, inner, true);
        project(inner, nullptr, layer.down, p.x, p.x, false);
    }
}

}  // namespace

extern "C" {

const char* minitri_instructions() {
#if defined(HAS_BF16_PAIRS)
    return "AVX-512 BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_NEON)
    return "NEON";
#else
    return "plain";
#endif
}

void minitri_set_threads(int num_threads) { Pool::get().resize(num_threads); }

void minitri_attention(int dtype, int is_short, const AttentionArguments* a) {
    if (dtype == 0) attention<Widened<float>>(*a, is_short);
    if (dtype == 1) attention<BFloat16Operand>(*a, is_short);
    if (dtype == 2) attention<Widened<Float16>>(*a, is_short);
}

void minitri_linear(int dtype, int bits, const LinearArguments* a) {
    if (dtype == 0) linear_of<Widened<float>>(bits, *a);
    if (dtype == 1) linear_of<BFloat16Operand>(bits, *a);
    if (dtype == 2) linear_of<Widened<Float16>>(bits, *a);
}

void minitri_pass(int dtype, const PassArguments* p) {
    if (dtype == 0) pass<Widened<float>>(*p);
    if (dtype == 1) pass<BFloat16Operand>(*p);
    if (dtype == 2) pass<Widened<Float16>>(*p);
}

void minitri_rotate(int dtype, const void* x, const float* cos, const float* sin, void* out, int64_t R,
                    int64_t total, int64_t heads, int64_t D) {
    auto call = [&](auto number) {
        using T = decltype(number);
        rotate(static_cast<const T*>(x), cos, sin, static_cast<T*>(out), R, total, heads, D);
    };
    if (dtype == 0) call(float{});
    if (dtype == 1) call(BFloat16{});
    if (dtype == 2) call(Float16{});
}

}
