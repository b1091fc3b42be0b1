/* Draft a block and verify a block, in one call each. */

#ifndef PACELINE_SPECULATION_H
#define PACELINE_SPECULATION_H

#include "transformer.h"
#include "verification.h"

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

/* Process each row's newest token and its drafted tokens, then verify these: greedily without
   uniforms, else by the rule. Writes block->target, and block->target_raw unless it is null.
   Returns 0 if a distribution has no mass. */
int64_t judge_ahead(const Model *model, Pass *pass, const int64_t *newest, double temperature,
                    const Block *block);

#endif
