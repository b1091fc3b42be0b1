#include "verification.h"

#include "sampling.h"

static Place place_at(const Block *block, int64_t row, int64_t position) {
    int64_t target = (row * (block->gamma + 1) + position) * block->vocab;
    int64_t draft = (row * block->places + position) * block->vocab;
    return (Place){
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
    float *room = block->room + row * block->vocab;
    int64_t kept = 0, count = block->num_drafted[row], next = -1;
    Place place = place_at(block, row, 0);
    while (kept < count && keeps(rule, &place, drafted[kept], accept[kept]))
        place = place_at(block, row, ++kept);
    if (kept < count) next = draw(recovery(rule, &place, room), place.draft, block->vocab, uniform);
    if (next < 0) next = draw(aim(rule, &place, room), 0, block->vocab, uniform);
    block->num_accepted[row] = kept;
    block->next_tokens[row] = next;
}

void judge(const Block *block, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (block->batch > 1)
    for (int64_t row = 0; row < block->batch; row++) judge_row(block, row);
}
