/* Linear maps and LayerNorm of a block of positions, whose rows, a channel each, are `stride` numbers apart.

   norm(x) = gain u + shift, where u = (x - mean) / sqrt(variance + eps). Gain and shift become a part of the linear map
   W x + b after it: V = W diag(gain), e = b + W shift. With S the sum of dh u^T over positions and d the sum of dh, where
   dh is the gradient of the map's output, the gradients are S diag(gain) + d shift^T of W, d of b, diag(W^T S) of the gain
   and W^T d of the shift. */

#ifndef ROWS_H
#define ROWS_H

#include "common.h"

/* rows of y = a x + bias in one slab, or rows of y *= a x with `times` */
INLINE void some_rows(const REAL *a, const REAL *x, REAL *y, const REAL *bias, long stride, long n, int times, const int rows) {
  vec sum[4][4]; /* of which `rows` are used; the size is fixed so that they stay in registers */
  for (int r = 0; r < rows; r++)
    for (int u = 0; u < 4; u++) sum[r][u] = (vec){} + (bias ? bias[r] : 0);
  for (long j = 0; j < n; j++) {
    const REAL *from = x + j * stride;
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
    for (int u = 0; u < 4; u++) {
      REAL *to = y + r * stride + u * LANES;
      if (times) sum[r][u] *= get(to);
      put(to, sum[r][u]);
    }
}

/* y (m, SLAB) = a (m, n) x (n, SLAB) + bias (m), or y *= a x with `times` */
INLINE void multiply(const REAL *a, const REAL *x, REAL *y, const REAL *bias, long stride, long m, long n, const int times) {
  long i = 0;
  for (; i + 4 <= m; i += 4) some_rows(a + i * n, x, y + i * stride, bias ? bias + i : NULL, stride, n, times, 4);
  for (; i < m; i++) some_rows(a + i * n, x, y + i * stride, bias ? bias + i : NULL, stride, n, times, 1);
}

INLINE void some_products(const REAL *g, const REAL *x, REAL *sums, long stride, long n, long used, const int rows, const int columns) {
  vec sum[4][4];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) sum[r][c] = get(sums + (r * n + c) * LANES);
  for (long v = 0; v < used; v += LANES) {
    vec left[4];
    for (int r = 0; r < rows; r++) left[r] = get(g + r * stride + v);
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) {
      const vec right = get(x + c * stride + v);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r][c] += left[r] * right;
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) put(sums + (r * n + c) * LANES, sum[r][c]);
}

/* sums (m, n, LANES) += g (m, used) x (n, used)^T, to be summed over the lanes at the end */
static inline void add_products(const REAL *g, const REAL *x, REAL *sums, long stride, long m, long n, long used) {
  long i = 0;
  for (; i + 4 <= m; i += 4) {
    long j = 0;
    for (; j + 4 <= n; j += 4) some_products(g + i * stride, x + j * stride, sums + (i * n + j) * LANES, stride, n, used, 4, 4);
    for (; j < n; j++) some_products(g + i * stride, x + j * stride, sums + (i * n + j) * LANES, stride, n, used, 4, 1);
  }
  for (; i < m; i++)
    for (long j = 0; j < n; j++) some_products(g + i * stride, x + j * stride, sums + (i * n + j) * LANES, stride, n, used, 1, 1);
}

/* sums (m, LANES) += g (m, used) */
static inline void add_sums(const REAL *g, REAL *sums, long stride, long m, long used) {
  for (long i = 0; i < m; i++) {
    vec sum[2] = {get(sums + i * LANES)};
    for (long v = 0; v < used; v += 2 * LANES) {
      sum[0] += get(g + i * stride + v);
      sum[1] += get(g + i * stride + v + LANES);
    }
    put(sums + i * LANES, sum[0] + sum[1]);
  }
}

static inline void finish(const REAL *sums, REAL *out, long count) {
  for (long i = 0; i < count; i++) out[i] = total(get(sums + i * LANES));
}

static inline void transpose(const REAL *a, REAL *out, long m, long n) {
  for (long i = 0; i < m; i++)
    for (long j = 0; j < n; j++) out[j * m + i] = a[i * n + j];
}

/* One slab of c channels: u in place of x, and scale = 1 / sqrt(variance + eps). */
static inline void normalise(REAL *x, REAL *scale, long stride, long c, REAL eps) {
  vec mean[4] = {}, square[4] = {};
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) mean[u] += get(x + i * stride + u * LANES);
  for (int u = 0; u < 4; u++) mean[u] /= (REAL)c;
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) {
      const vec d = get(x + i * stride + u * LANES) - mean[u];
      put(x + i * stride + u * LANES, d);
      square[u] += d * d;
    }
  for (int u = 0; u < 4; u++) put(scale + u * LANES, square[u] / (REAL)c + eps);
  for (long v = 0; v < SLAB; v++) scale[v] = 1 / REAL_SQRT(scale[v]); /* so that the compiler finds vectors */
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) put(x + i * stride + u * LANES, get(x + i * stride + u * LANES) * get(scale + u * LANES));
}

/* One slab: the gradient of x in place of g, that of u. */
static inline void normalise_backward(REAL *g, const REAL *unit, const REAL *scale, long stride, long c) {
  vec mean[4] = {}, along[4] = {};
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) {
      const long at = i * stride + u * LANES;
      mean[u] += get(g + at);
      along[u] += get(g + at) * get(unit + at);
    }
  for (int u = 0; u < 4; u++) {
    mean[u] /= (REAL)c;
    along[u] /= (REAL)c;
  }
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) {
      const long at = i * stride + u * LANES;
      put(g + at, (get(g + at) - mean[u] - get(unit + at) * along[u]) * get(scale + u * LANES));
    }
}

/* GELU of one slab in place, and its derivative unless `slopes` is NULL */
INLINE void activate(REAL *x, REAL *slopes, long stride, long m) {
  for (long i = 0; i < m; i++)
    for (int u = 0; u < 4; u++) {
      vec slope;
      put(x + i * stride + u * LANES, gelu(get(x + i * stride + u * LANES), &slope));
      if (slopes) put(slopes + i * stride + u * LANES, slope);
    }
}

/* A block of `count` positions, with zeros up to whole slabs. */
static inline void load(const REAL *from, REAL *to, long stride, long rows, long positions, long count) {
  const long used = (count + SLAB - 1) / SLAB * SLAB;
  for (long i = 0; i < rows; i++) {
    memcpy(to + i * stride, from + i * positions, count * sizeof(REAL));
    memset(to + i * stride + count, 0, (used - count) * sizeof(REAL));
  }
}

/* ... and back, plus `more`, laid out as the result, unless it is NULL */
static inline void store(const REAL *from, const REAL *more, REAL *to, long stride, long rows, long positions, long count) {
  for (long i = 0; i < rows; i++)
    if (more)
      for (long j = 0; j < count; j++) to[i * positions + j] = from[i * stride + j] + more[i * positions + j];
    else memcpy(to + i * positions, from + i * stride, count * sizeof(REAL));
}

/* V and e */
static inline void with_norm(const REAL *w1, const REAL *b1, const REAL *gain, const REAL *shift, REAL *v, REAL *e, long m, long c) {
  for (long j = 0; j < m; j++) {
    e[j] = b1[j];
    for (long i = 0; i < c; i++) {
      v[j * c + i] = w1[j * c + i] * gain[i];
      e[j] += w1[j * c + i] * shift[i];
    }
  }
}

/* From S, d and the weights: the gradients of W (in place of S), gain and shift. */
static inline void of_norm(const REAL *w, const REAL *gain, const REAL *shift, REAL *of_w, const REAL *of_b, REAL *of_gain,
                    REAL *of_shift, long m, long c) {
  for (long i = 0; i < c; i++) {
    of_gain[i] = of_shift[i] = 0;
    for (long j = 0; j < m; j++) {
      of_gain[i] += w[j * c + i] * of_w[j * c + i];
      of_shift[i] += w[j * c + i] * of_b[j];
      of_w[j * c + i] = of_w[j * c + i] * gain[i] + of_b[j] * shift[i];
    }
  }
}

#endif
