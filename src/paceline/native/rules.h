/* Acceptance rules at one position; see core/rules.py and core/cascade_rules.py for formulas. */

#ifndef PACELINE_RULES_H
#define PACELINE_RULES_H

#include <stdint.h>

/* Same order as `Kind` in structures.py. Rules state pi from LOSSY_TUNED on, defer per position
   from BILD on and per token from TOKEN_V1 on. */
enum {
    LOSSLESS, LENIENT_LINEAR, LENIENT_SQUARE, LENIENT_EXPONENTIAL, LOSSY, LOSSY_TUNED,
    BILD, CHOW, CHOW_LOG, DIFF, DIFF_LOG, OPT, OPT_LOG,
    TOKEN_V1, TOKEN_V2, TOKEN_V3,
};

typedef struct {
    int64_t kind;
    double alpha; /* epsilon of lenient rules, threshold of BiLD */
    double beta;  /* LOSSY only */
    int64_t target_bonus; /* the bonus token follows the target, not pi */
} Rule;

/* Distributions at one position, [vocab] each; raw ones are untempered. */
typedef struct {
    const float *target, *draft, *target_raw, *draft_raw;
    int64_t vocab;
} Position;

/* True if the drafted token is accepted; `uniform` is in [0, 1). */
int accepts(const Rule *rule, const Position *at, int64_t token, double uniform);

/* The distribution pi that the rule states, else the target: of bonus tokens, and of recovered ones
   without excess. May be written to `workspace` [vocab]. */
const float *aim(const Rule *rule, const Position *at, float *workspace);

/* A distribution whose excess over the draft the recovered token follows after a rejection. */
const float *recovery(const Rule *rule, const Position *at, float *workspace);

#endif
