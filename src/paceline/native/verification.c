#include "verification.h"

#include "sampling.h"

void judge_lossless(const int64_t *drafted, const int64_t *num_drafted, const float *draft_probs,
                    const float *target_probs, int64_t batch, int64_t gamma, int64_t vocab,
                    const double *accept_uniforms, const double *next_uniforms, int64_t threads,
                    int64_t *num_accepted, int64_t *next_tokens) {
#pragma omp parallel for num_threads(threads) if (batch > 1)
    for (int64_t b = 0; b < batch; b++) {
        const float *target = target_probs + b * (gamma + 1) * vocab;
        const float *draft = draft_probs + b * gamma * vocab;
        int64_t kept = 0;
        for (; kept < num_drafted[b]; kept++) {
            int64_t token = drafted[b * gamma + kept];
            float p = target[kept * vocab + token], q = draft[kept * vocab + token];
            float keep = q > 0.0f && p / q < 1.0f ? p / q : 1.0f;
            if (!(accept_uniforms[b * gamma + kept] < (double)keep)) break;
        }
        const float *here = target + kept * vocab;
        int64_t next = -1;
        if (kept < num_drafted[b]) next = draw(here, draft + kept * vocab, vocab, next_uniforms[b]);
        if (next < 0) next = draw(here, 0, vocab, next_uniforms[b]);
        num_accepted[b] = kept;
        next_tokens[b] = next;
    }
}
