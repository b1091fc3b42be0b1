/* Sizes, field offsets and enum values, which structures.py compares with its own. */

#include <stddef.h>

#include "divergences.h"
#include "speculation.h"

typedef struct {
    const char *name;
    int64_t value;
} Fact;

#define SIZE(type) {#type, sizeof(type)}
#define AT(type, field) {#type "." #field, offsetof(type, field)}
#define KIND(name) {#name, name}

static const Fact FACTS[] = {
    SIZE(Block), AT(Block, batch), AT(Block, gamma), AT(Block, places), AT(Block, vocab),
    AT(Block, drafted), AT(Block, num_drafted), AT(Block, draft), AT(Block, target),
    AT(Block, accept_uniforms), AT(Block, next_uniforms), AT(Block, num_accepted),
    AT(Block, next_tokens),

    SIZE(Draft), AT(Draft, gamma), AT(Draft, places), AT(Draft, vocab), AT(Draft, temperature),
    AT(Draft, uniforms), AT(Draft, tokens), AT(Draft, probs), AT(Draft, raw),

    SIZE(Matrix), AT(Matrix, weights), AT(Matrix, scales), AT(Matrix, rounds),

    SIZE(Layer), AT(Layer, qkv), AT(Layer, out), AT(Layer, gate_up), AT(Layer, down),
    AT(Layer, attention_norm), AT(Layer, mlp_norm), AT(Layer, query_norm), AT(Layer, key_norm),
    AT(Layer, qkv_bias), AT(Layer, window),

    SIZE(Model), AT(Model, num_layers), AT(Model, hidden), AT(Model, inner),
    AT(Model, query_heads), AT(Model, key_heads), AT(Model, head_size), AT(Model, head_rows),
    AT(Model, vocab), AT(Model, norm_eps), AT(Model, scaling), AT(Model, embeddings),
    AT(Model, head), AT(Model, head_bias), AT(Model, head_tokens), AT(Model, final_norm),
    AT(Model, layers),

    SIZE(Pass), AT(Pass, threads), AT(Pass, batch), AT(Pass, count), AT(Pass, width),
    AT(Pass, keep), AT(Pass, compact), AT(Pass, tokens), AT(Pass, lengths), AT(Pass, ends),
    AT(Pass, cos), AT(Pass, sin), AT(Pass, keys), AT(Pass, values), AT(Pass, columns),
    AT(Pass, logits), AT(Pass, states), AT(Pass, workspace),

    SIZE(Term), AT(Term, kind), AT(Term, weight), AT(Term, beta),

    SIZE(Losses), AT(Losses, terms), AT(Losses, num_terms), AT(Losses, rows), AT(Losses, vocab),
    AT(Losses, bytes), AT(Losses, target), AT(Losses, draft), AT(Losses, labels),
    AT(Losses, weights), AT(Losses, normalisers), AT(Losses, losses),

    KIND(FORWARD_KL), KIND(REVERSE_KL), KIND(JSD), KIND(TVD), KIND(NEGATIVE_LOG_ACCEPTANCE),
    KIND(CROSS_ENTROPY),
};

int64_t num_facts(void) { return sizeof FACTS / sizeof *FACTS; }
const char *fact_name(int64_t index) { return FACTS[index].name; }
int64_t fact_value(int64_t index) { return FACTS[index].value; }
