/* The rules of core/rules.py and core/cascade_rules.py, in their notation. Sums are float64. Values
   compared with thresholds have the same precision as there, so that ties break equally. */

#include "rules.h"

#include <math.h>

#include "sampling.h"
#include "vectors.h"

#define MOST_PIECES 200 /* Newton steps, as in core/rules.py */

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

/* sum x log y, with 0 log y = 0. */
static double sum_x_log_y(const float *x, const float *y, int64_t count) {
    Sums sums = {};
    for (int64_t i = 0; i < count; i += LANES) {
        f8 here = load8(x + i, count - i);
        add(&sums, select8(here > 0.0f, here * log8(load8(y + i, count - i)), (f8){}));
    }
    return total_of(&sums);
}

static double total_variation(const Position *at) {
    Sums sums = {};
    for (int64_t i = 0; i < at->vocab; i += LANES) {
        int64_t left = at->vocab - i;
        f8 difference = load8(at->target + i, left) - load8(at->draft + i, left);
        add(&sums, select8(difference < 0.0f, -difference, difference));
    }
    return 0.5 * total_of(&sums);
}

/* True if a binary rule defers at this position. */
static int defers(const Rule *rule, const Position *at) {
    const float *p = at->target_raw, *q = at->draft_raw;
    int64_t vocab = at->vocab;
    double alpha = rule->alpha;
    switch (rule->kind) {
    case BILD:
        return -sum_x_log_y(at->draft, p, vocab) > alpha;
    case CHOW:
        return largest_of(q, vocab) < (float)(1.0 - alpha);
    case CHOW_LOG:
        return -sum_x_log_y(q, q, vocab) > alpha;
    case DIFF:
    case OPT:
        if (rule->kind == OPT) alpha *= total_variation(at);
        return largest_of(q, vocab) < largest_of(p, vocab) - (float)alpha;
    default: /* DIFF_LOG, OPT_LOG */
        if (rule->kind == OPT_LOG) alpha *= total_variation(at);
        return sum_x_log_y(q, q, vocab) < sum_x_log_y(p, p, vocab) - alpha;
    }
}

/* A token-specific rule defers tokens with probs < bound. */
typedef struct {
    const float *probs;
    float bound;
} Cut;

static Cut cut_of(const Rule *rule, const Position *at) {
    float peak = largest_of(at->target_raw, at->vocab);
    float bound = rule->kind == TOKEN_V3 ? (float)(1.0 - rule->alpha) * peak
                                         : peak - (float)rule->alpha;
    return (Cut){rule->kind == TOKEN_V1 ? at->draft_raw : at->target_raw, bound};
}

/* eta: the draft's mass on deferred tokens, which pi distributes as the target does. */
static float deferred_mass(const Cut *cut, const Position *at) {
    Sums sums = {};
    for (int64_t i = 0; i < at->vocab; i += LANES) {
        int64_t left = at->vocab - i;
        i8 lost = load8(cut->probs + i, left) < cut->bound;
        add(&sums, select8(lost, load8(at->draft + i, left), (f8){}));
    }
    return (float)total_of(&sums);
}

static void token_pi(const Rule *rule, const Position *at, float *pi) {
    Cut cut = cut_of(rule, at);
    float eta = deferred_mass(&cut, at);
    for (int64_t i = 0; i < at->vocab; i++)
        pi[i] = (cut.probs[i] < cut.bound ? 0.0f : at->draft[i]) + at->target[i] * eta;
}

/* sum (p factor - q)_+ and its derivative, the sum of p over its positive terms. */
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
static double rejected_mass(const Position *at, double share) {
    d4 sums = {};
    for (int64_t i = 0; i < at->vocab; i += 4) {
        int64_t left = at->vocab - i;
        d4 here = load4(at->draft + i, left) - load4(at->target + i, left) / share;
        sums += (d4)((l4)(here > 0.0) & (l4)here);
    }
    return total(sums);
}

/* See `tuned_inverse_beta` in core/rules.py. */
static double tuned_inverse_beta(const Rule *rule, const Position *at) {
    double rejected = rejected_mass(at, 1.0 - rule->alpha), inverse = 1.0;
    for (int piece = 0; piece < MOST_PIECES; piece++) {
        double surplus, slope;
        excess(at->target, inverse, at->draft, at->vocab, &surplus, &slope);
        double lower = slope > 0.0 ? inverse - (surplus - rejected) / slope : inverse;
        if (lower < 0.0) lower = 0.0;
        if (!(lower < inverse)) break;
        inverse = lower;
    }
    return inverse;
}

/* f(p) of the acceptance probability min(1, f(p)/q); p for rules that defer. */
INLINE double relaxed(const Rule *rule, double p) {
    switch (rule->kind) {
    case LENIENT_LINEAR:
        return p / rule->alpha;
    case LENIENT_SQUARE:
        return p / (rule->alpha * rule->alpha);
    case LENIENT_EXPONENTIAL:
        return pow(p, rule->alpha);
    case LOSSY:
    case LOSSY_TUNED: /* p/beta <= p, so pi/q does not depend on beta here */
        return p / (1.0 - rule->alpha);
    default:
        return p;
    }
}

static int is_one_hot(const float *p, int64_t vocab) {
    int64_t count = 0;
    for (int64_t i = 0; i < vocab; i++) count += p[i] > 0.0f;
    return count == 1 && largest_of(p, vocab) == 1.0f;
}

/* True if the rule relaxes the argmax here: f(p) > p, at temperature 0. See `_Relaxed` in
   core/rules.py. */
static int relaxes_argmax(const Rule *rule, const Position *at) {
    if (rule->kind == LOSSLESS || rule->kind > LOSSY_TUNED || at->target_raw == at->target) return 0;
    double exact = rule->kind < LOSSY ? 1.0 : 0.0;
    return rule->alpha != exact && is_one_hot(at->target, at->vocab);
}

/* pi at temperature 0: q of the tokens that are kept, and the rest at the argmax. */
static void relaxed_argmax(const Rule *rule, const Position *at, float *pi) {
    double peak = largest_of(at->target_raw, at->vocab), kept = 0.0;
    for (int64_t i = 0; i < at->vocab; i++) {
        pi[i] = relaxed(rule, at->target_raw[i]) >= peak ? at->draft[i] : 0.0f;
        kept += pi[i];
    }
    float rest = kept < 1.0 ? (float)(1.0 - kept) : 0.0f;
    for (int64_t i = 0; i < at->vocab; i++) pi[i] += rest * at->target[i];
}

static void tuned_pi(const Rule *rule, const Position *at, float *pi) {
    if (relaxes_argmax(rule, at)) {
        relaxed_argmax(rule, at, pi);
        return;
    }
    float inverse = (float)tuned_inverse_beta(rule, at), share = (float)(1.0 - rule->alpha);
    for (int64_t i = 0; i < at->vocab; i++) {
        float p = at->target[i], q = at->draft[i];
        float accepted = p / share < q ? p / share : q;
        pi[i] = p * inverse > accepted ? p * inverse : accepted;
    }
}


/* uniform < min(1, wanted / q). */
INLINE int accepts_ratio(float wanted, float q, double uniform) {
    float ratio = q > 0.0f && wanted / q < 1.0f ? wanted / q : 1.0f;
    return uniform < (double)ratio;
}

int accepts(const Rule *rule, const Position *at, int64_t token, double uniform) {
    float p = at->target[token], q = at->draft[token];
    if (relaxes_argmax(rule, at))
        return relaxed(rule, at->target_raw[token]) >= largest_of(at->target_raw, at->vocab);
    if (rule->kind < TOKEN_V1)
        /* Without deferral pi = q, which accepts all: test `defers` only if p/q rejects. */
        return accepts_ratio((float)relaxed(rule, p), q, uniform) ||
               (rule->kind >= BILD && !defers(rule, at));
    Cut cut = cut_of(rule, at);
    if (!(cut.probs[token] < cut.bound)) return 1; /* pi = q + p eta */
    return accepts_ratio(p * deferred_mass(&cut, at), q, uniform);
}

const float *aim(const Rule *rule, const Position *at, float *workspace) {
    if (rule->kind >= TOKEN_V1) {
        token_pi(rule, at, workspace);
        return workspace;
    }
    if (rule->kind >= BILD) return defers(rule, at) ? at->target : at->draft;
    if (rule->kind < LOSSY_TUNED) return at->target;
    tuned_pi(rule, at, workspace);
    return workspace;
}

const float *recovery(const Rule *rule, const Position *at, float *workspace) {
    int binary = rule->kind >= BILD && rule->kind < TOKEN_V1;
    if (binary) return at->target; /* these rules reject only where they defer */
    if (rule->kind != LOSSY || rule->beta == 1.0) return aim(rule, at, workspace);
    float beta = (float)rule->beta;
    for (int64_t i = 0; i < at->vocab; i++) workspace[i] = at->target[i] / beta;
    return workspace;
}
