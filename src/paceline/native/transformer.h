/* A Llama-like model, and one pass of it; the layout is told in transformer.c. */

#ifndef PACELINE_LLAMA_H
#define PACELINE_LLAMA_H

#include <stdint.h>

typedef struct {
    const char *weights; /* packed bfloat16, or int8 where there are scales */
    const float *scales; /* [rows], or null */
    int64_t rounds;      /* of bfloat16: vectors may be rounded to it, where that is faster */
} Matrix;

typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head_size], or null */
    const float *qkv_bias;                  /* or null */
    int64_t window;                         /* columns it looks back; 0: all */
} Layer;

typedef struct {
    int64_t num_layers, hidden, inner, query_heads, key_heads, head_size;
    int64_t head_rows, vocab;
    float norm_eps, scaling;
    Matrix embeddings;           /* bfloat16, [tokens, hidden] */
    Matrix head;                 /* [head_rows, hidden] */
    const float *head_bias;      /* or null */
    const int64_t *head_tokens;  /* [head_rows], or null where row r is token r */
    const float *final_norm;
    const Layer *layers;
} Model;

typedef struct {
    int64_t threads, batch, count, width; /* width: columns after this pass, of the longest row */
    int64_t keep;                         /* logits of the last so many columns */
    int64_t compact;                      /* of the head's rows alone, [batch, keep, head_rows] */
    const int64_t *tokens;                /* [batch, count] */
    int64_t *lengths;                     /* [batch]: tokens a row holds after this pass */
    int64_t *ends;                        /* [batch]: the column behind the last of them */
    const float *cos, *sin;               /* [positions, head_size / 2] */
    float *const *keys, *const *values;   /* a layer: [batch, key_heads, room, head_size] */
    int64_t room;
    float *logits;    /* [batch, keep, vocab]; -inf for tokens without a row in the head */
    float *states;    /* [batch, keep, hidden] that they follow from, or null */
    float *workspace; /* `workspace_size` floats */
} Pass;

/* Tokens in a pass up to which this is the fastest way to read them. */
int64_t most_tokens(int64_t rounds);

/* A matrix [rows, size] of `bytes` an entry, as passes read it. */
int64_t packed_size(int64_t rows, int64_t size, int64_t bytes);
void pack(const char *weights, int64_t rows, int64_t size, int64_t bytes, char *packed);

/* Floats of workspace that passes of up to so many tokens need. */
int64_t workspace_size(const Model *model, int64_t num_tokens, int64_t width, int64_t threads);

void read_tokens(const Model *model, const Pass *pass);

#endif
