// Vectors of 16 floats, and the number types that become such.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define HAS_BF16_PAIRS 1
#endif

namespace {

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

// 16 bytes as integers, whose signs count or not: in two steps, which compilers know how to do.
template <class Byte>
inline Ints load_bytes(const uint8_t* p) {
    typedef Byte Bytes __attribute__((vector_size(16), aligned(1), may_alias));
    typedef int16_t Shorts __attribute__((vector_size(32)));
    return __builtin_convertvector(__builtin_convertvector(*(const Bytes*)p, Shorts), Ints);
}
inline Vec as_floats(Ints x) { return __builtin_convertvector(x, Vec); }

inline Vec splat(float x) { return Vec{} + x; }

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
inline float widen(Float16 x) {
#ifdef __AVX512F__
    return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_set1_epi16(short(x.bits))));
#endif
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

}  // namespace
