/* Drawing tokens and judging blocks, one pass over the vocabulary each. Sums run in float64. */

#include <math.h>
#include <stdint.h>

#define STRETCH 256 /* tokens whose mass is looked up together */
#define INLINE static inline __attribute__((always_inline))

typedef float f4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double d4 __attribute__((vector_size(32)));

/* Mass of token i: its probability, or by how much it exceeds the draft's where there is one. */
INLINE double mass(const float *target, const float *draft, int64_t i) {
    float excess = draft ? target[i] - draft[i] : target[i];
    return excess > 0.0f ? (double)excess : 0.0;
}

INLINE double mass_between(const float *target, const float *draft, int64_t begin, int64_t end) {
    d4 sums[4] = {};
    int64_t i = begin;
    for (; i + 16 <= end; i += 16)
        for (int k = 0; k < 4; k++) {
            f4 here = *(const f4 *)(target + i + 4 * k);
            if (draft) here -= *(const f4 *)(draft + i + 4 * k);
            here = (f4)((here > 0.0f) & (__typeof__(here > 0.0f))here);
            sums[k] += __builtin_convertvector(here, d4);
        }
    d4 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = (all[0] + all[2]) + (all[1] + all[3]);
    for (; i < end; i++) sum += mass(target, draft, i);
    return sum;
}

/* The token at which the running mass passes `uniform` of the total; -1 where there is no mass.
   A token without mass is never drawn. */
INLINE int64_t draw(const float *target, const float *draft, int64_t vocab, double uniform) {
    int64_t stretches = (vocab + STRETCH - 1) / STRETCH, stretch = 0;
    double sums[stretches], total = 0.0;
    for (int64_t s = 0; s < stretches; s++) {
        int64_t end = (s + 1) * STRETCH;
        sums[s] = mass_between(target, draft, s * STRETCH, end < vocab ? end : vocab);
        total += sums[s];
    }
    if (!(total > 0.0)) return -1;
    double left = uniform * total;
    /* Rounding may carry the point past the end of all: then the last mass there is is meant. */
    int64_t last = 0;
    for (int64_t s = 0; s < stretches; s++)
        if (sums[s] > 0.0) last = s;
    while (stretch < last && left >= sums[stretch]) left -= sums[stretch++];
    int64_t end = (stretch + 1) * STRETCH, token = -1;
    if (end > vocab) end = vocab;
    for (int64_t i = stretch * STRETCH; i < end; i++) {
        double here = mass(target, draft, i);
        if (here > 0.0) token = i;
        if (left < here) break;
        left -= here;
    }
    return token;
}

/* The first of the largest logits of each row. [rows, vocab] -> [rows] */
void best_tokens(const float *logits, int64_t rows, int64_t vocab, int64_t *tokens) {
    for (int64_t row = 0; row < rows; row++, logits += vocab) {
        f8 largest[2] = {};
        largest[0] += -INFINITY, largest[1] += -INFINITY;
        int64_t i = 0;
        for (; i + 16 <= vocab; i += 16)
            for (int k = 0; k < 2; k++) {
                f8 here = *(const f8 *)(logits + i + 8 * k);
                i8 more = here > largest[k];
                largest[k] = (f8)((more & (i8)here) | (~more & (i8)largest[k]));
            }
        float best = -INFINITY;
        for (int lane = 0; lane < 16; lane++) {
            float here = largest[lane / 8][lane % 8];
            best = here > best ? here : best;
        }
        for (; i < vocab; i++) best = logits[i] > best ? logits[i] : best;
        tokens[row] = 0;
        for (i = 0; i < vocab; i++)
            if (logits[i] == best) {
                tokens[row] = i;
                break;
            }
    }
}

/* probs [batch, vocab], uniforms [batch] in [0, 1) -> tokens [batch], -1 where all is 0. */
void draw_tokens(const float *probs, const double *uniforms, int64_t batch, int64_t vocab,
                 int64_t threads, int64_t *tokens) {
#pragma omp parallel for num_threads(threads) if (batch > 1)
    for (int64_t b = 0; b < batch; b++)
        tokens[b] = draw(probs + b * vocab, 0, vocab, uniforms[b]);
}

/* Algorithm A.1 of Zhou et al. 2023: keep with probability min(1, p/q), recover from (p - q)_+, or
   from p where nothing exceeds; all kept: a bonus from p. Shapes: drafted [batch, gamma],
   draft [batch, gamma, vocab], target [batch, gamma + 1, vocab], uniforms in [0, 1). */
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
