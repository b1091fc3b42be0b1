/* Products for any processor with vectors: bfloat16 weights are widened to float32 by a shift, which
   takes pairs apart. So a vector is laid out "paired": of each 16 entries first those at even places,
   then those at odd places; and so are the rows of 8-bit matrices. */

#include "products.h"

#ifndef TILES

#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define ROWS 2     /* rows of a matrix side by side; `gated` takes a gate and its up */
#define TOKENS 4   /* tokens at a time */
#define APART __attribute__((noinline))
#define AHEAD 4096 /* bytes to fetch early: a page, where the processor's own foresight ends */

/* beyond, products are bound by arithmetic; rounding vectors would not make it less */
int64_t most_tokens(int64_t rounds) {
    (void)rounds;
    return 8;
}
int64_t may_multiply(void) { return 1; }
void begin_products(Tiles *others) { (void)others; }
void end_products(const Tiles *others) { (void)others; }

INLINE int64_t paired(int64_t i) { return (i & ~(int64_t)15) | ((i & 1) << 3) | ((i & 15) >> 1); }

int64_t packed_size(int64_t rows, int64_t size, int64_t bytes) { return rows * size * bytes; }

void pack(const char *weights, int64_t rows, int64_t size, int64_t bytes, char *packed) {
    if (bytes == 2) {
        memcpy(packed, weights, (size_t)(rows * size * bytes));
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < size; i++) packed[r * size + paired(i)] = weights[r * size + i];
}

void read_row(const Matrix *matrix, int64_t row, int64_t size, float *out) {
    const uint16_t *weights = (const uint16_t *)matrix->weights + row * size;
    for (int64_t i = 0; i < size; i++) out[i] = widen(weights[i]);
}

int64_t operand_size(int64_t size, int64_t num_tokens) { return size * num_tokens; }

void lay_out(const Matrix *matrix, const float *x, int64_t size, int64_t num_tokens,
             float *operand) {
    (void)matrix;
    for (int64_t i = 0; i < size * num_tokens; i += 2 * LANES) {
        f8 first = *(const f8 *)(x + i), second = *(const f8 *)(x + i + LANES);
        *(f8 *)(operand + i) = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14);
        *(f8 *)(operand + i + LANES) =
            __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
    }
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

/* A thread's part of `multiply`; made apart for each small number of tokens, so that all sums of a
   row stay in registers. */
INLINE void multiply_part(const Matrix *matrix, const float *bias, const int64_t *places,
                          int64_t rows, int64_t size, const float *x, int64_t num_tokens,
                          float *out, int64_t stride, int add) {
    int64_t me = omp_get_thread_num(), begin = my_part(rows, me), end = my_part(rows, me + 1);
    int64_t stream = (end - begin + ROWS - 1) / ROWS;
    for (int64_t step = begin; step < begin + stream; step++) {
        int64_t these[ROWS];
        for (int row = 0; row < ROWS; row++) {
            int64_t r = step + row * stream;
            these[row] = r < end ? r : step; /* the last stream may be shorter: once more, then */
        }
        for (int64_t first = 0; first < num_tokens; first += TOKENS) {
            int m = num_tokens - first < TOKENS ? (int)(num_tokens - first) : TOKENS;
            float sums[ROWS][TOKENS], *here = out + first * stride;
            products(matrix, these, x + first * size, size, m, sums);
            for (int row = 0; row < ROWS; row++) {
                int64_t r = these[row];
                if (row && r == step) break;
                int64_t place = places ? places[r] : r;
                float more = bias ? bias[r] : 0.0f;
                for (int t = 0; t < m; t++) {
                    float sum = sums[row][t] + more;
                    here[t * stride + place] = add ? here[t * stride + place] + sum : sum;
                }
            }
        }
    }
}

#define MULTIPLY(name, num_tokens)                                                               \
    static APART void name(const Matrix *matrix, const float *bias, const int64_t *places,       \
                           int64_t rows, int64_t size, const float *x, int64_t count, float *out,\
                           int64_t stride, int add) {                                            \
        multiply_part(matrix, bias, places, rows, size, x, num_tokens, out, stride, add);        \
    }
MULTIPLY(multiply_1, 1)
MULTIPLY(multiply_2, 2)
MULTIPLY(multiply_3, 3)
MULTIPLY(multiply_4, 4)
MULTIPLY(multiply_many, count)

void multiply(const Matrix *matrix, const float *bias, const int64_t *places, int64_t rows,
              int64_t size, const float *x, int64_t num_tokens, float *out, int64_t stride,
              int add) {
    (num_tokens == 1   ? multiply_1
     : num_tokens == 2 ? multiply_2
     : num_tokens == 3 ? multiply_3
     : num_tokens == 4 ? multiply_4
                       : multiply_many)(matrix, bias, places, rows, size, x, num_tokens, out,
                                        stride, add);
}

/* A thread's part of `gated`. */
INLINE void gated_part(const Matrix *gate_up, int64_t inner, int64_t size, const float *x,
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
                *(f8 *)(act + (first + t) * inner + u * LANES) = value;
            }
        }
}

#define GATED(name, num_tokens)                                                                  \
    static APART void name(const Matrix *gate_up, int64_t inner, int64_t size, const float *x,   \
                           int64_t count, float *act) {                                          \
        gated_part(gate_up, inner, size, x, num_tokens, act);                                    \
    }
GATED(gated_1, 1)
GATED(gated_2, 2)
GATED(gated_3, 3)
GATED(gated_4, 4)
GATED(gated_many, count)

void gated(const Matrix *gate_up, int64_t inner, int64_t size, const float *x, int64_t num_tokens,
           float *act) {
    (num_tokens == 1   ? gated_1
     : num_tokens == 2 ? gated_2
     : num_tokens == 3 ? gated_3
     : num_tokens == 4 ? gated_4
                       : gated_many)(gate_up, inner, size, x, num_tokens, act);
}

#endif
