/* Vectors of eight, and exp of them. */

#ifndef PACELINE_VECTORS_H
#define PACELINE_VECTORS_H

#include <stdint.h>

#define LANES 8
#define INLINE static inline __attribute__((always_inline))

typedef float f8 __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float f4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef double d4 __attribute__((vector_size(32)));
typedef signed char b8 __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int32_t i8 __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE f8 select8(i8 which, f8 yes, f8 no) { return (f8)((which & (i8)yes) | (~which & (i8)no)); }

/* Sum of the lanes, in one order. */
INLINE float sum_lanes(f8 v) {
    f4 four = __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
    f4 two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
    return two[0] + two[1];
}

/* Where entry i of a paired vector stands; llama.c tells why. */
INLINE int64_t paired(int64_t i) { return (i & ~(int64_t)15) | ((i & 1) << 3) | ((i & 15) >> 1); }

/* The next 16 entries, paired. */
INLINE void write_paired(f8 first, f8 second, float *out) {
    *(f8 *)out = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14);
    *(f8 *)(out + LANES) = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
}

/* exp to 1e-7 of itself; about 1e-38 for all that is smaller. */
INLINE f8 exp8(f8 x) {
    x = select8(x < -87.0f, (f8){} - 87.0f, x);
    x = select8(x > 88.0f, (f8){} + 88.0f, x);
    f8 shifted = x * 1.44269504f + 12582912.0f; /* rounds to whole numbers */
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

#endif
