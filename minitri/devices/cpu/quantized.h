// Matrices of 4 to 8 bits: their layout, dequantization, and repacking of a GGUF file's blocks.

#pragma once

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

struct ConvertArguments {
    const void* weights;  // whole panels, or to `repack` rows as a GGUF file stores them
    const int64_t* rows;  // (N), or null: the first N
    void* out;            // (N, E), or of `repack` whole panels
    int64_t N, E, row_bytes, num_threads;  // bytes of a row in a GGUF file
};

template <class T, int BITS> void dequantize(bool is_nested, const ConvertArguments& a) {
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

template <class T> void dequantize_of(int form, const ConvertArguments& a) {
    by_bits(form, [&](auto bits) { dequantize<T, bits>(form >= NESTED, a); });
}

// Blocks of LANES rows in a GGUF file: of one group, or, in nested forms, of 8. A byte has low bits
// of two q, in this order of parts:
//   Q4_0 to Q8_0  a scale, in Q4_1 and Q5_1 an offset; in 5 bits, a word of high bits; low bits of
//                 the first 16 q and of the others. Without an offset 8 or 16 is subtracted
//   Q4_K, Q5_K    units of scales and of subtracted offsets; these, in 6 bits; in 5 bits, bytes of
//                 a high bit of every group; low bits of two groups, four times
//   Q6_K          low bits of groups 0 and 2, 1 and 3, ...; high bits of four groups; scales; units
template <int BITS> struct Blocks : Layout<BITS> {
    using Form = Layout<BITS>;
    typedef uint32_t Word __attribute__((aligned(1), may_alias));
    const uint8_t* at[LANES];
    int bytes, together;  // of a block; its groups

    Blocks(const ConvertArguments& a, bool is_nested, int64_t first)
        : Form(a.out, a.E, is_nested), together(is_nested ? 8 : 1) {
        bytes = int(a.row_bytes / (Form::groups / together));
        for (int i = 0; i < LANES; ++i) {
            const int64_t n = std::min(first + i, a.N - 1), row = a.rows ? a.rows[n] : n;
            at[i] = static_cast<const uint8_t*>(a.weights) + row * a.row_bytes;
        }
    }

    Bits load_four(int place) const {
        Bits words{};
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) words[i] = *reinterpret_cast<const Word*>(at[i] + place);
        return words;
    }

    // The i-th four q of the block's group g, as bytes.
    Bits four(int g, int i) const {
        if (BITS == 8) return load_four(2 + 4 * i);
        int low = bytes - 16 + i % 4 * 4, half = i / 4;
        Bits high{};
        if (Form::is_nested) {
            low = 4 * i + (BITS == 6 ? g / 4 * 64 + g % 2 * 32 : bytes - 128 + g / 2 * 32);
            half = BITS == 6 ? g / 2 % 2 : g % 2;
            if (BITS == 5) high = load_four(16 + 4 * i) >> g & 0x01010101;
            if (BITS == 6) high = load_four(128 + g / 4 * 32 + 4 * i) >> g % 4 * 2 & 0x03030303;
        } else if (BITS == 5) {  // spreads four bits
            high = (load_four(bytes - 20) >> 4 * i & 15) * 0x204081 & 0x01010101;
        }
        return (load_four(low) >> 4 * half & 0x0f0f0f0f) | high << 4;
    }

    // Stores COUNT bits of a group's q, from bit `first` on, as words.
    template <int COUNT> void store_words(int g, int first, uint8_t* to) const {
        Bits words[COUNT] = {};
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            Bits q = four(g, i) >> first & 0x01010101u * ((1 << COUNT) - 1);
            q = (q & 0xff0000ff) | (q & 0xff00) << 8 | (q >> 8 & 0xff00);  // inputs 0, 2, 1, 3
            if (COUNT < 8) q = (q | q >> (8 - COUNT)) & 0x00ff00ff;
            words[COUNT * i / 8] |= q << 2 * COUNT * i % 16;
        }
        for (int w = 0; w < COUNT; ++w)
            *reinterpret_cast<Bits*>(to + w * Form::WORD_BYTES) = words[w];
    }

    // Stores factors of a block of row n of a panel, whose first group is g.
    void store_factors(const uint8_t* block, int64_t g, uint8_t* panel, int n) const {
        auto* halves = reinterpret_cast<const Float16*>(block);
        auto* scale = reinterpret_cast<Float16*>(panel + Form::scales) + g / together * PANEL + n;
        Float16* offset = scale + (Form::offsets - Form::scales) / 2;
        *scale = halves[BITS == 6 ? 104 : 0];
        if (Form::HAS_OFFSETS) *offset = halves[1];
        if (Form::HAS_OFFSETS && Form::is_nested) offset->bits ^= 0x8000;
        else if (Form::HAS_OFFSETS && bytes % 4) narrow(widen(*scale) * -(1 << (BITS - 1)), offset);
        uint8_t* to = panel + Form::in_units + g * Form::SCALES * PANEL + n;
        for (int j = 0; Form::is_nested && j < 16; ++j) {  // of 6 bits: 8 scales, 8 offsets
            const uint8_t *six = block + 4 + j / 8 * 4 + j % 4, *both = block + 12 + j % 4;
            const int late = (*both >> j / 8 * 4 & 15) | (*six >> 2 & 48);
            if (BITS == 6) to[j * PANEL] = block[192 + j];
            else to[(j / 8 * Form::groups + j % 8) * PANEL] = j % 8 < 4 ? *six & 63 : late;
        }
    }
};

// Rows of a GGUF file as panels; the last row is repeated where it fills no panel.
template <int BITS> void repack(bool is_nested, const ConvertArguments& a) {
    using Form = Blocks<BITS>;
    Pool::get().run((a.N + PANEL - 1) / PANEL, a.N * a.E, a.num_threads, [&](int64_t task) {
        for (int lane = 0; lane < PANEL; lane += LANES) {
            Form form(a, is_nested, task * PANEL + lane);
            uint8_t* panel = static_cast<uint8_t*>(a.out) + task * form.panel_bytes;
            for (int64_t g = 0; g < form.groups; ++g) {
                const int64_t at = g * Form::WORD_BYTES, i = g % form.together;
                uint8_t* words = panel + 4 * lane;
                form.template store_words<Form::WORDS>(i, 0, words + at * Form::WORDS);
                words += form.high + at * Form::HIGH_WORDS;
                if constexpr (BITS == 5 || BITS == 6)
                    form.template store_words<Form::HIGH_WORDS>(i, 4, words);
                for (int n = 0; i + 1 == form.together && n < LANES; ++n) {
                    form.store_factors(form.at[n], g - i, panel, lane + n);
                    form.at[n] += form.bytes;
                }
            }
        }
    });
}

}  // namespace
