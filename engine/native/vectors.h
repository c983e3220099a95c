// Eight floats at a time: GCC's vector types, with intrinsics where the compiler needs telling.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define LANES 8
#define LOG2_E 1.44269504088896341f
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define APART static __attribute__((noinline))
#else
#define APART static __attribute__((noinline, noclone))  // large: compiled once, whatever the callers pass
#endif

typedef float vec __attribute__((vector_size(32), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(32), aligned(4)));

INLINE vec load(const float *source) { return *(const vec *)source; }
INLINE void store(float *target, vec value) { *(vec *)target = value; }
INLINE vec splat(float value) { return (vec){value, value, value, value, value, value, value, value}; }

// a * b + c, rounded once where the processor can. Never left to the compiler's taste: equal code must give equal bits.
INLINE vec fma_each(vec a, vec b, vec c) {
#if defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    vec sums;
    for (int i = 0; i < LANES; i++) sums[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return sums;
#else
    return a * b + c;
#endif
}

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

INLINE vec max_each(vec a, vec b) {
#if defined(__AVX2__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE float sum_lanes(vec v) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }

INLINE float max_lanes(vec v) {
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
}

INLINE int any_greater(vec a, vec b) {
#if defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#else
    return max_lanes(choose(a > b, splat(1.0f), splat(0.0f))) > 0.0f;
#endif
}

INLINE vec min_each(vec a, vec b) {
#if defined(__AVX2__)
    return (vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

// 2 to the x for x <= 126, within 2e-7 of it; exactly 1 at 0, exactly 0 at -127 and below.
INLINE vec power_of_two(vec x) {
    const vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const vec bounded = max_each(x, splat(-127.0f));
    const vec shifted = bounded + magic;
    const vec r = bounded - (shifted - magic);
    vec p = splat(1.3264727e-3f);  // the least relative error on [-0.5, 0.5] of all that are 1 at 0
    p = fma_each(p, r, splat(9.6715127e-3f));
    p = fma_each(p, r, splat(5.5507337e-2f));
    p = fma_each(p, r, splat(2.4022242e-1f));
    p = fma_each(p, r, splat(6.9314698e-1f));
    p = fma_each(p, r, splat(1.0f));
    return (vec)((ivec)p + ((ivec)shifted << 23));  // the magic's own bits leave at the top
}

// e to the x; x is cut at 87.
INLINE vec exponential(vec x) { return power_of_two(min_each(x, splat(87.0f)) * splat(LOG2_E)); }

// Four columns of eight rows that lie `stride` apart, [column] = a column's eight values; rows from `num_rows` on repeat the
// last one.
INLINE void load_columns(const float *source, int64_t stride, int num_rows, vec columns[4]) {
    const float *row[LANES];
    for (int i = 0; i < LANES; i++) row[i] = source + (i < num_rows ? i : num_rows - 1) * stride;
#if defined(__AVX2__)
    __m256 pair[4];  // rows i and i + 4
    for (int i = 0; i < 4; i++) pair[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row[i])), _mm_loadu_ps(row[i + 4]), 1);
    const __m256 a = _mm256_unpacklo_ps(pair[0], pair[1]), b = _mm256_unpackhi_ps(pair[0], pair[1]);
    const __m256 c = _mm256_unpacklo_ps(pair[2], pair[3]), d = _mm256_unpackhi_ps(pair[2], pair[3]);
    columns[0] = (vec)_mm256_shuffle_ps(a, c, 0x44);
    columns[1] = (vec)_mm256_shuffle_ps(a, c, 0xEE);
    columns[2] = (vec)_mm256_shuffle_ps(b, d, 0x44);
    columns[3] = (vec)_mm256_shuffle_ps(b, d, 0xEE);
#else
    for (int column = 0; column < 4; column++)
        for (int i = 0; i < LANES; i++) columns[column][i] = row[i][column];
#endif
}
