/* Products for processors without tiles, in float32 vectors.

   Layout. A matrix is packed in panels of 16 rows. An int8 panel holds the first entry of each row,
   then the second entry of each row, and so on. A bfloat16 panel holds two entries of each row at a
   time: a shift widens the first one to float32, a mask the second. A lane of a loaded vector is
   a row: products are a broadcast activation times a vector of weights, without horizontal sums.

   Blocking. Tokens are processed in chunks whose sums stay in registers: 12 tokens x 32 rows with
   AVX-512, 6 x 16 with AVX2. Each vector of weights is loaded and widened once per chunk. A chunk's
   activations are arranged by span, at constant distances between tokens, so that one register
   addresses them all.

   Order of sums. Products are summed in order within spans of SPAN entries, then spans in order,
   independently of the number of tokens. */

#include "products.h"

#ifndef TILES

#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define PANELS 2   /* at a time; `gated`: one of gates and one of ups */
#define SPAN 32    /* shorter: less rounding, more additions */
#define AHEAD 4096 /* prefetch distance in bytes: hardware prefetchers stop at the end of a page */

/* MOST: tokens whose sums of one panel fit in registers; MOST_PAIRED: of two panels. */
#ifdef __AVX512F__
#define WIDTH 16
#define MOST 12
#define MOST_PAIRED 12
#else
#define WIDTH 8
#define MOST 6
#define MOST_PAIRED 2
#endif
#define VECTORS (ROWS / WIDTH)

typedef float wide __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t wide_int __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef signed char wide_char __attribute__((vector_size(WIDTH), aligned(1), may_alias));

/* Activations are not rounded to bfloat16: on some processors vdpbf16ps has less throughput than
   float32 FMA. */
int64_t most_tokens(int64_t rounds) {
    (void)rounds;
    return WIDTH == 16 ? 192 : 64;
}
void begin_products(Tiles *others) { (void)others; }
void end_products(const Tiles *others) { (void)others; }

static int64_t panels_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }

int64_t packed_size(int64_t rows, int64_t size, int64_t bytes) {
    return panels_of(rows) * ROWS * size * bytes;
}

/* Rows [0, count) of a panel, `group` bytes of each at a time: an int8, or two bfloat16. */
INLINE void pack_panel(const char *rows, int64_t count, int64_t width, int64_t group, char *panel) {
    memset(panel, 0, (size_t)(ROWS * width));
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = 0; i < width; i += group)
            memcpy(panel + i * ROWS + r * group, rows + r * width + i, (size_t)group);
}

void pack(const char *weights, int64_t rows, int64_t size, int64_t bytes, char *packed) {
    const int64_t width = size * bytes;
#pragma omp parallel for
    for (int64_t p = 0; p < panels_of(rows); p++) {
        const char *here = weights + p * ROWS * width;
        int64_t count = rows - p * ROWS < ROWS ? rows - p * ROWS : ROWS;
        if (bytes == 2)
            pack_panel(here, count, width, 4, packed + p * ROWS * width);
        else
            pack_panel(here, count, width, 1, packed + p * ROWS * width);
    }
}

void read_row(const Matrix *matrix, int64_t row, int64_t size, float *out) {
    const uint16_t *panel = (const uint16_t *)matrix->weights + row / ROWS * ROWS * size;
    for (int64_t i = 0; i < size; i++)
        out[i] = widen(panel[i / 2 * 2 * ROWS + row % ROWS * 2 + i % 2]);
}

/* Chunks differ in size by at most one token. */
static int64_t chunks_of(int64_t num_tokens) { return (num_tokens + MOST - 1) / MOST; }
static int64_t begin_of(int64_t chunk, int64_t num_tokens) {
    return chunk * num_tokens / chunks_of(num_tokens);
}
static int64_t padded(int64_t size) { return (size + SPAN - 1) / SPAN * SPAN; }

int64_t operand_size(int64_t size, int64_t num_tokens) { return num_tokens * padded(size); }

void lay_out(const Matrix *matrix, const float *x, int64_t size, int64_t num_tokens,
             float *operand) {
    (void)matrix;
    for (int64_t c = 0; c < chunks_of(num_tokens); c++) {
        int64_t begin = begin_of(c, num_tokens), count = begin_of(c + 1, num_tokens) - begin;
        float *chunk = operand + begin * padded(size);
        for (int64_t t = 0; t < count; t++)
            for (int64_t i = 0; i < size; i += LANES) {
                float *here = chunk + i / SPAN * SPAN * count + t * SPAN + i % SPAN;
                *(f8 *)here = *(const f8 *)(x + (begin + t) * size + i);
            }
    }
}

INLINE wide small_weights(const char *weights) {
#if defined(__AVX512F__)
    __m128i bytes = _mm_loadu_si128((const __m128i *)weights);
    return (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
#elif defined(__AVX2__) /* gcc 12 does not vectorise the portable version */
    __m128i bytes = _mm_loadl_epi64((const __m128i *)weights);
    return (wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
#else
    wide_int numbers = __builtin_convertvector(*(const wide_char *)weights, wide_int);
    return __builtin_convertvector(numbers, wide);
#endif
}

/* Two entries of each row of a panel, as float32. */
INLINE void load_pair(int bytes, const char *weights, wide pair[2][VECTORS]) {
#pragma GCC unroll 2
    for (int v = 0; v < VECTORS; v++)
        if (bytes == 2) {
            wide_int both = *((const wide_int *)weights + v);
            pair[0][v] = (wide)(both << 16);
            pair[1][v] = (wide)(both & (int32_t)0xffff0000);
        } else {
            pair[0][v] = small_weights(weights + v * WIDTH);
            pair[1][v] = small_weights(weights + ROWS + v * WIDTH);
        }
}

/* Weights of a panel. For entry i, `ahead + i * step` is prefetched. */
typedef struct {
    const char *weights, *ahead;
    int64_t step;
} Panel;

/* sums[panel][token][row] += products of `panels` panels with `m` tokens over a span [begin, end).
   `bytes`, `panels` and `m` are compile-time constants, so inner loops unroll fully. */
INLINE void add_span(int bytes, const Panel *w, const float *x, int64_t begin, int64_t end,
                     int panels, int m, float (*sums)[MOST][ROWS]) {
    wide acc[PANELS][VECTORS][MOST] = {};
    for (int64_t i = begin; i < end; i += 2) {
        wide pairs[PANELS][2][VECTORS];
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
            __builtin_prefetch(w[p].ahead + i * w[p].step);
            load_pair(bytes, w[p].weights + i * ROWS * bytes, pairs[p]);
        }
#pragma GCC unroll 12
        for (int t = 0; t < m; t++)
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++)
#pragma GCC unroll 2
                for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
                    for (int v = 0; v < VECTORS; v++)
                        acc[p][v][t] += pairs[p][k][v] * x[t * SPAN + i - begin + k];
    }
    __asm__ volatile("" ::: "memory"); /* else gcc copies all sums to the stack */
    for (int t = 0; t < m; t++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < VECTORS; v++) *((wide *)sums[p][t] + v) += acc[p][v][t];
}

/* sums[panel][token][row] of two panels and a chunk of `m` tokens. */
INLINE void two_panels(int bytes, const Panel w[PANELS], const float *x, int64_t size, int m,
                       float (*restrict sums)[MOST][ROWS]) {
    for (int p = 0; p < PANELS; p++)
        for (int t = 0; t < m; t++)
            for (int v = 0; v < VECTORS; v++) *((wide *)sums[p][t] + v) = (wide){};
    for (int64_t i = 0; i < size; i += SPAN, x += m * SPAN) {
        const int64_t end = size - i < SPAN ? size : i + SPAN;
        if (m <= MOST_PAIRED) {
            add_span(bytes, w, x, i, end, 2, m, sums);
        } else {
            add_span(bytes, w, x, i, end, 1, m, sums);
            add_span(bytes, w + 1, x, i, end, 1, m, sums + 1);
        }
    }
}

/* A function for each number of tokens in a chunk. */
typedef void Products(const Panel w[PANELS], const float *x, int64_t size,
                      float sums[PANELS][MOST][ROWS]);

#define PRODUCTS(bytes, m)                                                                        \
    static __attribute__((noinline)) void products_##bytes##_##m(                                 \
        const Panel w[PANELS], const float *x, int64_t size, float sums[PANELS][MOST][ROWS]) {    \
        two_panels(bytes, w, x, size, m, sums);                                                   \
    }
#define NAME(bytes, m) [m - 1] = products_##bytes##_##m,
#define UP_TO_6(what, bytes)                                                                      \
    what(bytes, 1) what(bytes, 2) what(bytes, 3) what(bytes, 4) what(bytes, 5) what(bytes, 6)
#if MOST == 12
#define ALL(what, bytes)                                                                          \
    UP_TO_6(what, bytes) what(bytes, 7) what(bytes, 8) what(bytes, 9) what(bytes, 10)             \
    what(bytes, 11) what(bytes, 12)
#else
#define ALL(what, bytes) UP_TO_6(what, bytes)
#endif
ALL(PRODUCTS, 1)
ALL(PRODUCTS, 2)
static Products *const all_products[2][MOST] = {{ALL(NAME, 1)}, {ALL(NAME, 2)}};

static void scale(float *sums, const float *scales, int64_t count) {
    for (int64_t r = 0; r < count && r < ROWS; r++) sums[r] *= scales[r];
}

/* gates = silu(gates) * ups. */
INLINE void gate(float *gates, const float *ups) {
    for (int r = 0; r < ROWS; r += LANES) {
        f8 here = *(const f8 *)(gates + r);
        *(f8 *)(gates + r) = here * *(const f8 *)(ups + r) / (1.0f + exp8(-here));
    }
}

/* This thread's part of `multiply`, or of `gated` if `gates`: then the second panel is of ups. */
static void multiply_part(const Matrix *matrix, int64_t rows, int64_t size, const float *operand,
                          int64_t num_tokens, const Goal *goal, int gates) {
    const int64_t bytes = matrix->scales ? 1 : 2, width = ROWS * size * bytes;
    const int64_t panels = panels_of(rows) / (gates ? 2 : 1), me = omp_get_thread_num();
    const int64_t begin = my_part(panels, me), end = my_part(panels, me + 1);
    const int64_t stream = gates ? end - begin : (end - begin + 1) / 2;
    const int64_t chunks = chunks_of(num_tokens);
    float sums[PANELS][MOST][ROWS] __attribute__((aligned(64)));
    for (int64_t panel = begin; panel < begin + stream; panel++) {
        /* If the second stream is one panel shorter, the first stream's last one is repeated. */
        int64_t other = gates ? panel + panels : panel + stream < end ? panel + stream : panel;
        const int64_t row[PANELS] = {panel * ROWS, other * ROWS};
        for (int64_t c = 0; c < chunks; c++) {
            int64_t first = begin_of(c, num_tokens), count = begin_of(c + 1, num_tokens) - first;
            Panel w[PANELS]; /* with several chunks, each prefetches its share of the next panel */
            for (int p = 0; p < PANELS; p++) {
                const char *here = matrix->weights + row[p] / ROWS * width;
                w[p] = (Panel){here, chunks == 1 ? here + AHEAD : here + width + c * width / chunks,
                               ROWS * bytes / chunks};
            }
            all_products[bytes - 1][count - 1](w, operand + first * padded(size), size, sums);
            for (int64_t t = 0; t < count; t++) {
                for (int p = 0; p < PANELS && matrix->scales; p++)
                    scale(sums[p][t], matrix->scales + row[p], rows - row[p]);
                if (gates) gate(sums[0][t], sums[1][t]);
                deliver(goal, sums[0][t], row[0], first + t);
                if (!gates && other != panel) deliver(goal, sums[1][t], row[1], first + t);
            }
        }
    }
}

void multiply(const Matrix *matrix, const float *bias, const int64_t *places, int64_t rows,
              int64_t size, const float *operand, int64_t num_tokens, float *out, int64_t stride,
              int add) {
    const Goal goal = {bias, places, out, rows, stride, add};
    multiply_part(matrix, rows, size, operand, num_tokens, &goal, 0);
}

void gated(const Matrix *gate_up, int64_t inner, int64_t size, const float *operand,
           int64_t num_tokens, float *act) {
    const Goal goal = {0, 0, act, inner, inner, 0};
    multiply_part(gate_up, 2 * inner, size, operand, num_tokens, &goal, 1);
}

#endif
