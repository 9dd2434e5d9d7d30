// Matrices of 4 to 8 bits: their layout, and dequantization.

#pragma once

#include <algorithm>
#include <cstring>
#include "threads.h"
#include "widened.h"

namespace {

constexpr int PLAIN = 16;   // the form of weights that are not quantized; see `quantized.py:Form`
constexpr int NESTED = 32;  // is added to the bits of a form whose scales are integers

// Calls `work` with the bits of a quantized form as a constant.
template <class Work> inline void by_bits(int form, Work&& work) {
    switch (form % NESTED) {
        case 4: return work(std::integral_constant<int, 4>());
        case 5: return work(std::integral_constant<int, 5>());
        case 6: return work(std::integral_constant<int, 6>());
        case 8: return work(std::integral_constant<int, 8>());
    }
}

// Groups of 32 weights of a row share a scale: weight = scale q + offset. PANEL rows are stored
// together, so that the lanes of a vector are rows. A panel has these parts, each by groups:
//   low     4 words (of 32 bits, for each row) with the low 4 bits of every q: even inputs in the
//           low halves of words, from the lowest bits on, odd inputs in the high halves. Or 8
//           words, in this order, with q of 8 bits, which are signed.
//   high    1 or 2 words, in this order, with the other bits of q of 5 or 6. Of 6 bits 32 is
//           subtracted.
//   scales  float16; and then offsets, if q has 4 or 5 bits
// or, in a nested form, as of GGUF's K-quants, in place of these scales:
//   units   float16 for 8 groups: of scales, and of offsets, except for q of 6 bits
//   scales  in units, bytes: one for a group; or for q of 6 bits two, signed, for 16 inputs each;
//           then offsets in units, bytes, except for q of 6 bits
template <int BITS> struct Layout {
    static constexpr bool HAS_OFFSETS = BITS < 6;
    static constexpr int HIGH_WORDS = BITS == 8 ? 0 : BITS - 4,
                         WORDS = BITS == 8 ? 8 : 4;                              // of a group
    static constexpr int SCALES = BITS == 6 ? 2 : 1, PAIRS = BITS == 8 ? 2 : 4;  // of a word
    static constexpr int WORD_BYTES = PANEL * 4;                                 // of all rows
    const uint8_t* weights;
    bool is_nested;
    int64_t groups, high, scales, in_units, offsets, panel_bytes;

    Layout(const void* weights, int64_t E, bool is_nested)
        : weights(static_cast<const uint8_t*>(weights)),
          is_nested(is_nested),
          groups(E / GROUP),
          high(groups * WORDS * WORD_BYTES),
          scales(high + groups * HIGH_WORDS * WORD_BYTES) {
        const int64_t halves = (is_nested ? (groups + 7) / 8 : groups) * PANEL * 2;
        offsets = scales + halves;
        in_units = scales + halves * (1 + HAS_OFFSETS);
        panel_bytes = in_units + is_nested * groups * (SCALES + HAS_OFFSETS) * PANEL;
    }
    const uint8_t* panel_of(int64_t row) const { return weights + row / PANEL * panel_bytes; }

    // Scales of a part of a group, for the rows of a panel from `lane` on; all products are exact.
    Vec scale(const uint8_t* panel, int64_t g, int part, int lane) const {
        if (!is_nested) return halves_at(panel + scales, g, lane);
        const uint8_t* bytes = panel + in_units + (g * SCALES + part) * PANEL + lane;
        const Ints count = HAS_OFFSETS ? load_bytes<uint8_t>(bytes) : load_bytes<int8_t>(bytes);
        return halves_at(panel + scales, g / 8, lane) * as_floats(count);
    }
    Vec offset(const uint8_t* panel, int64_t g, int lane) const {
        if (!is_nested) return halves_at(panel + offsets, g, lane);
        const uint8_t* bytes = panel + in_units + (groups + g) * PANEL + lane;
        return halves_at(panel + offsets, g / 8, lane) * as_floats(load_bytes<uint8_t>(bytes));
    }

    // Unpacks a word: calls `use` with the number of a pair of inputs, and q of both, int16 in the
    // low and the high half of a lane, of LANES rows.
    template <class Use>
    void unpack(const uint8_t* panel, int64_t g, int word, int lane, Use&& use) const {
        const Shorts bits = load_shorts(panel + (g * WORDS + word) * WORD_BYTES + lane * 4);
        const uint8_t* others = panel + high + g * HIGH_WORDS * WORD_BYTES + lane * 4;
#pragma GCC unroll 4
        for (int i = 0; i < PAIRS; ++i) {
            const int pair = PAIRS * word + i, at = pair * HIGH_WORDS;
            Shorts q = bits >> 4 * i & 15;
            if (BITS == 8) q = (Shorts)((SignedShorts)(i == 0 ? bits << 8 : bits) >> 8);
            if (HIGH_WORDS > 0) {
                const Shorts more = load_shorts(others + at / 16 * WORD_BYTES) >> at % 16;
                q |= (more & uint16_t((1 << HIGH_WORDS) - 1)) << 4;
            }
            use(pair, BITS == 6 ? q - 32 : q);
        }
    }

    // The weights of a group, as floats: a vector of LANES rows for each input.
    void dequantize(const uint8_t* panel, int64_t g, int lane, Vec numbers[GROUP]) const {
        for (int word = 0; word < WORDS; ++word) {
            const Vec factor = scale(panel, g, word * SCALES / WORDS, lane);
            const Vec added = HAS_OFFSETS ? offset(panel, g, lane) : Vec{};
            unpack(panel, g, word, lane, [&](int pair, Shorts q) {
                const Vec even = as_floats((Ints)q << 16 >> 16), odd = as_floats((Ints)q >> 16);
                numbers[2 * pair] = HAS_OFFSETS ? factor * even + added : factor * even;
                numbers[2 * pair + 1] = HAS_OFFSETS ? factor * odd + added : factor * odd;
            });
        }
    }

  private:
    static Vec halves_at(const uint8_t* at, int64_t row, int lane) {
        return load(reinterpret_cast<const Float16*>(at) + row * PANEL + lane);
    }
};

struct DequantizeArguments {
    const void* weights;  // whole panels
    const int64_t* rows;  // (N), or null: the first N
    void* out;            // (N, E)
    int64_t N, E, num_threads;
};

template <class T, int BITS> void dequantize(bool is_nested, const DequantizeArguments& a) {
    using Form = Layout<BITS>;
    const Form form(a.weights, a.E, is_nested);
    const int64_t together = a.rows ? 1 : PANEL;
    Pool::get().run((a.N + together - 1) / together, a.N * a.E, a.num_threads, [&](int64_t task) {
        const int64_t first = task * together, row = a.rows ? a.rows[task] : first;
        const uint8_t* panel = form.panel_of(row);
        for (int64_t g = 0; g < form.groups; ++g) {
            for (int lane = 0; lane < PANEL; lane += LANES) {
                Vec numbers[GROUP];  // of LANES rows, then of rows LANES inputs at a time
                form.dequantize(panel, g, lane, numbers);
                for (int from = 0; from < GROUP; from += LANES) transpose_square(numbers + from);
                for (int64_t n = first; n < std::min(a.N, first + together); ++n) {
                    const int64_t r = (a.rows ? row : n) % PANEL - lane;
                    if (r < 0 || r >= LANES) continue;
                    T* out = static_cast<T*>(a.out) + n * a.E + g * GROUP;
                    float wide[GROUP];
                    for (int from = 0; from < GROUP; from += LANES)
                        store(wide + from, numbers[from + r]);
                    for (int i = 0; i < GROUP; ++i) narrow(wide[i], out + i);
                }
            }
        }
    });
}

template <class T> void dequantize_of(int form, const DequantizeArguments& a) {
    by_bits(form, [&](auto bits) { dequantize<T, bits>(form >= NESTED, a); });
}

}  // namespace
