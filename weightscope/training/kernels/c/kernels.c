/* Forward and backward passes of many networks on one CPU thread; built by build.py and called from __init__.py.

   Compiled once for float and once for double (REAL). The batch is innermost and fills the vector registers. Nothing is
   kept between calls; every function returns 0, or 1 if memory allocation fails. */

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
static REAL *numbers(long count) {
  void *p = NULL;
  return posix_memalign(&p, 64, (size_t)count * sizeof(REAL)) ? NULL : (REAL *)p;
}

/* --- depthwise convolution: stride 1, zero padding that keeps the size ------------------------------------------- */

typedef struct {
  long height, width, batch;  /* of the image */
  long k, dilation, reach;    /* of the filter; reach = dilation * (k - 1) / 2 */
  long lanes, padded;         /* batch rounded up to whole vectors; columns of a padded image */
} shape;

static shape shape_of(long height, long width, long batch, long k, long dilation) {
  shape s = {height, width, batch, k, dilation, dilation * (k - 1) / 2, 0, 0};
  s.lanes = (batch + LANES - 1) / LANES * LANES;
  s.padded = (width + COLUMNS - 1) / COLUMNS * COLUMNS + 2 * s.reach;
  return s;
}

/* Copy one channel between `reach` columns of zeros, which the caller cleared once. */
static void pad(const REAL *from, REAL *to, shape s) {
  for (long y = 0; y < s.height; y++)
    for (long x = 0; x < s.width; x++)
      memcpy(to + (y * s.padded + s.reach + x) * s.lanes, from + (y * s.width + x) * s.batch, s.batch * sizeof(REAL));
}

/* out = convolution of `in`, plus bias and, unless it is NULL, plus `more`. With `dense`, k is known at
   compile time and the dilation is 1: each input is loaded once for all the outputs of a row that it belongs to. With
   `narrow`, a row has COLUMNS pixels, and the zeros around it are left out. */
INLINE void convolve(const REAL *in, const REAL *w, REAL bias, const REAL *more, REAL *out, shape s, const long k,
                     const int flip, const int dense, const int narrow) {
  const long from_u = narrow ? k / 2 : 0, to_u = narrow ? k / 2 + COLUMNS : k + COLUMNS - 1;
  for (long y = 0; y < s.height; y++)
    for (long left = 0; left < s.width; left += COLUMNS)
      for (long b = 0; b < s.lanes; b += 2 * LANES) {
        const int two = b + LANES < s.lanes;
        const long second = two ? LANES : 0; /* the last vector may be alone: then it is computed twice */
        vec sum[COLUMNS][2];
        for (int q = 0; q < COLUMNS; q++) sum[q][0] = sum[q][1] = (vec){} + bias;
        for (long i = 0; i < k; i++) {
          const long row = y + i * s.dilation - s.reach;
          if (row < 0 || row >= s.height) continue;
          const REAL *at = in + (row * s.padded + left) * s.lanes + b, *taps = w + (flip ? k - 1 - i : i) * k;
          if (dense) {
#pragma GCC unroll 16
            for (long u = from_u; u < to_u; u++) {
              const vec first = get(at + u * s.lanes), other = get(at + u * s.lanes + second);
#pragma GCC unroll 4
              for (long q = 0; q < COLUMNS; q++)
                if (u - q >= 0 && u - q < k) {
                  const REAL tap = taps[flip ? k - 1 - (u - q) : u - q];
                  sum[q][0] += tap * first;
                  sum[q][1] += tap * other;
                }
            }
          } else
            for (long j = 0; j < k; j++)
#pragma GCC unroll 4
              for (long q = 0; q < COLUMNS; q++) {
                const REAL tap = taps[flip ? k - 1 - j : j], *from = at + (j * s.dilation + q) * s.lanes;
                sum[q][0] += tap * get(from);
                sum[q][1] += tap * get(from + second);
              }
        }
        for (long q = 0; q < COLUMNS && left + q < s.width; q++) {
          const long to = (y * s.width + left + q) * s.batch + b, rest = s.batch - b;
          if (more && rest >= 2 * LANES) {
            put(out + to, get(more + to) + sum[q][0]);
            put(out + to + LANES, get(more + to + LANES) + sum[q][1]);
          } else {
            REAL parts[2 * LANES];
            put(parts, sum[q][0]);
            put(parts + LANES, sum[q][1]);
            const long count = rest < 2 * LANES ? rest : 2 * LANES;
            for (long l = 0; l < count; l++) out[to + l] = more ? more[to + l] + parts[l] : parts[l];
          }
        }
      }
}

/* out (k, k) = sums over pixels and the batch of `in`, moved by each tap, times grad; up to 9 taps at a time. `sums` is
   workspace, (k, k, LANES). */
INLINE void correlate(const REAL *in, const REAL *grad, REAL *out, REAL *sums, shape s, const long k,
                      const int narrow) {
  memset(sums, 0, k * k * LANES * sizeof(REAL));
  for (long y = 0; y < s.height; y++)
    for (long i = 0; i < k; i++) { /* the rows that take part stay in the cache */
      const long row = y + i * s.dilation - s.reach;
      if (row < 0 || row >= s.height) continue;
      if (narrow) {
        vec sum[9];
        for (long j = 0; j < k; j++) sum[j] = get(sums + (i * k + j) * LANES);
        const REAL *at = in + (row * s.padded + s.reach) * s.lanes, *g = grad + (y * s.padded + s.reach) * s.lanes;
        for (long b = 0; b < s.lanes; b += LANES)
#pragma GCC unroll 4
          for (long x = 0; x < COLUMNS; x++) {
            const vec here = get(g + x * s.lanes + b);
#pragma GCC unroll 4
            for (long u = 0; u < COLUMNS; u++)
              if (u - x + k / 2 >= 0 && u - x + k / 2 < k) sum[u - x + k / 2] += here * get(at + u * s.lanes + b);
          }
        for (long j = 0; j < k; j++) put(sums + (i * k + j) * LANES, sum[j]);
        continue;
      }
      for (long from = 0; from < k; from += 9) {
        const long taps = k <= 9 ? k : k - from < 9 ? k - from : 9;
        vec sum[9];
        for (long j = 0; j < taps; j++) sum[j] = get(sums + (i * k + from + j) * LANES);
        for (long x = 0; x < s.width; x++)
          for (long b = 0; b < s.lanes; b += LANES) {
            const vec g = get(grad + (y * s.padded + s.reach + x) * s.lanes + b);
            const REAL *at = in + (row * s.padded + x + from * s.dilation) * s.lanes + b;
#pragma GCC unroll 9
            for (long j = 0; j < taps; j++) sum[j] += g * get(at + j * s.dilation * s.lanes);
          }
        for (long j = 0; j < taps; j++) put(sums + (i * k + from + j) * LANES, sum[j]);
      }
    }
  for (long j = 0; j < k * k; j++) out[j] = total(get(sums + j * LANES));
}

/* Code for a number of taps known at compile time is several times faster. */
#define KNOWN(k, call) \
  case k: { \
    enum { K = k, DENSE = 1 }; \
    if (s.width == COLUMNS) { enum { NARROW = 1 }; call; } \
    else { enum { NARROW = 0 }; call; } \
    break; \
  }
#define FOR_TAPS(k, dilation, call) \
  switch (dilation == 1 ? k : 0) { \
    KNOWN(3, call) KNOWN(5, call) KNOWN(7, call) KNOWN(9, call) \
    default: { const long K = k; enum { DENSE = 0, NARROW = 0 }; call; } \
  }

/* y (C, H, W, B) = depthwise convolution of x with w (C, k, k), plus bias (C). */
int depthwise_forward(const REAL *x, const REAL *w, const REAL *bias, REAL *y, long channels, long height, long width,
                      long batch, long k, long dilation) {
  const shape s = shape_of(height, width, batch, k, dilation);
  const long image = height * width * batch, size = height * s.padded * s.lanes;
  REAL *in = numbers(size);
  if (!in) return 1;
  memset(in, 0, size * sizeof(REAL));
  for (long c = 0; c < channels; c++) {
    pad(x + c * image, in, s);
    FOR_TAPS(k, dilation, convolve(in, w + c * K * K, bias[c], NULL, y + c * image, s, K, 0, DENSE, NARROW))
  }
  free(in);
  return 0;
}

/* The gradients grad_x, grad_w and grad_bias, given grad, the gradient of y; `more` (C, H, W, B) is added to grad_x. */
int depthwise_backward(const REAL *x, const REAL *w, const REAL *grad, const REAL *more, REAL *grad_x, REAL *grad_w, REAL *grad_bias,
                       long channels, long height, long width, long batch, long k, long dilation) {
  const shape s = shape_of(height, width, batch, k, dilation);
  const long image = height * width * batch, size = height * s.padded * s.lanes;
  REAL *in = numbers(2 * size + k * k * LANES), *g = in + size, *sums = g + size;
  if (!in) return 1;
  memset(in, 0, 2 * size * sizeof(REAL));
  for (long c = 0; c < channels; c++) {
    pad(x + c * image, in, s);
    pad(grad + c * image, g, s);
    vec sum = {};
    for (long i = 0; i < size; i += LANES) sum += get(g + i);
    grad_bias[c] = total(sum);
    FOR_TAPS(k, dilation, convolve(g, w + c * K * K, 0, more ? more + c * image : NULL, grad_x + c * image, s, K, 1, DENSE, NARROW))
    FOR_TAPS(k, dilation, correlate(in, g, grad_w + c * K * K, sums, s, K, NARROW))
  }
  free(in);
  return 0;
}

/* --- W2 gelu(W1 norm(x) + b1) + b2 ------------------------------------------------------------------------------- */

/* (rows, BLOCK) += or = a (rows, n) x (n, BLOCK), 4 vectors of columns at a time. */
INLINE void some_rows(const REAL *a, const REAL *x, REAL *y, const REAL *bias, long n, const int rows) {
  for (long v = 0; v < BLOCK; v += 4 * LANES) {
    vec sum[4][4]; /* of which `rows` are used; the size is fixed so that they stay in registers */
    for (int r = 0; r < rows; r++)
      for (int u = 0; u < 4; u++) sum[r][u] = (vec){} + (bias ? bias[r] : 0);
    for (long j = 0; j < n; j++) {
      const REAL *from = x + j * BLOCK + v;
      const vec x0 = get(from), x1 = get(from + LANES), x2 = get(from + 2 * LANES), x3 = get(from + 3 * LANES);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) {
        const REAL f = a[r * n + j];
        sum[r][0] += f * x0;
        sum[r][1] += f * x1;
        sum[r][2] += f * x2;
        sum[r][3] += f * x3;
      }
    }
    for (int r = 0; r < rows; r++)
      for (int u = 0; u < 4; u++) put(y + r * BLOCK + v + u * LANES, sum[r][u]);
  }
}

/* y (m, BLOCK) = a (m, n) x (n, BLOCK) + bias (m) */
static void multiply(const REAL *a, const REAL *x, REAL *y, const REAL *bias, long m, long n) {
  long i = 0;
  for (; i + 4 <= m; i += 4) some_rows(a + i * n, x, y + i * BLOCK, bias ? bias + i : NULL, n, 4);
  for (; i < m; i++) some_rows(a + i * n, x, y + i * BLOCK, bias ? bias + i : NULL, n, 1);
}

INLINE void some_products(const REAL *g, const REAL *x, REAL *sums, long n, const int rows, const int columns) {
  vec sum[4][4];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) sum[r][c] = get(sums + (r * n + c) * LANES);
  for (long v = 0; v < BLOCK; v += LANES) {
    vec left[4];
    for (int r = 0; r < rows; r++) left[r] = get(g + r * BLOCK + v);
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) {
      const vec right = get(x + c * BLOCK + v);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r][c] += left[r] * right;
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) put(sums + (r * n + c) * LANES, sum[r][c]);
}

/* sums (m, n, LANES) += g (m, BLOCK) x (n, BLOCK)^T, to be summed over the lanes at the end */
static void add_products(const REAL *g, const REAL *x, REAL *sums, long m, long n) {
  long i = 0;
  for (; i + 4 <= m; i += 4) {
    long j = 0;
    for (; j + 4 <= n; j += 4) some_products(g + i * BLOCK, x + j * BLOCK, sums + (i * n + j) * LANES, n, 4, 4);
    for (; j < n; j++) some_products(g + i * BLOCK, x + j * BLOCK, sums + (i * n + j) * LANES, n, 4, 1);
  }
  for (; i < m; i++)
    for (long j = 0; j < n; j++) some_products(g + i * BLOCK, x + j * BLOCK, sums + (i * n + j) * LANES, n, 1, 1);
}

static void add_sums(const REAL *g, REAL *sums, long m) {
  for (long i = 0; i < m; i++)
    for (long v = 0; v < BLOCK; v += LANES) put(sums + i * LANES, get(sums + i * LANES) + get(g + i * BLOCK + v));
}

static void finish(const REAL *sums, REAL *out, long count) {
  for (long i = 0; i < count; i++) out[i] = total(get(sums + i * LANES));
}

static void transpose(const REAL *a, REAL *out, long m, long n) {
  for (long i = 0; i < m; i++)
    for (long j = 0; j < n; j++) out[j * m + i] = a[i * n + j];
}

#if !DOUBLE
typedef int ints __attribute__((vector_size(WIDTH)));

INLINE vec choose(ints where, vec yes, vec no) { return (vec)((where & (ints)yes) | (~where & (ints)no)); }
#endif

/* The normal distribution function and density. For float: Abramowitz and Stegun 26.2.17's relative 7.1.26, 1.5e-7. */
INLINE void normal(vec x, vec *below, vec *density) {
#if DOUBLE
  for (int i = 0; i < LANES; i++) {
    (*below)[i] = 0.5 * erfc(-x[i] * M_SQRT1_2);
    (*density)[i] = exp(-0.5 * x[i] * x[i]) * (0.5 * M_2_SQRTPI * M_SQRT1_2);
  }
#else
  const vec size = choose(x < 0, -x, x);
  vec power = -0.5f * x * x;
  power = choose(power < -80.0f, (vec){} - 80.0f, power);
  /* exp(power) = 2^n exp(r), |r| <= ln(2) / 2 */
  const ints n = __builtin_convertvector(power * 1.44269504f - 0.5f, ints);
  const vec whole = __builtin_convertvector(n, vec), r = (power - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vec e = r * (1 / 720.0f) + 1 / 120.0f;
  e = e * r + 1 / 24.0f;
  e = e * r + 1 / 6.0f;
  e = e * r + 0.5f;
  e = e * r + 1;
  e = e * r + 1;
  const vec tail = e * (vec)((n + 127) << 23);
  const vec t = 1 / (1 + 0.2316418882f * size); /* 0.3275911 / sqrt(2) */
  vec q = t * 1.061405429f - 1.453152027f;
  q = q * t + 1.421413741f;
  q = q * t - 0.284496736f;
  q = q * t + 0.254829592f;
  q = 0.5f * q * t * tail;
  *below = choose(x < 0, q, 1 - q);
  *density = 0.398942280f * tail;
#endif
}

typedef struct {
  REAL *x, *unit, *scale, *normal, *hidden, *active, *slope, *out; /* of one block of positions */
} workspace;

/* Normalise one block over its channels: unit = (x - mean) / sqrt(variance + eps), normal = gain * unit + shift. */
static void normalise(workspace k, const REAL *gain, const REAL *shift, long c, REAL eps) {
  for (long v = 0; v < BLOCK; v += LANES) {
    vec mean = {}, square = {};
    for (long i = 0; i < c; i++) mean += get(k.x + i * BLOCK + v);
    mean /= (REAL)c;
    for (long i = 0; i < c; i++) {
      const vec d = get(k.x + i * BLOCK + v) - mean;
      put(k.unit + i * BLOCK + v, d);
      square += d * d;
    }
    square = square / (REAL)c + eps;
    vec scale;
    for (int l = 0; l < LANES; l++) scale[l] = 1 / (sizeof(REAL) == 4 ? (REAL)sqrtf((float)square[l]) : (REAL)sqrt(square[l]));
    put(k.scale + v, scale);
    for (long i = 0; i < c; i++) {
      const vec u = get(k.unit + i * BLOCK + v) * scale;
      put(k.unit + i * BLOCK + v, u);
      put(k.normal + i * BLOCK + v, gain[i] * u + shift[i]);
    }
  }
}

static void activate(workspace k, long m, int slope) {
  for (long i = 0; i < m * BLOCK; i += LANES) {
    vec below, density;
    const vec h = get(k.hidden + i);
    normal(h, &below, &density);
    put(k.active + i, h * below);
    if (slope) put(k.slope + i, below + h * density);
  }
}

static void load(const REAL *from, REAL *to, long rows, long stride, long count) {
  for (long i = 0; i < rows; i++) {
    memcpy(to + i * BLOCK, from + i * stride, count * sizeof(REAL));
    if (count < BLOCK) memset(to + i * BLOCK + count, 0, (BLOCK - count) * sizeof(REAL));
  }
}

static void store(const REAL *from, REAL *to, long rows, long stride, long count) {
  for (long i = 0; i < rows; i++) memcpy(to + i * stride, from + i * BLOCK, count * sizeof(REAL));
}

static void add(REAL *to, const REAL *from, long rows, long stride, long count) {
  for (long i = 0; i < rows; i++)
    for (long j = 0; j < count; j++) to[i * BLOCK + j] += from[i * stride + j];
}

static workspace blocks(REAL *at, long c, long m) {
  workspace k;
  k.x = at;
  k.unit = k.x + c * BLOCK;
  k.normal = k.unit + c * BLOCK;
  k.out = k.normal + c * BLOCK;
  k.scale = k.out + c * BLOCK;
  k.hidden = k.scale + BLOCK;
  k.active = k.hidden + m * BLOCK;
  k.slope = k.active + m * BLOCK;
  return k;
}
#define BLOCKS(c, m) ((4 * (c) + 1 + 3 * (m)) * BLOCK)

/* y (T, c, P) from x (T, c, P), plus `more` (T, c, P) unless it is NULL; gain, shift, b2 (T, c), w1 (T, m, c), b1 (T, m), w2 (T, c, m). */
int mlp_forward(const REAL *x, const REAL *gain, const REAL *shift, const REAL *w1, const REAL *b1, const REAL *w2,
                const REAL *b2, const REAL *more, REAL *y, long networks, long c, long m, long positions, double eps) {
  REAL *memory = numbers(BLOCKS(c, m));
  if (!memory) return 1;
  const workspace k = blocks(memory, c, m);
  for (long t = 0; t < networks; t++)
    for (long p = 0; p < positions; p += BLOCK) {
      const long at = t * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
      load(x + at, k.x, c, positions, count);
      normalise(k, gain + t * c, shift + t * c, c, (REAL)eps);
      multiply(w1 + t * m * c, k.normal, k.hidden, b1 + t * m, m, c);
      activate(k, m, 0);
      multiply(w2 + t * c * m, k.active, k.out, b2 + t * c, c, m);
      if (more) add(k.out, more + at, c, positions, count);
      store(k.out, y + at, c, positions, count);
    }
  free(memory);
  return 0;
}

/* All gradients, given grad, the gradient of y; intermediate values are recomputed block by block. */
int mlp_backward(const REAL *x, const REAL *gain, const REAL *shift, const REAL *w1, const REAL *b1, const REAL *w2,
                 const REAL *grad, REAL *grad_x, REAL *grad_gain, REAL *grad_shift, REAL *grad_w1, REAL *grad_b1,
                 REAL *grad_w2, REAL *grad_b2, long networks, long c, long m, long positions, double eps) {
  const long products = m * c, sums = (2 * products + 3 * c + m) * LANES;
  REAL *memory = numbers(BLOCKS(c, m) + c * BLOCK + sums + 2 * products);
  if (!memory) return 1;
  const workspace k = blocks(memory, c, m);
  REAL *g = memory + BLOCKS(c, m), *s_w1 = g + c * BLOCK, *s_w2 = s_w1 + products * LANES;
  REAL *s_gain = s_w2 + products * LANES, *s_shift = s_gain + c * LANES, *s_b2 = s_shift + c * LANES;
  REAL *s_b1 = s_b2 + c * LANES, *w1t = s_b1 + m * LANES, *w2t = w1t + products;
  for (long t = 0; t < networks; t++) {
    memset(s_w1, 0, sums * sizeof(REAL));
    transpose(w1 + t * products, w1t, m, c);
    transpose(w2 + t * products, w2t, c, m);
    for (long p = 0; p < positions; p += BLOCK) {
      const long at = t * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
      load(x + at, k.x, c, positions, count);
      load(grad + at, g, c, positions, count);
      normalise(k, gain + t * c, shift + t * c, c, (REAL)eps);
      multiply(w1 + t * products, k.normal, k.hidden, b1 + t * m, m, c);
      activate(k, m, 1);
      add_products(g, k.active, s_w2, c, m);
      add_sums(g, s_b2, c);
      multiply(w2t, g, k.hidden, NULL, m, c);
      for (long i = 0; i < m * BLOCK; i += LANES) put(k.hidden + i, get(k.hidden + i) * get(k.slope + i));
      add_products(k.hidden, k.normal, s_w1, m, c);
      add_sums(k.hidden, s_b1, m);
      multiply(w1t, k.hidden, k.out, NULL, c, m);
      for (long v = 0; v < BLOCK; v += LANES) {
        vec mean = {}, along = {};
        for (long i = 0; i < c; i++) {
          const vec d = get(k.out + i * BLOCK + v), u = get(k.unit + i * BLOCK + v), du = d * gain[t * c + i];
          put(s_shift + i * LANES, get(s_shift + i * LANES) + d);
          put(s_gain + i * LANES, get(s_gain + i * LANES) + d * u);
          mean += du;
          along += du * u;
        }
        mean /= (REAL)c;
        along /= (REAL)c;
        const vec scale = get(k.scale + v);
        for (long i = 0; i < c; i++) {
          const vec du = get(k.out + i * BLOCK + v) * gain[t * c + i];
          put(k.out + i * BLOCK + v, (du - mean - get(k.unit + i * BLOCK + v) * along) * scale);
        }
      }
      store(k.out, grad_x + at, c, positions, count);
    }
    finish(s_w1, grad_w1 + t * products, products);
    finish(s_w2, grad_w2 + t * products, products);
    finish(s_gain, grad_gain + t * c, c);
    finish(s_shift, grad_shift + t * c, c);
    finish(s_b2, grad_b2 + t * c, c);
    finish(s_b1, grad_b1 + t * m, m);
  }
  free(memory);
  return 0;
}
