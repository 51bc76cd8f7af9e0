/* W2 gelu(W1 norm(x) + b1) + b2, and norm(x) alone. */

#include "rows.h"

/* y (T, G, c, P) from x, plus `more`, as large, unless it is NULL, for G groups of P positions; gain, shift, b2 (T, c), w1 (T, m, c), b1 (T, m), w2 (T, c, m). */
int mlp_forward(const REAL *x, const REAL *gain, const REAL *shift, const REAL *w1, const REAL *b1, const REAL *w2,
                const REAL *b2, const REAL *more, REAL *y, long networks, long groups, long c, long m, long positions, double eps) {
  REAL *unit = numbers((2 * c + m) * STRIDE + SLAB + m * c + m), *out = unit + c * STRIDE, *active = out + c * STRIDE;
  REAL *scale = active + m * STRIDE, *v = scale + SLAB, *e = v + m * c;
  if (!unit) return 1;
  for (long t = 0; t < networks; t++) {
    with_norm(w1 + t * m * c, b1 + t * m, gain + t * c, shift + t * c, v, e, m, c);
    for (long part = t * groups; part < (t + 1) * groups; part++)
      for (long p = 0; p < positions; p += BLOCK) {
        const long at = part * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
        load(x + at, unit, STRIDE, c, positions, count);
        for (long s = 0; s < count; s += SLAB) {
          normalise(unit + s, scale, STRIDE, c, (REAL)eps);
          multiply(v, unit + s, active + s, e, STRIDE, m, c, 0);
          activate(active + s, NULL, STRIDE, m);
          multiply(w2 + t * m * c, active + s, out + s, b2 + t * c, STRIDE, c, m, 0);
        }
        store(out, more ? more + at : NULL, y + at, STRIDE, c, positions, count);
      }
  }
  free(unit);
  return 0;
}

/* All gradients, given grad, the gradient of y; `more` is added to that of x; intermediate values are recomputed block by block. */
int mlp_backward(const REAL *x, const REAL *gain, const REAL *shift, const REAL *w1, const REAL *b1, const REAL *w2,
                 const REAL *grad, const REAL *more, REAL *grad_x, REAL *grad_gain, REAL *grad_shift, REAL *grad_w1, REAL *grad_b1,
                 REAL *grad_w2, REAL *grad_b2, long networks, long groups, long c, long m, long positions, double eps) {
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
    for (long part = t * groups; part < (t + 1) * groups; part++)
      for (long p = 0; p < positions; p += BLOCK) {
        const long at = part * c * positions + p, count = positions - p < BLOCK ? positions - p : BLOCK;
        const long used = (count + SLAB - 1) / SLAB * SLAB;
        load(x + at, unit, STRIDE, c, positions, count);
        load(grad + at, g, STRIDE, c, positions, count);
        for (long s = 0; s < count; s += SLAB) {
          normalise(unit + s, scale, STRIDE, c, (REAL)eps);
          multiply(v, unit + s, active + s, e, STRIDE, m, c, 0);
          activate(active + s, hidden + s, STRIDE, m);
          multiply(w2t, g + s, hidden + s, NULL, STRIDE, m, c, 1);
          multiply(vt, hidden + s, out + s, NULL, STRIDE, c, m, 0);
          normalise_backward(out + s, unit + s, scale, STRIDE, c);
        }
        add_products(g, active, s_w2, STRIDE, c, m, used);
        add_products(hidden, unit, s_w1, STRIDE, m, c, used);
        add_sums(g, s_b2, STRIDE, c, used);
        add_sums(hidden, s_b1, STRIDE, m, used);
        store(out, more ? more + at : NULL, grad_x + at, STRIDE, c, positions, count);
      }
    REAL *of_w1 = grad_w1 + t * products, *of_b1 = grad_b1 + t * m, *of_gain = grad_gain + t * c, *of_shift = grad_shift + t * c;
    finish(s_w1, of_w1, products);
    finish(s_w2, grad_w2 + t * products, products);
    finish(s_b2, grad_b2 + t * c, c);
    finish(s_b1, of_b1, m);
    of_norm(w1_t, gain_t, shift_t, of_w1, of_b1, of_gain, of_shift, m, c);
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
      load(x + at, unit, STRIDE, c, positions, count);
      for (long s = 0; s < count; s += SLAB) normalise(unit + s, scale, STRIDE, c, (REAL)eps);
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
      load(x + at, unit, STRIDE, c, positions, count);
      load(grad + at, g, STRIDE, c, positions, count);
      for (long s = 0; s < count; s += SLAB) {
        normalise(unit + s, scale, STRIDE, c, (REAL)eps);
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
        normalise_backward(g + s, unit + s, scale, STRIDE, c);
      }
      store(g, NULL, grad_x + at, STRIDE, c, positions, count);
    }
    finish(s_gain, grad_gain + t * c, c);
    finish(s_shift, grad_shift + t * c, c);
  }
  free(unit);
  return 0;
}
