/* Multiply matrices with a few vectors; each thread computes its part of the rows.

   products.c uses SIMD vectors, tiles.c AMX tiles. Each has its own layout of packed weights, which
   are read once. The order of a token's sums does not depend on the other tokens. */

#ifndef PACELINE_PRODUCTS_H
#define PACELINE_PRODUCTS_H

#include <omp.h>

#include "transformer.h"
#include "vectors.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define TILES
#endif

INLINE int64_t my_part(int64_t count, int64_t thread) {
    return count * thread / omp_get_num_threads();
}

INLINE float widen(uint16_t weight) {
    union {
        uint32_t bits;
        float value;
    } wide = {.bits = (uint32_t)weight << 16};
    return wide.value;
}

#define ROWS 16 /* rows of a packed panel or tile */

/* Output of `multiply`; see its arguments. */
typedef struct {
    const float *bias;
    const int64_t *places;
    float *out;
    int64_t rows, stride;
    int add;
} Goal;

/* Write a token's sums of rows [row, row + ROWS). */
INLINE void deliver(const Goal *goal, const float *sums, int64_t row, int64_t token) {
    float *out = goal->out + token * goal->stride;
    int64_t count = goal->rows - row < ROWS ? goal->rows - row : ROWS;
    if (count == ROWS && !goal->bias && !goal->places) {
        for (int r = 0; r < ROWS; r += LANES) {
            f8 *here = (f8 *)(out + row + r), sum = *(const f8 *)(sums + r);
            if (goal->add) sum += *here;
            *here = sum;
        }
        return;
    }
    for (int64_t r = row; r < row + count; r++) {
        float sum = sums[r - row] + (goal->bias ? goal->bias[r] : 0.0f);
        float *here = out + (goal->places ? goal->places[r] : r);
        *here = goal->add ? *here + sum : sum;
    }
}

/* Convert one row of a packed bfloat16 matrix to float32. */
void read_row(const Matrix *matrix, int64_t row, int64_t size, float *out);

/* Size of the operand of num_tokens vectors, in floats. */
int64_t operand_size(int64_t size, int64_t num_tokens);

/* Arrange x[t] for products with this matrix; every thread has its own operand. */
void lay_out(const Matrix *matrix, const float *x, int64_t size, int64_t num_tokens,
             float *operand);

/* out[t, r] = row r of the matrix . x[t] + bias[r], or += if `add`. Row r is written to index
   places[r] if `places` is not null. `stride`: floats between tokens in `out`. */
void multiply(const Matrix *matrix, const float *bias, const int64_t *places, int64_t rows,
              int64_t size, const float *operand, int64_t num_tokens, float *out, int64_t stride,
              int add);

/* act[t] = silu(gate . x[t]) * (up . x[t]), the gated MLP. */
void gated(const Matrix *gate_up, int64_t inner, int64_t size, const float *operand,
           int64_t num_tokens, float *act);

/* Set up and restore the thread's AMX tiles; call before its first and after its last product. */
typedef struct {
    char bytes[64];
} Tiles;
void begin_products(Tiles *others);
void end_products(const Tiles *others);

#endif
