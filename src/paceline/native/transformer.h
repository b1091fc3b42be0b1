/* Forward pass of a Llama-like model over a few tokens. */

#ifndef PACELINE_LLAMA_H
#define PACELINE_LLAMA_H

#include <stdint.h>

typedef struct {
    const char *weights; /* packed bfloat16, or int8 if there are scales */
    const float *scales; /* [rows], or null */
    int64_t rounds;      /* bfloat16 only: inputs may be rounded to bfloat16 if that is faster */
} Matrix;

typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *attention_norm, *mlp_norm; /* [hidden] */
    const float *query_norm, *key_norm;     /* [head_size], or null */
    const float *qkv_bias;                  /* or null */
    int64_t window;                         /* sliding window in columns; 0: none */
} Layer;

typedef struct {
    int64_t num_layers, hidden, inner, query_heads, key_heads, head_size;
    int64_t head_rows, vocab;
    float norm_eps, scaling;
    Matrix embeddings;           /* bfloat16, [tokens, hidden] */
    Matrix head;                 /* [head_rows, hidden] */
    const float *head_bias;      /* or null */
    const int64_t *head_tokens;  /* [head_rows], or null if row r is token r */
    const float *final_norm;
    const Layer *layers;
} Model;

typedef struct {
    int64_t threads, batch, count, width; /* width: columns after this pass, of the longest row */
    int64_t keep;                         /* number of last columns with logits */
    int64_t compact;                      /* logits of head rows only, [batch, keep, head_rows] */
    const int64_t *tokens;                /* [batch, count] */
    int64_t *lengths;                     /* [batch]: tokens per row after this pass */
    int64_t *ends;                        /* [batch]: the column after the last token */
    const float *cos, *sin;               /* [positions, head_size / 2] */
    float *const *keys, *const *values;   /* per layer: [batch, key_heads, columns, head_size] */
    int64_t columns;
    float *logits;    /* [batch, keep, vocab]; -inf for tokens without a row in the head */
    float *states;    /* [batch, keep, hidden], inputs of the head, or null */
    float *workspace; /* `workspace_size` floats */
} Pass;

/* Number of tokens per pass up to which this code is faster than PyTorch. */
int64_t most_tokens(int64_t rounds);

/* Pack a matrix [rows, size] with `bytes` per entry; its packed size in bytes. */
int64_t packed_size(int64_t rows, int64_t size, int64_t bytes);
void pack(const char *weights, int64_t rows, int64_t size, int64_t bytes, char *packed);

/* Workspace in floats for passes of up to num_tokens tokens. */
int64_t workspace_size(const Model *model, int64_t num_tokens, int64_t width, int64_t threads);

void read_tokens(const Model *model, const Pass *pass);

#endif
