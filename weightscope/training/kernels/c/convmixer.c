/* The spatial mixing of ConvMixers, x + norm(gelu(conv(x))), a channel of a network at a time: between its parts nothing is
   read from memory. */

#include "common.h"

int depthwise_forward(const REAL *, const REAL *, const REAL *, REAL *, long, long, long, long, long, long);
int depthwise_backward(const REAL *, const REAL *, const REAL *, const REAL *, REAL *, REAL *, REAL *, long, long, long, long, long, long);
int gelu_norm_forward(const REAL *, const REAL *, const REAL *, const REAL *, REAL *, REAL *, REAL *, long, long, double);
int gelu_norm_backward(const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, REAL *, REAL *, REAL *, long, long);

/* y (C, H, W, B) = x + norm(gelu(conv(x))), and inner = conv(x); mean and scale (C) of the norm are returned. */
int mixing_forward(const REAL *x, const REAL *w, const REAL *bias, const REAL *gain, const REAL *shift, REAL *inner, REAL *y,
                   REAL *means, REAL *scales, long channels, long height, long width, long batch, long k, long dilation,
                   double eps) {
  const long size = height * width * batch;
  for (long c = 0; c < channels; c++, x += size, inner += size, y += size)
    if (depthwise_forward(x, w + c * k * k, bias + c, inner, 1, height, width, batch, k, dilation) ||
        gelu_norm_forward(inner, gain + c, shift + c, x, y, means + c, scales + c, 1, size, eps))
      return 1;
  return 0;
}

/* All gradients, given grad, the gradient of y. */
int mixing_backward(const REAL *x, const REAL *w, const REAL *inner, const REAL *gain, const REAL *means, const REAL *scales,
                    const REAL *grad, REAL *grad_x, REAL *grad_w, REAL *grad_bias, REAL *grad_gain, REAL *grad_shift,
                    long channels, long height, long width, long batch, long k, long dilation) {
  const long size = height * width * batch;
  REAL *middle = numbers(size); /* the gradient of inner */
  int failed = !middle;
  for (long c = 0; c < channels && !failed; c++, x += size, inner += size, grad += size, grad_x += size)
    failed = gelu_norm_backward(inner, gain + c, means + c, scales + c, grad, middle, grad_gain + c, grad_shift + c, 1, size) ||
             depthwise_backward(x, w + c * k * k, middle, grad, grad_x, grad_w + c * k * k, grad_bias + c, 1, height, width,
                                batch, k, dilation);
  free(middle);
  return failed;
}
