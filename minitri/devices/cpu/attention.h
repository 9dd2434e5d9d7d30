// Attention of a block over a prefix and itself.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>
#include "operands.h"
#include "threads.h"

namespace {

constexpr int PIECE = 512;   // slots of a task, for short blocks: a multiple of BLOCK
constexpr int TILE = 192;    // rows of a task
constexpr int MOST_ROWS = 16;  // that are multiplied together
constexpr int MOST_IN_PLACE = 12;  // rows for which numbers that have to be widened are multiplied as they lie
constexpr int MAX_WIDTH = 1024;  // largest head dim
constexpr int64_t MOST_FLOATS = 1 << 20;  // of parts at a time, if these keep all threads busy
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct AttentionArguments {
    const void *q, *keys, *values;
    void* out;                // (B, T, H, D)
    const int64_t* lengths;   // prefix per sequence
    const uint8_t* rule;      // (T, T), or null: causal
    int64_t B, T, H, K, D;
    int64_t q_batch, q_token, q_head;         // strides, in numbers
    int64_t kv_batch, kv_head, kv_slot;
    int64_t is_tiled;         // see `devices/cpu/tiles.py`
    int64_t num_threads;
};

// Where number d of slot s stands, in keys or values of D numbers a slot in tiles of P slots, each a
// matrix of units of W numbers.
inline int64_t place_in_tiles(int64_t s, int64_t d, int64_t D, int64_t P, int64_t W) {
    return s / P * P * D + d / W * W * P + s % P * W + d % W;
}

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
    static int64_t num_floats(int64_t rows, int64_t width) {
        return rows * (width + 1 + LANES) + MOST_ROWS * width;
    }
    Part(float* memory, int64_t rows, int64_t width)  // a matrix unit writes after the last row
        : sums(memory), largest(memory + (rows + MOST_ROWS) * width), totals(largest + rows) {}
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
    using Column = typename Op::Column;
    static thread_local Scratch<Unit> memory;
    const int steps = width / Op::STEP, prob_steps = BLOCK / Op::STEP;
    const int G = int(a.H / a.K), D = int(a.D);
    const float scale = LOG2_E / std::sqrt(float(D));
    const size_t block_units = size_t(steps) * BLOCK;
    // Rows that are multiplied together, of which the last ones may be no rows.
    const int most = std::max(MatrixUnit<Op>::ROWS, TILE_ROWS), num_parts = (R + most - 1) / most;
    const int together = MatrixUnit<Op>::ROWS ? (R + num_parts - 1) / num_parts : TILE_ROWS;
    Unit* block_keys = memory.get(2 * block_units + size_t(R + MOST_ROWS) * steps);
    Unit *block_values = block_keys + block_units, *queries = block_values + block_units;
    const bool is_in_place = a.is_tiled && (std::is_same<Column, Unit>::value || R <= MOST_IN_PLACE);
    copy_queries<Op>(a, b, k, first, R, width, queries);
    if (MatrixUnit<Op>::ROWS) MatrixUnit<Op>::use(together);
    if (width > D) std::memset(block_keys, 0, 2 * block_units * sizeof(Unit));  // what pads a head
    std::fill(part.sums, part.sums + int64_t(R) * width, 0.0f);
    std::fill(part.largest, part.largest + R, MINUS_INFINITY);
    std::fill(part.totals, part.totals + R * LANES, 0.0f);
    for (int64_t s = begin; s < end; s += BLOCK) {
        const int n = int(std::min<int64_t>(BLOCK, end - s));
        const int64_t at = b * a.kv_batch + k * a.kv_head + s * a.kv_slot;
        const T *slot_keys = static_cast<const T*>(a.keys) + at;
        const T *slot_values = static_cast<const T*>(a.values) + at;
        auto attend_block = [&](auto keys, auto values) {
            for (int r = 0; r < R; r += together) {
                const int M = std::min(together, R - r);
                alignas(64) float scores[MOST_ROWS * BLOCK];
                alignas(64) Unit probs[MOST_ROWS * BLOCK];
                keys.next = a.is_tiled && r == 0 ? slot_keys + BLOCK * D : nullptr;
                values.next = a.is_tiled && r == 0 ? slot_values + BLOCK * D : nullptr;
                multiply_packed(M, queries + r * steps, steps, keys, BLOCK, scores, true);
                for (int m = 0; m < M; ++m) {
                    float* row = scores + m * BLOCK;
                    if (s + BLOCK > a.lengths[b]) mask_scores(a, b, (first + r + m) / G, s, end, row);
                    update_softmax<Op>(row, scale, part, r + m, width);
                    Op::from_floats(row, BLOCK, probs + m * prob_steps);
                }
                multiply_packed(M, probs, prob_steps, values, width, part.sums + int64_t(r) * width, false);
            }
        };
        if (is_in_place && n == BLOCK) {
            attend_block(Columns<Op, Column>{reinterpret_cast<const Column*>(slot_keys), PANEL, steps * PANEL},
                         Columns<Op, Column>{reinterpret_cast<const Column*>(slot_values), width});
            continue;
        }
        Columns<Op> keys{block_keys, BLOCK}, values{block_values, width};
        if (a.is_tiled) {
            keys = {block_keys, PANEL, steps * PANEL};
            Op::copy_keys(slot_keys, D, block_keys);
            Op::copy_values(slot_values, n, D, block_values);
        } else {
            Op::transpose(slot_keys, a.kv_slot, n, D, block_keys);
            Op::interleave(slot_values, a.kv_slot, n, D, width, block_values);
        }
        attend_block(keys, values);
    }
}

// A short block is cut in pieces along its keys, a long one in tiles along its rows only.
template <class Op>
void attention(const AttentionArguments& a, bool is_short) {
    using T = typename Op::Stored;
    // A head is padded to whole panels of pairs.
    const int64_t G = a.H / a.K, width = (a.D + 2 * PANEL - 1) / (2 * PANEL) * 2 * PANEL;
    const int64_t rows = a.T * G, tile_rows = std::min<int64_t>(rows, TILE);
    const int64_t num_tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t longest = *std::max_element(a.lengths, a.lengths + a.B) + a.T;
    const int64_t num_pieces = is_short ? (longest + PIECE - 1) / PIECE : 1;
    const int64_t num_groups = a.B * a.K * num_tiles;
    const int64_t part_floats = Part::num_floats(tile_rows, width);
    static thread_local Scratch<float> part_memory;
    // How many groups have parts at a time: memory grows with the context, but not with B or K.
    const int64_t few = std::max(MOST_FLOATS / part_floats, 16 * a.num_threads) / num_pieces;
    const int64_t at_once = num_pieces > 1 ? std::clamp<int64_t>(few, 1, num_groups) : num_groups;
    float* parts = part_memory.get(num_pieces > 1 ? at_once * num_pieces * part_floats : 0);
    std::vector<std::atomic<int>> num_done(num_groups);  // of 0
    auto finish = [&](int64_t b, int64_t k, int64_t row, const float* sums, float total) {
        T* out = static_cast<T*>(a.out) + ((b * a.T + row / G) * a.H + k * G + row % G) * a.D;
        for (int64_t d = 0; d < a.D; ++d) narrow(sums[d] / total, out + d);
    };
    auto merge = [&](int64_t b, int64_t k, int64_t row, float* memory, int64_t r) {
        float merged[MAX_WIDTH] = {}, total = 0.0f, top = MINUS_INFINITY;
        auto part = [&](int64_t p) { return Part(memory + p * part_floats, tile_rows, width); };
        for (int64_t p = 0; p < num_pieces; ++p) top = std::max(top, part(p).largest[r]);
        for (int64_t p = 0; p < num_pieces; ++p) {
            const float weight = power_of_2(splat(part(p).largest[r] - top))[0];
            total += sum_lanes(load(part(p).totals + r * LANES)) * weight;
            const float* sums = part(p).sums + r * width;
            for (int64_t d = 0; d < width; ++d) merged[d] += sums[d] * weight;
        }
        finish(b, k, row, merged, total);
    };
    auto attend = [&](int64_t group, int64_t piece, float* memory) {
        // Later tiles of a long block see more, so they come first: nobody waits for them.
        const int64_t tile = num_tiles - 1 - group % num_tiles, k = group / num_tiles % a.K;
        const int64_t b = group / num_tiles / a.K, first = tile * tile_rows;
        const int R = int(std::min(tile_rows, rows - first));
        const int64_t last_token = a.rule ? a.T - 1 : (first + R - 1) / G;
        const int64_t visible = a.lengths[b] + last_token + 1, begin = piece * PIECE;
        const int64_t end = is_short ? std::min(visible, begin + PIECE) : visible;
        const Part part(memory, tile_rows, width);
        attend_slots<Op>(a, b, k, first, R, begin, end, int(width), part);
        // The last to finish merges, in the order of the pieces.
        if (num_done[group].fetch_add(1, std::memory_order_acq_rel) + 1 < num_pieces) return;
        for (int r = 0; r < R; ++r) {
            if (num_pieces > 1) merge(b, k, first + r, memory - piece * part_floats, r);
            else finish(b, k, first + r, part.sums + r * width, sum_lanes(load(part.totals + r * LANES)));
        }
    };
    for (int64_t start = 0; start < num_groups; start += at_once) {
        const int64_t num = std::min(at_once, num_groups - start) * num_pieces;
        Pool::get().run(num, a.B * a.K * longest * a.D * a.T, a.num_threads, [&](int64_t task) {
            static thread_local Scratch<float> own_memory;
            attend(start + task / num_pieces, task % num_pieces,
                   num_pieces > 1 ? parts + task * part_floats : own_memory.get(part_floats));
        });
    }
}

}  // namespace
