/* Consecutive ConvNeXt blocks, x + W2 gelu(W1 norm(conv(x)) + b1) + b2 each.

   A network at a time, and of its batch as many images as the cache holds, go through all blocks; so between two blocks
   nothing is read from memory. The input of each block and the output of its convolution are kept for the backward pass,
   image group by image group. */

#include "common.h"

#define WEIGHTS 8         /* of a block: weight and bias of the convolution, the norm, fc1 and fc2 */
#define CACHED (1L << 20) /* bytes that one array of a group of images may take */

int depthwise_forward(const REAL *, const REAL *, const REAL *, REAL *, long, long, long, long, long, long);
int depthwise_backward(const REAL *, const REAL *, const REAL *, const REAL *, REAL *, REAL *, REAL *, long, long, long, long, long, long);
int mlp_forward(const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *,
                const REAL *, REAL *, long, long, long, long, long, double);
int mlp_backward(const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *,
                 REAL *, REAL *, REAL *, REAL *, REAL *, REAL *, REAL *, long, long, long, long, long, double);

/* Images of `numbers_each` numbers that are worked on at once. */
static long group(long numbers_each, long batch) {
  long images = 2 * LANES;
  while (2 * images * numbers_each * (long)sizeof(REAL) <= CACHED) images *= 2;
  return images < batch ? images : batch;
}

/* (rows, batch), images `first` and following -> (rows, count); and back */
static void take(const REAL *from, REAL *to, long rows, long batch, long first, long count) {
  for (long r = 0; r < rows; r++) memcpy(to + r * count, from + r * batch + first, count * sizeof(REAL));
}
static void bring(const REAL *from, REAL *to, long rows, long batch, long first, long count) {
  for (long r = 0; r < rows; r++) memcpy(to + r * batch + first, from + r * count, count * sizeof(REAL));
}

/* y (T c, H, W, B) from x and the weights of each block, of shapes as in depthwise.c and mlp.c; `kept`, of
   2 blocks T c H W B numbers, is filled for the backward pass unless it is NULL. */
int blocks_forward(const REAL *x, const REAL *const *weights, REAL *kept, REAL *y, long blocks, long networks, long c,
                   long m, long height, long width, long batch, long k, double eps) {
  const long size = c * height * width, most = group(size, batch), sizes[WEIGHTS] = {c * k * k, c, c, c, m * c, m, c * m, c};
  REAL *out = numbers((kept ? 1 : 1 + 2 * blocks) * size * most);
  int failed = !out;
  for (long t = 0; t < networks && !failed; t++)
    for (long first = 0; first < batch && !failed; first += most) {
      const long count = batch - first < most ? batch - first : most, step = size * count;
      REAL *in = kept ? kept + (t * batch + first) * size * 2 * blocks : out + size * most;
      take(x + t * size * batch, in, size, batch, first, count);
      for (long l = 0; l < blocks && !failed; l++, in += 2 * step) {
        const REAL *w[WEIGHTS];
        for (int i = 0; i < WEIGHTS; i++) w[i] = weights[l * WEIGHTS + i] + t * sizes[i];
        failed = depthwise_forward(in, w[0], w[1], in + step, c, height, width, count, k, 1) ||
                 mlp_forward(in + step, w[2], w[3], w[4], w[5], w[6], w[7], in, l + 1 < blocks ? in + 2 * step : out, 1, 1, c, m,
                             height * width * count, eps);
      }
      bring(out, y + t * size * batch, size, batch, first, count);
    }
  free(out);
  return failed;
}

/* grad_x and the gradients of all weights, given grad, the gradient of y, and what the forward pass kept. */
int blocks_backward(const REAL *grad, const REAL *const *weights, const REAL *kept, REAL *grad_x, REAL *const *grads,
                    long blocks, long networks, long c, long m, long height, long width, long batch, long k, double eps) {
  const long size = c * height * width, most = group(size, batch), sizes[WEIGHTS] = {c * k * k, c, c, c, m * c, m, c * m, c};
  long parts = 0;
  for (int i = 0; i < WEIGHTS; i++) parts += sizes[i];
  REAL *g = numbers(3 * size * most + parts), *memory = g, *inner = g + size * most, *next = inner + size * most;
  REAL *part = next + size * most; /* the gradients that a group of images adds */
  int failed = !g;
  for (long t = 0; t < networks && !failed; t++)
    for (long first = 0; first < batch && !failed; first += most) {
      const long count = batch - first < most ? batch - first : most, step = size * count;
      const REAL *in = kept + (t * batch + first) * size * 2 * blocks + 2 * blocks * step;
      take(grad + t * size * batch, g, size, batch, first, count);
      for (long l = blocks - 1; l >= 0 && !failed; l--) {
        const REAL *w[WEIGHTS];
        REAL *to[WEIGHTS], *at = part;
        in -= 2 * step;
        for (int i = 0; i < WEIGHTS; i++) {
          w[i] = weights[l * WEIGHTS + i] + t * sizes[i];
          to[i] = first ? at : grads[l * WEIGHTS + i] + t * sizes[i];
          at += sizes[i];
        }
        failed = mlp_backward(in + step, w[2], w[3], w[4], w[5], w[6], g, NULL, inner, to[2], to[3], to[4], to[5], to[6], to[7], 1, 1,
                              c, m, height * width * count, eps) ||
                 depthwise_backward(in, w[0], inner, g, next, to[0], to[1], c, height, width, count, k, 1);
        REAL *const last = g;
        g = next, next = last;
        for (int i = 0; i < WEIGHTS && first; i++)
          for (long n = 0; n < sizes[i]; n++) grads[l * WEIGHTS + i][t * sizes[i] + n] += to[i][n];
      }
      bring(g, grad_x + t * size * batch, size, batch, first, count);
    }
  free(memory);
  return failed;
}
