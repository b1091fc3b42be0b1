/* Forward pass of a Llama-like model over a few tokens of a batch.

   Few tokens are bound by memory bandwidth, so each weight is read once. Matrices are bfloat16, or
   int8 with a scale per row; all else is float32. The order of sums, and so a token's logits, does
   not depend on the other tokens of the block or batch. M = B x N new tokens, row by row. */

#include <math.h>
#include <string.h>

#include "products.h"

#define PARTS 8    /* vectors of a value at a time */
#define TOGETHER 2 /* tokens of a row that share the loads of its keys */
#define KEYS 4     /* keys at a time */

/* RMSNorm of each token. */
static void normed(const float *x, const float *weight, float eps, int64_t size, int64_t num_tokens,
                   float *out) {
    for (int64_t t = 0; t < num_tokens; t++, x += size, out += size) {
        f8 squares[2] = {};
        for (int64_t i = 0; i < size; i += 2 * LANES)
            for (int k = 0; k < 2; k++) {
                f8 here = *(const f8 *)(x + i + k * LANES);
                squares[k] += here * here;
            }
        float factor = 1.0f / sqrtf(sum_lanes(squares[0] + squares[1]) / (float)size + eps);
        for (int64_t i = 0; i < size; i += LANES)
            *(f8 *)(out + i) = *(const f8 *)(x + i) * factor * *(const f8 *)(weight + i);
    }
}

/* Optional RMSNorm, then rotary embedding of one head, in place. */
static void turn(float *head, const float *norm, float eps, int64_t size, const float *cos,
                 const float *sin) {
    int64_t half = size / 2;
    if (norm) {
        float squares = 0.0f;
        for (int64_t i = 0; i < size; i++) squares += head[i] * head[i];
        float factor = 1.0f / sqrtf(squares / (float)size + eps);
        for (int64_t i = 0; i < size; i++) head[i] *= factor * norm[i];
    }
    for (int64_t i = 0; i < half; i++) {
        float a = head[i], b = head[half + i];
        head[i] = a * cos[i] - b * sin[i];
        head[half + i] = b * cos[i] + a * sin[i];
    }
}

/* Scores of num_keys (KEYS or 1) keys with `m` adjacent tokens' queries, `step` floats apart. */
INLINE void score(const float *queries, int64_t step, const float *keys, int64_t size,
                  float scaling, int m, int num_keys, float *scores, int64_t stride) {
    f8 sums[TOGETHER][KEYS] = {};
    for (int64_t i = 0; i < size; i += LANES)
        for (int k = 0; k < num_keys; k++) {
            f8 key = *(const f8 *)(keys + k * size + i);
            for (int t = 0; t < m; t++) sums[t][k] += *(const f8 *)(queries + t * step + i) * key;
        }
    for (int t = 0; t < m; t++)
        if (num_keys == KEYS)
            *(f4 *)(scores + t * stride) =
                sum_lanes_of(sums[t][0], sums[t][1], sums[t][2], sums[t][3]) * scaling;
        else
            scores[t * stride] = sum_lanes(sums[t][0]) * scaling;
}

INLINE void scored(const float *queries, int64_t step, const float *keys, int64_t size,
                   int64_t count, float scaling, int m, float *scores, int64_t stride) {
    int64_t c = 0;
    for (; c + KEYS <= count; c += KEYS)
        score(queries, step, keys + c * size, size, scaling, m, KEYS, scores + c, stride);
    for (; c < count; c++)
        score(queries, step, keys + c * size, size, scaling, m, 1, scores + c, stride);
}

INLINE float largest_of(const float *scores, int64_t count) {
    f8 largest = {}, here;
    largest -= INFINITY;
    for (int64_t c = 0; c < count; c += LANES) {
        here = *(const f8 *)(scores + c);
        largest = select8(here > largest, here, largest);
    }
    float most = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
    return most;
}

/* Sums over columns of score x value, for `parts` vectors of each value. */
INLINE void weighted(const float *scores, int64_t stride, const float *values, int64_t count,
                     int64_t size, int m, int parts, f8 sums[TOGETHER][PARTS]) {
    for (int64_t c = 0; c < count; c++)
        for (int k = 0; k < parts; k++) {
            f8 value = *(const f8 *)(values + c * size + k * LANES);
            for (int t = 0; t < m; t++) sums[t][k] += scores[t * stride + c] * value;
        }
}

/* Attention of `m` adjacent tokens; the last of `count` columns is the last token's own. `step`:
   floats between outputs. */
INLINE void attend(const float *queries, int64_t query_step, const float *keys, const float *values,
                   int64_t size, int64_t count, float scaling, int m, float *scores, int64_t stride,
                   float *mixed, int64_t step, int64_t first) {
    scored(queries, query_step, keys, size, count, scaling, m, scores, stride);
    float share[TOGETHER];
    for (int t = 0; t < m; t++) {
        float *mine = scores + t * stride;
        int64_t own = count - m + 1 + t; /* columns that token t attends to */
        for (int64_t c = own; c < count + LANES; c++) mine[c] = -INFINITY; /* scores are padded */
        float largest = largest_of(mine, own);
        f8 totals = {};
        for (int64_t c = 0; c < own; c += LANES) {
            f8 weights = exp8(*(const f8 *)(mine + c) - largest);
            *(f8 *)(mine + c) = weights;
            totals += weights;
        }
        for (int64_t c = own; c < count; c++) mine[c] = 0.0f;
        share[t] = 1.0f / sum_lanes(totals);
    }
    for (int64_t i = 0; i < size; i += PARTS * LANES) {
        int parts = size - i < PARTS * LANES ? (int)(size - i) / LANES : PARTS;
        f8 sums[TOGETHER][PARTS] = {};
        if (parts == PARTS)
            weighted(scores, stride, values + i, count, size, m, PARTS, sums);
        else
            weighted(scores, stride, values + i, count, size, m, parts, sums);
        for (int t = 0; t < m; t++)
            for (int k = 0; k < parts; k++)
                *(f8 *)(mixed + t * step + first + i + k * LANES) = sums[t][k] * share[t];
    }
}

/* One head of new tokens [from, to) of a row, in pairs if both attend from the same column. */
static void attend_head(const Model *model, const Pass *pass, int64_t l, int64_t b, int64_t h,
                        int64_t from, int64_t to, const float *qkv, float *scores, float *mixed) {
    const int64_t H = model->query_heads, K = model->key_heads, S = model->head_size;
    const int64_t N = pass->count, qkv_rows = (H + 2 * K) * S, stride = pass->width + LANES;
    int64_t window = model->layers[l].window, place = (b * K + h / (H / K)) * pass->columns * S;
    const float *keys = pass->keys[l] + place, *values = pass->values[l] + place;
    for (int64_t j = from; j < to;) {
        int64_t t = b * N + j, end = pass->ends[b] - N + j + 1;
        int64_t begin = pass->ends[b] - pass->lengths[b];
        int slides = window && begin < end + 1 - window;
        if (window && begin < end - window) begin = end - window;
        if (begin >= end) begin = end - 1;
        const float *query = qkv + t * qkv_rows + h * S;
        const float *k = keys + begin * S, *v = values + begin * S;
        float *out = mixed + t * H * S;
        /* padding before a row's first token attends to its own column only */
        int two = j + 1 < to && !slides && begin < end - 1;
        if (two)
            attend(query, qkv_rows, k, v, S, end + 1 - begin, model->scaling, 2, scores, stride, out,
                   H * S, h * S);
        else
            attend(query, qkv_rows, k, v, S, end - begin, model->scaling, 1, scores, stride, out,
                   H * S, h * S);
        j += 1 + two;
    }
}

/* Round up to whole cache lines of 16 floats. */
static int64_t up(int64_t size) { return (size + 15) / 16 * 16; }

static int64_t shared_size(const Model *model, int64_t num_tokens) {
    int64_t heads = model->query_heads * model->head_size;
    int64_t qkv = heads + 2 * model->key_heads * model->head_size;
    return up(num_tokens * (model->hidden + qkv + heads + model->inner));
}

static int64_t widest_operand(const Model *model, int64_t num_tokens) {
    int64_t heads = model->query_heads * model->head_size, widest = model->hidden;
    if (heads > widest) widest = heads;
    if (model->inner > widest) widest = model->inner;
    return up(operand_size(widest, num_tokens));
}

static int64_t own_size(const Model *model, int64_t num_tokens, int64_t width) {
    return up(num_tokens * model->hidden) + widest_operand(model, num_tokens) +
           up(TOGETHER * (width + LANES));
}

int64_t workspace_size(const Model *model, int64_t num_tokens, int64_t width, int64_t threads) {
    return shared_size(model, num_tokens) + threads * own_size(model, num_tokens, width);
}

void read_tokens(const Model *model, const Pass *pass) {
    const int64_t M = pass->batch * pass->count, N = pass->count, D = model->hidden;
    const int64_t H = model->query_heads, K = model->key_heads, S = model->head_size;
    const int64_t qkv_rows = (H + 2 * K) * S, inner = model->inner;
    float *x = pass->workspace, *qkv = x + M * D;
    float *mixed = qkv + M * qkv_rows, *act = mixed + M * H * S;

#pragma omp parallel num_threads(pass->threads)
    {
        int64_t me = omp_get_thread_num(), threads = omp_get_num_threads();
        int64_t own = own_size(model, M, pass->width);
        float *mine = pass->workspace + shared_size(model, M) + me * own;
        float *operand = mine + up(M * D), *scores = operand + widest_operand(model, M);
        Tiles others;
        begin_products(&others);
        for (int64_t t = me; t < M; t += threads)
            read_row(&model->embeddings, pass->tokens[t], D, x + t * D);
        if (model->head_tokens && !pass->compact) {
            int64_t size = pass->batch * pass->keep * model->vocab;
            for (int64_t i = my_part(size, me); i < my_part(size, me + 1); i++)
                pass->logits[i] = -INFINITY;
        }
#pragma omp barrier
        for (int64_t l = 0; l < model->num_layers; l++) {
            const Layer *layer = model->layers + l;
            normed(x, layer->attention_norm, model->norm_eps, D, M, mine);
            lay_out(&layer->qkv, mine, D, M, operand);
            multiply(&layer->qkv, layer->qkv_bias, 0, qkv_rows, D, operand, M, qkv, qkv_rows, 0);
#pragma omp barrier
            for (int64_t unit = me; unit < M * (H + K); unit += threads) {
                int64_t t = unit / (H + K), h = unit % (H + K), b = t / N, j = t % N;
                int64_t position = pass->lengths[b] - N + j, column = pass->ends[b] - N + j;
                if (position < 0) position = 0; /* padding, not read */
                float *head = qkv + t * qkv_rows + h * S;
                turn(head, h < H ? layer->query_norm : layer->key_norm, model->norm_eps, S,
                     pass->cos + position * (S / 2), pass->sin + position * (S / 2));
                if (h >= H) {
                    int64_t place = ((b * K + h - H) * pass->columns + column) * S;
                    memcpy(pass->keys[l] + place, head, S * sizeof(float));
                    memcpy(pass->values[l] + place, head + K * S, S * sizeof(float));
                }
            }
#pragma omp barrier
            /* heads that share keys and values are adjacent, so these stay in cache */
            for (int64_t unit = my_part(M * H, me); unit < my_part(M * H, me + 1);) {
                int64_t j = unit % N, group = H / K, g = unit / N % group;
                int64_t b = unit / N / group % pass->batch, k = unit / N / group / pass->batch;
                int64_t h = k * group + g;
                int64_t to = N, last = my_part(M * H, me + 1) - unit + j;
                if (last < to) to = last;
                attend_head(model, pass, l, b, h, j, to, qkv, scores, mixed);
                unit += to - j;
            }
#pragma omp barrier
            lay_out(&layer->out, mixed, H * S, M, operand);
            multiply(&layer->out, 0, 0, D, H * S, operand, M, x, D, 1);
#pragma omp barrier
            normed(x, layer->mlp_norm, model->norm_eps, D, M, mine);
            lay_out(&layer->gate_up, mine, D, M, operand);
            gated(&layer->gate_up, inner, D, operand, M, act);
#pragma omp barrier
            lay_out(&layer->down, act, inner, M, operand);
            multiply(&layer->down, 0, 0, D, inner, operand, M, x, D, 1);
#pragma omp barrier
        }
        int64_t kept = 0;
        for (int64_t t = 0; t < M; t++)
            if (t % N >= N - pass->keep)
                normed(x + t * D, model->final_norm, model->norm_eps, D, 1, mine + kept++ * D);
        if (pass->states && !me) memcpy(pass->states, mine, kept * D * sizeof *mine);
        lay_out(&model->head, mine, D, kept, operand);
        multiply(&model->head, model->head_bias, pass->compact ? 0 : model->head_tokens,
                 model->head_rows, D, operand, kept, pass->logits,
                 pass->compact ? model->head_rows : model->vocab, 0);
        end_products(&others);
    }
}
