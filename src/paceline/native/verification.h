/* Drafted tokens judged by a rule. */

#ifndef PACELINE_VERIFICATION_H
#define PACELINE_VERIFICATION_H

#include "rules.h"

typedef struct {
    Rule rule;
    int64_t batch, gamma, places, vocab; /* places: of the draft's, one behind the last for an aim */
    const int64_t *drafted, *num_drafted;         /* [batch, gamma], [batch] */
    const float *draft, *draft_raw;               /* [batch, places, vocab]; raw: null if the same */
    float *target, *target_raw;                   /* [batch, gamma + 1, vocab], as these */
    const double *accept_uniforms, *next_uniforms; /* [batch, gamma], [batch]; in [0, 1) */
    float *room;                                  /* [batch, vocab] */
    int64_t *num_accepted, *next_tokens;          /* [batch]: the verdict; -1 where there is no mass */
} Block;

/* Algorithm A.1 of Zhou et al. 2023, for any rule: tokens stay until the first that does not, whose
   place another takes; where all stay, a bonus follows them. Nothing beyond that is looked at. */
void judge(const Block *block, int64_t threads);

#endif
