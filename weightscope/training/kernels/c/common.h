/* What the kernels share. They are built by build.py and called from __init__.py.

   Forward and backward passes of many networks on one CPU thread, compiled once for float and once for double (REAL).
   The batch is innermost and fills the vector registers. Nothing is kept between calls; every function returns 0, or 1
   if memory allocation fails. */

#ifndef COMMON_H
#define COMMON_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

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
#define BLOCK 128 /* positions that the MLP works on at once: its activations stay in the cache */
#define REAL_SQRT(x) (sizeof(REAL) == 4 ? (REAL)sqrtf((float)(x)) : (REAL)sqrt((double)(x)))
#define COLUMNS 4 /* output pixels of one row that share what is loaded */
#define INLINE static inline __attribute__((always_inline))

typedef REAL vec __attribute__((vector_size(WIDTH), aligned(sizeof(REAL)), may_alias));

INLINE vec get(const REAL *p) { return *(const vec *)p; }
INLINE void put(REAL *p, vec v) { *(vec *)p = v; }
INLINE REAL total(vec v) {
  REAL sum = 0;
  for (int i = 0; i < LANES; i++) sum += v[i];
  return sum;
}
INLINE REAL *numbers(long count) {
  void *p = NULL;
  return posix_memalign(&p, 64, (size_t)count * sizeof(REAL)) ? NULL : (REAL *)p;
}

#if DOUBLE
INLINE vec exponential(vec x) {
  for (int i = 0; i < LANES; i++) x[i] = exp(x[i]);
  return x;
}
#else
typedef int ints __attribute__((vector_size(WIDTH)));

INLINE vec choose(ints where, vec yes, vec no) { return (vec)((where & (ints)yes) | (~where & (ints)no)); }

/* exp(x) for x <= 0; below -80, exp(-80) */
INLINE vec exponential(vec x) {
  x = choose(x < -80.0f, (vec){} - 80.0f, x);
  /* exp(x) = 2^n exp(r), |r| <= ln(2) / 2 */
  const ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
  const vec whole = __builtin_convertvector(n, vec), r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vec e = r * (1 / 720.0f) + 1 / 120.0f;
  e = e * r + 1 / 24.0f;
  e = e * r + 1 / 6.0f;
  e = e * r + 0.5f;
  e = e * r + 1;
  e = e * r + 1;
  return e * (vec)((n + 127) << 23);
}
#endif

/* The normal distribution function and density. For float: exp(-x^2 / 2) times a polynomial in |x| of degree 10, which
   approximates exp(x^2 / 2) Phi(-|x|) with the smallest largest error of the product, 7e-8, on [0, 5.6]; beyond, the
   product is below 1.1e-8. */
INLINE void normal(vec x, vec *below, vec *density) {
#if DOUBLE
  for (int i = 0; i < LANES; i++) {
    (*below)[i] = 0.5 * erfc(-x[i] * M_SQRT1_2);
    (*density)[i] = exp(-0.5 * x[i] * x[i]) * (0.5 * M_2_SQRTPI * M_SQRT1_2);
  }
#else
  const vec size = choose(x < 0, -x, x), u = choose(size > 5.6f, (vec){} + 5.6f, size), tail = exponential(-0.5f * x * x);
  vec q = u * 1.63169443e-06f - 3.52078641e-05f;
  q = q * u + 0.000339739054f;
  q = q * u - 0.00197462994f;
  q = q * u + 0.00793939643f;
  q = q * u - 0.0243139379f;
  q = q * u + 0.0611548945f;
  q = q * u - 0.132513806f;
  q = q * u + 0.249916792f;
  q = q * u - 0.39893651f;
  q = q * u + 0.49999994f;
  q *= tail;
  *below = choose(x < 0, q, 1 - q);
  *density = 0.398942280f * tail;
#endif
}

/* x Phi(x), and Phi(x) + x phi(x), its derivative */
INLINE vec gelu(vec x, vec *slope) {
  vec below = {}, density = {};
  normal(x, &below, &density);
  *slope = below + x * density;
  return x * below;
}

#endif
