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
constexpr int MAX_WIDTH = 1024;           // largest head dim
constexpr int64_t MOST_FLOATS = 1 << 20;  // floats of all parts, unless threads would wait
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

struct AttentionArguments {
    const void* q;           // (B, T, H, D)
    void *keys, *values;     // of a cache; only a pass writes them
    void* out;               // as q
    const int64_t* lengths;  // (B): prefixes
    const uint8_t* mask;     // (T, T), or null: causal
    int64_t B, T, H, K, D;
    int64_t kv_batch, kv_head, kv_slot;  // strides, in numbers
    int64_t is_tiled;                    // see `devices/cpu/tiles.py`
};

// Offset of number d of slot s in keys or values in tiles: tiles of P slots of D numbers, each a
// matrix (D / W, P) of units of W numbers.
inline int64_t place_in_tiles(int64_t s, int64_t d, int64_t D, int64_t P, int64_t W) {
    return s / P * P * D + d / W * W * P + s % P * W + d % W;
}

template <class Number> struct Scratch {  // aligned memory of a thread, kept between calls
    struct alignas(64) Line {
        char bytes[64];
    };
    std::vector<Line> lines;
    Number* get(size_t n) {
        lines.resize(std::max<size_t>(lines.size(), ceil_div(n * sizeof(Number), sizeof(Line))));
        return reinterpret_cast<Number*>(lines.data());
    }
};

// How a call is cut into tasks: a short block in pieces along its keys, a long one in tiles along
// its rows only. The pieces of a group have the same rows.
struct Plan {
    const AttentionArguments& a;
    bool is_short;
    int64_t G = a.H / a.K;                     // query heads of a KV head
    int64_t width = round_up(a.D, 2 * PANEL);  // D, padded to whole panels of pairs
    int64_t tile_rows = std::min<int64_t>(a.T * G, TILE);
    int64_t num_tiles = ceil_div(a.T * G, tile_rows);
    int64_t longest = *std::max_element(a.lengths, a.lengths + a.B) + a.T;
    int64_t num_pieces = is_short ? ceil_div(longest, PIECE) : 1;
    int64_t num_groups = a.B * a.K * num_tiles;
    // A matrix unit writes sums after the last row.
    int64_t part_floats = (tile_rows + MOST_ROWS) * width + tile_rows * (1 + LANES);
    // Groups that have parts at a time: memory grows with the context, but not with B or K.
    int64_t few = std::max(MOST_FLOATS / part_floats, 16 * Pool::num_threads) / num_pieces;
    int64_t groups_at_once = num_pieces > 1 ? std::clamp<int64_t>(few, 1, num_groups) : num_groups;
};

// The result of a task, before division: weighted sums of values (rows, width), the score near the
// largest that they are relative to (rows), and sums of weights by lanes (rows, LANES).
struct Part {
    const Plan& plan;
    float* sums;
    float* largest = sums + (plan.tile_rows + MOST_ROWS) * plan.width;
    float* totals = largest + plan.tile_rows;
};

// Rows [first, first + R) of a KV head over slots [begin, end); row r: token r / G, head r % G.
struct Task {
    const Plan& plan;
    int64_t group, begin;
    const AttentionArguments& a = plan.a;
    int64_t k = group / plan.num_tiles % a.K, b = group / plan.num_tiles / a.K;
    // Later tiles of a long block see more, so they come first: nobody waits for them.
    int64_t first = (plan.num_tiles - 1 - group % plan.num_tiles) * plan.tile_rows;
    int64_t R = std::min(a.T * plan.G - first, plan.tile_rows);
    int64_t seen = a.lengths[b] + (a.mask ? a.T : token(R - 1) + 1);  // slots that a row sees
    int64_t end = plan.num_pieces > 1 ? std::min(seen, begin + PIECE) : seen;

    int64_t token(int64_t r) const { return (first + r) / plan.G; }
    // Where the query or result of row r begins in a tensor (B, T, H, D).
    int64_t place(int64_t r) const {
        const int64_t head = k * plan.G + (first + r) % plan.G;
        return ((b * a.T + token(r)) * a.H + head) * a.D;
    }
};

// The queries of a task as operands (R, width), padded with zeros.
template <class Op> void copy_queries(const Task& task, typename Op::Unit* to) {
    const Plan& p = task.plan;
    alignas(64) float wide[MAX_WIDTH] = {};
    for (int64_t r = 0; r < task.R; ++r, to += p.width / Op::STEP) {
        const auto* q = static_cast<const typename Op::Stored*>(p.a.q) + task.place(r);
        for (int64_t d = 0; d < p.a.D; ++d) wide[d] = widen(q[d]);
        Op::from_floats(wide, int(p.width), to);
    }
}

// Replaces scores (M, BLOCK) of the rows [r, r + M) of a task and the slots from `s` on by minus
// infinity where a token does not see a slot.
inline void mask_block(const Task& task, int r, int M, int64_t s, float* scores) {
    const AttentionArguments& a = task.a;
    const int64_t block = a.lengths[task.b] - s;  // where the block's tokens begin
    for (int m = 0; m < M && block < BLOCK; ++m) {
        const int64_t t = task.token(r + m);
        for (int64_t j = std::max<int64_t>(a.mask ? block : block + t + 1, 0); j < BLOCK; ++j) {
            const bool is_seen = a.mask && s + j < task.end && a.mask[t * a.T + j - block];
            if (!is_seen) scores[m * BLOCK + j] = MINUS_INFINITY;
        }
    }
}

constexpr float SLACK = 8.0f;  // powers of 2

// Turns BLOCK scores of row r into exponentials (as powers of 2) of what they are above a number
// near the largest. Where one is far above that number so far, rescales the row's sums.
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

// Rows that are multiplied together; a matrix unit's last ones may be padding.
template <class Op> int rows_together(int64_t R) {
    return int(part_of(R, std::max(MatrixUnit<Op>::ROWS, TILE_ROWS)));
}

// All rows of a task over the BLOCK slots from `s` on: scores, their softmax, weighted values.
template <class Op, class Number>
void attend_block(const Task& task, const Part& part, const typename Op::Unit* queries, int64_t s,
                  Columns<Op, Number> keys, Columns<Op, Number> values) {
    const int R = int(task.R), width = int(task.plan.width), steps = width / Op::STEP;
    const int together = rows_together<Op>(R);
    const float scale = LOG2_E / std::sqrt(float(task.a.D));
    for (int r = 0; r < R; r += together) {
        const int M = std::min(together, R - r);
        alignas(64) float scores[MOST_ROWS * BLOCK];
        alignas(64) typename Op::Unit weights[MOST_ROWS * BLOCK];
        multiply_packed(M, queries + r * steps, steps, keys, BLOCK, scores, true);
        mask_block(task, r, M, s, scores);
        for (int m = 0; m < M; ++m) {
            update_softmax<Op>(scores + m * BLOCK, scale, part, r + m, width);
            Op::from_floats(scores + m * BLOCK, BLOCK, weights + m * (BLOCK / Op::STEP));
        }
        multiply_packed(M, weights, BLOCK / Op::STEP, values, width, part.sums + r * width, false);
        keys.next = values.next = nullptr;  // the next block is fetched once
    }
}

// Values of a BLOCK in tiles, with zeros after the n-th slot; keys there need not be zeros.
template <class Op, class T> const T* cut_values(const T* values, int n, int64_t D, T* to) {
    const int64_t whole = n / Op::STEP * Op::STEP * D;
    std::fill(std::copy_n(values, whole, to), to + BLOCK * D, T{});
    for (int64_t d = 0; n % Op::STEP && d < D; ++d)  // the first slot of a pair
        to[whole + d * Op::STEP] = values[whole + d * Op::STEP];
    return to;
}

template <class Op> void attend(const Task& task, const Part& part) {
    using T = typename Op::Stored;
    using Unit = typename Op::Unit;
    using Column = typename Op::Column;
    static thread_local Scratch<Unit> memory;
    const AttentionArguments& a = task.a;
    const int width = int(task.plan.width), steps = width / Op::STEP, D = int(a.D);
    const size_t block_units = size_t(steps) * BLOCK;
    Unit* block_keys = memory.get(2 * block_units + size_t(task.R + MOST_ROWS) * steps);
    Unit *block_values = block_keys + block_units, *queries = block_values + block_units;
    copy_queries<Op>(task, queries);
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
        if (!a.is_tiled) {
            Op::transpose(keys, a.kv_slot, n, D, block_keys);
            Op::interleave(values, a.kv_slot, n, D, width, block_values);
            attend_block<Op, Unit>(task, part, queries, s, {block_keys, BLOCK},
                                   {block_values, width});
            continue;
        }
        const T *next_keys = keys + BLOCK * D, *next_values = values + BLOCK * D;
        if (n < BLOCK) values = cut_values<Op>(values, n, D, reinterpret_cast<T*>(block_values));
        attend_block<Op, Column>(
            task, part, queries, s,
            {reinterpret_cast<const Column*>(keys), PANEL, steps * PANEL, next_keys},
            {reinterpret_cast<const Column*>(values), width, PANEL, next_values});
    }
}

// Writes the rows of a task: sums of the parts of all pieces, in their order, over their totals.
template <class T> void merge(const Task& task, float* memory) {
    const Plan& p = task.plan;
    auto part = [&](int64_t i) { return Part{p, memory + i * p.part_floats}; };
    for (int64_t r = 0; r < task.R; ++r) {
        float sums[MAX_WIDTH] = {}, total = 0.0f, top = MINUS_INFINITY;
        for (int64_t i = 0; i < p.num_pieces; ++i) top = std::max(top, part(i).largest[r]);
        for (int64_t i = 0; i < p.num_pieces; ++i) {
            const float weight = power_of_2(splat(part(i).largest[r] - top))[0];
            total += sum_lanes(load(part(i).totals + r * LANES)) * weight;
            const float* others = part(i).sums + r * p.width;
            for (int64_t d = 0; d < p.width; ++d) sums[d] += others[d] * weight;
        }
        T* out = static_cast<T*>(p.a.out) + task.place(r);
        for (int64_t d = 0; d < p.a.D; ++d) narrow(sums[d] / total, out + d);
    }
}

template <class Op> void attention(const AttentionArguments& a, bool is_short) {
    static thread_local Scratch<float> part_memory;
    const Plan plan{a, is_short};
    const int64_t P = plan.num_pieces;
    float* parts = part_memory.get(P > 1 ? plan.groups_at_once * P * plan.part_floats : 0);
    std::vector<std::atomic<int>> num_done(plan.num_groups);  // pieces of each group; 0 at first
    for (int64_t start = 0; start < plan.num_groups; start += plan.groups_at_once) {
        const int64_t num_tasks = std::min(plan.groups_at_once, plan.num_groups - start) * P;
        const int64_t num_numbers = a.B * a.K * plan.longest * a.D * a.T;
        Pool::get().run(num_tasks, num_numbers, [&](int64_t i) {
            static thread_local Scratch<float> own_memory;
            const int64_t group = start + i / P, piece = i % P;
            const Task task{plan, group, piece * PIECE};
            float* memory = P > 1 ? parts + i * plan.part_floats : own_memory.get(plan.part_floats);
            attend<Op>(task, Part{plan, memory});
            // The task that finishes a group as the last one merges its pieces.
            if (num_done[group].fetch_add(1, std::memory_order_acq_rel) + 1 < P) return;
            merge<typename Op::Stored>(task, memory - piece * plan.part_floats);
        });
    }
}

}  // namespace
