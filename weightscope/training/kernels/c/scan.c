/* Scans of state-space models whose maps depend on the token, as `selective_scan` in networks/scans.py:

     h_i[s] = exp(delta_i a[s]) h_{i-1}[s] + b_i[s] u_i,     h_0 = 0,     y_i = sum_s c_i[s] h_i[s],      a <= 0

   of each channel. u, delta, y (T, B, n, p); a (T, p, N); b, c (T, B, n, N). LANES channels are worked on at once. */

#include "common.h"

/* some channels of one token, and zeros */
INLINE vec get_some(const REAL *p, long used) {
  vec v = {};
  if (used == LANES) return get(p);
  for (long j = 0; j < used; j++) v[j] = p[j];
  return v;
}
INLINE void put_some(REAL *p, vec v, long used) {
  if (used == LANES) put(p, v);
  else for (long j = 0; j < used; j++) p[j] = v[j];
}

/* rates (channels in parts of LANES, N, LANES) of one network */
static void by_lanes(const REAL *a, REAL *rates, long p, long N) {
  for (long first = 0; first < p; first += LANES)
    for (long s = 0; s < N; s++)
      for (long j = 0; j < LANES; j++) *rates++ = first + j < p ? a[(first + j) * N + s] : 0;
}

int scan_forward(const REAL *u, const REAL *delta, const REAL *a, const REAL *b, const REAL *c, REAL *y, long networks,
                 long batch, long n, long p, long N) {
  const long wide = (p + LANES - 1) / LANES * LANES;
  REAL *rates = numbers(wide * N + N * LANES);
  if (!rates) return 1;
  REAL *h = rates + wide * N;
  for (long t = 0; t < networks; t++, a += p * N) {
    by_lanes(a, rates, p, N);
    for (long image = 0; image < batch; image++, u += n * p, delta += n * p, y += n * p, b += n * N, c += n * N)
      for (long first = 0; first < p; first += LANES) {
        const long used = p - first < LANES ? p - first : LANES;
        const REAL *rate = rates + first * N;
        memset(h, 0, (size_t)(N * LANES) * sizeof(REAL));
        for (long i = 0; i < n; i++) {
          const vec input = get_some(u + i * p + first, used), step = get_some(delta + i * p + first, used);
          vec sum = {};
          for (long s = 0; s < N; s++) {
            const vec state = exponential(step * get(rate + s * LANES)) * get(h + s * LANES) + b[i * N + s] * input;
            put(h + s * LANES, state);
            sum += c[i * N + s] * state;
          }
          put_some(y + i * p + first, sum, used);
        }
      }
  }
  free(rates);
  return 0;
}

/* All gradients, given grad, the gradient of y; states and decays of a sequence's LANES channels are computed again.

   The gradient of the state is g_i[s] = c_i[s] grad_i + exp(delta_{i+1} a[s]) g_{i+1}[s], from the last token on. */
int scan_backward(const REAL *u, const REAL *delta, const REAL *a, const REAL *b, const REAL *c, const REAL *grad,
                  REAL *grad_u, REAL *grad_delta, REAL *grad_a, REAL *grad_b, REAL *grad_c, long networks, long batch,
                  long n, long p, long N) {
  const long wide = (p + LANES - 1) / LANES * LANES, each = N * LANES;
  REAL *rates = numbers(2 * wide * N + (4 * n + 2) * each);
  if (!rates) return 1;
  REAL *of_rates = rates + wide * N, *g = of_rates + wide * N, *states = g + each; /* states (n + 1, N, LANES) */
  REAL *decays = states + (n + 1) * each, *of_b = decays + n * each, *of_c = of_b + n * each;
  for (long t = 0; t < networks; t++, a += p * N, grad_a += p * N) {
    by_lanes(a, rates, p, N);
    memset(of_rates, 0, (size_t)(wide * N) * sizeof(REAL));
    for (long image = 0; image < batch; image++) {
      memset(of_b, 0, (size_t)(2 * n * each) * sizeof(REAL));
      for (long first = 0; first < p; first += LANES) {
        const long used = p - first < LANES ? p - first : LANES;
        const REAL *rate = rates + first * N;
        REAL *of_rate = of_rates + first * N;
        memset(states, 0, (size_t)each * sizeof(REAL));
        memset(g, 0, (size_t)each * sizeof(REAL));
        for (long i = 0; i < n; i++) {
          const vec input = get_some(u + i * p + first, used), step = get_some(delta + i * p + first, used);
          const REAL *before = states + i * each;
          for (long s = 0; s < N; s++) {
            const vec decay = exponential(step * get(rate + s * LANES));
            put(decays + i * each + s * LANES, decay);
            put(states + (i + 1) * each + s * LANES, decay * get(before + s * LANES) + b[i * N + s] * input);
          }
        }
        for (long i = n - 1; i >= 0; i--) {
          const vec input = get_some(u + i * p + first, used), step = get_some(delta + i * p + first, used);
          const vec above = get_some(grad + i * p + first, used);
          vec of_input = {}, of_step = {};
          for (long s = 0; s < N; s++) {
            const long at = i * each + s * LANES;
            const vec of_state = get(g + s * LANES) + c[i * N + s] * above;
            put(of_c + at, get(of_c + at) + above * get(states + at + each));
            put(of_b + at, get(of_b + at) + of_state * input);
            of_input += b[i * N + s] * of_state;
            const vec earlier = of_state * get(decays + at), of_exponent = earlier * get(states + at);
            put(g + s * LANES, earlier);
            put(of_rate + s * LANES, get(of_rate + s * LANES) + of_exponent * step);
            of_step += of_exponent * get(rate + s * LANES);
          }
          put_some(grad_u + i * p + first, of_input, used);
          put_some(grad_delta + i * p + first, of_step, used);
        }
      }
      for (long k = 0; k < n * N; k++) {
        grad_b[k] = total(get(of_b + k * LANES));
        grad_c[k] = total(get(of_c + k * LANES));
      }
      u += n * p, delta += n * p, grad += n * p, grad_u += n * p, grad_delta += n * p;
      b += n * N, c += n * N, grad_b += n * N, grad_c += n * N;
    }
    for (long channel = 0; channel < p; channel++)
      for (long s = 0; s < N; s++)
        grad_a[channel * N + s] = of_rates[(channel / LANES * N + s) * LANES + channel % LANES];
  }
  free(rates);
  return 0;
}
