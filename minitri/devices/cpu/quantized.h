// Matrices of 4 to 8 bits: their layout, dequantization, and repacking of a GGUF file's blocks.

#pragma once

#include "threads.h"
#include "widened.h"

namespace {

constexpr int PLAIN = 16;   // the form of weights that are not quantized; see `quantized.py:Form`
constexpr int NESTED = 32;  // is added to the bits of a form whose scales are integers

// Calls `work` with the bits of a quantized form as a constant.
template <class Work> inline void by_bits(int form, Work&& work) {
    if (form % NESTED == 4) work(std::integral_constant<int, 4>());
    if (form % NESTED == 5) work(std::integral_constant<int, 5>());
    if (form % NESTED == 6) work(std::integral_constant<int, 6>());
    if (form % NESTED == 8) work(std::integral_constant<int, 8>());
}

// Groups of 32 weights of a row share a scale: weight = scale q + offset. PANEL rows are stored
// together, so that the lanes of a vector are rows. A panel has these parts, each by groups:
//   words   as many (of 32 bits, for each row) as q has bits: even inputs in the low halves of
//           words, odd inputs in the high halves, where `visit_fields` says. q of 8 bits are
//           signed; of 6 bits 32 is subtracted.
//   scales  float16; and then offsets, if q has 4 or 5 bits
// or, in a nested form, as of GGUF's K-quants, in place of these scales:
//   units   float16 for 8 groups: of scales, and of offsets, except for q of 6 bits
//   scales  in units, bytes: one for a group; or for q of 6 bits two, signed, for 16 inputs each;
//           then offsets in units, bytes, except for q of 6 bits
template <int BITS> struct Layout {
    static constexpr bool HAS_OFFSETS = BITS < 6;
    static constexpr int SCALES = BITS == 6 ? 2 : 1;  // of a group
    static constexpr int WORD_BYTES = PANEL * 4;      // of all rows
    static constexpr int PAIRS = GROUP / 2, ALL = PANEL / LANES;
    const uint8_t* weights;
    int64_t groups;
    bool is_nested;
    int64_t scales = groups * BITS * WORD_BYTES;
    int64_t offsets = scales + (is_nested ? (groups + 7) / 8 : groups) * PANEL * 2;
    int64_t in_units = HAS_OFFSETS ? 2 * offsets - scales : offsets;
    int64_t panel_bytes = in_units + is_nested * groups * (SCALES + HAS_OFFSETS) * PANEL;

    Layout(const void* weights, int64_t E, bool is_nested)
        : weights(static_cast<const uint8_t*>(weights)), groups(E / GROUP), is_nested(is_nested) {}
    const uint8_t* panel_of(int64_t row) const { return weights + row / PANEL * panel_bytes; }

    // Where halves of a group's words have q of a pair of inputs: calls `use` with a word, the
    // first of its bits, the first of q's bits, and their number. Fewer parts unpack faster.
    template <class Use> static void visit_fields(int pair, Use&& use) {
        constexpr int IN_WORD = 16 / BITS;  // pairs, except for some whose bits fill gaps
        if (BITS == 6 && pair % 8 > 5) {
            use(pair / 8 * 3 + pair % 2, 6, 0, 4);
            use(pair / 8 * 3 + 2, 6 + pair % 2 * 2, 4, 2);
        } else if (BITS == 6) {
            use(pair / 8 * 3 + pair % 8 / 2, pair % 2 * 10, 0, 6);
        } else if (BITS == 5 && pair == 15) {
            for (int bit = 0; bit < 5; ++bit) use(bit, 10, bit, 1);
        } else {
            use(pair / IN_WORD, pair % IN_WORD * BITS + (BITS == 5 && pair % 3 == 2), 0, BITS);
        }
    }

    // A group of a panel, unpacked when it is used. The panel's rows are lanes of ALL vectors.
    struct Packed {
        const Layout& form;
        const uint8_t* panel;
        int64_t g;

        // q of a pair of inputs in vector v: int16 in the low and the high half of a lane, of 6
        // bits without the subtraction.
        Shorts q(int pair, int v) const {
            const uint8_t* words = panel + g * BITS * WORD_BYTES + v * LANES * 4;
            Shorts q{};
            visit_fields(pair, [&](int word, int from, int to, int count) {
                const Shorts bits = *reinterpret_cast<const Shorts*>(words + word * WORD_BYTES);
                if (BITS == 8) q = (Shorts)((SignedShorts)(from ? bits : bits << 8) >> 8);
                else if (from + count == 16) q = bits >> from;
                else q |= bits >> (from - to) & uint16_t(((1 << count) - 1) << to);
            });
            return q;
        }

        // Scales of a part, or, after the last part, offsets, in vector v; all products are exact.
        Vec factor(int part, int v) const {
            const auto* halves = reinterpret_cast<const Float16*>(
                panel + (part < SCALES ? form.scales : form.offsets));
            const Vec units = load(halves + (form.is_nested ? g / 8 : g) * PANEL + v * LANES);
            if (!form.is_nested) return units;
            const int64_t place = part < SCALES ? g * SCALES + part : form.groups + g;
            const uint8_t* bytes = panel + form.in_units + place * PANEL + v * LANES;
            return units *
                   as_floats(HAS_OFFSETS ? load_bytes<uint8_t>(bytes) : load_bytes<int8_t>(bytes));
        }
    };

    // A group of a panel, unpacked: q of its pairs of inputs; scales of its parts, then offsets.
    struct Unpacked {
        Shorts qs[PAIRS][ALL];
        Vec factors[SCALES + 1][ALL];
        Shorts q(int pair, int v) const { return pinned(qs[pair][v]); }
        Vec factor(int part, int v) const { return factors[part][v]; }
    };
    void unpack(const Packed& group, Unpacked& to) const {
        for (int v = 0; v < ALL; ++v) {
#pragma GCC unroll 16
            for (int pair = 0; pair < PAIRS; ++pair) to.qs[pair][v] = group.q(pair, v);
            for (int part = 0; part < SCALES + HAS_OFFSETS; ++part)
                to.factors[part][v] = group.factor(part, v);
        }
    }
};

struct ConvertArguments {
    const void* weights;      // whole panels, or to `repack` rows as a GGUF file stores them
    const int64_t* rows;      // (N), or null: the first N
    void* out;                // (N, E), or of `repack` whole panels
    int64_t N, E, row_bytes;  // bytes of a row in a GGUF file
};

template <class T, int BITS> void dequantize(bool is_nested, const ConvertArguments& a) {
    using Form = Layout<BITS>;
    const Form form(a.weights, a.E, is_nested);
    const int64_t together = a.rows ? 1 : PANEL;
    Pool::get().run(ceil_div(a.N, together), a.N * a.E, [&](int64_t task) {
        const int64_t first = task * together, row = a.rows ? a.rows[task] : first;
        const uint8_t* panel = form.panel_of(row);
        for (int64_t g = 0; g < form.groups; ++g) {
            typename Form::Unpacked group;
            form.unpack({form, panel, g}, group);
            float numbers[GROUP][PANEL];
            for (int i = 0; i < Form::PAIRS * Form::ALL; ++i) {
                const int pair = i / Form::ALL, v = i % Form::ALL;
                const Shorts q = group.qs[pair][v] - uint16_t(BITS == 6 ? 32 : 0);
                const Vec scale = group.factors[pair * Form::SCALES / Form::PAIRS][v];
                for (int odd = 0; odd < 2; ++odd) {
                    Vec number = scale * as_floats((Ints)q << (odd ? 0 : 16) >> 16);
                    if (Form::HAS_OFFSETS) number += group.factors[Form::SCALES][v];
                    store(numbers[2 * pair + odd] + v * LANES, number);
                }
            }
            for (int64_t n = first; n < std::min(a.N, first + together); ++n) {
                const int64_t r = (a.rows ? row : n) % PANEL;
                T* out = static_cast<T*>(a.out) + n * a.E + g * GROUP;
                for (int i = 0; i < GROUP; ++i) narrow(numbers[i][r], out + i);
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

    // Stores q of the block's group g as words.
    void store_words(int g, uint8_t* to) const {
        Shorts words[BITS] = {};
#pragma GCC unroll 16
        for (int pair = 0; pair < GROUP / 2; ++pair) {
            const Bits both = four(g, pair / 2) >> pair % 2 * 16;
            const Shorts q = (Shorts)((both & 255) | (both & 0xff00) << 8);
            Form::visit_fields(pair, [&](int word, int from, int at, int count) {
                words[word] |= (q >> at & uint16_t((1 << count) - 1)) << from;
            });
        }
        for (int w = 0; w < BITS; ++w)
            *reinterpret_cast<Shorts*>(to + w * Form::WORD_BYTES) = words[w];
    }

    // Stores factors of a block of row n of a panel, whose first group is g.
    void store_factors(const uint8_t* block, int64_t g, uint8_t* panel, int n) const {
        auto* halves = reinterpret_cast<const Float16*>(block);
        auto* scale = reinterpret_cast<Float16*>(panel + Form::scales) + g / together * PANEL + n;
        Float16* offset = scale + (Form::offsets - Form::scales) / 2;
        *scale = halves[BITS == 6 ? 104 : 0];
        if (Form::HAS_OFFSETS) *offset = halves[1];
        if (Form::HAS_OFFSETS && Form::is_nested) narrow(-widen(halves[1]), offset);
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
    Pool::get().run(ceil_div(a.N, PANEL), a.N * a.E, [&](int64_t task) {
        for (int lane = 0; lane < PANEL; lane += LANES) {
            Form form(a, is_nested, task * PANEL + lane);
            uint8_t* panel = static_cast<uint8_t*>(a.out) + task * form.panel_bytes;
            for (int64_t g = 0; g < form.groups; ++g) {
                const int64_t i = g % form.together;
                form.store_words(i, panel + g * BITS * Form::WORD_BYTES + 4 * lane);
                for (int n = 0; i + 1 == form.together && n < LANES; ++n) {
                    form.store_factors(form.at[n], g - i, panel, lane + n);
                    form.at[n] += form.bytes;
                }
            }
        }
    });
}

}  // namespace
