/* Verify drafted tokens by a rule. */

#ifndef PACELINE_VERIFICATION_H
#define PACELINE_VERIFICATION_H

#include "rules.h"

typedef struct {
    Rule rule;
    int64_t batch, gamma, places, vocab;  /* places: draft positions; gamma + 1 if the bonus follows pi */
    const int64_t *drafted, *num_drafted; /* [batch, gamma], [batch] */
    const float *draft, *draft_raw;       /* [batch, places, vocab]; raw: null if equal */
    float *target, *target_raw;           /* [batch, gamma + 1, vocab]; raw: null if equal */
    const double *accept_uniforms, *next_uniforms; /* [batch, gamma], [batch]; in [0, 1) */
    float *room;                                   /* workspace, [batch, vocab] */
    int64_t *num_accepted, *next_tokens; /* results, [batch]; next_tokens is -1 without mass */
} Block;

/* Algorithm A.1 of Zhou et al. 2023, for any rule. Rows are independent. */
void judge(const Block *block, int64_t threads);

#endif
