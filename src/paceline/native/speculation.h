/* Draft a block and verify a block, in one call each. */

#ifndef PACELINE_SPECULATION_H
#define PACELINE_SPECULATION_H

#include "transformer.h"

typedef struct {
    int64_t gamma, places, vocab; /* places: distributions per row, gamma or gamma + 1 */
    double temperature;
    const double *uniforms; /* [batch, gamma] */
    int64_t *tokens;        /* [batch, gamma] */
    float *probs;           /* [batch, places, vocab]; null: greedy */
    float *raw;             /* [batch, places, vocab], untempered; null: not requested */
} Draft;

/* Process the pass's tokens, then draw `gamma` tokens per row, one pass each. With gamma + 1 places
   the last token is also processed. Returns 0 if a distribution has no mass. */
int64_t draw_ahead(const Model *model, Pass *pass, const Draft *draft);

typedef struct {
    int64_t batch, gamma, places, vocab;  /* places: draft distributions per row, at least gamma */
    const int64_t *drafted, *num_drafted; /* [batch, gamma], [batch] */
    const float *draft;                   /* [batch, places, vocab] */
    float *target;                        /* [batch, gamma + 1, vocab] */
    const double *accept_uniforms, *next_uniforms; /* [batch, gamma], [batch]; in [0, 1) */
    int64_t *num_accepted, *next_tokens; /* results, [batch]; next_tokens is -1 without mass */
} Block;

/* Algorithm A.1 of Zhou et al. 2023: the lossless rule. Rows are independent. */
void verify(const Block *block, int64_t threads);

/* Process each row's newest token and its drafted tokens, then verify these: greedily without
   uniforms, else by the lossless rule, and write block->target. Returns 0 if a distribution has no
   mass. */
int64_t verify_ahead(const Model *model, Pass *pass, const int64_t *newest, double temperature,
                     const Block *block);

#endif
