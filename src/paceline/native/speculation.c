#include "speculation.h"

#include <string.h>

#include "sampling.h"
#include "vectors.h"

/* Probabilities; one-hot at the first maximum at temperature 0. */
static void shape(const float *logits, int64_t rows, int64_t vocab, int64_t stride,
                  double temperature, int64_t threads, float *probs) {
    if (temperature > 0.0) {
        softmax(logits, rows, vocab, stride, (float)temperature, threads, probs);
        return;
    }
    int64_t best[rows];
    best_tokens(logits, rows, vocab, stride, best);
    memset(probs, 0, (size_t)(rows * vocab) * sizeof *probs);
    for (int64_t row = 0; row < rows; row++) probs[row * vocab + best[row]] = 1.0f;
}

/* Tokens with a row in the head, in increasing order. */
typedef struct {
    const int64_t *tokens; /* null: row r is token r */
    int64_t count;
} Known;

static Known known_tokens(const Model *model, int64_t vocab) {
    int64_t count = model->head_tokens ? model->head_rows : vocab;
    while (model->head_tokens && count && model->head_tokens[count - 1] >= vocab) count--;
    return (Known){model->head_tokens, count};
}

/* Move the first entries of a row, those of the known tokens, to the tokens' indices, in place. */
static void spread(float *row, const Known *known, int64_t vocab) {
    if (!known->tokens) return;
    int64_t end = vocab;
    for (int64_t i = known->count - 1; i >= 0; i--) {
        int64_t token = known->tokens[i];
        row[token] = row[i]; /* token >= i: does not overwrite entries still to be moved */
        for (int64_t rest = token + 1; rest < end; rest++) row[rest] = 0.0f;
        end = token;
    }
    for (int64_t rest = 0; rest < end; rest++) row[rest] = 0.0f;
}

/* Write the distributions of a row and return its next token, or -1 without mass. */
static int64_t next_token(const Draft *draft, int64_t row, int64_t index, const float *logits,
                          const Known *known) {
    int64_t vocab = draft->vocab, here = (row * draft->places + index) * vocab, best = 0;
    int64_t count = known->count;
    if (draft->raw) {
        softmax(logits, 1, count, count, 1.0f, 1, draft->raw + here);
        spread(draft->raw + here, known, vocab);
    }
    if (draft->probs) {
        float *probs = draft->probs + here;
        shape(logits, 1, count, count, draft->temperature, 1, probs);
        if (index < draft->gamma) /* the last distribution of gamma + 1 is for the bonus token */
            best = draw(probs, 0, count, draft->uniforms[row * draft->gamma + index]);
        spread(probs, known, vocab);
    } else {
        best_tokens(logits, 1, count, count, &best);
    }
    return known->tokens && best >= 0 ? known->tokens[best] : best;
}

int64_t draw_ahead(const Model *model, Pass *pass, const Draft *draft) {
    int64_t batch = pass->batch, newest[batch], empty = 0;
    const Known known = known_tokens(model, draft->vocab);
    const int64_t width = model->head_tokens ? model->head_rows : model->vocab;
    pass->compact = 1;
    for (int64_t index = 0; index < draft->places; index++) {
        read_tokens(model, pass);
#pragma omp parallel for num_threads(pass->threads) if (batch > 1) reduction(+ : empty)
        for (int64_t b = 0; b < batch; b++) {
            newest[b] = next_token(draft, b, index, pass->logits + b * width, &known);
            if (index < draft->gamma) draft->tokens[b * draft->gamma + index] = newest[b];
            empty += newest[b] < 0;
        }
        if (empty) break;
        pass->tokens = newest;
        pass->count = 1;
        pass->width++;
        for (int64_t b = 0; b < batch; b++) pass->lengths[b]++, pass->ends[b]++;
    }
    pass->compact = 0;
    return !empty;
}

/* uniform < min(1, p / q); accepts where q is 0 (never drawn). */
INLINE int accepts(float p, float q, double uniform) {
    float ratio = q > 0.0f && p / q < 1.0f ? p / q : 1.0f;
    return uniform < (double)ratio;
}

static void verify_row(const Block *block, int64_t row) {
    const int64_t *drafted = block->drafted + row * block->gamma;
    const double *accept = block->accept_uniforms + row * block->gamma;
    const float *p = block->target + row * (block->gamma + 1) * block->vocab;
    const float *q = block->draft + row * block->places * block->vocab;
    double uniform = block->next_uniforms[row];
    int64_t accepted = 0, count = block->num_drafted[row], next = -1;
    while (accepted < count && accepts(p[drafted[accepted]], q[drafted[accepted]], accept[accepted])) {
        p += block->vocab;
        q += block->vocab;
        accepted++;
    }
    if (accepted < count) next = draw(p, q, block->vocab, uniform);
    if (next < 0) next = draw(p, 0, block->vocab, uniform);
    block->num_accepted[row] = accepted;
    block->next_tokens[row] = next;
}

void verify(const Block *block, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (block->batch > 1)
    for (int64_t row = 0; row < block->batch; row++) verify_row(block, row);
}

/* Accept tokens while they equal the target's argmax, which is also the next token. */
static void verify_greedily(const Block *block, const float *logits, int64_t stride) {
    int64_t gamma = block->gamma, rows = block->batch * (gamma + 1), best[rows];
    best_tokens(logits, rows, block->vocab, stride, best);
    for (int64_t b = 0; b < block->batch; b++) {
        const int64_t *wanted = best + b * (gamma + 1), *drafted = block->drafted + b * gamma;
        int64_t kept = 0;
        while (kept < block->num_drafted[b] && drafted[kept] == wanted[kept]) kept++;
        block->num_accepted[b] = kept;
        block->next_tokens[b] = wanted[kept];
    }
}

int64_t verify_ahead(const Model *model, Pass *pass, const int64_t *newest, double temperature,
                     const Block *block) {
    int64_t gamma = block->gamma, count = gamma + 1, rows = block->batch * count, tokens[rows];
    for (int64_t b = 0; b < block->batch; b++) {
        tokens[b * count] = newest[b];
        for (int64_t g = 0; g < gamma; g++)
            tokens[b * count + 1 + g] = block->drafted[b * gamma + g];
    }
    pass->tokens = tokens;
    read_tokens(model, pass);
    const float *logits = pass->logits;
    int64_t stride = model->vocab, threads = pass->threads;
    if (!block->next_uniforms) {
        verify_greedily(block, logits, stride);
        return 1;
    }
    shape(logits, rows, block->vocab, stride, temperature, threads, block->target);
    verify(block, threads);
    for (int64_t b = 0; b < block->batch; b++)
        if (block->next_tokens[b] < 0) return 0;
    return 1;
}
