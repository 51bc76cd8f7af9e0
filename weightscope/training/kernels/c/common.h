/* What the kernels share. They are built by ../build.py and called from ../functions.py.

   Forward and backward passes of many networks on one CPU thread, compiled once for float and once for double (REAL).
   The batch is innermost and fills the vector registers. Nothing is kept between calls; every function returns 0, or 1
   if memory allocation fails. */

#ifndef COMMON_H
#define COMMON_H

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifndef REAL
#define REAL float
#endif
#if defined(__AVX512F__)
#define WIDTH 64 /* bytes of a vector register; vectors wider than the machine's are many times slower */
#elif defined(__AVX__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define LANES ((long)(WIDTH / sizeof(REAL)))
#define SLAB (4 * LANES)        /* positions of a product whose sums are in registers */
#define BLOCK (8 * SLAB)        /* positions that are worked on at once: what is kept of them stays in the cache */
#define STRIDE (BLOCK + LANES)  /* between rows of a block, so that they do not compete for places in the cache */
#define REAL_SQRT(x) (sizeof(REAL) == 4 ? (REAL)sqrtf((float)(x)) : (REAL)sqrt((double)(x)))
#define COLUMNS 4 /* output pixels of one row that share what is loaded */
#define INLINE static inline __attribute__((always_inline))

typedef REAL vec __attribute__((vector_size(WIDTH), aligned(sizeof(REAL)), may_alias));

INLINE vec get(const REAL *p) { return *(const vec *)p; }
INLINE void put(REAL *p, vec v) { *(vec *)p = v; }
INLINE REAL total(vec v) {
#if defined(__AVX512F__) && !DOUBLE
  return _mm512_reduce_add_ps((__m512)v);
#else
  REAL sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
#endif
}
INLINE REAL *numbers(long count) {
  void *p = NULL;
  return posix_memalign(&p, 64, (size_t)count * sizeof(REAL)) ? NULL : (REAL *)p;
}

typedef __typeof__((vec){} < (vec){}) mask; /* all bits of a lane, or none */
typedef int ints __attribute__((vector_size(WIDTH)));

INLINE vec choose(mask where, vec yes, vec no) { return (vec)((where & (mask)yes) | (~where & (mask)no)); }

#if DOUBLE
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec inverse(vec x) { return 1 / x; }
INLINE vec exponential(vec x) {
  for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
  return x;
}
#else
#if defined(__AVX512F__)
INLINE vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE vec inverse(vec x) { /* Newton's step after an estimate of 14 bits */
  const vec y = (vec)_mm512_rcp14_ps((__m512)x);
  return y * (2 - x * y);
}
#else
INLINE vec larger(vec a, vec b) { return choose(a > b, a, b); }
INLINE vec inverse(vec x) { return 1 / x; }
#endif

/* exp(x) for x <= 0; below -80, at most exp(-80) */
INLINE vec exponential(vec x) {
  /* exp(x) = 2^n exp(r), |r| <= ln(2) / 2 */
#if defined(__AVX512F__)
  const vec whole = (vec)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  x = larger((vec){} - 80.0f, x); /* NaN stays NaN */
  const ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
  const vec whole = __builtin_convertvector(n, vec);
#endif
  const vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vec e = r * (1 / 720.0f) + 1 / 120.0f;
  e = e * r + 1 / 24.0f;
  e = e * r + 1 / 6.0f;
  e = e * r + 0.5f;
  e = e * r + 1;
  e = e * r + 1;
#if defined(__AVX512F__)
  return (vec)_mm512_scalef_ps((__m512)e, (__m512)whole);
#else
  return e * (vec)((n + 127) << 23);
#endif
}
#endif

/* Phi(-|x|) and phi(x) of the normal distribution. For float, as Abramowitz and Stegun's 26.2.17: phi(x) times a
   polynomial in t = 1 / (1 + 0.3 |x|), here of degree 8, whose coefficients have the smallest largest relative error,
   8e-8: where all of a channel is far below zero, BatchNorm enlarges what is left of it. */
INLINE void normal(vec x, vec *beyond, vec *density) {
#if DOUBLE
  for (int i = 0; i < LANES; i++) {
    (*beyond)[i] = 0.5 * erfc(fabs(x[i]) * M_SQRT1_2);
    (*density)[i] = exp(-0.5 * x[i] * x[i]) * (0.5 * M_2_SQRTPI * M_SQRT1_2);
  }
#else
  const vec t = inverse(0.3f * larger(x, -x) + 1), tail = exponential(-0.5f * x * x);
  const vec s = t * t;
  const vec odd = ((s * 0.0367415361f + 0.214132973f) * s + 0.132440294f) * s + 0.120949076f;
  const vec q = (((s * -0.161679263f - 0.0609201187f) * s + 0.0987191892f) * s + 0.119616273f) + odd * t;
  *beyond = q * t * tail;
  *density = 0.398942280f * tail;
#endif
}

/* x Phi(x), and Phi(x) + x phi(x), its derivative */
INLINE vec gelu(vec x, vec *slope) {
  vec beyond = {}, density = {};
  normal(x, &beyond, &density);
  *slope = choose(x < 0, beyond, 1 - beyond) + x * density;
  return larger((vec){}, x) - larger(x, -x) * beyond;
}

#endif
