/* The formulas are in core/divergences.py; p is the target, q the draft. A row stays in cache: its
   logits are read once, its gradients written once. Terms add g_i = d loss / d log q_i; the
   gradient of logit i is g_i - q_i sum_j g_j. */

#include "divergences.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "vectors.h"

#if defined(__GLIBC__) && defined(__x86_64__)
/* The same function under its name before glibc 2.29: torch's wheels need 2.28 only. */
__asm__(".symver log, log@GLIBC_2.2.5");
#endif

#define STRETCH 256 /* entries summed in float32 */

typedef uint16_t u8 __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* Arrays [size], the vocabulary padded with up to seven tokens of probability 0. `coverage`: the
   target's mass on these tokens; p and log_p are normalised over them. */
typedef struct {
    float *log_p, *p, *log_q, *q, *grads;
    int64_t size;
    float coverage, log_coverage;
} Row;

/* Loop over entries; adds `part` to `total` after every stretch. */
#define SUMMED(i)                                                                             \
    for (int64_t begin = 0; begin < row->size;                                                \
         total += (double)sum_lanes(part), part = (f8){}, begin += STRETCH)                   \
        for (int64_t i = begin; i < begin + STRETCH && i < row->size; i += LANES)

INLINE f8 at(const float *x, int64_t i) { return *(const f8 *)(x + i); }
INLINE void put(float *x, int64_t i, f8 value) { *(f8 *)(x + i) = value; }
INLINE f8 where(i8 which, f8 value) { return (f8)(which & (i8)value); }

INLINE f8 logits_at(const char *logits, int bytes, int64_t i, int64_t left) {
    u8 some = (u8){} + 0xff80; /* -inf */
    if (bytes == 4) {
        f8 wide = (f8)(__builtin_convertvector(some, i8) << 16);
        if (left >= LANES) return *(const f8 *)(logits + 4 * i);
        for (int64_t lane = 0; lane < left; lane++) wide[lane] = ((const float *)logits)[i + lane];
        return wide;
    }
    if (left >= LANES)
        some = *(const u8 *)(logits + 2 * i);
    else
        for (int64_t lane = 0; lane < left; lane++)
            some[lane] = ((const uint16_t *)logits)[i + lane];
    return (f8)(__builtin_convertvector(some, i8) << 16);
}

/* bfloat16: round to nearest, ties to even. */
INLINE void put_gradients(char *out, int bytes, int64_t i, int64_t left, f8 grads) {
    i8 bits = (i8)grads, none = grads != grads;
    i8 high = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u8 some = __builtin_convertvector((none & 0x7fc0) | (~none & high), u8);
    if (left >= LANES && bytes == 4) *(f8 *)(out + 4 * i) = grads;
    if (left >= LANES && bytes == 2) *(u8 *)(out + 2 * i) = some;
    for (int64_t lane = 0; left < LANES && lane < left; lane++) {
        if (bytes == 4)
            ((float *)out)[i + lane] = grads[lane];
        else
            ((uint16_t *)out)[i + lane] = some[lane];
    }
}

/* Write log-softmax and softmax of a row of logits; return its log-sum-exp. */
INLINE float normalise(const char *logits, int bytes, int64_t vocab, const Row *row, float *logs,
                      float *probs) {
    f8 most = (f8){} - INFINITY, part = {};
    for (int64_t i = 0; i < row->size; i += LANES) {
        f8 here = logits_at(logits, bytes, i, vocab - i);
        put(logs, i, here);
        most = select8(here > most, here, most);
    }
    float largest = most[0];
    for (int lane = 1; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    double total = 0.0;
    SUMMED(i) {
        f8 here = at(logs, i) - largest;
        here = select8(here < -87.0f, (f8){}, exp8(here)); /* exp8 is not exactly 0 */
        put(probs, i, here);
        part += here;
    }
    float scale = (float)(1.0 / total), shift = largest + (float)log(total);
    for (int64_t i = 0; i < row->size; i += LANES) {
        put(probs, i, at(probs, i) * scale);
        put(logs, i, at(logs, i) - shift);
    }
    return shift;
}

static double forward_kl(const Row *row, float weight) {
    double total = 0.0;
    f8 part = {};
    SUMMED(i) {
        f8 p = at(row->p, i);
        part += where(p > 0.0f, p * (at(row->log_p, i) - at(row->log_q, i)));
        put(row->grads, i, at(row->grads, i) - weight * p);
    }
    return total;
}

static double reverse_kl(const Row *row, float weight) {
    double total = 0.0;
    f8 part = {};
    SUMMED(i) {
        f8 q = at(row->q, i);
        f8 here = where(q > 0.0f, q * (at(row->log_q, i) - at(row->log_p, i)));
        part += here;
        put(row->grads, i, at(row->grads, i) + weight * here);
    }
    return total;
}

static double jsd(const Row *row, float weight, float beta) {
    double total = 0.0;
    f8 part = {};
    SUMMED(i) {
        f8 p = at(row->p, i), q = at(row->q, i), log_m = log8(beta * p + (1.0f - beta) * q);
        f8 mine = (1.0f - beta) * where(q > 0.0f, q * (at(row->log_q, i) - log_m));
        part += beta * where(p > 0.0f, p * (at(row->log_p, i) - log_m)) + mine;
        put(row->grads, i, at(row->grads, i) + weight * mine);
    }
    return total;
}

/* 1 - sum min(p, q); |p - q| = p for tokens outside of the subset. */
static double tvd(const Row *row, float weight) {
    double total = 0.0;
    f8 part = {};
    SUMMED(i) {
        f8 p = row->coverage * at(row->p, i), q = at(row->q, i), difference = q - p;
        f8 sign = where(difference > 0.0f, (f8){} + 1.0f) - where(difference < 0.0f, (f8){} + 1.0f);
        part += 0.5f * sign * difference;
        put(row->grads, i, at(row->grads, i) + 0.5f * weight * sign * q);
    }
    return total + 0.5 * (1.0 - (double)row->coverage);
}

/* In log space: an overlap of e^-200 still has a finite value and gradient. */
static double negative_log_acceptance(const Row *row, float weight) {
    f8 most = (f8){} - INFINITY, part = {};
    double total = 0.0;
    for (int64_t i = 0; i < row->size; i += LANES) {
        f8 p = at(row->log_p, i) + row->log_coverage, q = at(row->log_q, i);
        f8 less = select8(q < p, q, p);
        most = select8(less > most, less, most);
    }
    float largest = most[0];
    for (int lane = 1; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
    SUMMED(i) {
        f8 p = at(row->log_p, i) + row->log_coverage, q = at(row->log_q, i);
        f8 less = select8(q < p, q, p) - largest;
        part += select8(less < -87.0f, (f8){}, exp8(less));
    }
    float share = weight / (float)total;
    for (int64_t i = 0; i < row->size; i += LANES) {
        f8 p = at(row->log_p, i) + row->log_coverage, q = at(row->log_q, i), less = q - largest;
        f8 here = where((q < p) & (less >= -87.0f), share * exp8(less));
        put(row->grads, i, at(row->grads, i) - here);
    }
    return -((double)largest + log(total));
}

static double value_of(const Term *term, const Row *row, int64_t label) {
    float weight = (float)term->weight;
    switch (term->kind) {
    case FORWARD_KL:
        return forward_kl(row, weight);
    case REVERSE_KL:
        return reverse_kl(row, weight);
    case JSD:
        return jsd(row, weight, (float)term->beta);
    case TVD:
        return tvd(row, weight);
    case NEGATIVE_LOG_ACCEPTANCE:
        return negative_log_acceptance(row, weight);
    case CROSS_ENTROPY:
        row->grads[label] -= weight;
        return -(double)row->log_q[label];
    default:
        return NAN;
    }
}

/* Gradients of the logits, through the softmax. */
INLINE void write_gradients(const Row *row, float weight, char *out, int bytes, int64_t vocab) {
    double total = 0.0;
    f8 part = {};
    SUMMED(i) part += at(row->grads, i);
    float sum = (float)total;
    for (int64_t i = 0; i < row->size; i += LANES)
        put_gradients(out, bytes, i, vocab - i,
                   weight * (at(row->grads, i) - sum * at(row->q, i)));
}

INLINE void one_row(const Losses *losses, int bytes, int64_t r, Row *row) {
    int64_t vocab = losses->vocab, place = r * vocab * bytes;
    normalise(losses->draft + place, bytes, vocab, row, row->log_q, row->q);
    if (losses->target) {
        float sum = normalise(losses->target + place, bytes, vocab, row, row->log_p, row->p);
        row->log_coverage = losses->normalisers ? sum - losses->normalisers[r] : 0.0f;
        row->coverage = expf(row->log_coverage);
    }
    for (int64_t i = 0; i < row->size; i += LANES) put(row->grads, i, (f8){});
    double loss = 0.0;
    for (int64_t k = 0; k < losses->num_terms; k++)
        loss += losses->terms[k].weight * value_of(losses->terms + k, row, losses->labels[r]);
    losses->losses[r] = (float)loss;
    write_gradients(row, losses->weights[r], losses->draft + place, bytes, vocab);
}

int64_t losses_and_slopes(const Losses *losses, int64_t threads) {
    int64_t size = (losses->vocab + LANES - 1) / LANES * LANES;
    float *buffers = malloc((size_t)(5 * size * threads) * sizeof *buffers);
    if (!buffers) return 0;
#pragma omp parallel num_threads(threads)
    {
        float *buffer = buffers + 5 * size * omp_get_thread_num();
        Row row = {buffer, buffer + size, buffer + 2 * size, buffer + 3 * size, buffer + 4 * size,
                   size, 1, 0};
#pragma omp for
        for (int64_t r = 0; r < losses->rows; r++) {
            if (losses->bytes == 4)
                one_row(losses, 4, r, &row);
            else
                one_row(losses, 2, r, &row);
        }
    }
    free(buffers);
    return 1;
}
