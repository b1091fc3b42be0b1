/* Softmax, top-p and sampling of [rows, vocab]; `stride`: floats between rows of logits. */

#ifndef PACELINE_SAMPLING_H
#define PACELINE_SAMPLING_H

#include <stdint.h>

/* Index of the first maximum of each row. */
void best_tokens(const float *logits, int64_t rows, int64_t vocab, int64_t stride, int64_t *tokens);

/* probs = softmax(logits / temperature), temperature > 0. */
void softmax(const float *logits, int64_t rows, int64_t vocab, int64_t stride, float temperature,
             int64_t threads, float *probs);

/* Top-p in place, renormalised; ties go to the first token. Returns 0 if out of memory. */
int64_t keep_top_p(float *probs, int64_t rows, int64_t vocab, float top_p, int64_t threads);

/* Sample by inverse CDF from the target, or from its excess over the draft unless that is null.
   Returns -1 if the sum is 0 or NaN, and never a token of mass 0. */
int64_t draw(const float *target, const float *draft, int64_t vocab, double uniform);

/* `draw` for each row, with one uniform in [0, 1) per row. */
void draw_tokens(const float *probs, const double *uniforms, int64_t rows, int64_t vocab,
                 int64_t threads, int64_t *tokens);

#endif
