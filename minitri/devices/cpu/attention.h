// Attention of a block to a cached prefix and itself.

#pragma once

#include <atomic>
#include <limits>
#include <vector>
#include "amx.h"
#include "threads.h"

namespace {

constexpr int PIECE = 512;                // slots of a task, for short blocks: a multiple of BLOCK
constexpr int TILE = 192;                 // rows of a task
constexpr int MOST_ROWS = 16;             // rows that are multiplied together
constexpr int MOST_IN_PLACE = 12;         // rows; with more, K and V are widened once, in a copy
constexpr int MAX_WIDTH = 1024;           // largest head dim
constexpr int64_t MOST_FLOATS = 1 << 20;  // floats of all parts, unless threads would wait
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct AttentionArguments {
    const void *q, *keys, *values;
    void* out;               // (B, T, H, D)
    const int64_t* lengths;  // (B): prefixes
    const uint8_t* mask;     // (T, T), or null: causal
    int64_t B, T, H, K, D;
    int64_t q_batch, q_token, q_head;  // strides, in numbers
    int64_t kv_batch, kv_head, kv_slot;
    int64_t is_tiled;  // see `devices/cpu/tiles.py`
};

// Offset of number d of slot s in keys or values in tiles: tiles of P slots of D numbers, each a
// matrix (D / W, P) of units of W numbers.
inline int64_t place_in_tiles(int64_t s, int64_t d, int64_t D, int64_t P, int64_t W) {
    return s / P * P * D + d / W * W * P + s % P * W + d % W;
}

template <class Number> struct Scratch {  // 64-byte aligned memory of a thread, kept between calls
    Number* get(size_t n) {
        const size_t all = n + 63 / sizeof(Number) + 1;
        if (memory.size() < all) memory.resize(all);
        auto address = reinterpret_cast<uintptr_t>(memory.data());
        return reinterpret_cast<Number*>((address + 63) / 64 * 64);
    }
    std::vector<Number> memory;
};

// The result of a task, before division: weighted sums of values (rows, width), the score near the
// largest that they are relative to (rows), and sums of weights by lanes (rows, LANES).
struct Part {
    float *sums, *largest, *totals;
    static int64_t num_floats(int64_t rows, int64_t width) {
        return rows * (width + 1 + LANES) + MOST_ROWS * width;
    }
    Part(float* memory, int64_t rows, int64_t width)  // a matrix unit writes after the last row
        : sums(memory), largest(memory + (rows + MOST_ROWS) * width), totals(largest + rows) {}
};

// Rows [first, first + R) of one KV head, whose row r is token r / G and query head r % G, over the
// slots [begin, end).
struct Task {
    int64_t b, k, first, R, begin, end;
    int64_t group, piece;  // the pieces of a group have the same rows
};

// How a call is cut into tasks: a short block in pieces along its keys, a long one in tiles along
// its rows only.
struct Plan {
    int64_t G, width;  // query heads of a KV head; D, padded to whole panels of pairs
    int64_t tile_rows, num_tiles, num_pieces, num_groups, longest;
    int64_t part_floats, groups_at_once;  // groups that have parts at a time
};

inline Plan plan_tasks(const AttentionArguments& a, bool is_short) {
    Plan p;
    p.G = a.H / a.K;
    p.width = round_up(a.D, 2 * PANEL);
    p.tile_rows = std::min<int64_t>(a.T * p.G, TILE);
    p.num_tiles = ceil_div(a.T * p.G, p.tile_rows);
    p.longest = *std::max_element(a.lengths, a.lengths + a.B) + a.T;
    p.num_pieces = is_short ? ceil_div(p.longest, PIECE) : 1;
    p.num_groups = a.B * a.K * p.num_tiles;
    p.part_floats = Part::num_floats(p.tile_rows, p.width);
    // Memory grows with the context, but not with B or K.
    const int64_t few =
        std::max(MOST_FLOATS / p.part_floats, 16 * Pool::num_threads) / p.num_pieces;
    p.groups_at_once = p.num_pieces > 1 ? std::clamp<int64_t>(few, 1, p.num_groups) : p.num_groups;
    return p;
}

inline Task task_of(const AttentionArguments& a, const Plan& p, int64_t group, int64_t piece) {
    // Later tiles of a long block see more, so they come first: nobody waits for them.
    const int64_t tile = p.num_tiles - 1 - group % p.num_tiles, k = group / p.num_tiles % a.K;
    const int64_t b = group / p.num_tiles / a.K, first = tile * p.tile_rows;
    const int64_t R = std::min(p.tile_rows, a.T * p.G - first);
    const int64_t last_token = a.mask ? a.T - 1 : (first + R - 1) / p.G;
    const int64_t visible = a.lengths[b] + last_token + 1, begin = piece * PIECE;
    const int64_t end = p.num_pieces > 1 ? std::min(visible, begin + PIECE) : visible;
    return {b, k, first, R, begin, end, group, piece};
}

// A task with its queries as operands (R, width), padded with zeros, and the sums of its rows.
template <class Op> struct Work {
    const AttentionArguments& a;
    const Task& task;
    const Part& part;
    int64_t G;
    int width;
    const typename Op::Unit* queries;
};

template <class Op>
void copy_queries(const AttentionArguments& a, const Task& task, const Plan& plan,
                  typename Op::Unit* to) {
    alignas(64) float wide[MAX_WIDTH] = {};
    for (int64_t row = task.first; row < task.first + task.R; ++row, to += plan.width / Op::STEP) {
        const int64_t head = task.k * plan.G + row % plan.G;
        const auto* q = static_cast<const typename Op::Stored*>(a.q) + task.b * a.q_batch +
                        row / plan.G * a.q_token + head * a.q_head;
        for (int64_t d = 0; d < a.D; ++d) wide[d] = widen(q[d]);
        Op::from_floats(wide, int(plan.width), to);
    }
}

// Scores (M, BLOCK) of the rows [r, r + M) of a task and the slots from `s` on; minus infinity for
// what a token does not see.
template <class Op, class Number>
void score_block(const Work<Op>& w, int r, int M, int64_t s, const Columns<Op, Number>& keys,
                 float* scores) {
    const AttentionArguments& a = w.a;
    const int64_t steps = w.width / Op::STEP;
    multiply_packed(M, w.queries + r * steps, int(steps), keys, BLOCK, scores, true);
    const int64_t block = a.lengths[w.task.b] - s;  // where the block's tokens begin
    for (int m = 0; m < M && block < BLOCK; ++m) {
        const int64_t t = (w.task.first + r + m) / w.G;
        for (int64_t j = std::max<int64_t>(a.mask ? block : block + t + 1, 0); j < BLOCK; ++j) {
            const bool is_seen = a.mask && s + j < w.task.end && a.mask[t * a.T + j - block];
            if (!is_seen) scores[m * BLOCK + j] = MINUS_INFINITY;
        }
    }
}

constexpr float SLACK = 8.0f;  // powers of 2

// Turns BLOCK scores of row r into exponentials (as powers of 2) of what they are above a number
// near the largest. Where one is far above that of the row so far, rescales what the row has
// summed.
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

// Rows that are multiplied together; the last ones of a matrix unit's may be no rows.
template <class Op> int rows_together(int64_t R) {
    return int(part_of(R, std::max(MatrixUnit<Op>::ROWS, TILE_ROWS)));
}

// All rows of a task over the BLOCK slots from `s` on: scores, their softmax, weighted values.
template <class Op, class Number>
void attend_block(const Work<Op>& w, int64_t s, Columns<Op, Number> keys,
                  Columns<Op, Number> values) {
    const int R = int(w.task.R), together = rows_together<Op>(R);
    const float scale = LOG2_E / std::sqrt(float(w.a.D));
    for (int r = 0; r < R; r += together) {
        const int M = std::min(together, R - r);
        alignas(64) float scores[MOST_ROWS * BLOCK];
        alignas(64) typename Op::Unit weights[MOST_ROWS * BLOCK];
        score_block(w, r, M, s, keys, scores);
        for (int m = 0; m < M; ++m) {
            update_softmax<Op>(scores + m * BLOCK, scale, w.part, r + m, w.width);
            Op::from_floats(scores + m * BLOCK, BLOCK, weights + m * (BLOCK / Op::STEP));
        }
        multiply_packed(M, weights, BLOCK / Op::STEP, values, w.width, w.part.sums + r * w.width,
                        false);
        keys.next = values.next = nullptr;  // the next block is fetched once
    }
}

template <class Op>
void attend(const AttentionArguments& a, const Task& task, const Plan& plan, const Part& part) {
    using T = typename Op::Stored;
    using Unit = typename Op::Unit;
    using Column = typename Op::Column;
    static thread_local Scratch<Unit> memory;
    const int width = int(plan.width), steps = width / Op::STEP, D = int(a.D);
    const size_t block_units = size_t(steps) * BLOCK;
    Unit* block_keys = memory.get(2 * block_units + size_t(task.R + MOST_ROWS) * steps);
    Unit *block_values = block_keys + block_units, *queries = block_values + block_units;
    copy_queries<Op>(a, task, plan, queries);
    const Work<Op> work{a, task, part, plan.G, width, queries};
    const bool is_in_place =
        a.is_tiled && (std::is_same<Column, Unit>::value || task.R <= MOST_IN_PLACE);
    if (MatrixUnit<Op>::ROWS) MatrixUnit<Op>::use(rows_together<Op>(task.R));
    if (width > D) std::memset(block_keys, 0, 2 * block_units * sizeof(Unit));  // pads heads
    std::fill(part.sums, part.sums + task.R * width, 0.0f);
    std::fill(part.largest, part.largest + task.R, MINUS_INFINITY);
    std::fill(part.totals, part.totals + task.R * LANES, 0.0f);
    for (int64_t s = task.begin; s < task.end; s += BLOCK) {
        const int n = int(std::min<int64_t>(BLOCK, task.end - s));
        const int64_t at = task.b * a.kv_batch + task.k * a.kv_head + s * a.kv_slot;
        const T *keys = static_cast<const T*>(a.keys) + at,
                *values = static_cast<const T*>(a.values) + at;
        const T* next_keys = a.is_tiled ? keys + BLOCK * D : nullptr;
        const T* next_values = a.is_tiled ? values + BLOCK * D : nullptr;
        if (is_in_place && n == BLOCK) {
            const auto* key_units = reinterpret_cast<const Column*>(keys);
            const auto* value_units = reinterpret_cast<const Column*>(values);
            attend_block<Op, Column>(work, s, {key_units, PANEL, steps * PANEL, next_keys},
                                     {value_units, width, PANEL, next_values});
        } else if (a.is_tiled) {
            Op::copy_keys(keys, D, block_keys);
            Op::copy_values(values, n, D, block_values);
            attend_block<Op, Unit>(work, s, {block_keys, PANEL, steps * PANEL, next_keys},
                                   {block_values, width, PANEL, next_values});
        } else {
            Op::transpose(keys, a.kv_slot, n, D, block_keys);
            Op::interleave(values, a.kv_slot, n, D, width, block_values);
            attend_block<Op, Unit>(work, s, {block_keys, BLOCK}, {block_values, width});
        }
    }
}

// Writes the rows of a task: their sums, of all pieces in their order, over their totals.
template <class T>
void merge(const AttentionArguments& a, const Task& task, const Plan& plan, float* memory) {
    auto part = [&](int64_t p) {
        return Part(memory + p * plan.part_floats, plan.tile_rows, plan.width);
    };
    for (int64_t r = 0; r < task.R; ++r) {
        float sums[MAX_WIDTH] = {}, total = 0.0f, top = MINUS_INFINITY;
        for (int64_t p = 0; p < plan.num_pieces; ++p) top = std::max(top, part(p).largest[r]);
        for (int64_t p = 0; p < plan.num_pieces; ++p) {
            const float weight = power_of_2(splat(part(p).largest[r] - top))[0];
            total += sum_lanes(load(part(p).totals + r * LANES)) * weight;
            const float* others = part(p).sums + r * plan.width;
            for (int64_t d = 0; d < plan.width; ++d) sums[d] += others[d] * weight;
        }
        const int64_t token = (task.first + r) / plan.G,
                      head = task.k * plan.G + (task.first + r) % plan.G;
        T* out = static_cast<T*>(a.out) + ((task.b * a.T + token) * a.H + head) * a.D;
        for (int64_t d = 0; d < a.D; ++d) narrow(sums[d] / total, out + d);
    }
}

template <class Op> void attention(const AttentionArguments& a, bool is_short) {
    static thread_local Scratch<float> part_memory;
    const Plan plan = plan_tasks(a, is_short);
    const int64_t P = plan.num_pieces;
    float* parts = part_memory.get(P > 1 ? plan.groups_at_once * P * plan.part_floats : 0);
    std::vector<std::atomic<int>> num_done(plan.num_groups);  // pieces of each group; 0 at first
    for (int64_t start = 0; start < plan.num_groups; start += plan.groups_at_once) {
        const int64_t num_tasks = std::min(plan.groups_at_once, plan.num_groups - start) * P;
        const int64_t num_numbers = a.B * a.K * plan.longest * a.D * a.T;
        Pool::get().run(num_tasks, num_numbers, [&](int64_t i) {
            static thread_local Scratch<float> own_memory;
            const Task task = task_of(a, plan, start + i / P, i % P);
            float* memory = P > 1 ? parts + i * plan.part_floats : own_memory.get(plan.part_floats);
            attend<Op>(a, task, plan, Part(memory, plan.tile_rows, plan.width));
            // The task that finishes a group as the last one merges its pieces.
            if (num_done[task.group].fetch_add(1, std::memory_order_acq_rel) + 1 < P) return;
            merge<typename Op::Stored>(a, task, plan, memory - task.piece * plan.part_floats);
        });
    }
}

}  // namespace
