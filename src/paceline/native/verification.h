#ifndef PACELINE_VERIFICATION_H
#define PACELINE_VERIFICATION_H

#include <stdint.h>

/* Algorithm A.1 of Zhou et al. 2023: keep with probability min(1, p/q), recover from (p - q)_+, or
   from p where nothing exceeds; all kept: a bonus from p. Shapes: drafted [batch, gamma],
   draft [batch, gamma, vocab], target [batch, gamma + 1, vocab], uniforms in [0, 1). */
void judge_lossless(const int64_t *drafted, const int64_t *num_drafted, const float *draft_probs,
                    const float *target_probs, int64_t batch, int64_t gamma, int64_t vocab,
                    const double *accept_uniforms, const double *next_uniforms, int64_t threads,
                    int64_t *num_accepted, int64_t *next_tokens);

#endif
