#include "verification.h"

#include "sampling.h"

static Position position_at(const Block *block, int64_t row, int64_t index) {
    int64_t target = (row * (block->gamma + 1) + index) * block->vocab;
    int64_t draft = (row * block->places + index) * block->vocab;
    return (Position){
        .target = block->target + target,
        .draft = block->draft + draft,
        .target_raw = (block->target_raw ? block->target_raw : block->target) + target,
        .draft_raw = (block->draft_raw ? block->draft_raw : block->draft) + draft,
        .vocab = block->vocab,
    };
}

static void judge_row(const Block *block, int64_t row) {
    const Rule *rule = &block->rule;
    const int64_t *drafted = block->drafted + row * block->gamma;
    const double *accept = block->accept_uniforms + row * block->gamma;
    double uniform = block->next_uniforms[row];
    float *workspace = block->room + row * block->vocab;
    int64_t accepted = 0, count = block->num_drafted[row], next = -1;
    Position at = position_at(block, row, 0);
    while (accepted < count && accepts(rule, &at, drafted[accepted], accept[accepted]))
        at = position_at(block, row, ++accepted);
    if (accepted < count)
        next = draw(recovery(rule, &at, workspace), at.draft, block->vocab, uniform);
    if (next < 0) {
        int of_target = accepted == count && rule->target_bonus;
        next = draw(of_target ? at.target : aim(rule, &at, workspace), 0, block->vocab, uniform);
    }
    block->num_accepted[row] = accepted;
    block->next_tokens[row] = next;
}

void judge(const Block *block, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (block->batch > 1)
    for (int64_t row = 0; row < block->batch; row++) judge_row(block, row);
}
