// Vectors of floats as long as a register, and conversions from and to other number types.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define HAS_AVX512 1
constexpr int LANES = 16, REGISTERS = 32;
constexpr char INSTRUCTIONS[] = "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define HAS_AVX2 1
constexpr int LANES = 8, REGISTERS = 16;
constexpr char INSTRUCTIONS[] = "AVX2";
#elif defined(__ARM_NEON)
constexpr int LANES = 4, REGISTERS = 32;
constexpr char INSTRUCTIONS[] = "NEON";
typedef __fp16 Half;
#else
constexpr int LANES = 4, REGISTERS = 16;
constexpr char INSTRUCTIONS[] = "plain";
typedef _Float16 Half;
#endif

namespace {

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int16_t SignedShorts __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

struct BFloat16 {
    uint16_t bits;
};

// a / b, rounded up; a, rounded up to a multiple of b; the size of the fewest equal parts of a that
// are at most b.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t part_of(int64_t a, int64_t b) { return a > 0 ? ceil_div(a, ceil_div(a, b)) : 0; }

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, BFloat16* to) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bool is_nan = x != x;
    to->bits = is_nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(HAS_AVX512) || defined(HAS_AVX2)
struct Float16 {
    uint16_t bits;
};
inline float widen(Float16 x) { return _cvtsh_ss(x.bits); }
inline void narrow(float x, Float16* to) { to->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }
#else
struct Float16 {
    Half number;
};
inline float widen(Float16 x) { return x.number; }
inline void narrow(float x, Float16* to) { to->number = x; }
#endif

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }

inline Vec load(const BFloat16* p) {
#ifdef HAS_AVX2
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#endif
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const Halves*>(p), Bits) << 16);
}

inline Vec load(const Float16* p) {
#if defined(HAS_AVX512)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(HAS_AVX2)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
    Vec wide;
    for (int i = 0; i < LANES; ++i) wide[i] = widen(p[i]);
    return wide;
}

// Loads the first n numbers at p, at most LANES, and zeros after them.
template <class T> inline Vec some(const T* p, int64_t n) {
    if (n >= LANES) return load(p);
    T padded[LANES] = {};
    std::memcpy(padded, p, n * sizeof(T));
    return load(padded);
}
// Loads LANES bytes as integers, signed or unsigned; in two steps, which compilers vectorize.
template <class Byte> inline Ints load_bytes(const uint8_t* p) {
#ifdef HAS_AVX2
    const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
    return (Ints)(std::is_signed<Byte>::value ? _mm256_cvtepi8_epi32(bytes)
                                              : _mm256_cvtepu8_epi32(bytes));
#endif
    typedef Byte Bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));
    return __builtin_convertvector(__builtin_convertvector(*(const Bytes*)p, Shorts), Ints);
}
inline Shorts load_shorts(const uint8_t* p) { return *reinterpret_cast<const Shorts*>(p); }

// A vector kept in a register: GCC neither loads it again for every use nor changes the order of
// additions, which would need more registers.
template <class V> inline V pinned(V v) {
#ifdef __AVX2__
    asm("" : "+v"(v));
#endif
    return v;
}

// sum + the products of two int16 in each lane of `pairs` with the two of `both`.
inline Ints multiply_pairs(Ints sum, Shorts pairs, uint32_t both) {
#if defined(HAS_AVX512) && defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)pairs, _mm512_set1_epi32(int(both)));
#elif defined(HAS_AVX512)
    return pinned(sum + (Ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(int(both))));
#elif defined(HAS_AVX2)
    return pinned(sum + (Ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(int(both))));
#endif
    return sum + ((Ints)pairs << 16 >> 16) * int16_t(both) +
           ((Ints)pairs >> 16) * int16_t(both >> 16);
}
inline Vec as_floats(Ints x) { return __builtin_convertvector(x, Vec); }

inline Vec splat(float x) { return Vec{} + x; }

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// Combines the first 2 WIDTH lanes into one number, in the same order everywhere: by halves.
template <int WIDTH = LANES / 2, class Combine> inline float fold_lanes(Vec v, Combine combine) {
    for (int i = 0; i < WIDTH; ++i) v[i] = combine(v[i], v[i + WIDTH]);
    if constexpr (WIDTH == 1) return v[0];
    else return fold_lanes<WIDTH / 2>(v, combine);
}
inline float sum_lanes(Vec v) {
#ifdef HAS_AVX512
    return _mm512_reduce_add_ps((__m512)v);
#endif
    return fold_lanes(v, [](float a, float b) { return a + b; });
}
inline float max_lanes(Vec v) {
    return fold_lanes(v, [](float a, float b) { return a > b ? a : b; });
}

inline bool any_above(Vec v, float limit) {
#if defined(HAS_AVX512)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#elif defined(HAS_AVX2)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(limit), _CMP_GT_OQ)) != 0;
#endif
    return max_lanes(v) > limit;
}

// 2^x, with a relative error of 1e-7; exactly 0 below -126, so also for minus infinity.
// NaN stays NaN: damaged weights must not pass for a text.
inline Vec power_of_2(Vec x) {
    Vec clamped = x < -126.0f ? splat(-126.0f) : x;
    Vec shifted = clamped + 12582912.0f;        // 1.5 * 2^23: rounds to a whole number
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
constexpr int PANEL = 16;  // columns that are stored together, see `tiles.py`
constexpr int GROUP = 32;  // quantized weights that share an offset and, except in 6 bits, a scale

}  // namespace
