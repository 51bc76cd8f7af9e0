/* A ConvNeXt block, x + W2 gelu(W1 norm(conv(x)) + b1) + b2, network by network: what the convolution of a network writes
   is still in the cache when its MLP reads it. */

#include "common.h"

int depthwise_forward(const REAL *, const REAL *, const REAL *, REAL *, long, long, long, long, long, long);
int depthwise_backward(const REAL *, const REAL *, const REAL *, const REAL *, REAL *, REAL *, REAL *, long, long, long, long, long, long);
int mlp_forward(const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *,
                const REAL *, REAL *, long, long, long, long, double);
int mlp_backward(const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, REAL *,
                 REAL *, REAL *, REAL *, REAL *, REAL *, REAL *, long, long, long, long, double);

/* inner and y (T c, H, W, B) from x and the weights, of shapes as in depthwise.c and mlp.c */
int block_forward(const REAL *x, const REAL *w, const REAL *bias, const REAL *gain, const REAL *shift, const REAL *w1,
                  const REAL *b1, const REAL *w2, const REAL *b2, REAL *inner, REAL *y, long networks, long c, long m,
                  long height, long width, long batch, long k, double eps) {
  const long positions = height * width * batch;
  for (long t = 0; t < networks; t++) {
    const long row = t * c, at = row * positions, product = row * m;
    if (depthwise_forward(x + at, w + row * k * k, bias + row, inner + at, c, height, width, batch, k, 1) ||
        mlp_forward(inner + at, gain + row, shift + row, w1 + product, b1 + t * m, w2 + product, b2 + row, x + at, y + at,
                    1, c, m, positions, eps))
      return 1;
  }
  return 0;
}

/* All gradients, given grad, the gradient of y. */
int block_backward(const REAL *x, const REAL *w, const REAL *inner, const REAL *gain, const REAL *shift, const REAL *w1,
                   const REAL *b1, const REAL *w2, const REAL *grad, REAL *grad_x, REAL *grad_w, REAL *grad_bias,
                   REAL *grad_gain, REAL *grad_shift, REAL *grad_w1, REAL *grad_b1, REAL *grad_w2, REAL *grad_b2,
                   long networks, long c, long m, long height, long width, long batch, long k, double eps) {
  const long positions = height * width * batch;
  REAL *middle = numbers(c * positions); /* the gradient of inner */
  int failed = !middle;
  for (long t = 0; t < networks && !failed; t++) {
    const long row = t * c, at = row * positions, product = row * m;
    failed = mlp_backward(inner + at, gain + row, shift + row, w1 + product, b1 + t * m, w2 + product, grad + at, middle,
                          grad_gain + row, grad_shift + row, grad_w1 + product, grad_b1 + t * m, grad_w2 + product,
                          grad_b2 + row, 1, c, m, positions, eps) ||
             depthwise_backward(x + at, w + row * k * k, middle, grad + at, grad_x + at, grad_w + row * k * k,
                                grad_bias + row, c, height, width, batch, k, 1);
  }
  free(middle);
  return failed;
}
