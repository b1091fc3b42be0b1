/* Divergences of rows of logits, and their gradients. */

#ifndef PACELINE_DIVERGENCES_H
#define PACELINE_DIVERGENCES_H

#include <stdint.h>

/* Same order as `DivergenceKind` in structures.py. */
enum { FORWARD_KL, REVERSE_KL, JSD, TVD, NEGATIVE_LOG_ACCEPTANCE, CROSS_ENTROPY };

typedef struct {
    int64_t kind;
    double weight;
    double beta; /* JSD only */
} Term;

typedef struct {
    const Term *terms;
    int64_t num_terms;
    int64_t rows, vocab;
    int64_t bytes;            /* per logit: 4 float32, 2 bfloat16 */
    const char *target;       /* logits [rows, vocab]; null if no term needs them */
    char *draft;              /* logits [rows, vocab]; overwritten with the weighted gradients */
    const int64_t *labels;    /* [rows] */
    const float *weights;     /* [rows], of the gradients */
    const float *normalisers; /* [rows], if the logits are a subset of the target's: log-sum-exp of
                                 all of them; else null */
    float *losses;            /* [rows], unweighted sums of the terms */
} Losses;

/* Returns 0 if there is no memory; nothing is then written. */
int64_t losses_and_slopes(const Losses *losses, int64_t threads);

#endif
