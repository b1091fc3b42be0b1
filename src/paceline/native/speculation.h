/* The two halves of a block in one call each: a draft draws ahead, its target judges. */

#ifndef PACELINE_SPECULATION_H
#define PACELINE_SPECULATION_H

#include "transformer.h"
#include "verification.h"

typedef struct {
    int64_t gamma, places, vocab; /* places: gamma, or one more; vocab: tokens that count */
    double temperature;
    const double *uniforms; /* [batch, gamma] */
    int64_t *tokens;        /* [batch, gamma] */
    float *probs;           /* [batch, places, vocab]; null: the likeliest tokens are taken */
    float *raw;             /* as these, untempered; null: not asked for */
} Draft;

/* Read the pass's tokens, then draw `gamma` tokens a row, each read before the next one's
   distribution: the last, too, where there is a place behind it. -> 0 where there is no mass. */
int64_t draw_ahead(const Model *model, Pass *pass, const Draft *draft);

/* Read the newest token and the drafted ones of each row, then judge these: by the likeliest tokens
   where there are no uniforms, else by the rule, the target's distributions being written, raw ones
   where there is room for them. -> 0 where there is no mass. */
int64_t judge_ahead(const Model *model, Pass *pass, const int64_t *newest, double temperature,
                    const Block *block);

#endif
