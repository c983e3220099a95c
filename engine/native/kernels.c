// One step of a Qwen2 text model for a few rows: norms, projections, RoPE, attention over two slabs, MLP.
//
// Every row is computed by itself, by the same instructions in the same order, whatever rows stand beside it. So a row's
// result has the same bits in a block of sixteen as alone: verification is exact by construction. Two rules keep it so:
// dot products always run over eight operands at once (the ragged end repeats the last one and drops the result), and
// attention walks keys on a fixed grid of KEY_BLOCK from the start of each slab, with what a row may not see at weight zero.
//
// Weights and keys are read once per step for all rows; keys and values of a block stay in the first-level cache.

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#define KEY_BLOCK 64
#define LANES 8
#define CHUNK 32  // widest run of value columns whose sums are kept in registers

typedef float vec __attribute__((vector_size(32), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(32), aligned(4)));

typedef struct {
    const float *input_norm, *qkv, *qkv_bias, *output, *mlp_norm, *gate_up, *down;
} Layer;

typedef struct {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate;
    float eps, scaling;
    const Layer *layers;
    const float *final_norm;
} Model;

// Keys and values [num_layers, num_kv_heads, capacity, head_dim]; strides count floats.
typedef struct {
    float *keys, *values;
    int64_t layer_stride, head_stride;
    int32_t len;
} Slab;

static inline vec load(const float *source) { return *(const vec *)source; }
static inline void store(float *target, vec value) { *(vec *)target = value; }
static inline vec splat(float value) { return (vec){value, value, value, value, value, value, value, value}; }

// Sums the lanes of eight vectors: lane i of the result is the sum of part[i].
static inline vec sum_each(const vec part[LANES]) {
#if defined(__AVX__)
    __m256 a = _mm256_hadd_ps(_mm256_hadd_ps((__m256)part[0], (__m256)part[1]), _mm256_hadd_ps((__m256)part[2], (__m256)part[3]));
    __m256 b = _mm256_hadd_ps(_mm256_hadd_ps((__m256)part[4], (__m256)part[5]), _mm256_hadd_ps((__m256)part[6], (__m256)part[7]));
    return (vec)_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
#else
    vec sums;
    for (int i = 0; i < LANES; i++) {
        const vec p = part[i];
        sums[i] = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + (p[6] + p[7]));
    }
    return sums;
#endif
}

// Dot products of one vector with eight others that lie `stride` apart, of which those from `num_others` on repeat the last
// one; `width` is a multiple of LANES.
static inline __attribute__((always_inline)) vec dot_eight(const float *one, const float *others, int64_t stride, int num_others,
                                                           int width) {
    vec sums[LANES];
    for (int i = 0; i < LANES; i++) sums[i] = splat(0.0f);
    for (int column = 0; column < width; column += LANES) {
        const vec x = load(one + column);
        for (int i = 0; i < LANES; i++) {
            const int place = i < num_others ? i : num_others - 1;
            sums[i] += x * load(others + place * stride + column);
        }
    }
    return sum_each(sums);
}

static inline float sum_lanes(vec v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

static inline float max_lanes(vec v) {
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
}

static inline vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }
static inline vec max_each(vec a, vec b) { return choose(a > b, a, b); }
static inline vec min_each(vec a, vec b) { return choose(a < b, a, b); }

// e to the x, within 2 units in the last place; exactly 0 below -87.
static inline vec exponential(vec x) {
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const ivec is_tiny = x < splat(-87.0f);
    const vec clamped = min_each(max_each(x, splat(-87.0f)), splat(88.0f));
    const vec shifted = clamped * splat(1.44269504088896341f) + magic;
    const vec n = shifted - magic;
    const vec r = (clamped - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);
    vec p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    const ivec bits = (ivec)p + ((((ivec)shifted) - (int32_t)0x4B400000) << 23);
    return (vec)(bits & ~is_tiny);
}

static void rms_norm(const float *x, const float *weight, float eps, int width, float *out) {
    vec squares = splat(0.0f);
    for (int i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    const vec scale = splat(1.0f / sqrtf(sum_lanes(squares) / (float)width + eps));
    for (int i = 0; i < width; i += LANES) store(out + i, load(weight + i) * (load(x + i) * scale));
}

// out[row] = weight @ x[row] (+ bias) (+ what out held); weight [num_out, width], num_out a multiple of LANES.
static void linear(const float *x, int num_rows, int width, const float *weight, const float *bias, int num_out, float *out,
                   int accumulate) {
    for (int o = 0; o < num_out; o += LANES) {
        for (int row = 0; row < num_rows; row++) {
            float *target = out + (int64_t)row * num_out + o;
            vec sums = dot_eight(x + (int64_t)row * width, weight + (int64_t)o * width, width, LANES, width);
            if (bias) sums += load(bias + o);
            if (accumulate) sums += load(target);
            store(target, sums);
        }
    }
}

static void rotate(float *head, const float *cosines, const float *sines, int half) {
    for (int i = 0; i < half; i += LANES) {
        const vec a = load(head + i), b = load(head + half + i), c = load(cosines + i), s = load(sines + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
}

// The running softmax of one query row.
typedef struct {
    float top, mass;
} Softmax;

// Adds the first `num_visible` of at most KEY_BLOCK keys to one row's softmax and weighted sum of values.
static inline __attribute__((always_inline)) void attend_block(const float *query, const float *keys, const float *values,
                                                               int num_visible, int head_dim, Softmax *state, float *sum) {
    float weights[KEY_BLOCK] __attribute__((aligned(32)));
    const vec lowest = splat(-INFINITY);
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7};
    const int num_whole = num_visible / LANES * LANES;
    vec top = lowest;
    for (int j = 0; j < num_whole; j += LANES) {
        const vec scores = dot_eight(query, keys + (int64_t)j * head_dim, head_dim, LANES, head_dim);
        top = max_each(top, scores);
        store(weights + j, scores);
    }
    for (int j = num_whole; j < KEY_BLOCK; j += LANES) {
        vec scores = lowest;
        if (j < num_visible) {
            scores = dot_eight(query, keys + (int64_t)j * head_dim, head_dim, num_visible - j, head_dim);
            scores = choose(lane < num_visible - j, scores, lowest);
        }
        top = max_each(top, scores);
        store(weights + j, scores);
    }
    const float block_top = max_lanes(top);
    const float new_top = block_top > state->top ? block_top : state->top;
    const float decay = exponential(splat(state->top - new_top))[0];
    vec mass = splat(0.0f);
    for (int j = 0; j < KEY_BLOCK; j += LANES) {
        const vec weight = exponential(load(weights + j) - splat(new_top));
        store(weights + j, weight);
        mass += weight;
    }
    state->mass = state->mass * decay + sum_lanes(mass);
    state->top = new_top;
    for (int column = 0; column < head_dim; column += CHUNK) {
        vec even[CHUNK / LANES], odd[CHUNK / LANES];
        for (int c = 0; c < CHUNK / LANES; c++) even[c] = odd[c] = splat(0.0f);
        int j = 0;
        for (; j + 1 < num_visible; j += 2) {
            const float *pair = values + (int64_t)j * head_dim + column;
            const vec w0 = splat(weights[j]), w1 = splat(weights[j + 1]);
            for (int c = 0; c < CHUNK / LANES; c++) {
                even[c] += w0 * load(pair + c * LANES);
                odd[c] += w1 * load(pair + head_dim + c * LANES);
            }
        }
        if (j < num_visible)  // the last key has no partner; beside others it would have one of weight zero
            for (int c = 0; c < CHUNK / LANES; c++)
                even[c] += splat(weights[j]) * load(values + (int64_t)j * head_dim + column + c * LANES);
        for (int c = 0; c < CHUNK / LANES; c++) {
            float *target = sum + column + c * LANES;
            store(target, load(target) * splat(decay) + (even[c] + odd[c]));
        }
    }
}

// All query rows of one KV head over one slab. Row r of `num_rows` sees `visible_len + r * causal` keys.
// Queries and sums are [num_rows, num_heads, head_dim], of which this head's group is [first_head, first_head + group).
static void attend_slab(const Slab *slab, int layer, int kv_head, int num_rows, int visible_len, int causal, int num_heads,
                        int first_head, int group, int head_dim, const float *queries, Softmax *states, float *sums) {
    const float *keys = slab->keys + layer * slab->layer_stride + kv_head * slab->head_stride;
    const float *values = slab->values + layer * slab->layer_stride + kv_head * slab->head_stride;
    const int longest = visible_len + (num_rows - 1) * causal;
    for (int start = 0; start < longest; start += KEY_BLOCK) {
        for (int row = 0; row < num_rows; row++) {
            int num_visible = visible_len + row * causal - start;
            if (num_visible <= 0) continue;
            if (num_visible > KEY_BLOCK) num_visible = KEY_BLOCK;
            for (int head = first_head; head < first_head + group; head++) {
                const int64_t place = (int64_t)row * num_heads + head;
                const float *block_keys = keys + (int64_t)start * head_dim, *block_values = values + (int64_t)start * head_dim;
                if (head_dim == CHUNK)  // a constant width lets the compiler keep the query in registers
                    attend_block(queries + place * CHUNK, block_keys, block_values, num_visible, CHUNK, states + place,
                                 sums + place * CHUNK);
                else
                    attend_block(queries + place * head_dim, block_keys, block_values, num_visible, head_dim, states + place,
                                 sums + place * head_dim);
            }
        }
    }
}

static void attention(const Model *model, int layer, int num_rows, const float *qkv, float *queries, const float *cosines,
                      const float *sines, const Slab *context, const Slab *thread, Softmax *states, float *out) {
    const int head_dim = model->head_dim, num_heads = model->num_heads, num_kv_heads = model->num_kv_heads;
    const int row_width = (num_heads + 2 * num_kv_heads) * head_dim, half = head_dim / 2;
    for (int row = 0; row < num_rows; row++) {
        const float *source = qkv + (int64_t)row * row_width;
        float *query = queries + (int64_t)row * num_heads * head_dim;
        memcpy(query, source, sizeof(float) * num_heads * head_dim);
        for (int head = 0; head < num_heads; head++) {
            float *one = query + head * head_dim;
            rotate(one, cosines + row * half, sines + row * half, half);
            for (int i = 0; i < head_dim; i += LANES) store(one + i, load(one + i) * splat(model->scaling));
        }
        for (int head = 0; head < num_kv_heads; head++) {
            const int64_t place = layer * thread->layer_stride + head * thread->head_stride + (int64_t)(thread->len + row) * head_dim;
            memcpy(thread->keys + place, source + (num_heads + head) * head_dim, sizeof(float) * head_dim);
            memcpy(thread->values + place, source + (num_heads + num_kv_heads + head) * head_dim, sizeof(float) * head_dim);
            rotate(thread->keys + place, cosines + row * half, sines + row * half, half);
        }
    }
    for (int i = 0; i < num_rows * num_heads; i++) states[i] = (Softmax){-INFINITY, 0.0f};
    memset(out, 0, sizeof(float) * num_rows * num_heads * head_dim);
    const int group = num_heads / num_kv_heads;
    for (int head = 0; head < num_kv_heads; head++) {
        if (context->len)
            attend_slab(context, layer, head, num_rows, context->len, 0, num_heads, head * group, group, head_dim, queries, states, out);
        attend_slab(thread, layer, head, num_rows, thread->len + 1, 1, num_heads, head * group, group, head_dim, queries, states, out);
    }
    for (int i = 0; i < num_rows * num_heads; i++) {
        const vec scale = splat(1.0f / states[i].mass);
        for (int c = 0; c < head_dim; c += LANES) store(out + i * head_dim + c, load(out + i * head_dim + c) * scale);
    }
}

// out[row] = weight @ x[row]: [num_rows, width] to [num_rows, num_out].
void foveate_linear(const float *x, int32_t num_rows, int32_t width, const float *weight, int32_t num_out, float *out) {
    linear(x, num_rows, width, weight, 0, num_out, out, 0);
}

// Floats of scratch that a step of `num_rows` rows needs.
int64_t foveate_scratch_floats(const Model *model, int32_t num_rows) {
    const int64_t heads = (int64_t)model->num_heads * model->head_dim, kv = (int64_t)model->num_kv_heads * model->head_dim;
    return num_rows * (model->hidden + heads + 2 * kv + heads + heads + 2 * model->num_heads + 3 * (int64_t)model->intermediate);
}

// Runs `hidden` [num_rows, hidden] through all layers and the final norm, in place. Writes keys and values of the rows to
// the thread at its len, which the caller owns. Cosines and sines are [num_rows, head_dim / 2].
void foveate_decode(const Model *model, int32_t num_rows, float *hidden, const float *cosines, const float *sines,
                    const Slab *context, const Slab *thread, float *scratch) {
    const int width = model->hidden, heads = model->num_heads * model->head_dim, inter = model->intermediate;
    const int qkv_width = heads + 2 * model->num_kv_heads * model->head_dim;
    float *normed = scratch, *qkv = normed + (int64_t)num_rows * width, *queries = qkv + (int64_t)num_rows * qkv_width;
    float *attended = queries + (int64_t)num_rows * heads, *gate_up = attended + (int64_t)num_rows * heads;
    float *gated = gate_up + (int64_t)num_rows * 2 * inter;
    Softmax *states = (Softmax *)(gated + (int64_t)num_rows * inter);
    for (int index = 0; index < model->num_layers; index++) {
        const Layer *layer = model->layers + index;
        for (int r = 0; r < num_rows; r++)
            rms_norm(hidden + (int64_t)r * width, layer->input_norm, model->eps, width, normed + (int64_t)r * width);
        linear(normed, num_rows, width, layer->qkv, layer->qkv_bias, qkv_width, qkv, 0);
        attention(model, index, num_rows, qkv, queries, cosines, sines, context, thread, states, attended);
        linear(attended, num_rows, heads, layer->output, 0, width, hidden, 1);
        for (int r = 0; r < num_rows; r++)
            rms_norm(hidden + (int64_t)r * width, layer->mlp_norm, model->eps, width, normed + (int64_t)r * width);
        linear(normed, num_rows, width, layer->gate_up, 0, 2 * inter, gate_up, 0);
        for (int r = 0; r < num_rows; r++) {
            const float *gate = gate_up + (int64_t)r * 2 * inter, *up = gate + inter;
            for (int i = 0; i < inter; i += LANES) {
                const vec g = load(gate + i);
                store(gated + (int64_t)r * inter + i, g / (splat(1.0f) + exponential(-g)) * load(up + i));
            }
        }
        linear(gated, num_rows, inter, layer->down, 0, width, hidden, 1);
    }
    for (int r = 0; r < num_rows; r++)
        rms_norm(hidden + (int64_t)r * width, model->final_norm, model->eps, width, hidden + (int64_t)r * width);
}
