/* W2 gelu(W1 norm(x) + b1) + b2, and norm(x) alone.

   norm(x) = gain u + shift, where u = (x - mean) / sqrt(variance + eps). Gain and shift become a part of fc1:
   V = W1 diag(gain), e = b1 + W1 shift. With S the sum of dh u^T over positions and d the sum of dh, where dh is the
   gradient of fc1's output, the gradients are S diag(gain) + d shift^T of W1, d of b1, diag(W1^T S) of the gain and
   W1^T d of the shift. */

#include "common.h"

/* rows of y = a x + bias in one slab, or rows of y *= a x with `times` */
INLINE void some_rows(const REAL *a, const REAL *x, REAL *y, const REAL *bias, long n, int times, const int rows) {
  vec sum[4][4]; /* of which `rows` are used; the size is fixed so that they stay in registers */
  for (int r = 0; r < rows; r++)
    for (int u = 0; u < 4; u++) sum[r][u] = (vec){} + (bias ? bias[r] : 0);
  for (long j = 0; j < n; j++) {
    const REAL *from = x + j * STRIDE;
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
      REAL *to = y + r * STRIDE + u * LANES;
      if (times) sum[r][u] *= get(to);
      put(to, sum[r][u]);
    }
}

/* y (m, SLAB) = a (m, n) x (n, SLAB) + bias (m), or y *= a x with `times` */
INLINE void multiply(const REAL *a, const REAL *x, REAL *y, const REAL *bias, long m, long n, const int times) {
  long i = 0;
  for (; i + 4 <= m; i += 4) some_rows(a + i * n, x, y + i * STRIDE, bias ? bias + i : NULL, n, times, 4);
  for (; i < m; i++) some_rows(a + i * n, x, y + i * STRIDE, bias ? bias + i : NULL, n, times, 1);
}

INLINE void some_products(const REAL *g, const REAL *x, REAL *sums, long n, long used, const int rows, const int columns) {
  vec sum[4][4];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) sum[r][c] = get(sums + (r * n + c) * LANES);
  for (long v = 0; v < used; v += LANES) {
    vec left[4];
    for (int r = 0; r < rows; r++) left[r] = get(g + r * STRIDE + v);
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) {
      const vec right = get(x + c * STRIDE + v);
#pragma GCC unroll 4
      for (int r = 0; r < rows; r++) sum[r][c] += left[r] * right;
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) put(sums + (r * n + c) * LANES, sum[r][c]);
}

/* sums (m, n, LANES) += g (m, used) x (n, used)^T, to be summed over the lanes at the end */
static void add_products(const REAL *g, const REAL *x, REAL *sums, long m, long n, long used) {
  long i = 0;
  for (; i + 4 <= m; i += 4) {
    long j = 0;
    for (; j + 4 <= n; j += 4) some_products(g + i * STRIDE, x + j * STRIDE, sums + (i * n + j) * LANES, n, used, 4, 4);
    for (; j < n; j++) some_products(g + i * STRIDE, x + j * STRIDE, sums + (i * n + j) * LANES, n, used, 4, 1);
  }
  for (; i < m; i++)
    for (long j = 0; j < n; j++) some_products(g + i * STRIDE, x + j * STRIDE, sums + (i * n + j) * LANES, n, used, 1, 1);
}

/* sums (m, LANES) += g (m, used) */
static void add_sums(const REAL *g, REAL *sums, long m, long used) {
  for (long i = 0; i < m; i++) {
    vec sum[2] = {get(sums + i * LANES)};
    for (long v = 0; v < used; v += 2 * LANES) {
      sum[0] += get(g + i * STRIDE + v);
      sum[1] += get(g + i * STRIDE + v + LANES);
    }
    put(sums + i * LANES, sum[0] + sum[1]);
  }
}

static void finish(const REAL *sums, REAL *out, long count) {
  for (long i = 0; i < count; i++) out[i] = total(get(sums + i * LANES));
}

static void transpose(const REAL *a, REAL *out, long m, long n) {
  for (long i = 0; i < m; i++)
    for (long j = 0; j < n; j++) out[j * m + i] = a[i * n + j];
}

/* One slab of c channels: u in place of x, and scale = 1 / sqrt(variance + eps). */
static void normalise(REAL *x, REAL *scale, long c, REAL eps) {
  vec mean[4] = {}, square[4] = {};
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) mean[u] += get(x + i * STRIDE + u * LANES);
  for (int u = 0; u < 4; u++) mean[u] /= (REAL)c;
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) {
      const vec d = get(x + i * STRIDE + u * LANES) - mean[u];
      put(x + i * STRIDE + u * LANES, d);
      square[u] += d * d;
    }
  for (int u = 0; u < 4; u++) put(scale + u * LANES, square[u] / (REAL)c + eps);
  for (long v = 0; v < SLAB; v++) scale[v] = 1 / REAL_SQRT(scale[v]); /* so that the compiler finds vectors */
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) put(x + i * STRIDE + u * LANES, get(x + i * STRIDE + u * LANES) * get(scale + u * LANES));
}

/* One slab: the gradient of x in place of g, that of u. */
static void normalise_backward(REAL *g, const REAL *unit, const REAL *scale, long c) {
  vec mean[4] = {}, along[4] = {};
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) {
      const long at = i * STRIDE + u * LANES;
      mean[u] += get(g + at);
      along[u] += get(g + at) * get(unit + at);
    }
  for (int u = 0; u < 4; u++) {
    mean[u] /= (REAL)c;
    along[u] /= (REAL)c;
  }
  for (long i = 0; i < c; i++)
    for (int u = 0; u < 4; u++) {
      const long at = i * STRIDE + u * LANES;
      put(g + at, (get(g + at) - mean[u] - get(unit + at) * along[u]) * get(scale + u * LANES));
    }
}

/* GELU of one slab in place, and its derivative unless `slopes` is NULL */
INLINE void activate(REAL *x, REAL *slopes, long m) {
  for (long i = 0; i < m; i++)
    for (int u = 0; u < 4; u++) {
      vec slope;
      put(x + i * STRIDE + u * LANES, gelu(get(x + i * STRIDE + u * LANES), &slope));
      if (slopes) put(slopes + i * STRIDE + u * LANES, slope);
    }
}

/* A block of `count` positions, with zeros up to whole slabs. */
static void load(const REAL *from, REAL *to, long rows, long stride, long count) {
  const long used = (count + SLAB - 1) / SLAB * SLAB;
  for (long i = 0; i < rows; i++) {
    memcpy(to + i * STRIDE, from + i * stride, count * sizeof(REAL));
    memset(to + i * STRIDE + count, 0, (used - count) * sizeof(REAL));
  }
}

/* ... and back, plus `more`, laid out as the result, unless it is NULL */
static void store(const REAL *from, const REAL *more, REAL *to, long rows, long stride, long count) {
  for (long i = 0; i < rows; i++)
    if (more)
      for (long j = 0; j < count; j++) to[i * stride + j] = from[i * STRIDE + j] + more[i * stride + j];
    else memcpy(to + i * stride, from + i * STRIDE, count * sizeof(REAL));
}

/* V and e */
static void with_norm(const REAL *w1, const REAL *b1, const REAL *gain, const REAL *shift, REAL *v, REAL *e, long m, long c) {
  for (long j = 0; j < m; j++) {
    e[j] = b1[j];
    for (long i = 0; i < c; i++) {
      v[j * c + i] = w1[j * c + i] * gain[i];
      e[j] += w1[j * c + i] * shift[i];
    }
  }
}

/* y (T, c, P) from x (T, c, P), plus `more` (T, c, P) unless it is NULL; gain, shift, b2 (T, c), w1 (T, m, c), b1 (T, m), w2 (T, c, m). */
int mlp_forward(const REAL *x, const REAL *gain, const REAL *shift, const REAL *w1, const REAL *b1, const REAL *w2,
                const REAL *b2, const REAL *more, REAL *y, long networks, long c, long m, long positions, double eps) {
  REAL *unit = numbers((2 * c + m) * STRIDE + SLAB + m * c + m), *out = unit + c * STRIDE, *active = out + c * STRIDE;
  REAL *scale = active + m * STRIDE, *v = scale + SLAB, *e = v + m * c;
  if (!unit) return 1;
  for (long t = 0; t < networks; t++) {
    with_norm(w1 + t * m * c, b1 + t * m, gain + t * c, shift + t * c, v, e, m, c);
    for (long p = 0; p < positions; p += BLOCK) {
      const long at = t * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
      load(x + at, unit, c, positions, count);
      for (long s = 0; s < count; s += SLAB) {
        normalise(unit + s, scale, c, (REAL)eps);
        multiply(v, unit + s, active + s, e, m, c, 0);
        activate(active + s, NULL, m);
        multiply(w2 + t * m * c, active + s, out + s, b2 + t * c, c, m, 0);
      }
      store(out, more ? more + at : NULL, y + at, c, positions, count);
    }
  }
  free(unit);
  return 0;
}

/* All gradients, given grad, the gradient of y; intermediate values are recomputed block by block. */
int mlp_backward(const REAL *x, const REAL *gain, const REAL *shift, const REAL *w1, const REAL *b1, const REAL *w2,
                 const REAL *grad, REAL *grad_x, REAL *grad_gain, REAL *grad_shift, REAL *grad_w1, REAL *grad_b1,
                 REAL *grad_w2, REAL *grad_b2, long networks, long c, long m, long positions, double eps) {
  const long products = m * c, sums = (2 * products + c + m) * LANES;
  REAL *unit = numbers((3 * c + 2 * m) * STRIDE + SLAB + sums + 3 * products + m);
  if (!unit) return 1;
  REAL *g = unit + c * STRIDE, *out = g + c * STRIDE, *active = out + c * STRIDE, *hidden = active + m * STRIDE;
  REAL *scale = hidden + m * STRIDE, *s_w1 = scale + SLAB, *s_w2 = s_w1 + products * LANES;
  REAL *s_b2 = s_w2 + products * LANES, *s_b1 = s_b2 + c * LANES;
  REAL *v = s_b1 + m * LANES, *vt = v + products, *w2t = vt + products, *e = w2t + products;
  for (long t = 0; t < networks; t++) {
    const REAL *w1_t = w1 + t * products, *gain_t = gain + t * c, *shift_t = shift + t * c;
    memset(s_w1, 0, sums * sizeof(REAL));
    with_norm(w1_t, b1 + t * m, gain_t, shift_t, v, e, m, c);
    transpose(v, vt, m, c);
    transpose(w2 + t * products, w2t, c, m);
    for (long p = 0; p < positions; p += BLOCK) {
      const long at = t * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
      const long used = (count + SLAB - 1) / SLAB * SLAB;
      load(x + at, unit, c, positions, count);
      load(grad + at, g, c, positions, count);
      for (long s = 0; s < count; s += SLAB) {
        normalise(unit + s, scale, c, (REAL)eps);
        multiply(v, unit + s, active + s, e, m, c, 0);
        activate(active + s, hidden + s, m);
        multiply(w2t, g + s, hidden + s, NULL, m, c, 1);
        multiply(vt, hidden + s, out + s, NULL, c, m, 0);
        normalise_backward(out + s, unit + s, scale, c);
      }
      add_products(g, active, s_w2, c, m, used);
      add_products(hidden, unit, s_w1, m, c, used);
      add_sums(g, s_b2, c, used);
      add_sums(hidden, s_b1, m, used);
      store(out, NULL, grad_x + at, c, positions, count);
    }
    REAL *of_w1 = grad_w1 + t * products, *of_b1 = grad_b1 + t * m, *of_gain = grad_gain + t * c, *of_shift = grad_shift + t * c;
    finish(s_w1, of_w1, products);
    finish(s_w2, grad_w2 + t * products, products);
    finish(s_b2, grad_b2 + t * c, c);
    finish(s_b1, of_b1, m);
    for (long i = 0; i < c; i++) {
      of_gain[i] = of_shift[i] = 0;
      for (long j = 0; j < m; j++) {
        of_gain[i] += w1_t[j * c + i] * of_w1[j * c + i];
        of_shift[i] += w1_t[j * c + i] * of_b1[j];
        of_w1[j * c + i] = of_w1[j * c + i] * gain_t[i] + of_b1[j] * shift_t[i];
      }
    }
  }
  free(unit);
  return 0;
}

/* y (T, c, P) = LayerNorm of x (T, c, P) over c; gain and shift (T, c). */
int norm_forward(const REAL *x, const REAL *gain, const REAL *shift, REAL *y, long networks, long c, long positions,
                 double eps) {
  REAL *unit = numbers(c * STRIDE + SLAB), *scale = unit + c * STRIDE;
  if (!unit) return 1;
  for (long t = 0; t < networks; t++)
    for (long p = 0; p < positions; p += BLOCK) {
      const long at = t * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
      load(x + at, unit, c, positions, count);
      for (long s = 0; s < count; s += SLAB) normalise(unit + s, scale, c, (REAL)eps);
      for (long i = 0; i < c; i++)
        for (long j = 0; j < count; j++)
          y[at + i * positions + j] = gain[t * c + i] * unit[i * STRIDE + j] + shift[t * c + i];
    }
  free(unit);
  return 0;
}

/* The gradients of x, gain and shift, given grad, the gradient of y. */
int norm_backward(const REAL *x, const REAL *gain, const REAL *grad, REAL *grad_x, REAL *grad_gain, REAL *grad_shift,
                  long networks, long c, long positions, double eps) {
  REAL *unit = numbers(2 * c * STRIDE + SLAB + 2 * c * LANES), *g = unit + c * STRIDE, *scale = g + c * STRIDE;
  REAL *s_gain = scale + SLAB, *s_shift = s_gain + c * LANES;
  if (!unit) return 1;
  for (long t = 0; t < networks; t++) {
    memset(s_gain, 0, 2 * c * LANES * sizeof(REAL));
    for (long p = 0; p < positions; p += BLOCK) {
      const long at = t * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
      load(x + at, unit, c, positions, count);
      load(grad + at, g, c, positions, count);
      for (long s = 0; s < count; s += SLAB) {
        normalise(unit + s, scale, c, (REAL)eps);
        for (long i = 0; i < c; i++) {
          vec gains = get(s_gain + i * LANES), shifts = get(s_shift + i * LANES);
          for (int u = 0; u < 4; u++) {
            const long to = s + i * STRIDE + u * LANES;
            const vec d = get(g + to);
            gains += d * get(unit + to);
            shifts += d;
            put(g + to, d * gain[t * c + i]);
          }
          put(s_gain + i * LANES, gains);
          put(s_shift + i * LANES, shifts);
        }
        normalise_backward(g + s, unit + s, scale, c);
      }
      store(g, NULL, grad_x + at, c, positions, count);
    }
    finish(s_gain, grad_gain + t * c, c);
    finish(s_shift, grad_shift + t * c, c);
  }
  free(unit);
  return 0;
}
