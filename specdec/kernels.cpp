// A decoding step of a Llama-like model on a CPU, in bfloat16, straight from the weights as transformers holds them.
//
// At a few tokens a step is bound by reading the weights once; everything else is kept out of the way. Every row is
// summed in one order, whatever rows it shares the forward with: a token's hidden state is the same, bit for bit,
// alone, in any batch, and in a round of K+1 tokens.
// Letters: R tokens of this forward (B rows x N), H hidden, O outputs, D head width, S slots.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef uint16_t bf16;
typedef float lanes __attribute__((vector_size(64)));  // the compiler splits it where registers are narrower
typedef uint32_t words __attribute__((vector_size(64)));
typedef int32_t integers __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

struct Shape {
  int64_t layers, hidden, inner, heads, kv_heads, width, slots;
  float eps, scale;
};

struct Layer {  // pointers; null where the model has none
  const bf16 *input_norm, *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm, *post_norm;
  const bf16 *gate, *up, *down;
  bf16 *keys, *values;  // [B, kv_heads, S, D]
  int64_t window;       // 0: full attention
};

static inline float widen(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline bf16 narrow(float x) {  // round to nearest even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline words load(const bf16* p) {
  words w;
  std::memcpy(&w, p, 64);
  return w;
}
static inline lanes even(words w) { return (lanes)(w << 16); }
static inline lanes odd(words w) { return (lanes)(w & 0xffff0000u); }

// The sums of four, in one order of additions: over halves, quarters, then pairs.
static inline four sum(const lanes& a, const lanes& b, const lanes& c, const lanes& d) {
  four q[4];
  const lanes* each[] = {&a, &b, &c, &d};
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    eight h[2];
    std::memcpy(h, each[i], 64);
    eight s = h[0] + h[1];
    four t[2];
    std::memcpy(t, &s, 32);
    q[i] = t[0] + t[1];
  }
  four low01 = {q[0][0], q[0][1], q[1][0], q[1][1]}, high01 = {q[0][2], q[0][3], q[1][2], q[1][3]};
  four low23 = {q[2][0], q[2][1], q[3][0], q[3][1]}, high23 = {q[2][2], q[2][3], q[3][2], q[3][3]};
  four s01 = low01 + high01, s23 = low23 + high23;
  four first = {s01[0], s01[2], s23[0], s23[2]}, second = {s01[1], s01[3], s23[1], s23[3]};
  return first + second;
}

static inline float sum(const lanes& x) { return sum(x, x, x, x)[0]; }

static inline lanes exponential(lanes x) {  // relative error 2e-7; 0 below -87, where float has no normal number left
  const float log2e = 1.44269504f, high = 0.693359375f, low = -2.12194440e-4f;
  lanes n = x * log2e;
  integers i = __builtin_convertvector(n + (n < 0 ? lanes{} - 0.5f : lanes{} + 0.5f), integers);
  n = __builtin_convertvector(i, lanes);
  lanes r = x - n * high - n * low;
  lanes p = lanes{} + 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = p * r + c;
  lanes scale = (lanes)((i + 127) << 23);
  return x < -87.0f ? lanes{} : (p * r * r + r + 1.0f) * scale;
}

// Activations of a linear, in the form its inner loop multiplies 32 at a time with bf16 weights.
#ifdef __AVX512BF16__
typedef bf16 active;
struct Chunk {
  __m512bh x;
  explicit Chunk(const active* p) : x((__m512bh)load(p)) {}
};
static inline lanes multiply(lanes total, words weights, const Chunk& c) {
  return (lanes)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, c.x);
}
static void unpack(const bf16* x, active* out, int64_t size) { std::memcpy(out, x, size * sizeof(bf16)); }
#else
typedef float active;  // 16 even, then 16 odd of each 32: the order in which bf16 weights unpack
struct Chunk {
  lanes e, o;
  explicit Chunk(const active* p) { std::memcpy(&e, p, 64), std::memcpy(&o, p + 16, 64); }
};
static inline lanes multiply(lanes total, words weights, const Chunk& c) {
  total += even(weights) * c.e;
  return total + odd(weights) * c.o;
}
static void unpack(const bf16* x, active* out, int64_t size) {
  for (int64_t k = 0; k < size; k += 32) {
    lanes e = even(load(x + k)), o = odd(load(x + k));
    std::memcpy(out + k, &e, 64), std::memcpy(out + k + 16, &o, 64);
  }
}
#endif

static const int64_t OUTPUTS = 4;  // outputs summed together: a block's weights stay in the first cache
static const int64_t AHEAD = 4;    // blocks fetched early, into the second cache: many may be on their way at once

template <int ROWS, bool FETCH, class Store>
static inline void sum_block(const active* x, const bf16* const* w, int64_t size, int64_t row, int64_t valid,
                             Store store) {
  lanes total[OUTPUTS][ROWS] = {};
  for (int64_t k = 0; k < size; k += 32) {
#pragma GCC unroll 16
    for (int j = 0; j < OUTPUTS; j++) {
      words weights = load(w[j] + k);  // a line used, a line asked for: reading and multiplying overlap
      if (FETCH) __builtin_prefetch(w[0] + AHEAD * OUTPUTS * size + OUTPUTS * k + 32 * j, 0, 2);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) total[j][r] = multiply(total[j][r], weights, Chunk(x + (row + r) * size + k));
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) {
    four sums = sum(total[0][r], total[1][r], total[2][r], total[3][r]);
    for (int64_t j = 0; j < valid; j++) store(row + r, j, sums[j]);
  }
}

// out[r, o] = sum_k x[r, k] w[o, k] for one block of outputs; store(r, o, value).
template <class Store>
static inline void linear_block(const active* x, const bf16* w, int64_t size, int64_t outputs, int64_t rows,
                                int64_t block, Store store) {
  int64_t first = block * OUTPUTS, valid = std::min(OUTPUTS, outputs - first);
  const bf16* each[OUTPUTS];
  for (int64_t j = 0; j < OUTPUTS; j++) each[j] = w + (first + std::min(j, valid - 1)) * size;
  auto put = [&](int64_t r, int64_t j, float value) { store(r, first + j, value); };
  if (rows == 1) return sum_block<1, true>(x, each, size, 0, valid, put);
  if (rows == 2) return sum_block<2, true>(x, each, size, 0, valid, put);
  if (rows == 3) return sum_block<3, true>(x, each, size, 0, valid, put);
  sum_block<4, true>(x, each, size, 0, valid, put);
  int64_t r = 4;
  for (; r + 4 <= rows; r += 4) sum_block<4, false>(x, each, size, r, valid, put);
  if (rows - r == 3) sum_block<3, false>(x, each, size, r, valid, put);
  if (rows - r == 2) sum_block<2, false>(x, each, size, r, valid, put);
  if (rows - r == 1) sum_block<1, false>(x, each, size, r, valid, put);
}

static inline int64_t blocks(int64_t outputs) { return (outputs + OUTPUTS - 1) / OUTPUTS; }

// RMS norm with transformers' rounding: to bf16 before the weight. In place when x == out.
static void norm(const bf16* x, const bf16* weight, bf16* out, int64_t size, float eps) {
  lanes squares = {};
  for (int64_t i = 0; i < size; i += 32) {
    lanes e = even(load(x + i)), o = odd(load(x + i));
    squares += e * e, squares += o * o;
  }
  float factor = 1 / std::sqrt(sum(squares) / size + eps);
  for (int64_t i = 0; i < size; i++) out[i] = narrow(widen(weight[i]) * widen(narrow(widen(x[i]) * factor)));
}

static void rotate(bf16* x, const bf16* cos, const bf16* sin, int64_t width) {
  for (int64_t i = 0, half = width / 2; i < half; i++) {
    float a = widen(x[i]), b = widen(x[i + half]);
    x[i] = narrow(a * widen(cos[i]) - b * widen(sin[i]));
    x[i + half] = narrow(b * widen(cos[i + half]) + a * widen(sin[i + half]));
  }
}

// One query [D] over the keys of its row from `first` to `last`; scores is scratch for as many.
static void attend(const bf16* query, const bf16* keys, const bf16* values, int64_t first, int64_t last, int64_t width,
                   float scale, float* scores, bf16* out) {
  active q[512];
  float mixed[512];
  unpack(query, q, width);
  float top = -INFINITY;
  int64_t count = last - first + 1, padded = (count + 15) / 16 * 16;
  for (int64_t s = 0; s < padded; s += 4) {
    lanes total[4] = {};
    for (int64_t i = 0; i < 4; i++) {
      const bf16* key = keys + std::min(first + s + i, last) * width;
      for (int64_t k = 0; k < width; k += 32) total[i] = multiply(total[i], load(key + k), Chunk(q + k));
    }
    four dots = sum(total[0], total[1], total[2], total[3]) * scale;
    for (int64_t i = 0; i < 4; i++) {
      scores[s + i] = s + i < count ? dots[i] : -INFINITY;
      top = std::max(top, scores[s + i]);
    }
  }
  lanes mass = {};
  for (int64_t s = 0; s < padded; s += 16) {
    lanes part;
    std::memcpy(&part, scores + s, 64);
    part = exponential(part - top);
    mass += part;
    std::memcpy(scores + s, &part, 64);
  }
  float all = sum(mass);
  std::memset(mixed, 0, width * sizeof(float));
  for (int64_t s = first; s <= last; s++) {
    float share = scores[s - first] / all;
    for (int64_t k = 0; k < width; k += 32) {
      words w = load(values + s * width + k);
      lanes e, o;
      std::memcpy(&e, mixed + k, 64);
      std::memcpy(&o, mixed + k + 16, 64);
      e += even(w) * share;
      o += odd(w) * share;
      std::memcpy(mixed + k, &e, 64);
      std::memcpy(mixed + k + 16, &o, 64);
    }
  }
  for (int64_t k = 0; k < width; k += 32)
    for (int64_t i = 0; i < 16; i++) {
      out[k + 2 * i] = narrow(mixed[k + i]);
      out[k + 2 * i + 1] = narrow(mixed[k + 16 + i]);
    }
}

static inline float biased(float value, const bf16* bias, int64_t o) { return bias ? value + widen(bias[o]) : value; }

extern "C" {

// x [R, size], w [outputs, size], bias [outputs] or null -> out [R, outputs]
void linear(const bf16* x, const bf16* w, const bf16* bias, bf16* out, int64_t rows, int64_t size, int64_t outputs,
            int threads) {
  std::vector<active> unpacked(rows * size);
  for (int64_t r = 0; r < rows; r++) unpack(x + r * size, unpacked.data() + r * size, size);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks(outputs); b++)
    linear_block(unpacked.data(), w, size, outputs, rows, b,
                 [&](int64_t r, int64_t o, float value) { out[r * outputs + o] = narrow(biased(value, bias, o)); });
}

// hidden [R, H] in and out; token r is at positions[r] of row r / columns; cos, sin [S, D]; out: final norm applied.
void decode(const Shape* shape, const Layer* layers, const bf16* final_norm, bf16* hidden, const int64_t* positions,
            int64_t rows, int64_t columns, const bf16* cos, const bf16* sin, int threads) {
  const int64_t H = shape->hidden, D = shape->width, S = shape->slots, I = shape->inner;
  const int64_t Q = shape->heads * D, KV = shape->kv_heads * D, group = shape->heads / shape->kv_heads;
  const float eps = shape->eps;
  std::vector<bf16> normed(rows * H), q(rows * Q), k(rows * KV), v(rows * KV), mixed(rows * Q);
  std::vector<bf16> gate(rows * I), up(rows * I);
  std::vector<active> x(rows * std::max({H, Q, I}));
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scores(S + 16);
    for (int64_t l = 0; l < shape->layers; l++) {
      const Layer& layer = layers[l];
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++) {
        norm(hidden + r * H, layer.input_norm, &normed[r * H], H, eps);
        unpack(&normed[r * H], &x[r * H], H);
      }
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks(Q) + 2 * blocks(KV); b++) {
        auto project = [&](const bf16* w, const bf16* bias, bf16* out, int64_t outputs, int64_t block) {
          linear_block(x.data(), w, H, outputs, rows, block,
                       [&](int64_t r, int64_t o, float sum) { out[r * outputs + o] = narrow(biased(sum, bias, o)); });
        };
        int64_t kv = b - blocks(Q);
        if (kv < 0) project(layer.q, layer.q_bias, q.data(), Q, b);
        else if (kv < blocks(KV)) project(layer.k, layer.k_bias, k.data(), KV, kv);
        else project(layer.v, layer.v_bias, v.data(), KV, kv - blocks(KV));
      }
#pragma omp for schedule(static)
      for (int64_t task = 0; task < rows * shape->kv_heads; task++) {  // rotate, and write to the cache
        int64_t r = task / shape->kv_heads, h = task % shape->kv_heads, p = positions[r];
        for (int64_t g = 0; g < group; g++) {
          bf16* query = &q[r * Q + (h * group + g) * D];
          if (layer.q_norm) norm(query, layer.q_norm, query, D, eps);
          rotate(query, cos + p * D, sin + p * D, D);
        }
        bf16* key = &k[r * KV + h * D];
        if (layer.k_norm) norm(key, layer.k_norm, key, D, eps);
        rotate(key, cos + p * D, sin + p * D, D);
        int64_t slot = ((r / columns * shape->kv_heads + h) * S + p) * D;
        std::memcpy(layer.keys + slot, key, D * sizeof(bf16));
        std::memcpy(layer.values + slot, &v[r * KV + h * D], D * sizeof(bf16));
      }
#pragma omp for schedule(static)
      for (int64_t task = 0; task < rows * shape->heads; task++) {
        int64_t r = task / shape->heads, h = task % shape->heads, p = positions[r];
        int64_t first = layer.window ? std::max<int64_t>(0, p - layer.window + 1) : 0;
        int64_t slots = (r / columns * shape->kv_heads + h / group) * S * D;
        attend(&q[r * Q + h * D], layer.keys + slots, layer.values + slots, first, p, D, shape->scale, scores.data(),
               &mixed[r * Q + h * D]);
        unpack(&mixed[r * Q + h * D], &x[r * Q + h * D], D);
      }
      auto add = [&](int64_t r, int64_t o, float value) {
        hidden[r * H + o] = narrow(widen(hidden[r * H + o]) + widen(narrow(value)));
      };
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks(H); b++)
        linear_block(x.data(), layer.o, Q, H, rows, b,
                     [&](int64_t r, int64_t o, float value) { add(r, o, biased(value, layer.o_bias, o)); });
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++) {
        norm(hidden + r * H, layer.post_norm, &normed[r * H], H, eps);
        unpack(&normed[r * H], &x[r * H], H);
      }
#pragma omp for schedule(static)
      for (int64_t b = 0; b < 2 * blocks(I); b++) {
        bool second = b >= blocks(I);
        bf16* out = second ? up.data() : gate.data();
        linear_block(x.data(), second ? layer.up : layer.gate, H, I, rows, second ? b - blocks(I) : b,
                     [&](int64_t r, int64_t o, float value) { out[r * I + o] = narrow(value); });
      }
#pragma omp for schedule(static)
      for (int64_t b = 0; b < rows * I / 32; b++) {
        bf16* g = &gate[b * 32];
        float silu[32];  // even places, then odd ones
        lanes e = even(load(g)), o = odd(load(g));
        e = e / (1.0f + exponential(-e)), o = o / (1.0f + exponential(-o));
        std::memcpy(silu, &e, 64), std::memcpy(silu + 16, &o, 64);
        for (int64_t i = 0; i < 32; i++) g[i] = narrow(widen(narrow(silu[i / 2 + i % 2 * 16])) * widen(up[b * 32 + i]));
        unpack(g, &x[b * 32], 32);
      }
#pragma omp for schedule(static)
      for (int64_t b = 0; b < blocks(H); b++) linear_block(x.data(), layer.down, I, H, rows, b, add);
    }
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) norm(hidden + r * H, final_norm, hidden + r * H, H, eps);
  }
}
}
