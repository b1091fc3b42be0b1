/* The rules at one place of a block; core/rules.py and core/cascade_rules.py tell their mathematics. */

#ifndef PACELINE_RULES_H
#define PACELINE_RULES_H

#include <stdint.h>

/* Numbered as `Kind` in verification.py is. From LOSSY_TUNED on rules state an aim, from BILD on
   they defer a whole place to the target, from TOKEN_V1 on one token at a time. */
enum {
    LOSSLESS,
    LENIENT_LINEAR,
    LENIENT_SQUARE,
    LENIENT_EXPONENTIAL,
    LOSSY,
    LOSSY_TUNED,
    BILD,
    CHOW,
    CHOW_LOG,
    DIFF,
    DIFF_LOG,
    OPT,
    OPT_LOG,
    TOKEN_V1,
    TOKEN_V2,
    TOKEN_V3,
};

typedef struct {
    int64_t kind;
    double alpha; /* a lenient rule's epsilon, BiLD's threshold */
    double beta;  /* of LOSSY alone */
} Rule;

/* The distributions behind one text, [vocab] each; raw ones are untempered. */
typedef struct {
    const float *target, *draft, *target_raw, *draft_raw;
    int64_t vocab;
} Place;

/* Does this drafted token stay? Looks at no more than it must; `uniform` is in [0, 1). */
int keeps(const Rule *rule, const Place *place, int64_t token, double uniform);

/* What a bonus token follows, and a recovered one where nothing exceeds the draft: the aim that the
   rule states, else the target. It may be written to `room` [vocab]. */
const float *aim(const Rule *rule, const Place *place, float *room);

/* Once a token was rejected here: what exceeds the draft of this, the recovered token follows. */
const float *recovery(const Rule *rule, const Place *place, float *room);

#endif
