/* A few tokens of a batch through a whole Llama-like model, as one call.

   Reading one token is bound by memory: each weight is fetched once and used once. The matrices
   are bfloat16, widened to float32 by a shift, or whole numbers of 8 bits with a scale a row;
   everything else is float32. Sums run in one order whatever else is in the block or the batch,
   so a token's logits do not depend on its company.

   Layout: a matrix is [out, in], row by row. A vector that a matrix is multiplied with is "paired":
   of each 16 entries first those at even places, then those at odd places, as the shift takes
   weights apart. So are the rows of 8-bit matrices. M tokens are the B x N new ones, row after row
   of the batch.
*/

#include <math.h>
#include <omp.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "llama.h"
#include "vectors.h"

#define ROWS 2     /* rows of a matrix side by side; `gated` takes a gate and its up */
#define TOKENS 4   /* tokens at a time */
#define AHEAD 4096 /* bytes to fetch early: a page, where the processor's own foresight ends */

INLINE int64_t my_part(int64_t count, int64_t thread) {
    return count * thread / omp_get_num_threads();
}

INLINE float sum_lanes(f8 v) {
    f4 four = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    f4 two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return two[0] + two[1];
}

INLINE f8 even_weights(i8 pairs) { return (f8)(pairs << 16); }
INLINE f8 odd_weights(i8 pairs) { return (f8)(pairs & (int32_t)0xffff0000); }
INLINE f8 small_weights(const char *weights) {
#ifdef __AVX2__ /* gcc 12 takes the portable line apart, entry by entry */
    i8 numbers = (i8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)weights));
#else
    i8 numbers = __builtin_convertvector(*(const b8 *)weights, i8);
#endif
    return __builtin_convertvector(numbers, f8);
}
INLINE float widen(uint16_t weight) {
    uint32_t bits = (uint32_t)weight << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE int64_t paired(int64_t i) { return (i & ~(int64_t)15) | ((i & 1) << 3) | ((i & 15) >> 1); }

/* Products of `rows` rows of weights, `bytes` each, with `m` paired vectors: sums[row][token]. */
INLINE void some_rows(const char *const *w, int bytes, const float *x, int64_t size, int rows,
                      int m, float sums[][TOKENS]) {
    f8 evens[ROWS][TOKENS] = {}, odds[ROWS][TOKENS] = {};
#pragma GCC unroll 4
    for (int64_t i = 0; i < size; i += 2 * LANES) {
        f8 even_w[ROWS], odd_w[ROWS];
        for (int row = 0; row < rows; row++) {
            const char *here = w[row] + i * bytes;
            /* once a line of 64 bytes is enough, but wider weights come faster with more */
            if (bytes == 2 || !(i & 63)) __builtin_prefetch(here + AHEAD);
            if (bytes == 2) {
                i8 pairs = *(const i8 *)here;
                even_w[row] = even_weights(pairs), odd_w[row] = odd_weights(pairs);
            } else {
                even_w[row] = small_weights(here), odd_w[row] = small_weights(here + LANES);
            }
        }
        for (int t = 0; t < m; t++) {
            const float *here = x + t * size + i;
            f8 even = *(const f8 *)here, odd = *(const f8 *)(here + LANES);
            for (int row = 0; row < rows; row++) {
                evens[row][t] += even_w[row] * even;
                odds[row][t] += odd_w[row] * odd;
            }
        }
    }
    for (int row = 0; row < rows; row++)
        for (int t = 0; t < m; t++) sums[row][t] = sum_lanes(evens[row][t] + odds[row][t]);
}

/* The same for ROWS rows, taken in as many at a time as the registers hold the sums of. */
INLINE void few_tokens(const char *const *w, int bytes, const float *x, int64_t size, int m,
                       float sums[ROWS][TOKENS]) {
    if (m == 1)
        some_rows(w, bytes, x, size, ROWS, 1, sums);
    else if (m == 2)
        some_rows(w, bytes, x, size, ROWS, 2, sums);
    else
        for (int row = 0; row < ROWS; row++)
            if (m == 3)
                some_rows(w + row, bytes, x, size, 1, 3, sums + row);
            else
                some_rows(w + row, bytes, x, size, 1, TOKENS, sums + row);
}

/* sums[row][token] of these rows of the matrix, scales applied. */
INLINE void products(const Matrix *matrix, const int64_t rows[ROWS], const float *x, int64_t size,
                     int m, float sums[ROWS][TOKENS]) {
    const int bytes = matrix->scales ? 1 : 2;
    const char *w[ROWS];
    for (int row = 0; row < ROWS; row++) w[row] = matrix->weights + rows[row] * size * bytes;
    if (bytes == 2) {
        few_tokens(w, 2, x, size, m, sums);
    } else {
        few_tokens(w, 1, x, size, m, sums);
        for (int row = 0; row < ROWS; row++)
            for (int t = 0; t < m; t++) sums[row][t] *= matrix->scales[rows[row]];
    }
}

/* out[t, r] = row r of the matrix . x[t] + bias[r], or += where `add`; with `places`, row r goes
   there. Each thread takes its part of the rows, in ROWS streams side by side, which memory
   delivers faster than neighbours in turn. `stride`: floats from one token's `out` to the next. */
static void multiply(const Matrix *matrix, const float *bias, const int64_t *places, int64_t rows,
                     int64_t size, const float *x, int64_t num_tokens, float *out, int64_t stride,
                     int add) {
    int64_t me = omp_get_thread_num(), begin = my_part(rows, me), end = my_part(rows, me + 1);
    int64_t stream = (end - begin + ROWS - 1) / ROWS;
    for (int64_t step = begin; step < begin + stream; step++) {
        int64_t these[ROWS];
        int here = 0;
        for (int row = 0; row < ROWS; row++) {
            int64_t r = step + row * stream;
            these[row] = r < end ? r : step;
            here += r < end;
        }
        for (int64_t first = 0; first < num_tokens; first += TOKENS) {
            int m = num_tokens - first < TOKENS ? (int)(num_tokens - first) : TOKENS;
            float sums[ROWS][TOKENS];
            products(matrix, these, x + first * size, size, m, sums);
            for (int t = 0; t < m; t++)
                for (int row = 0; row < here; row++) {
                    int64_t r = these[row];
                    float *place = out + (first + t) * stride + (places ? places[r] : r);
                    float sum = sums[row][t] + (bias ? bias[r] : 0.0f);
                    *place = add ? *place + sum : sum;
                }
        }
    }
}

/* act[t] = silu(gate . x[t]) * (up . x[t]), paired. */
static void gated(const Matrix *gate_up, int64_t inner, int64_t size, const float *x,
                  int64_t num_tokens, float *act) {
    int64_t units = inner / LANES, me = omp_get_thread_num();
    for (int64_t u = my_part(units, me); u < my_part(units, me + 1); u++)
        for (int64_t first = 0; first < num_tokens; first += TOKENS) {
            int m = num_tokens - first < TOKENS ? (int)(num_tokens - first) : TOKENS;
            f8 gate[TOKENS], up[TOKENS];
            for (int lane = 0; lane < LANES; lane++) {
                int64_t r = u * LANES + lane, rows[ROWS] = {r, r + inner};
                float sums[ROWS][TOKENS];
                products(gate_up, rows, x + first * size, size, m, sums);
                for (int t = 0; t < m; t++) gate[t][lane] = sums[0][t], up[t][lane] = sums[1][t];
            }
            for (int t = 0; t < m; t++) {
                f8 value = gate[t] * up[t] / (1.0f + exp8(-gate[t]));
                for (int lane = 0; lane < LANES; lane++)
                    act[(first + t) * inner + paired(u * LANES + lane)] = value[lane];
            }
        }
}

/* Root-mean-square norm of each token, paired. */
static void normed(const float *x, const float *weight, float eps, int64_t size, int64_t num_tokens,
                   float *out) {
    for (int64_t t = 0; t < num_tokens; t++, x += size, out += size) {
        f8 squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            f8 here = *(const f8 *)(x + i);
            squares += here * here;
        }
        float factor = 1.0f / sqrtf(sum_lanes(squares) / (float)size + eps);
        for (int64_t i = 0; i < size; i++) out[paired(i)] = x[i] * factor * weight[i];
    }
}

/* One head in place: its norm, if it has one, then turned by its position. */
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

/* Sums over columns of score x value, for `parts` vectors of a value side by side. */
INLINE void weighted(const float *scores, const float *values, int64_t count, int64_t size,
                     int parts, f8 sums[4]) {
    for (int64_t c = 0; c < count; c++)
        for (int k = 0; k < parts; k++)
            sums[k] += scores[c] * *(const f8 *)(values + c * size + k * LANES);
}

/* Mix of the values by how well the keys agree with the query; columns [begin, end). Written paired
   into `mixed`, from place `first` on. */
static void attend(const float *query, const float *keys, const float *values, int64_t size,
                   int64_t begin, int64_t end, float scaling, float *scores, float *mixed,
                   int64_t first) {
    float largest = -INFINITY;
    for (int64_t c = begin; c < end; c++) {
        f8 sums = {};
        for (int64_t i = 0; i < size; i += LANES)
            sums += *(const f8 *)(query + i) * *(const f8 *)(keys + c * size + i);
        float score = sum_lanes(sums) * scaling;
        scores[c - begin] = score;
        largest = score > largest ? score : largest;
    }
    int64_t count = end - begin;
    float total = 0.0f;
    for (int64_t c = 0; c < count; c += LANES) {
        f8 weights = exp8(*(const f8 *)(scores + c) - largest); /* behind the end: room, not used */
        *(f8 *)(scores + c) = weights;
        for (int64_t lane = 0; lane < LANES && c + lane < count; lane++) total += weights[lane];
    }
    values += begin * size;
    for (int64_t i = 0; i < size; i += 4 * LANES) {
        int parts = size - i < 4 * LANES ? (int)(size - i) / LANES : 4;
        f8 sums[4] = {};
        if (parts == 4)
            weighted(scores, values + i, count, size, 4, sums);
        else
            weighted(scores, values + i, count, size, parts, sums);
        for (int64_t k = 0; k < parts * LANES; k++)
            mixed[paired(first + i + k)] = sums[k / LANES][k % LANES] / total;
    }
}

static int64_t up(int64_t size) { return (size + 15) / 16 * 16; }

int64_t workspace_size(const Model *model, int64_t num_tokens, int64_t width, int64_t threads) {
    int64_t heads = model->query_heads * model->head_size;
    int64_t qkv = heads + 2 * model->key_heads * model->head_size;
    int64_t shared = num_tokens * (model->hidden + qkv + heads + model->inner);
    return up(shared) + threads * up(num_tokens * model->hidden + width + LANES);
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
        float *mine = pass->workspace + up(M * (D + qkv_rows + H * S + inner)) +
                      me * up(M * D + pass->width + LANES);
        float *scores = mine + M * D;
        for (int64_t t = me; t < M; t += threads)
            for (int64_t i = 0; i < D; i++)
                x[t * D + i] = widen(model->embeddings[pass->tokens[t] * D + i]);
        if (model->head_tokens) {
            int64_t size = pass->batch * pass->keep * model->vocab;
            for (int64_t i = my_part(size, me); i < my_part(size, me + 1); i++)
                pass->logits[i] = -INFINITY;
        }
#pragma omp barrier
        for (int64_t l = 0; l < model->num_layers; l++) {
            const Layer *layer = model->layers + l;
            normed(x, layer->attention_norm, model->norm_eps, D, M, mine);
            multiply(&layer->qkv, layer->qkv_bias, 0, qkv_rows, D, mine, M, qkv, qkv_rows, 0);
#pragma omp barrier
            for (int64_t unit = me; unit < M * (H + K); unit += threads) {
                int64_t t = unit / (H + K), h = unit % (H + K), b = t / N, j = t % N;
                int64_t position = pass->lengths[b] - N + j, column = pass->width - N + j;
                if (position < 0) position = 0; /* before the row's first token: read by nobody */
                float *head = qkv + t * qkv_rows + h * S;
                turn(head, h < H ? layer->query_norm : layer->key_norm, model->norm_eps, S,
                     pass->cos + position * (S / 2), pass->sin + position * (S / 2));
                if (h >= H) {
                    int64_t place = ((b * K + h - H) * pass->room + column) * S;
                    memcpy(pass->keys[l] + place, head, S * sizeof(float));
                    memcpy(pass->values[l] + place, head + K * S, S * sizeof(float));
                }
            }
#pragma omp barrier
            /* neighbouring heads share keys and values: let one thread have them */
            for (int64_t unit = my_part(M * H, me); unit < my_part(M * H, me + 1); unit++) {
                int64_t t = unit % M, h = unit / M, b = t / N, j = t % N;
                int64_t end = pass->width - N + j + 1, begin = pass->width - pass->lengths[b];
                if (layer->window && begin < end - layer->window) begin = end - layer->window;
                if (begin >= end) begin = end - 1;
                int64_t place = (b * K + h / (H / K)) * pass->room * S;
                attend(qkv + t * qkv_rows + h * S, pass->keys[l] + place,
                       pass->values[l] + place, S, begin, end, model->scaling, scores,
                       mixed + t * H * S, h * S);
            }
#pragma omp barrier
            multiply(&layer->out, 0, 0, D, H * S, mixed, M, x, D, 1);
#pragma omp barrier
            normed(x, layer->mlp_norm, model->norm_eps, D, M, mine);
            gated(&layer->gate_up, inner, D, mine, M, act);
#pragma omp barrier
            multiply(&layer->down, 0, 0, D, inner, act, M, x, D, 1);
#pragma omp barrier
        }
        int64_t kept = 0;
        for (int64_t t = 0; t < M; t++)
            if (t % N >= N - pass->keep)
                normed(x + t * D, model->final_norm, model->norm_eps, D, 1, mine + kept++ * D);
        multiply(&model->head, model->head_bias, model->head_tokens, model->head_rows, D, mine,
                 kept, pass->logits, model->vocab, 0);
    }
}
