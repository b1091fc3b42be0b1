/* Matrices times a few vectors; a thread does its part. "Paired" is told in llama.c. */

#ifndef PACELINE_PRODUCTS_H
#define PACELINE_PRODUCTS_H

#include <omp.h>

#include "llama.h"
#include "vectors.h"

INLINE int64_t my_part(int64_t count, int64_t thread) {
    return count * thread / omp_get_num_threads();
}

/* out[t, r] = row r of the matrix . x[t] + bias[r], or += where `add`; with `places`, row r goes
   there. Each thread takes its part of the rows, in ROWS streams side by side, which memory
   delivers faster than neighbours in turn. `stride`: floats from one token's `out` to the next. */
void multiply(const Matrix *matrix, const float *bias, const int64_t *places, int64_t rows,
              int64_t size, const float *x, int64_t num_tokens, float *out, int64_t stride,
              int add);

/* act[t] = silu(gate . x[t]) * (up . x[t]), paired. */
void gated(const Matrix *gate_up, int64_t inner, int64_t size, const float *x, int64_t num_tokens,
           float *act);

#endif
