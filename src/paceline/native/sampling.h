/* From logits to tokens. Shapes: rows x vocab, one row behind the other. */

#ifndef PACELINE_SAMPLING_H
#define PACELINE_SAMPLING_H

#include <stdint.h>

float largest_of(const float *logits, int64_t vocab);

/* The first of the largest logits of each row. Rows are `stride` floats apart. */
void best_tokens(const float *logits, int64_t rows, int64_t vocab, int64_t stride, int64_t *tokens);

/* probs = softmax(logits / temperature), temperature > 0. */
void softmax(const float *logits, int64_t rows, int64_t vocab, int64_t stride, float temperature,
             int64_t threads, float *probs);

/* The smallest set of likeliest entries of each row whose mass reaches top_p, scaled to 1, in place; of
   equals the first. 0 if there is no memory for it. */
int64_t keep_top_p(float *probs, int64_t rows, int64_t vocab, float top_p, int64_t threads);

/* The token at which the running mass passes `uniform` of the total; -1 where there is none. Where
   there is a draft, the mass is what exceeds its. A token without mass is never drawn. */
int64_t draw(const float *target, const float *draft, int64_t vocab, double uniform);

/* One token a row by its uniform in [0, 1); -1 where all is 0 or not a number. */
void draw_tokens(const float *probs, const double *uniforms, int64_t rows, int64_t vocab,
                 int64_t threads, int64_t *tokens);

#endif
