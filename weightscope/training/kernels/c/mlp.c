/* W2 gelu(W1 norm(x) + b1) + b2, and norm(x) alone. */

#include "common.h"

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
    put(k.scale + v, square / (REAL)c + eps);
  }
  for (long v = 0; v < BLOCK; v++) k.scale[v] = 1 / REAL_SQRT(k.scale[v]); /* so that the compiler finds vectors */
  for (long i = 0; i < c; i++)
    for (long v = 0; v < BLOCK; v += LANES) {
      const vec u = get(k.unit + i * BLOCK + v) * get(k.scale + v);
      put(k.unit + i * BLOCK + v, u);
      put(k.normal + i * BLOCK + v, gain[i] * u + shift[i]);
    }
}

/* The gradient of x in k.out, where the gradient of `normal` was; adds to those of gain and shift (c, LANES). */
static void normalise_backward(workspace k, const REAL *gain, REAL *s_gain, REAL *s_shift, long c) {
  vec mean[BLOCK / LANES] = {}, along[BLOCK / LANES] = {};
  for (long i = 0; i < c; i++) {
    vec shifts = get(s_shift + i * LANES), gains = get(s_gain + i * LANES);
    for (long v = 0; v < BLOCK / LANES; v++) {
      const vec d = get(k.out + i * BLOCK + v * LANES), du = d * get(k.unit + i * BLOCK + v * LANES);
      shifts += d;
      gains += du;
      mean[v] += d * gain[i];
      along[v] += du * gain[i];
    }
    put(s_shift + i * LANES, shifts);
    put(s_gain + i * LANES, gains);
  }
  for (long v = 0; v < BLOCK / LANES; v++) {
    mean[v] /= (REAL)c;
    along[v] /= (REAL)c;
  }
  for (long i = 0; i < c; i++)
    for (long v = 0; v < BLOCK / LANES; v++) {
      REAL *out = k.out + i * BLOCK + v * LANES;
      put(out, (get(out) * gain[i] - mean[v] - get(k.unit + i * BLOCK + v * LANES) * along[v]) * get(k.scale + v * LANES));
    }
}

INLINE void activate(workspace k, long m, REAL *active, REAL *slopes) {
  for (long i = 0; i < m * BLOCK; i += LANES) {
    vec slope;
    put(active + i, gelu(get(k.hidden + i), &slope));
    if (slopes) put(slopes + i, slope);
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
      activate(k, m, k.active, NULL);
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
      activate(k, m, k.active, k.slope);
      add_products(g, k.active, s_w2, c, m);
      add_sums(g, s_b2, c);
      multiply(w2t, g, k.hidden, NULL, m, c);
      for (long i = 0; i < m * BLOCK; i += LANES) put(k.hidden + i, get(k.hidden + i) * get(k.slope + i));
      add_products(k.hidden, k.normal, s_w1, m, c);
      add_sums(k.hidden, s_b1, m);
      multiply(w1t, k.hidden, k.out, NULL, c, m);
      normalise_backward(k, gain + t * c, s_gain, s_shift, c);
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

/* y (T, c, P) = LayerNorm of x (T, c, P) over c; gain and shift (T, c). */
int norm_forward(const REAL *x, const REAL *gain, const REAL *shift, REAL *y, long networks, long c, long positions,
                 double eps) {
  REAL *memory = numbers(BLOCKS(c, 0));
  if (!memory) return 1;
  const workspace k = blocks(memory, c, 0);
  for (long t = 0; t < networks; t++)
    for (long p = 0; p < positions; p += BLOCK) {
      const long at = t * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
      load(x + at, k.x, c, positions, count);
      normalise(k, gain + t * c, shift + t * c, c, (REAL)eps);
      store(k.normal, y + at, c, positions, count);
    }
  free(memory);
  return 0;
}

/* The gradients of x, gain and shift, given grad, the gradient of y. */
int norm_backward(const REAL *x, const REAL *gain, const REAL *grad, REAL *grad_x, REAL *grad_gain, REAL *grad_shift,
                  long networks, long c, long positions, double eps) {
  REAL *memory = numbers(BLOCKS(c, 0) + 2 * c * LANES), *s_gain = memory + BLOCKS(c, 0), *s_shift = s_gain + c * LANES;
  if (!memory) return 1;
  const workspace k = blocks(memory, c, 0);
  for (long t = 0; t < networks; t++) {
    memset(s_gain, 0, 2 * c * LANES * sizeof(REAL));
    for (long p = 0; p < positions; p += BLOCK) {
      const long at = t * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
      load(x + at, k.x, c, positions, count);
      load(grad + at, k.out, c, positions, count);
      normalise(k, gain + t * c, gain + t * c, c, (REAL)eps); /* its shift is not used */
      normalise_backward(k, gain + t * c, s_gain, s_shift, c);
      store(k.out, grad_x + at, c, positions, count);
    }
    finish(s_gain, grad_gain + t * c, c);
    finish(s_shift, grad_shift + t * c, c);
  }
  free(memory);
  return 0;
}
