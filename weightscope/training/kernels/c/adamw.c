/* One step of AdamW for each row. */

#include "common.h"

/* weights, gradient, first, second (T, D); decayed (D), 1 or 0; rate, decay, clip (T); scalars: the rates' factor,
   1 / (1 - b1^t), 1 / sqrt(1 - b2^t). */
int adamw_step(REAL *weights, const REAL *gradient, REAL *first, REAL *second, const REAL *decayed, const REAL *rate,
               const REAL *decay, const REAL *clip, const REAL *scalars, long networks, long size, double b1, double b2,
               double eps) {
  const REAL of_first = (REAL)(1 - b1), of_second = (REAL)(1 - b2), keep = (REAL)b2, floor = (REAL)eps;
  for (long t = 0; t < networks; t++, weights += size, gradient += size, first += size, second += size) {
    const REAL eta = rate[t] * scalars[0], mean = scalars[1], root = scalars[2], shrink = decay[t], factor = clip[t];
    for (long d = 0; d < size; d++) {
      const REAL g = gradient[d] * factor;
      first[d] += of_first * (g - first[d]);
      second[d] = keep * second[d] + of_second * g * g;
      const REAL w = weights[d] - eta * decayed[d] * shrink * weights[d];
      weights[d] = w - eta * mean * (first[d] / (REAL_SQRT(second[d]) * root + floor));
    }
  }
  return 0;
}
