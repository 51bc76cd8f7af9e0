/* y = softmax(q^T k / sqrt(d)) v of heads of d channels, without a matrix for the whole batch in memory: one vector of
   images at a time, ROWS queries at a time. A number of an image is a lane, so no product adds up across lanes. */

#include "rows.h"

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
  long j = 0;
  for (; j + 4 <= l; j += 4) {
    long i = 0;
    for (; i + 4 <= m; i += 4) ENTRIES(4, 4);
    for (; i < m; i++) ENTRIES(1, 4);
  }
  for (; j < l; j++) {
    long i = 0;
    for (; i + 4 <= m; i += 4) ENTRIES(4, 1);
    for (; i < m; i++) ENTRIES(1, 1);
  }
}

/* exp(scale (p - largest)) of each row of p (rows, n), in place, and the inverse of their sum. */
static void exponentials(REAL *p, REAL *inverses, long rows, long n, REAL scale) {
  for (long r = 0; r < rows; r++, p += n * LANES) {
    vec most = get(p), sum[2] = {};
    for (long j = 1; j < n; j++) most = larger(most, get(p + j * LANES));
    for (long j = 0; j < n; j++) {
      const vec e = exponential((get(p + j * LANES) - most) * scale);
      sum[j & 1] += e;
      put(p + j * LANES, e);
    }
    put(inverses + r * LANES, 1 / (sum[0] + sum[1]));
  }
}

static REAL scale_of(long d) { return (REAL)(1 / sqrt((double)d)); }

/* One head of a vector of images; channels are `row` numbers apart in memory, and tokens `step`. `space` has
   attention_space(n) numbers. */
static long attention_space(long n) { return (2 * ROWS * n + ROWS) * LANES; }

static void attend(const REAL *q, const REAL *k, const REAL *v, REAL *out, REAL *space, long d, long n, long row, long step) {
  REAL *p = space, *inverses = p + 2 * ROWS * n * LANES;
  const strides token = {step / LANES, row / LANES}, channel = {row / LANES, step / LANES}, map = {n, 1};
  for (long i = 0; i < n; i += ROWS) {
    const long rows = n - i < ROWS ? n - i : ROWS;
    product(q + i * step, token, k, channel, p, map, rows, d, n, 0);
    exponentials(p, inverses, rows, n, scale_of(d));
    product(p, map, v, token, out + i * step, token, rows, n, d, 0);
    for (long c = 0; c < d; c++)
      for (long r = 0; r < rows; r++) {
        REAL *at = out + c * row + (i + r) * step;
        put(at, get(at) * get(inverses + r * LANES));
      }
  }
}

/* The gradients of q, k and v, of which those of k and v are added to what is there, given that of `out`, g, which is
   overwritten. With E = exp(scale (q k^T - largest)), 1 / sum = w and g' = w g, the map's gradient is E (g' v^T - w a),
   where a are the row sums of E g' v^T. */
static void attend_backward(const REAL *q, const REAL *k, const REAL *v, REAL *g, REAL *of_q, REAL *of_k, REAL *of_v,
                            REAL *space, long d, long n, long row, long step) {
  REAL *p = space, *s = p + ROWS * n * LANES, *inverses = s + ROWS * n * LANES;
  const strides token = {step / LANES, row / LANES}, channel = {row / LANES, step / LANES}, map = {n, 1}, turned = {1, n};
  const REAL scale = scale_of(d);
  for (long i = 0; i < n; i += ROWS) {
    const long rows = n - i < ROWS ? n - i : ROWS;
    product(q + i * step, token, k, channel, p, map, rows, d, n, 0);
    exponentials(p, inverses, rows, n, scale);
    for (long c = 0; c < d; c++)
      for (long r = 0; r < rows; r++) {
        REAL *at = g + c * row + (i + r) * step;
        put(at, get(at) * get(inverses + r * LANES));
      }
    product(g + i * step, token, v, channel, s, map, rows, d, n, 0);
    product(p, turned, g + i * step, token, of_v, token, n, rows, d, 1);
    for (long r = 0; r < rows; r++) {
      REAL *pr = p + r * n * LANES, *sr = s + r * n * LANES;
      vec along[2] = {};
      for (long j = 0; j < n; j++) along[j & 1] += get(pr + j * LANES) * get(sr + j * LANES);
      const vec mean = (along[0] + along[1]) * get(inverses + r * LANES);
      for (long j = 0; j < n; j++) put(sr + j * LANES, get(pr + j * LANES) * scale * (get(sr + j * LANES) - mean));
    }
    product(s, map, k, token, of_q + i * step, token, rows, n, d, 0);
    product(s, turned, q + i * step, token, of_k, token, n, rows, d, 1);
  }
}

/* (rows, batch), images `first` and following -> (rows, images), zeros beyond the batch; and back */
static void gather(const REAL *from, REAL *to, long rows, long batch, long first, long images) {
  const long count = batch - first < images ? batch - first : images;
  for (long i = 0; i < rows; i++, from += batch, to += images) {
    long l = 0;
    for (; l + LANES <= count; l += LANES) put(to + l, get(from + first + l));
    for (; l < images; l++) to[l] = l < count ? from[first + l] : 0;
  }
}

static void scatter(const REAL *from, REAL *to, long rows, long batch, long first, long images) {
  const long count = batch - first < images ? batch - first : images;
  for (long i = 0; i < rows; i++, from += images, to += batch) {
    long l = 0;
    for (; l + LANES <= count; l += LANES) put(to + first + l, get(from + l));
    for (; l < count; l++) to[first + l] = from[l];
  }
}

/* y (T H, d, n, B) from qkv (T, 3, H, d, n, B). */
int attention_forward(const REAL *qkv, REAL *y, long networks, long heads, long d, long n, long batch) {
  const long row = (n + 1) * LANES, part = d * row, size = d * n * batch;
  REAL *q = numbers(4 * part + attention_space(n)), *k = q + part, *v = k + part, *out = v + part, *space = out + part;
  if (!q) return 1;
  for (long t = 0; t < networks; t++)
    for (long h = 0; h < heads; h++)
      for (long b = 0; b < batch; b += LANES) {
        const REAL *at = qkv + (t * 3 * heads + h) * size;
        for (long i = 0; i < 3 * d; i++) gather(at + i / d * heads * size + i % d * n * batch, q + i * row, n, batch, b, LANES);
        attend(q, k, v, out, space, d, n, row, LANES);
        for (long i = 0; i < d; i++) scatter(out + i * row, y + ((t * heads + h) * d + i) * n * batch, n, batch, b, LANES);
      }
  free(q);
  return 0;
}

/* grad_qkv (T, 3, H, d, n, B), given grad, the gradient of y; the attention maps are computed again. */
int attention_backward(const REAL *qkv, const REAL *grad, REAL *grad_qkv, long networks, long heads, long d, long n,
                       long batch) {
  const long row = (n + 1) * LANES, part = d * row, size = d * n * batch;
  REAL *q = numbers(7 * part + attention_space(n)), *g = q + 3 * part, *of_q = g + part, *space = of_q + 3 * part;
  if (!q) return 1;
  for (long t = 0; t < networks; t++)
    for (long h = 0; h < heads; h++)
      for (long b = 0; b < batch; b += LANES) {
        const long at = (t * 3 * heads + h) * size;
        for (long i = 0; i < 3 * d; i++) gather(qkv + at + i / d * heads * size + i % d * n * batch, q + i * row, n, batch, b, LANES);
        for (long i = 0; i < d; i++) gather(grad + ((t * heads + h) * d + i) * n * batch, g + i * row, n, batch, b, LANES);
        memset(of_q, 0, 3 * part * sizeof(REAL));
        attend_backward(q, q + part, q + 2 * part, g, of_q, of_q + part, of_q + 2 * part, space, d, n, row, LANES);
        for (long i = 0; i < 3 * d; i++)
          scatter(of_q + i * row, grad_qkv + at + i / d * heads * size + i % d * n * batch, n, batch, b, LANES);
      }
  free(q);
  return 0;
}

/* --- x + W_p attention(W norm(x) + b) + b_p ------------------------------------------------------------------------------

   The weights `w` of one network: gain and shift of the norm (c), W (3 c, c), b (3 c), W_p (c, c) and b_p (c). */

/* Of n tokens and a batch: images that are worked on at once, whole vectors of them with enough positions for the
   products; how many such groups there are; positions of a group, in whole slabs; and the distance of channels. */
typedef struct {
  long images, groups, positions, slabs, row;
} shape;

static shape shape_of(long n, long batch) {
  shape s = {.images = LANES};
  while (s.images < batch && n * s.images < 2 * BLOCK) s.images *= 2;
  s.groups = (batch + s.images - 1) / s.images;
  s.positions = n * s.images;
  s.slabs = (s.positions + SLAB - 1) / SLAB * SLAB;
  s.row = s.slabs + LANES;
  return s;
}

/* y from x, both (groups, c, positions); `kept`, as large, is the input of W_p, for the backward pass. */
static int layer_forward(const REAL *x, const REAL *const *w, REAL *kept, REAL *y, long c, long heads, long n, shape s,
                         double eps) {
  const long d = c / heads, each = c * s.row, size = c * s.positions;
  REAL *u = numbers(5 * each + SLAB + 3 * c * c + 3 * c + attention_space(n)), *qkv = u + each, *out = qkv + 3 * each;
  REAL *scale = out + each, *v = scale + SLAB, *e = v + 3 * c * c, *space = e + 3 * c;
  if (!u) return 1;
  memset(out, 0, each * sizeof(REAL)); /* positions that fill up a slab */
  with_norm(w[2], w[3], w[0], w[1], v, e, 3 * c, c);
  for (long b = 0; b < s.groups; b++, x += size, y += size) {
    load(x, u, s.row, c, s.positions, s.positions);
    for (long p = 0; p < s.slabs; p += SLAB) {
      normalise(u + p, scale, s.row, c, (REAL)eps);
      multiply(v, u + p, qkv + p, e, s.row, 3 * c, c, 0);
    }
    for (long h = 0; h < heads; h++)
      for (long l = 0; l < s.images; l += LANES) {
        REAL *q = qkv + h * d * s.row + l;
        attend(q, q + each, q + 2 * each, out + h * d * s.row + l, space, d, n, s.row, s.images);
      }
    for (long p = 0; p < s.slabs; p += SLAB) multiply(w[4], out + p, u + p, w[5], s.row, c, c, 0);
    if (kept) store(out, NULL, kept + b * size, s.row, c, s.positions, s.positions);
    store(u, x, y, s.row, c, s.positions, s.positions);
  }
  free(u);
  return 0;
}

/* The gradients `to` of the weights and of x, given grad, the gradient of y. */
static int layer_backward(const REAL *x, const REAL *kept, const REAL *const *w, const REAL *grad, REAL *grad_x,
                          REAL *const *to, long c, long heads, long n, shape s, double eps) {
  const long d = c / heads, each = c * s.row, size = c * s.positions, sums = (4 * c * c + 4 * c) * LANES;
  REAL *u = numbers(10 * each + sums + s.row + 7 * c * c + 3 * c + attention_space(n)), *qkv = u + each, *y = qkv + 3 * each;
  if (!u) return 1;
  REAL *g = y + each, *of_y = g + each, *of_qkv = of_y + each, *s_qkv = of_qkv + 3 * each, *s_p = s_qkv + 3 * c * c * LANES;
  REAL *s_b = s_p + c * c * LANES, *s_bp = s_b + 3 * c * LANES, *scale = s_bp + c * LANES, *v = scale + s.row;
  REAL *vt = v + 3 * c * c, *pt = vt + 3 * c * c, *e = pt + c * c, *space = e + 3 * c;
  memset(of_qkv, 0, (3 * each + sums) * sizeof(REAL));
  with_norm(w[2], w[3], w[0], w[1], v, e, 3 * c, c);
  transpose(v, vt, 3 * c, c);
  transpose(w[4], pt, c, c);
  for (long b = 0; b < s.groups; b++, x += size, kept += size, grad += size, grad_x += size) {
    load(x, u, s.row, c, s.positions, s.positions);
    load(kept, y, s.row, c, s.positions, s.positions);
    load(grad, g, s.row, c, s.positions, s.positions);
    for (long p = 0; p < s.slabs; p += SLAB) {
      normalise(u + p, scale + p, s.row, c, (REAL)eps);
      multiply(v, u + p, qkv + p, e, s.row, 3 * c, c, 0);
      multiply(pt, g + p, of_y + p, NULL, s.row, c, c, 0);
    }
    add_products(g, y, s_p, s.row, c, c, s.slabs);
    add_sums(g, s_bp, s.row, c, s.slabs);
    memset(of_qkv + each, 0, 2 * each * sizeof(REAL));
    for (long h = 0; h < heads; h++)
      for (long l = 0; l < s.images; l += LANES) {
        const long at = h * d * s.row + l;
        REAL *q = qkv + at, *of_q = of_qkv + at;
        attend_backward(q, q + each, q + 2 * each, of_y + at, of_q, of_q + each, of_q + 2 * each, space, d, n, s.row, s.images);
      }
    add_products(of_qkv, u, s_qkv, s.row, 3 * c, c, s.slabs);
    add_sums(of_qkv, s_b, s.row, 3 * c, s.slabs);
    for (long p = 0; p < s.slabs; p += SLAB) {
      multiply(vt, of_qkv + p, g + p, NULL, s.row, c, 3 * c, 0);
      normalise_backward(g + p, u + p, scale + p, s.row, c);
    }
    store(g, grad, grad_x, s.row, c, s.positions, s.positions);
  }
  finish(s_qkv, to[2], 3 * c * c);
  finish(s_b, to[3], 3 * c);
  finish(s_p, to[4], c * c);
  finish(s_bp, to[5], c);
  of_norm(w[2], w[0], w[1], to[2], to[3], to[0], to[1], 3 * c, c);
  free(u);
  return 0;
}

/* --- consecutive blocks of transformers ---------------------------------------------------------------------------------- */

#define WEIGHTS 12 /* of a block: those of the attention layer, and gain, shift, W1, b1, W2 and b2 of the MLP */

int mlp_forward(const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *,
                const REAL *, REAL *, long, long, long, long, long, double);
int mlp_backward(const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *, const REAL *,
                 REAL *, REAL *, REAL *, REAL *, REAL *, REAL *, REAL *, long, long, long, long, long, double);

/* Images in all groups, zeros among them. */
int transformer_images(long n, long batch) { return shape_of(n, batch).images * shape_of(n, batch).groups; }

/* y (T c, n, B) from x and the weights of each block; `kept`, T 3 blocks c n images numbers, is filled for the backward
   pass unless it is NULL: of each network and block its input, the input of W_p, and that of the MLP, group by group. */
int transformer_forward(const REAL *x, const REAL *const *weights, REAL *kept, REAL *y, long blocks, long networks, long c,
                        long m, long heads, long n, long batch, double eps) {
  const shape s = shape_of(n, batch);
  const long part = c * s.positions, size = part * s.groups;
  const long sizes[WEIGHTS] = {c, c, 3 * c * c, 3 * c, c * c, c, c, c, m * c, m, c * m, c};
  REAL *memory = numbers(3 * size);
  int failed = !memory;
  for (long t = 0; t < networks && !failed; t++) {
    REAL *in = kept ? kept + t * blocks * 3 * size : memory;
    for (long b = 0; b < s.groups; b++) gather(x + t * c * n * batch, in + b * part, c * n, batch, b * s.images, s.images);
    for (long l = 0; l < blocks && !failed; l++) {
      const REAL *w[WEIGHTS];
      for (int i = 0; i < WEIGHTS; i++) w[i] = weights[l * WEIGHTS + i] + t * sizes[i];
      REAL *const middle = in + 2 * size, *next = l + 1 == blocks ? memory : kept ? in + 3 * size : in;
      failed = layer_forward(in, w, kept ? in + size : NULL, middle, c, heads, n, s, eps) ||
               mlp_forward(middle, w[6], w[7], w[8], w[9], w[10], w[11], middle, next, 1, s.groups, c, m, s.positions, eps);
      in = next;
    }
    for (long b = 0; b < s.groups; b++) scatter(memory + b * part, y + t * c * n * batch, c * n, batch, b * s.images, s.images);
  }
  free(memory);
  return failed;
}

/* grad_x and the gradients of all weights, given grad, the gradient of y, and what the forward pass kept. */
int transformer_backward(const REAL *grad, const REAL *const *weights, const REAL *kept, REAL *grad_x, REAL *const *grads,
                         long blocks, long networks, long c, long m, long heads, long n, long batch, double eps) {
  const shape s = shape_of(n, batch);
  const long part = c * s.positions, size = part * s.groups;
  const long sizes[WEIGHTS] = {c, c, 3 * c * c, 3 * c, c * c, c, c, c, m * c, m, c * m, c};
  REAL *g = numbers(2 * size), *inner = g + size;
  int failed = !g;
  for (long t = 0; t < networks && !failed; t++) {
    for (long b = 0; b < s.groups; b++) gather(grad + t * c * n * batch, g + b * part, c * n, batch, b * s.images, s.images);
    for (long l = blocks - 1; l >= 0 && !failed; l--) {
      const REAL *w[WEIGHTS], *in = kept + (t * blocks + l) * 3 * size;
      REAL *to[WEIGHTS];
      for (int i = 0; i < WEIGHTS; i++) {
        w[i] = weights[l * WEIGHTS + i] + t * sizes[i];
        to[i] = grads[l * WEIGHTS + i] + t * sizes[i];
      }
      failed = mlp_backward(in + 2 * size, w[6], w[7], w[8], w[9], w[10], g, g, inner, to[6], to[7], to[8], to[9], to[10],
                            to[11], 1, s.groups, c, m, s.positions, eps) ||
               layer_backward(in, in + size, w, inner, g, to, c, heads, n, s, eps);
    }
    for (long b = 0; b < s.groups; b++) scatter(g + b * part, grad_x + t * c * n * batch, c * n, batch, b * s.images, s.images);
  }
  free(g);
  return failed;
}
