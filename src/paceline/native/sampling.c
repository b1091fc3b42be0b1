/* Sums are float64. */

#include "sampling.h"

#include <float.h>
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "vectors.h"

#define STRETCH 256 /* tokens per partial sum */

/* Probability of token i, or its excess over the draft's. */
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

int64_t draw(const float *target, const float *draft, int64_t vocab, double uniform) {
    int64_t stretches = (vocab + STRETCH - 1) / STRETCH, stretch = 0;
    double sums[stretches], total = 0.0;
    for (int64_t s = 0; s < stretches; s++) {
        int64_t end = (s + 1) * STRETCH;
        sums[s] = mass_between(target, draft, s * STRETCH, end < vocab ? end : vocab);
        total += sums[s];
    }
    if (!(total > 0.0)) return -1;
    double left = uniform * total;
    /* Rounding may move the point past the total: then take the last token with mass. */
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

static float largest_of(const float *logits, int64_t vocab) {
    f8 largest[2] = {};
    largest[0] += -INFINITY, largest[1] += -INFINITY;
    int64_t i = 0;
    for (; i + 2 * LANES <= vocab; i += 2 * LANES)
        for (int k = 0; k < 2; k++) {
            f8 here = *(const f8 *)(logits + i + k * LANES);
            largest[k] = select8(here > largest[k], here, largest[k]);
        }
    float best = -INFINITY;
    for (int lane = 0; lane < 2 * LANES; lane++) {
        float here = largest[lane / LANES][lane % LANES];
        best = here > best ? here : best;
    }
    for (; i < vocab; i++) best = logits[i] > best ? logits[i] : best;
    return best;
}

void best_tokens(const float *logits, int64_t rows, int64_t vocab, int64_t stride,
                 int64_t *tokens) {
    for (int64_t row = 0; row < rows; row++, logits += stride) {
        float best = largest_of(logits, vocab);
        int64_t i = 0;
        while (i < vocab && logits[i] != best) i++;
        tokens[row] = i < vocab ? i : 0;
    }
}

static void softmax_row(const float *logits, int64_t vocab, float temperature, float *probs) {
    float largest = largest_of(logits, vocab);
    float sharpness = 1.0f / fminf(fmaxf(temperature, FLT_MIN), 1 / FLT_MIN);
    double total = 0.0;
    for (int64_t begin = 0; begin < vocab; begin += STRETCH) {
        int64_t end = begin + STRETCH < vocab ? begin + STRETCH : vocab;
        f8 sums = {};
        for (int64_t i = begin; i < end; i += LANES) {
            f8 here = {};
            int64_t left = end - i < LANES ? end - i : LANES;
            if (left == LANES)
                here = *(const f8 *)(logits + i);
            else
                for (int64_t lane = 0; lane < LANES; lane++)
                    here[lane] = lane < left ? logits[i + lane] : -INFINITY;
            here = (here - largest) * sharpness;
            here = select8(here < -87.0f, (f8){}, exp8(here)); /* exp8 is not exactly 0 */
            sums += here;
            if (left == LANES)
                *(f8 *)(probs + i) = here;
            else
                for (int64_t lane = 0; lane < left; lane++) probs[i + lane] = here[lane];
        }
        for (int lane = 0; lane < LANES; lane++) total += (double)sums[lane];
    }
    float scale = (float)(1.0 / total);
    for (int64_t i = 0; i < vocab; i++) probs[i] *= scale;
}

void softmax(const float *logits, int64_t rows, int64_t vocab, int64_t stride, float temperature,
             int64_t threads, float *probs) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        softmax_row(logits + row * stride, vocab, temperature, probs + row * vocab);
}

typedef struct {
    float prob;
    int32_t token;
} Candidate;

static int likelier_first(const void *a, const void *b) {
    const Candidate *one = a, *other = b;
    if (one->prob != other->prob) return one->prob < other->prob ? 1 : -1;
    return one->token < other->token ? -1 : 1;
}

/* Sorts only entries above `least`: the others have less mass in total than top-p may drop. */
static void keep_top_p_row(float *probs, int64_t vocab, float top_p, Candidate *candidates) {
    float least = top_p < 0.9999f ? 0.99f * (1.0f - top_p) / (float)vocab : 0.0f;
    int64_t count = 0;
    for (int64_t i = 0; i < vocab; i++)
        if (probs[i] > least) candidates[count++] = (Candidate){probs[i], (int32_t)i};
    qsort(candidates, (size_t)count, sizeof *candidates, likelier_first);
    int64_t kept = 0;
    double mass = 0.0;
    for (; kept < count; kept++) {
        double reached = mass + candidates[kept].prob;
        if (kept > 0 && (float)reached - candidates[kept].prob >= top_p) break;
        mass = reached;
    }
    if (!(mass > 0.0)) return; /* not a distribution: leave it */
    memset(probs, 0, sizeof *probs * (size_t)vocab);
    float scale = (float)(1.0 / mass);
    for (int64_t k = 0; k < kept; k++) probs[candidates[k].token] = candidates[k].prob * scale;
}

int64_t keep_top_p(float *probs, int64_t rows, int64_t vocab, float top_p, int64_t threads) {
    Candidate *buffer = malloc(sizeof *buffer * (size_t)(vocab * threads));
    if (!buffer) return 0;
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        keep_top_p_row(probs + row * vocab, vocab, top_p, buffer + vocab * omp_get_thread_num());
    free(buffer);
    return 1;
}

void draw_tokens(const float *probs, const double *uniforms, int64_t rows, int64_t vocab,
                 int64_t threads, int64_t *tokens) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        tokens[row] = draw(probs + row * vocab, 0, vocab, uniforms[row]);
}
