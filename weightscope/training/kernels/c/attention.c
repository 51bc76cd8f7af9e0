/* y = softmax(q^T k / sqrt(d)) v of heads of d channels, without a matrix for the whole batch in memory: one vector of
   images at a time, ROWS queries at a time. A number of an image is a lane, so no product adds up across lanes. */

#include "common.h"

#define ROWS 8L

typedef struct {
  long x, y; /* distances between rows and between columns, in vectors */
} strides;

INLINE void some_entries(const REAL *a, strides sa, const REAL *b, strides sb, REAL *out, strides so, long n, int add,
                         const int rows, const int columns) {
  vec sum[4][4];
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) sum[r][c] = add ? get(out + (r * so.x + c * so.y) * LANES) : (vec){};
  for (long z = 0; z < n; z++) {
    vec right[4];
#pragma GCC unroll 4
    for (int c = 0; c < columns; c++) right[c] = get(b + (z * sb.x + c * sb.y) * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
      const vec left = get(a + (r * sa.x + z * sa.y) * LANES);
#pragma GCC unroll 4
      for (int c = 0; c < columns; c++) sum[r][c] += left * right[c];
    }
  }
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns; c++) put(out + (r * so.x + c * so.y) * LANES, sum[r][c]);
}

/* out (m, l) = or += a (m, n) x b (n, l), an entry being a vector */
static void product(const REAL *a, strides sa, const REAL *b, strides sb, REAL *out, strides so, long m, long n, long l,
                    int add) {
#define ENTRIES(rows, columns) \
  some_entries(a + i * sa.x * LANES, sa, b + j * sb.y * LANES, sb, out + (i * so.x + j * so.y) * LANES, so, n, add, rows, columns)
  long i = 0;
  for (; i + 4 <= m; i += 4) {
    long j = 0;
    for (; j + 4 <= l; j += 4) ENTRIES(4, 4);
    for (; j < l; j++) ENTRIES(4, 1);
  }
  for (; i < m; i++) {
    long j = 0;
    for (; j + 4 <= l; j += 4) ENTRIES(1, 4);
    for (; j < l; j++) ENTRIES(1, 1);
  }
}

/* `factor` x (d, n, batch), images `first` and following -> (n, d, LANES), zeros beyond the batch; and back */
static void gather(const REAL *from, REAL *to, long d, long n, long batch, long first, REAL factor) {
  const long count = batch - first < LANES ? batch - first : LANES;
  for (long c = 0; c < d; c++)
    for (long i = 0; i < n; i++) {
      const REAL *x = from + (c * n + i) * batch + first;
      REAL *y = to + (i * d + c) * LANES;
      if (count == LANES) put(y, get(x) * factor);
      else
        for (long l = 0; l < LANES; l++) y[l] = l < count ? x[l] * factor : 0;
    }
}

static void scatter(const REAL *from, REAL *to, long d, long n, long batch, long first, REAL factor) {
  const long count = batch - first < LANES ? batch - first : LANES;
  for (long c = 0; c < d; c++)
    for (long i = 0; i < n; i++) {
      const REAL *x = from + (i * d + c) * LANES;
      REAL *y = to + (c * n + i) * batch + first;
      if (count == LANES) put(y, get(x) * factor);
      else
        for (long l = 0; l < count; l++) y[l] = x[l] * factor;
    }
}

/* Softmax of each row of p (rows, n), in place. */
static void softmax(REAL *p, long rows, long n) {
  for (long r = 0; r < rows; r++, p += n * LANES) {
    vec most = get(p), sum = {};
    for (long j = 1; j < n; j++) most = larger(most, get(p + j * LANES));
    for (long j = 0; j < n; j++) {
      const vec e = exponential(get(p + j * LANES) - most);
      sum += e;
      put(p + j * LANES, e);
    }
    sum = 1 / sum;
    for (long j = 0; j < n; j++) put(p + j * LANES, get(p + j * LANES) * sum);
  }
}

static REAL scale_of(long d) { return (REAL)(1 / sqrt((double)d)); }

/* y (heads, d, n, B) from qkv (T, 3, H, d, n, B), where `heads` = T H. */
int attention_forward(const REAL *qkv, REAL *y, long networks, long heads, long d, long n, long batch) {
  const long size = d * n, image = size * LANES;
  REAL *q = numbers(4 * image + ROWS * n * LANES), *k = q + image, *v = k + image, *out = v + image, *p = out + image;
  if (!q) return 1;
  const strides by_token = {d, 1}, by_channel = {1, d}, map = {n, 1};
  for (long t = 0; t < networks; t++)
    for (long h = 0; h < heads; h++)
      for (long b = 0; b < batch; b += LANES) {
        const REAL *at = qkv + (t * 3 * heads + h) * size * batch;
        gather(at, q, d, n, batch, b, scale_of(d));
        gather(at + heads * size * batch, k, d, n, batch, b, 1);
        gather(at + 2 * heads * size * batch, v, d, n, batch, b, 1);
        for (long i = 0; i < n; i += ROWS) {
          const long rows = n - i < ROWS ? n - i : ROWS;
          product(q + i * d * LANES, by_token, k, by_channel, p, map, rows, d, n, 0);
          softmax(p, rows, n);
          product(p, map, v, by_token, out + i * d * LANES, by_token, rows, n, d, 0);
        }
        scatter(out, y + (t * heads + h) * size * batch, d, n, batch, b, 1);
      }
  free(q);
  return 0;
}

/* grad_qkv (T, 3, H, d, n, B), given grad, the gradient of y; the attention maps are computed again. */
int attention_backward(const REAL *qkv, const REAL *grad, REAL *grad_qkv, long networks, long heads, long d, long n,
                       long batch) {
  const long size = d * n, image = size * LANES, rest = heads * size * batch;
  REAL *q = numbers(7 * image + 2 * ROWS * n * LANES), *k = q + image, *v = k + image, *g = v + image;
  REAL *of_q = g + image, *of_k = of_q + image, *of_v = of_k + image, *p = of_v + image, *s = p + ROWS * n * LANES;
  if (!q) return 1;
  const strides by_token = {d, 1}, by_channel = {1, d}, map = {n, 1}, turned = {1, n};
  for (long t = 0; t < networks; t++)
    for (long h = 0; h < heads; h++)
      for (long b = 0; b < batch; b += LANES) {
        const long at = (t * 3 * heads + h) * size * batch;
        gather(qkv + at, q, d, n, batch, b, scale_of(d));
        gather(qkv + at + rest, k, d, n, batch, b, 1);
        gather(qkv + at + 2 * rest, v, d, n, batch, b, 1);
        gather(grad + (t * heads + h) * size * batch, g, d, n, batch, b, 1);
        memset(of_k, 0, 2 * image * sizeof(REAL));
        for (long i = 0; i < n; i += ROWS) {
          const long rows = n - i < ROWS ? n - i : ROWS;
          product(q + i * d * LANES, by_token, k, by_channel, p, map, rows, d, n, 0);
          softmax(p, rows, n);
          product(g + i * d * LANES, by_token, v, by_channel, s, map, rows, d, n, 0);
          product(p, turned, g + i * d * LANES, by_token, of_v, by_token, n, rows, d, 1);
          for (long r = 0; r < rows; r++) {
            REAL *pr = p + r * n * LANES, *sr = s + r * n * LANES;
            vec along = {};
            for (long j = 0; j < n * LANES; j += LANES) along += get(pr + j) * get(sr + j);
            for (long j = 0; j < n * LANES; j += LANES) put(sr + j, get(pr + j) * (get(sr + j) - along));
          }
          product(s, map, k, by_token, of_q + i * d * LANES, by_token, rows, n, d, 0);
          product(s, turned, q + i * d * LANES, by_token, of_k, by_token, n, rows, d, 1);
        }
        scatter(of_q, grad_qkv + at, d, n, batch, b, scale_of(d));
        scatter(of_k, grad_qkv + at + rest, d, n, batch, b, 1);
        scatter(of_v, grad_qkv + at + 2 * rest, d, n, batch, b, 1);
      }
  free(q);
  return 0;
}
