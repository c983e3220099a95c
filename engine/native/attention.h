// Attention of a few rows over slabs of keys and values, block by block with a running softmax.
//
// Keys of a block are transposed once, then every score is one chain of multiply-adds over the columns, eight keys side by
// side, several queries at once. Each weighted sum of values is one chain over the block's keys. Which queries share a tile
// changes what lies in registers, never the order of a query's own operations; keys a row may not see take no part.

#pragma once

#include "vectors.h"

#define KEY_BLOCK 32  // two blocks of keys and values, this one and the next, stay in the first-level cache
#define TILE 6        // queries that are computed together
#define FEW 3         // up to so many queries are computed as one pass, over wider runs of keys and columns
#define WIDE_RUN 4    // vectors in such a run; its columns divide head_dim
#define RUN 2
#define MAX_SUMS 12   // vectors of sums that sixteen registers hold beside their operands

// Keys and values [num_layers, num_kv_heads, capacity, head_dim]; strides count floats.
typedef struct {
    float *keys, *values;
    int64_t layer_stride, head_stride;
    int32_t len;
} Slab;

// The query rows of one KV head's group of heads: query q belongs to row q / group.
typedef struct {
    int32_t num_queries, group, head_dim;
    float *queries;  // [num_tiles, head_dim, TILE], times scaling and log2 e: weights are powers of two
    float *tops;     // [num_queries], highest score so far
    float *masses;   // [num_queries, LANES], sum of weights, by the key's place modulo LANES
    float *sums;     // [num_queries, head_dim], of values times weights
} Queries;

// Work space of one block.
typedef struct {
    float *keys;     // transposed, [head_dim, KEY_BLOCK]
    float *partial;  // [TILE, head_dim], the block's values times weights
    float weights[TILE * KEY_BLOCK] __attribute__((aligned(64)));
    const float *next_keys, *next_values;  // what memory was not asked for yet of the next block
    int fetch_step, fetch_lines;           // floats to go on by each time, cache lines of 16 floats to ask for
} Block;

// Asks memory for a little of the next block. Evenly, a key at a time, so that it is busy while this block is computed: only
// so many lines can be on their way, and asking for more waits. Addresses behind a slab's end are harmless.
INLINE void fetch(Block *block) {
    for (int line = 0; line < block->fetch_lines; line++) {
        __builtin_prefetch(block->next_keys + line * 16);
        __builtin_prefetch(block->next_values + line * 16);
    }
    block->next_keys += block->fetch_step;
    block->next_values += block->fetch_step;
}

// Scores of a tile of queries with the first `num_keys` keys, and what lies behind them up to a multiple of the run.
INLINE void score_tile(const int num, const float *queries, int head_dim, int num_keys, Block *block) {
    const int run = num <= FEW ? WIDE_RUN : RUN;  // vectors of keys at once
    for (int j = 0; j < num_keys; j += run * LANES) {
        vec sums[MAX_SUMS];
        for (int i = 0; i < num * run; i++) sums[i] = splat(0.0f);
        for (int column = 0; column < head_dim; column++) {
            const float *keys = block->keys + column * KEY_BLOCK + j;
            vec held[WIDE_RUN];  // the operands or the keys, whichever are fewer: registers are short
            if (num <= run) {
                for (int q = 0; q < num; q++) held[q] = splat(queries[column * TILE + q]);
                for (int k = 0; k < run; k++) {
                    const vec part = load(keys + k * LANES);
                    for (int q = 0; q < num; q++) sums[q * run + k] = fma_each(held[q], part, sums[q * run + k]);
                }
            } else {
                for (int k = 0; k < run; k++) held[k] = load(keys + k * LANES);
                for (int q = 0; q < num; q++) {
                    const vec operand = splat(queries[column * TILE + q]);
                    for (int k = 0; k < run; k++) sums[q * run + k] = fma_each(operand, held[k], sums[q * run + k]);
                }
            }
        }
        for (int q = 0; q < num; q++)
            for (int k = 0; k < run; k++) store(block->weights + q * KEY_BLOCK + j + k * LANES, sums[q * run + k]);
    }
}

// Turns a query's first `num_visible` scores into weights; returns what earlier sums must be multiplied with.
INLINE float soften(float *scores, int num_visible, float *top, float *mass) {
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7};
    const int num_ragged = num_visible % LANES;
    if (num_ragged) {
        float *last = scores + num_visible - num_ragged;
        store(last, choose(lane < num_ragged, load(last), splat(-INFINITY)));
    }
    vec highest = load(scores);
    for (int j = LANES; j < num_visible; j += LANES) highest = max_each(highest, load(scores + j));
    float decay = 1.0f;
    if (any_greater(highest, splat(*top))) {
        const float new_top = max_lanes(highest);
        decay = power_of_two(splat(*top - new_top))[0];
        *top = new_top;
    }
    const vec offset = splat(*top);
    vec sum = load(mass) * splat(decay);
    for (int j = 0; j < num_visible; j += LANES) {
        const vec weight = power_of_two(load(scores + j) - offset);
        store(scores + j, weight);
        sum += weight;
    }
    store(mass, sum);
    return decay;
}

// Adds keys [first, last) times their weights to the partial sums of some queries of a tile.
INLINE void weigh_values(const int num, int tile_place, int first, int last, const float *values, int head_dim, Block *block) {
    const int run = num <= FEW ? WIDE_RUN : RUN;  // vectors of columns at once
    const float *weights = block->weights + tile_place * KEY_BLOCK;
    float *partial = block->partial + tile_place * head_dim;
    for (int column = 0; column < head_dim; column += run * LANES) {
        vec sums[MAX_SUMS];
        for (int q = 0; q < num; q++)
            for (int c = 0; c < run; c++) sums[q * run + c] = load(partial + q * head_dim + column + c * LANES);
        const float *value = values + (int64_t)first * head_dim + column;
        for (int j = first; j < last; j++, value += head_dim) {
            fetch(block);
            vec held[WIDE_RUN];  // the weights or the values, whichever are fewer
            if (num <= run) {
                for (int q = 0; q < num; q++) held[q] = splat(weights[q * KEY_BLOCK + j]);
                for (int c = 0; c < run; c++) {
                    const vec part = load(value + c * LANES);
                    for (int q = 0; q < num; q++) sums[q * run + c] = fma_each(held[q], part, sums[q * run + c]);
                }
            } else {
                for (int c = 0; c < run; c++) held[c] = load(value + c * LANES);
                for (int q = 0; q < num; q++) {
                    const vec weight = splat(weights[q * KEY_BLOCK + j]);
                    for (int c = 0; c < run; c++) sums[q * run + c] = fma_each(weight, held[c], sums[q * run + c]);
                }
            }
        }
        for (int q = 0; q < num; q++)
            for (int c = 0; c < run; c++) store(partial + q * head_dim + column + c * LANES, sums[q * run + c]);
    }
}

INLINE void attend_tile(const int num, Queries *queries, int first, const int *visible, const float *values, Block *block) {
    const int head_dim = queries->head_dim;
    int longest = 0, common = KEY_BLOCK;
    for (int q = 0; q < num; q++) {
        longest = visible[q] > longest ? visible[q] : longest;
        common = visible[q] < common ? visible[q] : common;
    }
    score_tile(num, queries->queries + (int64_t)first * head_dim, head_dim, longest, block);
    float decays[TILE];
    for (int q = 0; q < num; q++) {
        decays[q] = 1.0f;
        if (visible[q] > 0)
            decays[q] = soften(block->weights + q * KEY_BLOCK, visible[q], queries->tops + first + q, queries->masses + (first + q) * LANES);
    }
    for (int i = 0; i < num * head_dim; i += LANES) store(block->partial + i, splat(0.0f));
    weigh_values(num, 0, 0, common, values, head_dim, block);
    for (int q = 0; q < num; q++) {  // beyond the keys that all see, each query goes on alone
        if (visible[q] == 0) continue;  // nothing of this block is seen, whoever shares the tile
        if (visible[q] > common) weigh_values(1, q, common, visible[q], values, head_dim, block);
        float *sum = queries->sums + (int64_t)(first + q) * head_dim;
        for (int c = 0; c < head_dim; c += LANES)
            store(sum + c, fma_each(load(sum + c), splat(decays[q]), load(block->partial + q * head_dim + c)));
    }
}

// Transposes a block's keys; places behind the last one, up to a multiple of LANES, repeat it.
static void transpose_keys(const float *keys, int num_keys, int head_dim, float *target) {
    for (int j = 0; j < num_keys; j += LANES) {
        const int num_rows = num_keys - j < LANES ? num_keys - j : LANES;
        for (int column = 0; column < head_dim; column += 4) {
            vec columns[4];
            load_columns(keys + (int64_t)j * head_dim + column, head_dim, num_rows, columns);
            for (int i = 0; i < 4; i++) store(target + (column + i) * KEY_BLOCK + j, columns[i]);
        }
    }
}

// Passes that a block's columns are summed in; each asks for its share of the next block.
static int num_passes(int num_queries) {
    const int rest = num_queries % TILE;
    return num_queries / TILE * (WIDE_RUN / RUN) + (rest > FEW ? WIDE_RUN / RUN : rest > 0);
}

// All queries of one KV head over its part of a slab. Row r sees `visible_len + r * causal` keys.
APART void attend_slab(Queries *queries, const float *keys, const float *values, int visible_len, int causal, Block *block) {
    const int num_queries = queries->num_queries, group = queries->group, head_dim = queries->head_dim;
    const int longest = visible_len + (num_queries / group - 1) * causal, passes = num_passes(num_queries);
    block->fetch_step = (WIDE_RUN * LANES + passes - 1) / passes;
    block->fetch_lines = passes == 1 ? 2 : 1;
    for (int start = 0; start < longest; start += KEY_BLOCK) {
        const int num_keys = longest - start < KEY_BLOCK ? longest - start : KEY_BLOCK;
        const float *block_values = values + (int64_t)start * head_dim;
        transpose_keys(keys + (int64_t)start * head_dim, num_keys, head_dim, block->keys);
        block->next_keys = keys + (int64_t)(start + KEY_BLOCK) * head_dim;
        block->next_values = values + (int64_t)(start + KEY_BLOCK) * head_dim;
        for (int first = 0; first < num_queries; first += TILE) {
            const int num = num_queries - first < TILE ? num_queries - first : TILE;
            int visible[TILE];
            for (int q = 0; q < num; q++) {
                const int left = visible_len + (first + q) / group * causal - start;
                visible[q] = left < 0 ? 0 : left < KEY_BLOCK ? left : KEY_BLOCK;
            }
            switch (num) {  // a constant number of queries keeps a tile's sums in registers
                case 1: attend_tile(1, queries, first, visible, block_values, block); break;
                case 2: attend_tile(2, queries, first, visible, block_values, block); break;
                case 3: attend_tile(3, queries, first, visible, block_values, block); break;
                case 4: attend_tile(4, queries, first, visible, block_values, block); break;
                case 5: attend_tile(5, queries, first, visible, block_values, block); break;
                default: attend_tile(TILE, queries, first, visible, block_values, block); break;
            }
        }
    }
}

// How much attention the keys of a slab got from queries [first, num_queries) whose softmax is complete: summed over a row's
// group, then over the rows or, with `is_max`, the largest of them. Merged into scores [visible_len], which begin at zero.
APART void score_keys(const Queries *queries, int first, const float *keys, int visible_len, int is_max, float *scores, Block *block) {
    const int head_dim = queries->head_dim, group = queries->group;
    for (int start = 0; start < visible_len; start += KEY_BLOCK) {
        const int num_keys = visible_len - start < KEY_BLOCK ? visible_len - start : KEY_BLOCK;
        float row[KEY_BLOCK] = {0}, merged[KEY_BLOCK] = {0};
        transpose_keys(keys + (int64_t)start * head_dim, num_keys, head_dim, block->keys);
        memcpy(merged, scores + start, sizeof(float) * num_keys);
        for (int tile = first / TILE * TILE; tile < queries->num_queries; tile += TILE) {
            score_tile(TILE, queries->queries + (int64_t)tile * head_dim, head_dim, num_keys, block);
            for (int q = tile > first ? tile : first; q < tile + TILE && q < queries->num_queries; q++) {
                const vec top = splat(queries->tops[q]), scale = splat(1.0f / sum_lanes(load(queries->masses + (int64_t)q * LANES)));
                const float *source = block->weights + (q - tile) * KEY_BLOCK;
                for (int j = 0; j < KEY_BLOCK; j += LANES) {
                    const vec sum = q % group ? load(row + j) : splat(0.0f);
                    store(row + j, fma_each(power_of_two(load(source + j) - top), scale, sum));
                }
                if (q % group == group - 1)
                    for (int j = 0; j < KEY_BLOCK; j += LANES)
                        store(merged + j, is_max ? max_each(load(merged + j), load(row + j)) : load(merged + j) + load(row + j));
            }
        }
        memcpy(scores + start, merged, sizeof(float) * num_keys);
    }
}
