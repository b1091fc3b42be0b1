/* Vectors of eight floats, with exp and log. */

#ifndef PACELINE_VECTORS_H
#define PACELINE_VECTORS_H

#include <math.h>
#include <stdint.h>

#define LANES 8
#define INLINE static inline __attribute__((always_inline))

typedef float f8 __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float f4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef double d4 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE f8 select8(i8 which, f8 yes, f8 no) { return (f8)((which & (i8)yes) | (~which & (i8)no)); }

/* Load eight floats; lanes from `left` on are 0. */
INLINE f8 load8(const float *x, int64_t left) {
    if (left >= LANES) return *(const f8 *)x;
    f8 some = {};
    for (int64_t lane = 0; lane < left; lane++) some[lane] = x[lane];
    return some;
}

/* Sum of the lanes, in a fixed order. */
INLINE float sum_lanes(f8 v) {
    f4 four = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    f4 two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return two[0] + two[1];
}

/* `sum_lanes` of four vectors. */
INLINE f4 sum_lanes_of(f8 a, f8 b, f8 c, f8 d) {
    f8 ab = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
            __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    f8 cd = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11) +
            __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    f8 two = __builtin_shufflevector(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) +
             __builtin_shufflevector(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
    return __builtin_shufflevector(two, two, 0, 2, 4, 6) +
           __builtin_shufflevector(two, two, 1, 3, 5, 7);
}

/* exp with relative error 1e-7; inputs are clamped to [-87, 88]. */
INLINE f8 exp8(f8 x) {
    x = select8(x < -87.0f, (f8){} - 87.0f, x);
    x = select8(x > 88.0f, (f8){} + 88.0f, x);
    f8 shifted = x * 1.44269504f + 12582912.0f; /* rounds to an integer */
    f8 n = shifted - 12582912.0f;
    f8 r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f8 p = (f8){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (f8)((__builtin_convertvector(n, i8) + 127) << 23);
}

/* Natural logarithm with relative error 1e-7; -inf at 0. */
INLINE f8 log8(f8 x) {
    i8 tiny = x < 1.17549435e-38f; /* subnormal */
    f8 whole = select8(tiny, x * 33554432.0f, x);
    i8 exponent = ((i8)whole - 0x3f3504f3) >> 23; /* mantissa in [sqrt(1/2), sqrt(2)) */
    f8 f = (f8)((i8)whole - (exponent << 23)) - 1.0f;
    f8 n = __builtin_convertvector(exponent - (tiny & 25), f8);
    f8 p = (f8){} + 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    f8 square = f * f;
    p = p * f * square + n * -2.12194440e-4f - 0.5f * square;
    return select8(x > 0.0f, f + p + n * 0.693359375f, (f8){} - INFINITY);
}

#endif
