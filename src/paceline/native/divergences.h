/* Divergences of rows of logits, and their slopes. */

#ifndef PACELINE_DIVERGENCES_H
#define PACELINE_DIVERGENCES_H

#include <stdint.h>

/* Numbered as `DivergenceKind` in divergences.py is. */
enum { FORWARD_KL, REVERSE_KL, JSD, TVD, NEGATIVE_LOG_ACCEPTANCE, CROSS_ENTROPY };

typedef struct {
    int64_t kind;
    double weight;
    double beta; /* of JSD alone */
} Term;

typedef struct {
    const Term *terms;
    int64_t num_terms;
    int64_t rows, vocab;
    int64_t bytes;         /* of a logit: 4 float32, 2 bfloat16 */
    const char *target;    /* logits [rows, vocab]; null where no term asks for them */
    char *draft;           /* likewise; afterwards what the losses times the weights rise by */
    const int64_t *labels; /* [rows] */
    const float *weights;  /* [rows] */
    const float *normalisers; /* [rows]: log-sum-exp of the target's logits over its whole vocabulary,
                                 of which these are part; null where they are all of it */
    float *losses;         /* [rows]: the sum of the terms; the row's weight is not in it */
} Losses;

void losses_and_slopes(const Losses *losses, int64_t threads);

#endif
