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
                         WORDS = BITS == 8 ? 8 : 4;  // of a group
    static constexpr int SCALES = BITS == 6 ? 2 : 1;
    static constexpr int WORD_BYTES = PANEL * 4;  // of all rows
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

    // Unpacks a word: calls `use` with the number of an input, or of a pair, and q of LANES rows.
    template <class Op, class Use>
    void unpack(const uint8_t* panel, int64_t g, int word, int lane, Use&& use) const {
        const uint8_t* low = panel + (g * WORDS + word) * WORD_BYTES + lane * 4;
        const uint8_t* others = panel + high + g * HIGH_WORDS * WORD_BYTES + lane * 4;
        Op::template unpack<BITS>(low, others, word, use);
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
                for (int word = 0; word < Form::WORDS; ++word) {
                    const Vec scale = form.scale(panel, g, word * Form::SCALES / Form::WORDS, lane);
                    const Vec offset = Form::HAS_OFFSETS ? form.offset(panel, g, lane) : Vec{};
                    form.template unpack<Widened<T>>(panel, g, word, lane, [&](int i, Vec q) {
                        numbers[i] = Form::HAS_OFFSETS ? scale * q + offset : scale * q;
                    });
                }
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
