/* Depthwise convolution: stride 1, zero padding that keeps the size. */

#include "common.h"

typedef struct {
  long height, width, batch;  /* of the image */
  long k, dilation, reach;    /* of the filter; reach = dilation * (k - 1) / 2 */
  long lanes, vecs;           /* batch rounded up to whole vectors; of which as many are worked on at once */
  long padded;                /* columns of a padded image */
} shape;

static shape shape_of(long height, long width, long batch, long k, long dilation) {
  shape s = {height, width, batch, k, dilation, dilation * (k - 1) / 2, 0, 0, 0};
  s.lanes = (batch + LANES - 1) / LANES * LANES;
  s.vecs = s.lanes % (2 * LANES) ? 1 : 2;
  const long columns = 2 * COLUMNS / s.vecs;
  s.padded = (width + columns - 1) / columns * columns + 2 * s.reach;
  return s;
}

/* Copy one channel between `reach` columns of zeros, which the caller cleared once. */
static void pad(const REAL *from, REAL *to, shape s) {
  const long at_once = s.batch == s.lanes ? s.width : 1; /* pixels */
  for (long y = 0; y < s.height; y++)
    for (long x = 0; x < s.width; x += at_once)
      memcpy(to + (y * s.padded + s.reach + x) * s.lanes, from + (y * s.width + x) * s.batch, at_once * s.batch * sizeof(REAL));
}

/* out = convolution of `in`, plus bias and, unless it is NULL, plus `more`; `vecs` vectors of the batch and 8 / vecs
   pixels of a row at a time. With `dense`, k is known at compile time and the dilation is 1: each input is loaded once
   for all the outputs of a row that it belongs to. With `narrow`, a row has as many pixels, and the zeros around it are
   left out. */
INLINE void convolve(const REAL *in, const REAL *w, REAL bias, const REAL *more, REAL *out, shape s, const long k,
                     const int flip, const int dense, const int narrow, const int vecs) {
  const long columns = narrow ? COLUMNS : 2 * COLUMNS / vecs;
  const long from_u = narrow ? k / 2 : 0, to_u = narrow ? k / 2 + columns : k + columns - 1;
  for (long y = 0; y < s.height; y++)
    for (long left = 0; left < s.width; left += columns)
      for (long b = 0; b < s.lanes; b += vecs * LANES) {
        vec sum[2 * COLUMNS][2];
        for (int q = 0; q < columns; q++) sum[q][0] = sum[q][1] = (vec){} + bias;
        for (long i = 0; i < k; i++) {
          const long row = y + i * s.dilation - s.reach;
          if (row < 0 || row >= s.height) continue;
          const REAL *at = in + (row * s.padded + left) * s.lanes + b, *taps = w + (flip ? k - 1 - i : i) * k;
          if (dense) {
#pragma GCC unroll 16
            for (long u = from_u; u < to_u; u++) {
              const vec first = get(at + u * s.lanes), second = vecs == 2 ? get(at + u * s.lanes + LANES) : first;
#pragma GCC unroll 8
              for (long q = 0; q < columns; q++)
                if (u - q >= 0 && u - q < k) {
                  const REAL tap = taps[flip ? k - 1 - (u - q) : u - q];
                  sum[q][0] += tap * first;
                  if (vecs == 2) sum[q][1] += tap * second;
                }
            }
          } else
            for (long j = 0; j < k; j++)
#pragma GCC unroll 8
              for (long q = 0; q < columns; q++) {
                const REAL tap = taps[flip ? k - 1 - j : j], *from = at + (j * s.dilation + q) * s.lanes;
                sum[q][0] += tap * get(from);
                if (vecs == 2) sum[q][1] += tap * get(from + LANES);
              }
        }
        for (long q = 0; q < columns && left + q < s.width; q++)
          for (long v = 0; v < vecs; v++) {
            const long to = (y * s.width + left + q) * s.batch + b + v * LANES, rest = s.batch - b - v * LANES;
            if (more && rest >= LANES) sum[q][v] += get(more + to);
            if (rest >= LANES) put(out + to, sum[q][v]);
            else
              for (long l = 0; l < rest; l++) out[to + l] = sum[q][v][l] + (more ? more[to + l] : 0);
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
#define KNOWN(k, ...) \
  case k: { \
    enum { K = k, DENSE = 1 }; \
    if (s.width == COLUMNS) { enum { NARROW = 1 }; __VA_ARGS__; } \
    else { enum { NARROW = 0 }; __VA_ARGS__; } \
    break; \
  }
#define FOR_TAPS(k, dilation, ...) \
  switch (dilation == 1 ? k : 0) { \
    KNOWN(3, __VA_ARGS__) KNOWN(5, __VA_ARGS__) KNOWN(7, __VA_ARGS__) KNOWN(9, __VA_ARGS__) \
    default: { const long K = k; enum { DENSE = 0, NARROW = 0 }; __VA_ARGS__; } \
  }
#define CONVOLVE(...) \
  if (s.vecs == 2) convolve(__VA_ARGS__, DENSE, NARROW, 2); \
  else convolve(__VA_ARGS__, DENSE, NARROW, 1)

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
    FOR_TAPS(k, dilation, CONVOLVE(in, w + c * K * K, bias[c], NULL, y + c * image, s, K, 0))
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
    FOR_TAPS(k, dilation, CONVOLVE(g, w + c * K * K, 0, more ? more + c * image : NULL, grad_x + c * image, s, K, 1))
    FOR_TAPS(k, dilation, correlate(in, g, grad_w + c * K * K, sums, s, K, NARROW))
  }
  free(in);
  return 0;
}
