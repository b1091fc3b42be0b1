/* The two halves of a block: a draft draws ahead, its target judges. */

#include "llama.h"
#include "sampling.h"
#include "verification.h"

/* Read the pass's tokens, then draw `gamma` tokens a row, each but the last read before the next:
   the likeliest ones where there are no uniforms [batch, gamma]. `vocab`: tokens that count.
   -> tokens [batch, gamma], probs [batch, gamma, vocab]; 0 where a distribution has no mass. */
int64_t draw_ahead(const Model *model, Pass *pass, int64_t gamma, int64_t vocab, float temperature,
                const double *uniforms, int64_t *tokens, float *probs) {
    int64_t batch = pass->batch, newest[batch];
    for (int64_t place = 0; place < gamma; place++) {
        read_tokens(model, pass);
        for (int64_t b = 0; b < batch; b++) {
            const float *logits = pass->logits + b * model->vocab;
            if (uniforms) {
                float *here = probs + (b * gamma + place) * vocab;
                softmax(logits, 1, vocab, vocab, temperature, 1, here);
                newest[b] = draw(here, 0, vocab, uniforms[b * gamma + place]);
            } else {
                best_tokens(logits, 1, vocab, vocab, newest + b);
            }
            tokens[b * gamma + place] = newest[b];
            if (newest[b] < 0) return 0;
        }
        pass->tokens = newest;
        pass->count = 1;
        pass->width++;
        for (int64_t b = 0; b < batch; b++) pass->lengths[b]++;
    }
    return 1;
}

/* Read the newest token and `gamma` drafted ones a row, then judge those: by the likeliest tokens
   where there are no uniforms, else losslessly. `probs` [batch, gamma + 1, vocab] is written; what
   else there is, `judge_lossless` tells. -> 0 where a distribution has no mass. */
int64_t judge_ahead(const Model *model, Pass *pass, const int64_t *newest, const int64_t *drafted,
                    int64_t vocab, float temperature, const int64_t *num_drafted,
                    const float *draft_probs, const double *accept_uniforms,
                    const double *next_uniforms, float *probs, int64_t *num_accepted,
                    int64_t *next_tokens) {
    int64_t batch = pass->batch, gamma = pass->count - 1, rows = batch * pass->count;
    int64_t tokens[rows], best[rows];
    for (int64_t b = 0; b < batch; b++) {
        tokens[b * pass->count] = newest[b];
        for (int64_t g = 0; g < gamma; g++)
            tokens[b * pass->count + 1 + g] = drafted[b * gamma + g];
    }
    pass->tokens = tokens;
    read_tokens(model, pass);
    if (next_uniforms) {
        softmax(pass->logits, rows, vocab, model->vocab, temperature, pass->threads, probs);
        judge_lossless(drafted, num_drafted, draft_probs, probs, batch, gamma, vocab,
                       accept_uniforms, next_uniforms, pass->threads, num_accepted, next_tokens);
        for (int64_t b = 0; b < batch; b++)
            if (next_tokens[b] < 0) return 0;
        return 1;
    }
    best_tokens(pass->logits, rows, vocab, model->vocab, best);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t *wanted = best + b * pass->count;
        int64_t kept = 0;
        while (kept < num_drafted[b] && drafted[b * gamma + kept] == wanted[kept]) kept++;
        num_accepted[b] = kept;
        next_tokens[b] = wanted[kept];
    }
    return 1;
}
