/* Products with AMX tiles: 16 rows of weights times up to 16 columns.

   Tiles multiply bfloat16 into float32, or int8 into int32. To keep float32 precision, a vector is
   split into three columns: three bfloat16 that sum to it, or three 8-bit digits. For few tokens
   this is free, as reading the weights is the bottleneck. bfloat16 matrices with `rounds` use one
   column, the nearest bfloat16.

   Layout. A matrix is packed in blocks of 16 rows. A block is a sequence of tiles, each with 64
   bytes of all rows: 4 bytes of each row, then the next 4 bytes of each row, and so on. */

#include "products.h"

#ifdef TILES

#include <immintrin.h>
#include <string.h>

#define LINE 64    /* bytes per row of a tile */
#define TILE 1024  /* bytes per tile */
#define PARTS 3    /* columns per vector, unless it is rounded */
#define COLUMNS 16 /* columns per tile; two tiles at a time */
#define BLOCKS 2   /* blocks of weights at a time */
#define AHEAD 4096 /* prefetch distance in bytes */
#define LARGEST 8323072.0f /* 127 * 2^16: the range of three digits */

typedef float f16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4), may_alias));

/* The tile configuration: palette 1, then bytes per row and rows of each tile. */
typedef struct {
    uint8_t palette, first_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} Shapes;

int64_t most_tokens(int64_t rounds) { return rounds ? 192 : 64; }

/* Restore the tile configuration of other libraries on this thread. */
void begin_products(Tiles *others) { _tile_storeconfig(others->bytes); }
void end_products(const Tiles *others) {
    if (others->bytes[0])
        _tile_loadconfig(others->bytes);
    else
        _tile_release();
}

static int64_t steps_of(int64_t size, int64_t bytes) { return (size * bytes + LINE - 1) / LINE; }
static int64_t blocks_of(int64_t rows) { return (rows + ROWS - 1) / ROWS; }
static int64_t bytes_of(const Matrix *matrix) { return matrix->scales ? 1 : 2; }
static int64_t parts_of(const Matrix *matrix) {
    return matrix->rounds && !matrix->scales ? 1 : PARTS;
}

int64_t packed_size(int64_t rows, int64_t size, int64_t bytes) {
    return blocks_of(rows) * steps_of(size, bytes) * TILE;
}

void pack(const char *weights, int64_t rows, int64_t size, int64_t bytes, char *packed) {
    int64_t steps = steps_of(size, bytes), width = size * bytes;
#pragma omp parallel for
    for (int64_t b = 0; b < blocks_of(rows); b++) {
        char *block = packed + b * steps * TILE;
        memset(block, 0, (size_t)(steps * TILE));
        for (int64_t r = b * ROWS; r < rows && r < (b + 1) * ROWS; r++)
            for (int64_t i = 0; i < width; i += 4)
                memcpy(block + r % ROWS * 4 + i / 4 * LINE, weights + r * width + i,
                       width - i < 4 ? width - i : 4);
    }
}

void read_row(const Matrix *matrix, int64_t row, int64_t size, float *out) {
    const char *block = matrix->weights + row / ROWS * steps_of(size, 2) * TILE + row % ROWS * 4;
    for (int64_t i = 0; i < size; i++)
        out[i] = widen(*(const uint16_t *)(block + i / 2 * LINE + i % 2 * 2));
}

/* Tokens are processed in chunks of equal size; the last one is padded with zeros. */
static int64_t chunks_of(int64_t num_tokens, int64_t parts) {
    int64_t most = 2 * COLUMNS / parts;
    return (num_tokens + most - 1) / most;
}
static int64_t chunk_of(int64_t num_tokens, int64_t parts) {
    int64_t chunks = chunks_of(num_tokens, parts);
    return chunks ? (num_tokens + chunks - 1) / chunks : 0;
}

/* An operand: scales of the tokens (int8 only), then the columns by chunk and step. */
static int64_t scales_size(int64_t num_tokens) { return (num_tokens + 15) / 16 * 16; }

int64_t operand_size(int64_t size, int64_t num_tokens) {
    int64_t columns = PARTS * chunks_of(num_tokens, PARTS) * chunk_of(num_tokens, PARTS);
    return scales_size(num_tokens) + columns * steps_of(size, 2) * LINE / 4;
}

/* Split 16 floats into sums of three bfloat16, exactly. */
static void split_floats(__m512 x, char *first, int64_t part) {
    for (int k = 0; k < PARTS; k++) {
        __m512i bits = _mm512_castps_si512(x);
        __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
        _mm256_storeu_si256((__m256i *)(first + k * part), high);
        x -= _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_srli_epi32(bits, 16), 16));
    }
}

static void round_floats(__m512 x, char *first) {
    _mm256_storeu_si256((__m256i *)first, (__m256i)_mm512_cvtneps_pbh(x));
}

/* Split 16 integers into signed 8-bit digits, the highest first. */
static void split_numbers(__m512i numbers, char *first, int64_t part) {
    for (int k = PARTS - 1; k >= 0; k--) {
        _mm_storeu_si128((__m128i *)(first + k * part), _mm512_cvtepi32_epi8(numbers));
        __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(numbers, 24), 24);
        numbers = _mm512_srai_epi32(_mm512_sub_epi32(numbers, digit), 8);
    }
}

/* Scale that maps the largest entry to LARGEST; NaN if there is a NaN or infinite entry. */
static float scale_of(const float *x, int64_t size) {
    f8 largest = {}, zero = {};
    for (int64_t i = 0; i < size; i += LANES) {
        f8 here = load8(x + i, size - i), without_sign = select8(here < 0.0f, -here, here);
        largest = select8(without_sign > largest, without_sign, largest);
        zero += here * 0.0f;
    }
    float most = 0.0f;
    for (int lane = 0; lane < LANES; lane++) most = largest[lane] > most ? largest[lane] : most;
    return most / LARGEST + sum_lanes(zero);
}

void lay_out(const Matrix *matrix, const float *x, int64_t size, int64_t num_tokens,
             float *operand) {
    int64_t bytes = bytes_of(matrix), steps = steps_of(size, bytes), parts = parts_of(matrix);
    int64_t chunk = chunk_of(num_tokens, parts), part = chunk * LINE, entries = LINE / bytes;
    char *columns = (char *)(operand + scales_size(num_tokens));
    if (size % entries || num_tokens % chunk)
        memset(columns, 0, (size_t)(chunks_of(num_tokens, parts) * steps * parts * part));
    for (int64_t t = 0; t < num_tokens; t++, x += size) {
        char *column = columns + t / chunk * steps * parts * part + t % chunk * LINE;
        float scale = bytes == 1 ? scale_of(x, size) : 1.0f;
        __m512 inverse = _mm512_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
        if (bytes == 1) operand[t] = scale;
        for (int64_t i = 0; i < size; i += 16) {
            __mmask16 there = (__mmask16)(size - i < 16 ? (1 << (size - i)) - 1 : 0xffff);
            __m512 here = _mm512_maskz_loadu_ps(there, x + i);
            char *first = column + i / entries * parts * part + i % entries * bytes;
            if (parts == 1)
                round_floats(here, first);
            else if (bytes == 2)
                split_floats(here, first, part);
            else
                split_numbers(_mm512_cvtps_epi32(here * inverse), first, part);
        }
    }
}

/* Tiles 0-3: sums [two groups of columns][two blocks]; 4, 5: columns; 6, 7: weights. */
static void shape_tiles(int64_t columns) {
    Shapes shapes = {.palette = 1};
    int64_t groups[2] = {columns < COLUMNS ? columns : COLUMNS, columns - COLUMNS};
    if (groups[1] < 1) groups[1] = 1; /* not used */
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = LINE;
        int64_t rows = tile < 4 ? groups[tile / 2] : tile < 6 ? groups[tile - 4] : ROWS;
        shapes.rows[tile] = (uint8_t)rows;
    }
    _tile_loadconfig(&shapes);
}

INLINE void fetch(const char *tile) {
    for (int line = 0; line < TILE; line += 64) __builtin_prefetch(tile + AHEAD + line);
}

#define ADD(sums, columns, weights)            \
    if (bytes == 2)                            \
        _tile_dpbf16ps(sums, columns, weights); \
    else                                       \
        _tile_dpbssd(sums, columns, weights)

/* sums[block][column][row]: products of two blocks of weights with the columns of a chunk. Only the
   first chunk prefetches weights. */
INLINE void products(const char *const w[BLOCKS], int bytes, int64_t steps, const char *columns,
                     int64_t count, int first, float sums[BLOCKS][2 * COLUMNS][ROWS]) {
    const int64_t step = count * LINE, second = COLUMNS * LINE;
    const int two = count > COLUMNS; /* groups of columns */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; k++) {
        if (first) fetch(w[0] + k * TILE), fetch(w[1] + k * TILE);
        _tile_loadd(4, columns + k * step, LINE);
        _tile_loadd(6, w[0] + k * TILE, LINE);
        ADD(0, 4, 6);
        _tile_loadd(7, w[1] + k * TILE, LINE);
        ADD(1, 4, 7);
        if (!two) continue;
        _tile_loadd(5, columns + k * step + second, LINE);
        ADD(2, 5, 6);
        ADD(3, 5, 7);
    }
    _tile_stored(0, sums[0][0], LINE);
    _tile_stored(1, sums[1][0], LINE);
    if (!two) return;
    _tile_stored(2, sums[0][COLUMNS], LINE);
    _tile_stored(3, sums[1][COLUMNS], LINE);
}

/* Add the products of a token's columns. */
INLINE f16 joined(const float sums[2 * COLUMNS][ROWS], int bytes, int64_t parts, int64_t token,
                  int64_t chunk) {
    if (parts == 1) return *(const f16 *)sums[token];
    if (bytes == 2) {
        f16 sum = *(const f16 *)sums[2 * chunk + token] + *(const f16 *)sums[chunk + token];
        return sum + *(const f16 *)sums[token];
    }
    f16 sum = {};
    for (int k = PARTS - 1; k >= 0; k--)
        sum += __builtin_convertvector(*(const i16 *)sums[k * chunk + token], f16) *
               (float)(1 << 8 * (PARTS - 1 - k));
    return sum;
}

INLINE f16 scaled(const Matrix *matrix, const float *operand, f16 sums, int64_t row, int64_t rows,
                  int64_t token) {
    f16 scales = {};
    if (rows - row >= ROWS)
        scales = *(const f16 *)(matrix->scales + row);
    else
        for (int64_t r = row; r < rows; r++) scales[r - row] = matrix->scales[r];
    return sums * scales * operand[token];
}

INLINE f16 silu(f16 x) {
    f16 value;
    for (int half = 0; half < 2; half++) {
        f8 here = *((const f8 *)&x + half);
        *((f8 *)&value + half) = here / (1.0f + exp8(-here));
    }
    return value;
}

/* This thread's part of `multiply`, or of `gated` if `gates`: then the second block is of ups. */
INLINE void multiply_part(const Matrix *matrix, int bytes, int64_t rows, int64_t size,
                          const float *operand, int64_t num_tokens, const Goal *goal, int gates) {
    int64_t steps = steps_of(size, bytes), parts = parts_of(matrix);
    int64_t chunk = chunk_of(num_tokens, parts), count = parts * chunk;
    const char *columns = (const char *)(operand + scales_size(num_tokens));
    int64_t blocks = blocks_of(rows) / (gates ? 2 : 1), me = omp_get_thread_num();
    int64_t begin = my_part(blocks, me), end = my_part(blocks, me + 1);
    int64_t stream = gates ? end - begin : (end - begin + BLOCKS - 1) / BLOCKS;
    float sums[BLOCKS][2 * COLUMNS][ROWS] __attribute__((aligned(64)));
    shape_tiles(count);
    for (int64_t block = begin; block < begin + stream; block++) {
        /* If the second stream is one block shorter, the first stream's last one is repeated. */
        int64_t other = gates ? block + blocks : block + stream < end ? block + stream : block;
        const char *w[BLOCKS] = {matrix->weights + block * steps * TILE,
                                 matrix->weights + other * steps * TILE};
        for (int64_t first = 0; first < num_tokens; first += chunk) {
            const char *these = columns + first * parts * steps * LINE;
            products(w, bytes, steps, these, count, first == 0, sums);
            for (int64_t t = 0; t < chunk && first + t < num_tokens; t++) {
                f16 both[BLOCKS];
                for (int k = 0; k < BLOCKS; k++) {
                    both[k] = joined(sums[k], bytes, parts, t, chunk);
                    int64_t row = (k ? other : block) * ROWS;
                    if (bytes == 1)
                        both[k] = scaled(matrix, operand, both[k], row, rows, first + t);
                }
                if (gates) both[0] = silu(both[0]) * both[1];
                deliver(goal, (const float *)&both[0], block * ROWS, first + t);
                if (!gates && other != block)
                    deliver(goal, (const float *)&both[1], other * ROWS, first + t);
            }
        }
    }
}

void multiply(const Matrix *matrix, const float *bias, const int64_t *places, int64_t rows,
              int64_t size, const float *operand, int64_t num_tokens, float *out, int64_t stride,
              int add) {
    const Goal goal = {bias, places, out, rows, stride, add};
    if (matrix->scales)
        multiply_part(matrix, 1, rows, size, operand, num_tokens, &goal, 0);
    else
        multiply_part(matrix, 2, rows, size, operand, num_tokens, &goal, 0);
}

void gated(const Matrix *gate_up, int64_t inner, int64_t size, const float *operand,
           int64_t num_tokens, float *act) {
    const Goal goal = {0, 0, act, inner, inner, 0};
    if (gate_up->scales)
        multiply_part(gate_up, 1, 2 * inner, size, operand, num_tokens, &goal, 1);
    else
        multiply_part(gate_up, 2, 2 * inner, size, operand, num_tokens, &goal, 1);
}

#endif
