// Operand of products in bfloat16, where a processor multiplies pairs (AVX-512 BF16).
//
// As `widened.h`, with STEP = 2: a unit is a pair of neighbours along K in 32 bits, whose products
// are added in float32 by one instruction. Rows are pairs (M, K / 2); columns are pairs (K / 2, N),
// contiguous in N. Keys as columns, N = BLOCK slots and K = D, are transposed by pairs of numbers;
// values as columns, N = D and K = BLOCK, are interleaved: a pair holds the same number of two
// neighbouring slots. Where K is odd the last pair has a zero. Processors without such an
// instruction widen bfloat16 to float32.

#pragma once

#include "widened.h"

namespace {

#if defined(HAS_AVX512) && defined(__AVX512BF16__)
#define HAS_BF16_PAIRS 1
struct Pairs {
    using Stored = BFloat16;
    using Unit = uint32_t;
    static constexpr int STEP = 2;
    using Column = Unit;
    static Vec multiply(Vec sum, const Unit* rows, const Unit* columns) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(int(*rows)),
                                     (__m512bh)_mm512_loadu_si512(columns));
    }
    static void transpose(const BFloat16* rows, int64_t stride, int n, int D, Unit* to) {
        Widened<float>::transpose(reinterpret_cast<const float*>(rows), stride / 2, n, D / 2,
                                  reinterpret_cast<float*>(to));
    }
    static void interleave(const BFloat16* rows, int64_t stride, int n, int D, int width,
                           Unit* to) {
        for (int s = 0; s < BLOCK; s += 2, to += width) {
            const BFloat16 *even = rows + s * stride, *odd = even + stride;
            for (int d = 0; d < D; ++d)
                to[d] = (s < n ? even[d].bits : 0) | (s + 1 < n ? odd[d].bits : 0) << 16;
        }
    }
    static void from_floats(const float* x, int n, Unit* to) {
        for (int i = 0; i < n; i += 2 * LANES) {
            __m512bh both = _mm512_cvtne2ps_pbh((__m512)load(x + i + LANES), (__m512)load(x + i));
            _mm512_storeu_si512(to + i / 2, (__m512i)both);
        }
    }
    static Vec dot(Vec sum, const BFloat16* weights, const Unit* x) {
        return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(weights),
                                     (__m512bh)_mm512_loadu_si512(x));
    }

    // 2^x with a relative error of 3e-6, as it is rounded to bfloat16 later; minimax polynomial.
    static Vec weight(Vec x) {
        const Vec r = (Vec)_mm512_reduce_ps((__m512)x, 1);  // x less the whole number below it
        Vec e = splat(1.3534171e-2f) * r + 5.2011463e-2f;
        e = e * r + 2.4144275e-1f;
        e = e * r + 6.9300384e-1f;
        e = e * r + 1.0000026f;
        return (Vec)_mm512_scalef_ps((__m512)e, (__m512)x);
    }
};

using BFloat16Operand = Pairs;
#else
using BFloat16Operand = Widened<BFloat16>;
#endif

}  // namespace
