/* Rules as core/rules.py and core/cascade_rules.py state them, p and q as there. Sums run in float64;
   what is compared with a threshold is float32 where it is there, lest a tie be broken otherwise. */

#include "rules.h"

#include <math.h>

#include "sampling.h"
#include "vectors.h"

#define MOST_PIECES 200 /* Newton's steps, as in core/rules.py */

typedef struct {
    d4 halves[2];
} Sums;

INLINE void add(Sums *sums, f8 more) {
    f4 low = __builtin_shufflevector(more, more, 0, 1, 2, 3);
    f4 high = __builtin_shufflevector(more, more, 4, 5, 6, 7);
    sums->halves[0] += __builtin_convertvector(low, d4);
    sums->halves[1] += __builtin_convertvector(high, d4);
}

INLINE double total(d4 sums) { return (sums[0] + sums[2]) + (sums[1] + sums[3]); }
INLINE double total_of(const Sums *sums) { return total(sums->halves[0] + sums->halves[1]); }

/* sum x log y, 0 where x is. */
static double sum_x_log_y(const float *x, const float *y, int64_t count) {
    Sums sums = {};
    for (int64_t i = 0; i < count; i += LANES) {
        f8 here = load8(x + i, count - i);
        add(&sums, select8(here > 0.0f, here * log8(load8(y + i, count - i)), (f8){}));
    }
    return total_of(&sums);
}

static double total_variation(const Place *place) {
    Sums sums = {};
    for (int64_t i = 0; i < place->vocab; i += LANES) {
        int64_t left = place->vocab - i;
        f8 difference = load8(place->target + i, left) - load8(place->draft + i, left);
        add(&sums, select8(difference < 0.0f, -difference, difference));
    }
    return 0.5 * total_of(&sums);
}

/* Is the whole place the target's? */
static int defers(const Rule *rule, const Place *place) {
    const float *p = place->target_raw, *q = place->draft_raw;
    int64_t vocab = place->vocab;
    double alpha = rule->alpha;
    switch (rule->kind) {
    case BILD:
        return -sum_x_log_y(place->draft, p, vocab) > alpha;
    case CHOW:
        return largest_of(q, vocab) < (float)(1.0 - alpha);
    case CHOW_LOG:
        return -sum_x_log_y(q, q, vocab) > alpha;
    case DIFF:
    case OPT:
        if (rule->kind == OPT) alpha *= total_variation(place);
        return largest_of(q, vocab) < largest_of(p, vocab) - (float)alpha;
    default: /* DIFF_LOG, OPT_LOG */
        if (rule->kind == OPT_LOG) alpha *= total_variation(place);
        return sum_x_log_y(q, q, vocab) < sum_x_log_y(p, p, vocab) - alpha;
    }
}

/* Tokens that have less than `bound` here are given up by a rule that asks for each. */
typedef struct {
    const float *probs;
    float bound;
} Cut;

static Cut cut_of(const Rule *rule, const Place *place) {
    float peak = largest_of(place->target_raw, place->vocab);
    float bound = rule->kind == TOKEN_V3 ? (float)(1.0 - rule->alpha) * peak
                                         : peak - (float)rule->alpha;
    return (Cut){rule->kind == TOKEN_V1 ? place->draft_raw : place->target_raw, bound};
}

/* eta, the draft's mass on tokens that are given up: it goes where the target has its own. */
static float given_up(const Cut *cut, const Place *place) {
    Sums sums = {};
    for (int64_t i = 0; i < place->vocab; i += LANES) {
        int64_t left = place->vocab - i;
        i8 lost = load8(cut->probs + i, left) < cut->bound;
        add(&sums, select8(lost, load8(place->draft + i, left), (f8){}));
    }
    return (float)total_of(&sums);
}

static void sharpen(const Rule *rule, const Place *place, float *pi) {
    Cut cut = cut_of(rule, place);
    float eta = given_up(&cut, place);
    for (int64_t i = 0; i < place->vocab; i++)
        pi[i] = (cut.probs[i] < cut.bound ? 0.0f : place->draft[i]) + place->target[i] * eta;
}

/* sum (p factor - q)_+, and its slope, the sum of p where that is above 0. */
static void excess(const float *p, double factor, const float *q, int64_t count, double *surplus,
                   double *slope) {
    d4 surpluses = {}, slopes = {};
    for (int64_t i = 0; i < count; i += 4) {
        d4 p4 = load4(p + i, count - i), q4 = load4(q + i, count - i);
        d4 here = p4 * factor - q4;
        l4 above = (l4)(here > 0.0);
        surpluses += (d4)(above & (l4)here);
        slopes += (d4)(above & (l4)p4);
    }
    *surplus = total(surpluses);
    *slope = total(slopes);
}

/* sum (q - p / share)_+ */
static double rejected_mass(const Place *place, double share) {
    d4 sums = {};
    for (int64_t i = 0; i < place->vocab; i += 4) {
        int64_t left = place->vocab - i;
        d4 here = load4(place->draft + i, left) - load4(place->target + i, left) / share;
        sums += (d4)((l4)(here > 0.0) & (l4)here);
    }
    return total(sums);
}

/* 1/beta at which as much is recovered as is rejected; core's `tuned_inverse_beta` tells how. */
static double tuned_inverse_beta(const Rule *rule, const Place *place) {
    double rejected = rejected_mass(place, 1.0 - rule->alpha), inverse = 1.0;
    for (int piece = 0; piece < MOST_PIECES; piece++) {
        double surplus, slope;
        excess(place->target, inverse, place->draft, place->vocab, &surplus, &slope);
        double lower = slope > 0.0 ? inverse - (surplus - rejected) / slope : inverse;
        if (lower < 0.0) lower = 0.0;
        if (!(lower < inverse)) break;
        inverse = lower;
    }
    return inverse;
}

static void tune(const Rule *rule, const Place *place, float *pi) {
    float inverse = (float)tuned_inverse_beta(rule, place), share = (float)(1.0 - rule->alpha);
    for (int64_t i = 0; i < place->vocab; i++) {
        float p = place->target[i], q = place->draft[i];
        float kept = p / share < q ? p / share : q;
        pi[i] = p * inverse > kept ? p * inverse : kept;
    }
}

/* f(p), of which min(1, f(p)/q) is kept; for rules that defer it is p. */
INLINE float relaxed(const Rule *rule, float p) {
    switch (rule->kind) {
    case LENIENT_LINEAR:
        return (float)((double)p / rule->alpha);
    case LENIENT_SQUARE:
        return (float)((double)p / (rule->alpha * rule->alpha));
    case LENIENT_EXPONENTIAL:
        return (float)pow((double)p, rule->alpha);
    case LOSSY:
    case LOSSY_TUNED: /* p/beta is no more than p, so the larger of the two is never it */
        return (float)((double)p / (1.0 - rule->alpha));
    default:
        return p;
    }
}

/* Does a token stay of whose mass q in the draft so much is wanted? */
INLINE int stays(float wanted, float q, double uniform) {
    float keep = q > 0.0f && wanted / q < 1.0f ? wanted / q : 1.0f;
    return uniform < (double)keep;
}

int keeps(const Rule *rule, const Place *place, int64_t token, double uniform) {
    float p = place->target[token], q = place->draft[token];
    if (rule->kind < TOKEN_V1)
        /* an aim of q keeps every token: only one that p would lose asks which it is */
        return stays(relaxed(rule, p), q, uniform) || (rule->kind >= BILD && !defers(rule, place));
    Cut cut = cut_of(rule, place);
    if (!(cut.probs[token] < cut.bound)) return 1; /* it keeps q, and p eta more */
    return stays(p * given_up(&cut, place), q, uniform);
}

const float *aim(const Rule *rule, const Place *place, float *room) {
    if (rule->kind >= TOKEN_V1) {
        sharpen(rule, place, room);
        return room;
    }
    if (rule->kind >= BILD) return defers(rule, place) ? place->target : place->draft;
    if (rule->kind < LOSSY_TUNED) return place->target;
    tune(rule, place, room);
    return room;
}

const float *recovery(const Rule *rule, const Place *place, float *room) {
    int whole = rule->kind >= BILD && rule->kind < TOKEN_V1;
    if (whole) return place->target; /* none is rejected where such a rule does not defer */
    if (rule->kind != LOSSY || rule->beta == 1.0) return aim(rule, place, room);
    float beta = (float)rule->beta;
    for (int64_t i = 0; i < place->vocab; i++) room[i] = place->target[i] / beta;
    return room;
}
