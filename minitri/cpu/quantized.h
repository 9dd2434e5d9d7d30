// Matrices of 4 to 8 bits: how they lie, and plain numbers of them.

#pragma once

#include <algorithm>
#include <cstring>
#include "operands.h"
#include "threads.h"

namespace {

constexpr int NESTED = 32;    // is added to the bits of a form whose scales are integers

// Units of groups from one on that is a multiple of LANES: each counts for 8.
inline Vec units_of(const Float16* unit) {
#ifdef HAS_AVX512
    alignas(32) static const uint16_t order[16] = {
        0x0100, 0x0100, 0x0100, 0x0100, 0x0100, 0x0100, 0x0100, 0x0100,
        0x0302, 0x0302, 0x0302, 0x0302, 0x0302, 0x0302, 0x0302, 0x0302};
    int both;
    std::memcpy(&both, unit, sizeof both);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(both), *(const __m256i*)order);
    return (Vec)_mm512_cvtph_ps(bytes);
#else
    return splat(widen(*unit));
#endif
}

// A row of weights by groups of 32: number = scale q + offset. It holds one part after the other:
//   low     4 bits of every q: byte i of 32 has q number i of a group in its low half, and of the
//           next group in its high one. Or all of them: q of 8 bits are bytes, from -128 on.
//   high    the other bits of q, if it has 5 or 6: byte i of 32 has those of numbers i of 8 groups,
//           or of 4, from its lowest bits on. Of 6 bits 32 is subtracted.
//   scales  of the groups, float16; and their offsets, but for q of 8 bits
// or, if it is nested, as GGUF's K-quants are, in place of these scales:
//   units   of scales, a float16 for 8 groups; and of offsets, but for q of 6 bits
//   scales  in units, bytes: one for a group; or for q of 6 bits two, signed, one for 16 numbers each
//   offsets in units, bytes, but for q of 6 bits
// `low` is padded to pairs of groups, `high` to whole 32 bytes, units and what counts them to pairs.
template <int BITS>
struct Layout {
    static constexpr bool HAS_OFFSETS = BITS < 6;
    static constexpr int LOW_BYTES = GROUP * (BITS == 8 ? 8 : 4) / 8;  // of a group
    static constexpr int HIGH_BITS = BITS == 8 ? 0 : BITS - 4;
    static constexpr int SCALES = BITS == 6 ? 2 : 1;  // of a group
    const uint8_t* weights;
    bool is_nested;
    int64_t groups, units, high, scales, row_bytes;

    Layout(const void* weights, int64_t E, bool is_nested)
        : weights(static_cast<const uint8_t*>(weights)), is_nested(is_nested), groups(E / GROUP),
          units((groups + 15) / 16 * 2), high((groups + groups % 2) * LOW_BYTES),
          scales(high + (groups * HIGH_BITS + 7) / 8 * GROUP),
          row_bytes(scales + (HAS_OFFSETS ? 2 : 1) * (is_nested ? units * (2 + 8 * SCALES) : groups * 2)) {}

    // Of LANES groups from the g-th on, zeros after the last one; of nested ones all products are exact.
    Vec factors(const uint8_t* row, int64_t g, float* scale) const {
        const auto* halves = reinterpret_cast<const Float16*>(row + scales);
        if (!is_nested) {
            const int64_t here = std::min<int64_t>(LANES, groups - g);
            store(scale, some(halves + g, here));
            return HAS_OFFSETS ? some(halves + groups + g, here) : Vec{};
        }
        const auto* unit = halves + g / 8;
        const uint8_t* in_units = row + scales + units * (HAS_OFFSETS ? 4 : 2) + g * SCALES;
        if (HAS_OFFSETS) {
            store(scale, units_of(unit) * as_floats(load_bytes<uint8_t>(in_units)));
            return units_of(unit + units) * as_floats(load_bytes<uint8_t>(in_units + units * 8));
        }
        for (int i = 0; i < 2; ++i) {
            const Vec one = splat(widen(unit[i * LANES / 16]));
            store(scale + i * LANES, one * as_floats(load_bytes<int8_t>(in_units + i * LANES)));
        }
        return Vec{};
    }

    // Two groups from the g-th on, an even one.
    template <class Op>
    void unpack(const uint8_t* row, int64_t g, typename Op::Quants w[2]) const {
        const uint8_t* others = row + high + g * HIGH_BITS / 8 * GROUP;
        Op::template unpack<BITS>(row + g * LOW_BYTES, others, int(g * HIGH_BITS % 8), w);
    }
};

struct DequantizeArguments {
    const void* weights;      // N rows
    void* out;                // (N, E)
    int64_t N, E, num_threads;
};

template <class T, int BITS>
void dequantize(bool is_nested, const DequantizeArguments& a) {
    using Form = Layout<BITS>;
    const Form form(a.weights, a.E, is_nested);
    constexpr int64_t ROWS = 16;
    Pool::get().run((a.N + ROWS - 1) / ROWS, a.N * a.E, a.num_threads, [&](int64_t task) {
        for (int64_t n = task * ROWS; n < std::min(a.N, (task + 1) * ROWS); ++n) {
            const uint8_t* row = form.weights + n * form.row_bytes;
            T* out = static_cast<T*>(a.out) + n * a.E;
            float scale[2 * LANES], offset[LANES];
            for (int64_t g = 0; g < form.groups; g += 2) {
                const int i = int(g % LANES);
                if (i == 0) store(offset, form.factors(row, g, scale));
                typename Widened<T>::Quants w[2];
                form.template unpack<Widened<T>>(row, g, w);
                for (int64_t half = 0; half < std::min<int64_t>(2, form.groups - g); ++half) {
                    float wide[GROUP];
                    for (int from = 0; from < GROUP; from += LANES) {
                        Vec part = w[half].part[from / LANES];
                        part *= scale[(i + half) * Form::SCALES + from * Form::SCALES / GROUP];
                        store(wide + from, Form::HAS_OFFSETS ? part + offset[i + half] : part);
                    }
                    for (float number : wide) narrow(number, out++);
                }
            }
        }
    });
}

template <class T>
void dequantize_of(int form, const DequantizeArguments& a) {
    const int bits = form % NESTED;
    const bool is_nested = form >= NESTED;
    if (bits == 4) dequantize<T, 4>(is_nested, a);
    if (bits == 5) dequantize<T, 5>(is_nested, a);
    if (bits == 6) dequantize<T, 6>(is_nested, a);
    if (bits == 8) dequantize<T, 8>(is_nested, a);
}

}  // namespace
