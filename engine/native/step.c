// One step of a Qwen2 or Qwen3 text model for rows of any number of sequences: norms, projections, RoPE, attention over two slabs, MLP.
//
// Every row is computed by the same operations in the same order, whatever rows stand beside it. So a row's result has the
// same bits in a block of sixteen, or beside other answers, as alone: verification is exact by construction.
//
// Weights are read once per step for all rows, a context's keys once for all sequences on it; keys and values of a block
// stay in the first-level cache.

#include "attention.h"
#include "linear.h"
#include "vectors.h"

typedef struct {
    const float *input_norm, *mlp_norm;
    const float *query_norm, *key_norm;  // [head_dim], or null
    Matrix qkv, output, gate_up, down;
} Layer;

typedef struct {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    float eps, scaling;
    const float *embedding;  // [vocab, hidden]
    const Layer *layers;
    const float *final_norm;
    Matrix lm_head;  // its bias is -infinity for what is never chosen, else 0
} Model;

// What one sequence has in a step: tokens, or embeddings, at consecutive places of its thread from its len on. The caller
// owns all memory. Angles are [num_rows, head_dim / 2]. Sequences on the same context stand side by side.
typedef struct {
    const int32_t *token_ids;
    const float *embeds;  // [num_rows, hidden], in place of token_ids, or null
    const float *cosines, *sines;
    Slab context, thread;
    float *tapped;   // where to keep what enters the layer `tapped_layer`, [num_rows, hidden], or null
    float *queries;  // where to keep all rotated queries, [num_layers, num_heads, num_rows, head_dim], or null
    float *scores;   // where to merge the attention that the context gets, [num_layers, num_kv_heads, context len], or null
    const float *added;  // what the first num_added layers' results get, [num_added, num_rows, hidden], or null
    int32_t num_rows, tapped_layer, num_chosen;  // logits are wanted of the last num_chosen rows
    int32_t first_scoring, is_max;  // rows from first_scoring on give scores; the largest of theirs, or their sum
    int32_t num_added;
} Part;

static void rms_norm(const float *x, const float *weight, float eps, int num_rows, int width, float *out) {
    for (int row = 0; row < num_rows; row++, x += width, out += width) {
        vec squares = splat(0.0f);
        for (int i = 0; i < width; i += LANES) squares = fma_each(load(x + i), load(x + i), squares);
        const vec scale = splat(1.0f / sqrtf(sum_lanes(squares) / (float)width + eps));
        for (int i = 0; i < width; i += LANES) store(out + i, load(weight + i) * (load(x + i) * scale));
    }
}

static void rotate(const float *head, const float *cosines, const float *sines, int half, float *out) {
    for (int i = 0; i < half; i += LANES) {
        const vec a = load(head + i), b = load(head + half + i), c = load(cosines + i), s = load(sines + i);
        store(out + i, a * c - b * s);
        store(out + half + i, b * c + a * s);
    }
}

// Returns a head with its norm taken, in `place`, or as it is in a model without.
static const float *head_normed(const Model *model, const float *head, const float *norm, float *place) {
    if (!norm) return head;
    rms_norm(head, norm, model->eps, 1, model->head_dim, place);
    return place;
}

// Writes the rows' keys and values to the thread.
static void write_rows(const Model *model, const Part *part, int layer, const float *qkv) {
    const int head_dim = model->head_dim, num_kv_heads = model->num_kv_heads, half = head_dim / 2;
    const Slab *thread = &part->thread;
    float normed[head_dim];
    for (int row = 0; row < part->num_rows; row++) {
        const float *key = qkv + ((int64_t)row * (model->num_heads + 2 * num_kv_heads) + model->num_heads) * head_dim;
        for (int head = 0; head < num_kv_heads; head++, key += head_dim) {
            const int64_t place = layer * thread->layer_stride + head * thread->head_stride + (int64_t)(thread->len + row) * head_dim;
            rotate(head_normed(model, key, model->layers[layer].key_norm, normed), part->cosines + row * half, part->sines + row * half, half, thread->keys + place);
            memcpy(thread->values + place, key + num_kv_heads * head_dim, sizeof(float) * head_dim);
        }
    }
}

// Packs the queries of one KV head behind those that are there, and clears their softmax.
static void begin_queries(const Model *model, const Part *part, int layer, int kv_head, const float *qkv, Queries *queries) {
    const int head_dim = model->head_dim, half = head_dim / 2, group = queries->group;
    const float scale = model->scaling * LOG2_E;
    float rotated[head_dim], normed[head_dim];
    for (int row = 0; row < part->num_rows; row++)
        for (int g = 0; g < group; g++) {
            const int q = queries->num_queries++, head = kv_head * group + g;
            const float *query = qkv + ((int64_t)row * (model->num_heads + 2 * model->num_kv_heads) + head) * head_dim;
            rotate(head_normed(model, query, model->layers[layer].query_norm, normed), part->cosines + row * half, part->sines + row * half, half, rotated);
            if (part->queries)
                memcpy(part->queries + (((int64_t)layer * model->num_heads + head) * part->num_rows + row) * head_dim, rotated, sizeof(float) * head_dim);
            float *target = queries->queries + (int64_t)(q / TILE) * TILE * head_dim + q % TILE;
            for (int column = 0; column < head_dim; column++) target[column * TILE] = rotated[column] * scale;
            queries->tops[q] = -INFINITY;
            memset(queries->masses + (int64_t)q * LANES, 0, sizeof(float) * LANES);
            memset(queries->sums + (int64_t)q * head_dim, 0, sizeof(float) * head_dim);
        }
}

// A part's own queries of those that share a context: packed anew at `place`, with the same softmax.
static Queries own_queries(const Queries *shared, int first, int num_queries, float *place) {
    const int head_dim = shared->head_dim;
    Queries own = *shared;
    own.num_queries = num_queries;
    own.tops += first;
    own.masses += (int64_t)first * LANES;
    own.sums += (int64_t)first * head_dim;
    if (num_queries == shared->num_queries) return own;
    own.queries = place;
    for (int q = 0; q < num_queries; q++) {
        const float *source = shared->queries + (int64_t)((first + q) / TILE) * TILE * head_dim + (first + q) % TILE;
        float *target = place + (int64_t)(q / TILE) * TILE * head_dim + q % TILE;
        for (int column = 0; column < head_dim; column++) target[column * TILE] = source[column * TILE];
    }
    return own;
}

// Writes the group's part of out [num_rows, num_heads, head_dim].
static void end_queries(const Model *model, int kv_head, const Queries *queries, float *out) {
    const int head_dim = model->head_dim, group = queries->group;
    for (int q = 0; q < queries->num_queries; q++) {
        float *target = out + ((int64_t)(q / group) * model->num_heads + kv_head * group + q % group) * head_dim;
        const vec scale = splat(1.0f / sum_lanes(load(queries->masses + q * LANES)));
        for (int c = 0; c < head_dim; c += LANES) store(target + c, load(queries->sums + (int64_t)q * head_dim + c) * scale);
    }
}

// Bytes to a cache line's, so that parts of the scratch do not share one.
static int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

// Where a step keeps what is not its result; with a null start, the size of it.
typedef struct {
    float *normed, *qkv, *attended, *gate_up, *gated, *own;
    Queries queries;
    Block block;
    int64_t num_floats;
} Scratch;

static float *take(Scratch *scratch, float *start, int64_t floats) {
    float *part = start ? start + scratch->num_floats : 0;
    scratch->num_floats += padded(floats);
    return part;
}

static void lay_out(const Model *model, int64_t num_rows, float *start, Scratch *scratch) {
    const int64_t head_dim = model->head_dim, heads = model->num_heads * head_dim, group = model->num_heads / model->num_kv_heads;
    const int64_t num_queries = num_rows * group, tiles = (num_queries + TILE - 1) / TILE;
    scratch->num_floats = 0;
    scratch->normed = take(scratch, start, num_rows * model->hidden);
    scratch->qkv = take(scratch, start, num_rows * (heads + 2 * model->num_kv_heads * head_dim));
    scratch->attended = take(scratch, start, num_rows * heads);
    scratch->gate_up = take(scratch, start, num_rows * 2 * model->intermediate);
    scratch->gated = take(scratch, start, num_rows * model->intermediate);
    scratch->own = take(scratch, start, tiles * TILE * head_dim);
    scratch->queries = (Queries){
        .group = group,
        .head_dim = head_dim,
        .queries = take(scratch, start, tiles * TILE * head_dim),
        .tops = take(scratch, start, num_queries),
        .masses = take(scratch, start, num_queries * LANES),
        .sums = take(scratch, start, num_queries * head_dim),
    };
    scratch->block.keys = take(scratch, start, head_dim * KEY_BLOCK);
    scratch->block.partial = take(scratch, start, TILE * head_dim);
}

// The first of the parts behind `first` that stands on another context.
static int end_of_context(const Part *parts, int num_parts, int first) {
    int end = first + 1;
    while (end < num_parts && parts[end].context.keys == parts[first].context.keys && parts[end].context.len == parts[first].context.len) end++;
    return end;
}

static void attend_parts(const Model *model, const Part *parts, int num_parts, int layer, const float *qkv, float *attended, Scratch *scratch) {
    const int64_t row_width = (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    const Slab *context = &parts[0].context;
    for (int head = 0; head < model->num_kv_heads; head++) {
        Queries *queries = &scratch->queries;
        queries->num_queries = 0;
        const float *source = qkv;
        for (int i = 0; i < num_parts; source += parts[i++].num_rows * row_width)
            begin_queries(model, parts + i, layer, head, source, queries);
        const int64_t old = layer * context->layer_stride + head * context->head_stride;
        if (context->len) attend_slab(queries, context->keys + old, context->values + old, context->len, 0, &scratch->block);
        for (int i = 0, first = 0; i < num_parts; first += parts[i++].num_rows * queries->group) {
            const Slab *thread = &parts[i].thread;
            const int64_t new = layer * thread->layer_stride + head * thread->head_stride;
            Queries own = own_queries(queries, first, parts[i].num_rows * queries->group, scratch->own);
            attend_slab(&own, thread->keys + new, thread->values + new, thread->len + 1, 1, &scratch->block);
            if (parts[i].scores)
                score_keys(&own, parts[i].first_scoring * queries->group, context->keys + old, context->len, parts[i].is_max,
                           parts[i].scores + ((int64_t)layer * model->num_kv_heads + head) * context->len, &scratch->block);
        }
        end_queries(model, head, queries, attended);
    }
}

static void attention(const Model *model, const Part *parts, int num_parts, int layer, Scratch *scratch) {
    const int64_t row_width = (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    const float *qkv = scratch->qkv;
    float *attended = scratch->attended;
    for (int first = 0, end; first < num_parts; first = end) {
        end = end_of_context(parts, num_parts, first);
        int num_rows = 0;
        for (int i = first; i < end; num_rows += parts[i++].num_rows) write_rows(model, parts + i, layer, qkv + num_rows * row_width);
        attend_parts(model, parts + first, end - first, layer, qkv, attended, scratch);
        qkv += num_rows * row_width;
        attended += (int64_t)num_rows * model->num_heads * model->head_dim;
    }
}

static void gate(const float *gate_up, int num_rows, int width, float *out) {
    for (int row = 0; row < num_rows; row++, gate_up += 2 * width, out += width)
        for (int i = 0; i < width; i += LANES) {
            const vec g = load(gate_up + i);
            store(out + i, g / (splat(1.0f) + exponential(-g)) * load(gate_up + width + i));
        }
}

// Floats of scratch that a step of `num_rows` rows needs.
int64_t foveate_scratch_floats(const Model *model, int32_t num_rows) {
    Scratch scratch;
    lay_out(model, num_rows, 0, &scratch);
    return scratch.num_floats;
}

static void embed(const Model *model, const Part *part, float *hidden) {
    const int64_t width = model->hidden;
    if (part->embeds) memcpy(hidden, part->embeds, sizeof(float) * part->num_rows * width);
    else
        for (int row = 0; row < part->num_rows; row++)
            memcpy(hidden + row * width, model->embedding + part->token_ids[row] * width, sizeof(float) * width);
}

static void tap(const Model *model, const Part *parts, int num_parts, int layer, const float *hidden) {
    for (int i = 0; i < num_parts; hidden += (int64_t)parts[i++].num_rows * model->hidden)
        if (parts[i].tapped && parts[i].tapped_layer == layer) memcpy(parts[i].tapped, hidden, sizeof(float) * parts[i].num_rows * model->hidden);
}

static void add_rows(const Model *model, const Part *parts, int num_parts, int layer, float *hidden) {
    for (int i = 0; i < num_parts; i++) {
        const int64_t floats = (int64_t)parts[i].num_rows * model->hidden;
        if (layer < parts[i].num_added)
            for (int64_t k = 0; k < floats; k++) hidden[k] += parts[i].added[layer * floats + k];
        hidden += floats;
    }
}

static void layer_of_rows(const Model *model, const Part *parts, int num_parts, int num_rows, int index, Scratch *scratch, float *hidden) {
    const Layer *layer = model->layers + index;
    rms_norm(hidden, layer->input_norm, model->eps, num_rows, model->hidden, scratch->normed);
    linear(&layer->qkv, scratch->normed, num_rows, scratch->qkv, 0);
    attention(model, parts, num_parts, index, scratch);
    linear(&layer->output, scratch->attended, num_rows, hidden, 1);
    rms_norm(hidden, layer->mlp_norm, model->eps, num_rows, model->hidden, scratch->normed);
    linear(&layer->gate_up, scratch->normed, num_rows, scratch->gate_up, 0);
    gate(scratch->gate_up, num_rows, model->intermediate, scratch->gated);
    linear(&layer->down, scratch->gated, num_rows, hidden, 1);
}

// Writes logits [num_rows, vocab] of hidden states [num_rows, hidden].
void foveate_logits(const Model *model, const float *hidden, int32_t num_rows, float *logits) {
    linear(&model->lm_head, hidden, num_rows, logits, 0);
}

// Writes logits of the rows that are wanted, in order of the parts, and the likeliest token of each, the first of equals.
static void choose_tokens(const Model *model, const Part *parts, int num_parts, const float *hidden, float *gathered, float *logits, int32_t *chosen) {
    const int64_t width = model->hidden, vocab = model->lm_head.num_out;
    int num_chosen = 0;
    for (int i = 0; i < num_parts; num_chosen += parts[i++].num_chosen) {
        hidden += parts[i].num_rows * width;
        memcpy(gathered + num_chosen * width, hidden - parts[i].num_chosen * width, sizeof(float) * parts[i].num_chosen * width);
    }
    foveate_logits(model, gathered, num_chosen, logits);
    for (int row = 0; row < num_chosen; row++, logits += vocab) {
        int32_t best = 0;
        for (int32_t id = 1; id < vocab; id++)
            if (logits[id] > logits[best]) best = id;
        chosen[row] = best;
    }
}

// Runs a step. Writes the hidden states after the final norm, [num_rows, hidden] in order of the parts, and of the rows that
// are wanted logits [num_chosen, vocab] and likeliest tokens. Keys and values go to the threads.
void foveate_step(const Model *model, const Part *parts, int32_t num_parts, float *start, float *hidden, float *logits, int32_t *chosen) {
    Scratch scratch;
    int num_rows = 0;
    for (int i = 0; i < num_parts; num_rows += parts[i++].num_rows) embed(model, parts + i, hidden + (int64_t)num_rows * model->hidden);
    lay_out(model, num_rows, start, &scratch);
    for (int layer = 0; layer < model->num_layers; layer++) {
        tap(model, parts, num_parts, layer, hidden);
        layer_of_rows(model, parts, num_parts, num_rows, layer, &scratch, hidden);
        add_rows(model, parts, num_parts, layer, hidden);
    }
    rms_norm(hidden, model->final_norm, model->eps, num_rows, model->hidden, hidden);
    choose_tokens(model, parts, num_parts, hidden, scratch.normed, logits, chosen);
}
