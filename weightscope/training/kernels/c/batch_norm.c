/* BatchNorm after GELU, and its gradients: one row of P numbers, a channel of a network, at a time. */

#include "common.h"

/* A row, with zeros up to whole vectors. */
static void take(const REAL *from, REAL *to, long count, long padded) {
  memcpy(to, from, count * sizeof(REAL));
  memset(to + count, 0, (padded - count) * sizeof(REAL));
}

/* y (rows, P) = gain (gelu(x) - mean) scale + shift, plus `more` unless it is NULL; mean and scale (rows) are returned. */
int gelu_norm_forward(const REAL *x, const REAL *gain, const REAL *shift, const REAL *more, REAL *y, REAL *means,
                      REAL *scales, long rows, long positions, double eps) {
  const long padded = (positions + LANES - 1) / LANES * LANES, whole = positions / LANES * LANES;
  REAL *a = numbers(padded);
  if (!a) return 1;
  for (long row = 0; row < rows; row++, x += positions, y += positions) {
    take(x, a, positions, padded);
    vec sum[2] = {}, square[2] = {}, slope;
    for (long p = 0, turn = 0; p < padded; p += LANES, turn ^= 1) {
      const vec active = gelu(get(a + p), &slope);
      put(a + p, active);
      sum[turn] += active;
    }
    const REAL mean = total(sum[0] + sum[1]) / positions;
    for (long p = 0, turn = 0; p < whole; p += LANES, turn ^= 1) {
      const vec d = get(a + p) - mean;
      square[turn] += d * d;
    }
    REAL variance = total(square[0] + square[1]);
    for (long p = whole; p < positions; p++) variance += (a[p] - mean) * (a[p] - mean);
    const REAL scale = (REAL)(1 / sqrt((double)variance / positions + eps));
    const REAL factor = gain[row] * scale, offset = shift[row] - mean * factor;
    for (long p = 0; p < whole; p += LANES) {
      const vec out = get(a + p) * factor + offset;
      if (more) put(y + p, out + get(more + row * positions + p));
      else put(y + p, out);
    }
    for (long p = whole; p < positions; p++) y[p] = a[p] * factor + offset + (more ? more[row * positions + p] : 0);
    means[row] = mean;
    scales[row] = scale;
  }
  free(a);
  return 0;
}

/* The gradients of x, gain and shift, given grad, the gradient of y. */
int gelu_norm_backward(const REAL *x, const REAL *gain, const REAL *means, const REAL *scales, const REAL *grad,
                       REAL *grad_x, REAL *grad_gain, REAL *grad_shift, long rows, long positions) {
  const long padded = (positions + LANES - 1) / LANES * LANES, whole = positions / LANES * LANES;
  REAL *u = numbers(3 * padded), *slopes = u + padded, *g = slopes + padded;
  if (!u) return 1;
  for (long row = 0; row < rows; row++, x += positions, grad += positions, grad_x += positions) {
    const REAL mean = means[row], scale = scales[row];
    take(x, u, positions, padded);
    take(grad, g, positions, padded); /* beyond the row zeros, which add nothing to the sums */
    vec sum = {}, along = {};
    for (long p = 0; p < padded; p += LANES) {
      vec slope;
      const vec normal = (gelu(get(u + p), &slope) - mean) * scale, here = get(g + p);
      put(u + p, normal);
      put(slopes + p, slope);
      sum += here;
      along += here * normal;
    }
    grad_shift[row] = total(sum);
    grad_gain[row] = total(along);
    const REAL s = grad_shift[row] / positions, v = grad_gain[row] / positions, factor = gain[row] * scale;
    for (long p = 0; p < padded; p += LANES) {
      const vec out = (get(g + p) - s - get(u + p) * v) * get(slopes + p) * factor;
      if (p < whole) put(grad_x + p, out);
      else
        for (long l = 0; p + l < positions; l++) grad_x[p + l] = out[l];
    }
  }
  free(u);
  return 0;
}
