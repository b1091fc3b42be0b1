/* Matrices times a few vectors; each thread computes its part.

   products.c is for any processor with vectors, tiles.c for those that multiply tiles (AMX). Each
   packs the weights in its own layout and reads them from memory once. The order of a token's sums
   does not depend on the other tokens. */

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

/* Row `row` of a bfloat16 matrix. */
void read_row(const Matrix *matrix, int64_t row, int64_t size, float *out);

/* Floats that vectors take once they are laid out for products. */
int64_t operand_size(int64_t size, int64_t num_tokens);

/* x[t], laid out for products with this matrix; each thread has its own. */
void lay_out(const Matrix *matrix, const float *x, int64_t size, int64_t num_tokens,
             float *operand);

/* out[t, r] = row r of the matrix . x[t] + bias[r], or += where `add`; with `places`, row r goes
   there. `stride`: floats from one token's `out` to the next. */
void multiply(const Matrix *matrix, const float *bias, const int64_t *places, int64_t rows,
              int64_t size, const float *operand, int64_t num_tokens, float *out, int64_t stride,
              int add);

/* act[t] = silu(gate . x[t]) * (up . x[t]). */
void gated(const Matrix *gate_up, int64_t inner, int64_t size, const float *operand,
           int64_t num_tokens, float *act);

/* What a thread must do before its first product and behind its last. */
typedef struct {
    char bytes[64];
} Tiles;
void begin_products(Tiles *others);
void end_products(const Tiles *others);

#endif
