// Passes of the sparse codecs, each as one loop over blocks that stay in a core's cache.
//
// They give the bytes of the eager definitions (codecs/topk.py, randomk.py, threshold.py; passes.py,
// memory.py): the same products and sums, each rounded on its own, in the same order. Hence
// -ffp-contract=off and nothing of -ffast-math. Only the sum of squares that a limit of threshold is
// made of is in another order, in double precision.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int kLargestBlock = 4096;  // of topk, whose places have 12 bits
constexpr int kRows = 16;            // of the columns whose maxima are searched first

enum ValueType : int64_t { kBFloat16, kFloat32, kInt8 };

}  // namespace

// As in native.py.
struct Call {
  float* grad;      // (blocks, block)
  float* residual;  // null: no error feedback
  float* velocity;  // null: no momentum correction
  const int32_t* keys;
  const float* scale;
  int64_t blocks, block, k, values, received;
  float momentum;
  float encode_factor;  // gradient -> what is encoded
  float own_factor;     // own decoded payload -> what it stands for
  float weight;         // of a received payload in the mean
  float gain;           // of an unbiased choice
  float per_level;      // largest magnitude -> scale of int8 values
};

// One payload, as in native.py.
struct Planes {
  uint8_t* places;
  void* values;
  uint16_t* scales;
};

namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// A magnitude as an integer: the same order, and NaN above infinity.
int32_t size_of(float x) { return static_cast<int32_t>(bits_of(x) & 0x7fffffff); }

constexpr int32_t kInfinity = 0x7f800000;

uint16_t to_bfloat16(float x) {
  if (x != x) return 0x7fc0;
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bfloat16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }

struct Limit {
  int32_t least;  // k sizes are at least this
  int equal;      // and of those that equal it, so many belong to the k, the first ones
};

// The k-th largest of n sizes, by bisection; a lower number where that separates exactly k.
Limit limit_of(const int32_t* sizes, int n, int k) {
  if (n == k) return {0, n};
  int32_t largest = 0;
  for (int i = 0; i < n; ++i) largest = sizes[i] > largest ? sizes[i] : largest;
  int64_t low = 0, high = int64_t{largest} + 1;  // at least k are >= low, fewer are >= high
  int above = 0;                                 // sizes >= high
  while (high - low > 1) {
    const int32_t middle = static_cast<int32_t>(low + (high - low) / 2);
    int32_t count = 0;
    for (int i = 0; i < n; ++i) count += sizes[i] >= middle;
    if (count == k) return {middle, n};
    if (count > k) {
      low = middle;
    } else {
      high = middle;
      above = count;
    }
  }
  return {static_cast<int32_t>(low), k - above};
}

// Columns of a block: of the k that have the largest maxima, each has one of the k largest sizes.
int columns_of(int n, int k) { return 2 * k <= n / kRows ? n / kRows : n; }

// Places of the k largest of n numbers, ascending; of equal ones the first.
void choose(const float* x, int n, int k, const int32_t* maxima, uint16_t* chosen) {
  // At least k sizes are at least this, and few more.
  const int32_t start = limit_of(maxima, columns_of(n, k), k).least;
  uint8_t large[kLargestBlock];
  for (int i = 0; i < n; ++i) large[i] = size_of(x[i]) >= start;
  uint16_t places[kLargestBlock];
  int32_t found[kLargestBlock];
  int count = 0;
  for (int i = 0; i < n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, large + i, sizeof eight);
    if (!eight) continue;
    for (int j = i; j < i + 8; ++j) {
      places[count] = static_cast<uint16_t>(j);
      found[count] = size_of(x[j]);
      count += large[j];
    }
  }
  const Limit limit = limit_of(found, count, k);
  int equal = limit.equal, taken = 0;
  for (int i = 0; i < count; ++i)
    if (found[i] > limit.least || (found[i] == limit.least && equal-- > 0))
      chosen[taken++] = places[i];
}

// memory.py: what is compensated of element i.
float compensated(const Call& c, int64_t i, float scale) {
  const float x = c.grad[i];
  if (c.velocity) return x + (c.residual[i] + c.velocity[i] * c.momentum) * scale;
  return c.residual ? x + c.residual[i] * scale : x;
}

// What is encoded of n elements, and the largest size of every column.
template <class Value>
void load_as(Value value, int64_t n, int64_t columns, float* out, int32_t* maxima) {
  std::memset(maxima, 0, columns * sizeof(int32_t));
  for (int64_t from = 0; from < n; from += columns)
    for (int64_t i = 0; i < columns; ++i) {
      const float x = value(from + i);
      out[from + i] = x;
      maxima[i] = size_of(x) > maxima[i] ? size_of(x) : maxima[i];
    }
}

void load(const Call& c, int64_t from, int64_t n, int64_t columns, float* out, int32_t* maxima) {
  const float *g = c.grad + from, scale = *c.scale, m = c.momentum, factor = c.encode_factor;
  const float* e = c.residual ? c.residual + from : nullptr;
  const float* u = c.velocity ? c.velocity + from : nullptr;
  const auto load_as_of = [&](auto value) { load_as(value, n, columns, out, maxima); };
  if (u)
    load_as_of([=](int64_t i) { return (g[i] + (e[i] + u[i] * m) * scale) * factor; });
  else if (e)
    load_as_of([=](int64_t i) { return (g[i] + e[i] * scale) * factor; });
  else
    load_as_of([=](int64_t i) { return g[i] * factor; });
}

// A block as it was encoded, where that was kept.
struct Loaded {
  alignas(64) float x[kLargestBlock];
  bool whole = false;  // all of the block is in x, and finite
};

struct TopK {
  static bool is_lost(float) { return false; }

  static void encode(const Call& c, const Planes& own, int64_t b, Loaded& loaded) {
    const int n = static_cast<int>(c.block), k = static_cast<int>(c.k), half = k / 2;
    float* x = loaded.x;
    alignas(64) int32_t maxima[kLargestBlock];
    uint16_t at[kLargestBlock];
    load(c, b * n, n, columns_of(n, k), x, maxima);
    choose(x, n, k, maxima, at);
    int32_t largest = 0;
    for (int i = 0; i < k; ++i) largest = std::max(largest, size_of(x[at[i]]));
    loaded.whole = largest < kInfinity;
    uint8_t* places = own.places + b * half * 3;
    for (int i = 0; i < half; ++i) {
      const int first = at[i], second = at[half + i];
      places[i] = static_cast<uint8_t>(first);
      places[half + i] = static_cast<uint8_t>((first >> 8) | ((second >> 8) << 4));
      places[2 * half + i] = static_cast<uint8_t>(second);
    }
    if (c.values == kBFloat16) {
      auto values = static_cast<uint16_t*>(own.values) + b * k;
      for (int i = 0; i < k; ++i) values[i] = to_bfloat16(x[at[i]]);
    } else if (c.values == kFloat32) {
      auto values = static_cast<float*>(own.values) + b * k;
      for (int i = 0; i < k; ++i) values[i] = x[at[i]];
    } else {
      auto codes = static_cast<int8_t*>(own.values) + b * k;
      const float scale = from_bits(bits_of(from_bits(largest) * c.per_level) & 0xffff0000u);
      const float per_step = 1.0f / (scale < 0x1p-126f ? 0x1p-126f : scale);
      for (int i = 0; i < k; ++i) {
        const float code = std::nearbyint(x[at[i]] * per_step);
        codes[i] = code == code ? static_cast<int8_t>(code) : 0;
      }
      own.scales[b] = to_bfloat16(scale);
    }
  }

  static void decode(const Call& c, const Planes& payload, int64_t b, uint16_t* at, float* value) {
    const int k = static_cast<int>(c.k), half = k / 2;
    const uint8_t* places = payload.places + b * half * 3;
    for (int i = 0; i < half; ++i) {
      const int middle = places[half + i];
      at[i] = static_cast<uint16_t>(places[i] | ((middle & 15) << 8));
      at[half + i] = static_cast<uint16_t>(places[2 * half + i] | ((middle >> 4) << 8));
    }
    if (c.values == kBFloat16) {
      auto values = static_cast<const uint16_t*>(payload.values) + b * k;
      for (int i = 0; i < k; ++i) value[i] = from_bfloat16(values[i]);
    } else if (c.values == kFloat32) {
      std::memcpy(value, static_cast<const float*>(payload.values) + b * k, k * sizeof(float));
    } else {
      auto codes = static_cast<const int8_t*>(payload.values) + b * k;
      const float scale = from_bfloat16(payload.scales[b]);
      for (int i = 0; i < k; ++i) value[i] = static_cast<float>(codes[i]) * scale;
    }
  }
};

struct RandomK {
  // Whether the first value is of a block that is not finite; all of it then decodes to NaN.
  static bool is_lost(float first) { return first != first; }

  // noise.py
  static uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
  }

  static void places(const Call& c, int64_t b, uint16_t* at) {
    const uint32_t key = static_cast<uint32_t>(c.keys[b]);
    const uint32_t start = mix(key), step = mix(key + 0x9e3779b9u) | 1;
    const uint32_t mask = static_cast<uint32_t>(c.block) - 1;
    for (uint32_t i = 0; i < c.k; ++i) at[i] = static_cast<uint16_t>((start + i * step) & mask);
  }

  static void encode(const Call& c, const Planes& own, int64_t b, Loaded& loaded) {
    const int64_t from = b * c.block, size = std::min<int64_t>(c.block, kLargestBlock);
    alignas(64) int32_t maxima[kLargestBlock / kRows];
    int32_t largest = 0;
    for (int64_t start = 0; start < c.block; start += size) {
      load(c, from + start, size, size / kRows, loaded.x, maxima);
      largest = std::max(largest, *std::max_element(maxima, maxima + size / kRows));
    }
    loaded.whole = size == c.block && largest < kInfinity;
    const float poison = largest >= kInfinity ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
    std::vector<uint16_t> at(c.k);
    places(c, b, at.data());
    float* values = static_cast<float*>(own.values) + b * c.k;
    for (int64_t i = 0; i < c.k; ++i)
      values[i] = compensated(c, from + at[i], *c.scale) * c.encode_factor + poison;
  }

  static void decode(const Call& c, const Planes& payload, int64_t b, uint16_t* at, float* value) {
    places(c, b, at);
    const float* values = static_cast<const float*>(payload.values) + b * c.k;
    for (int64_t i = 0; i < c.k; ++i) value[i] = values[i] * c.gain;
  }
};

bool is_finite(float x) { return size_of(x) < kInfinity; }

// memory.py: the new state of n elements of which nothing is sent. What is not finite stays.
void keep_any(const float* g, float* e, float* u, int64_t n, float m, float scale) {
  if (u && scale == 1)
    for (int64_t i = 0; i < n; ++i) {
      const float before = u[i] * m, left = g[i] + (e[i] + before);
      const bool finite = is_finite(left);
      e[i] = finite ? left : e[i];
      u[i] = finite ? g[i] + before : u[i];
    }
  else if (u)
    for (int64_t i = 0; i < n; ++i) {
      const float before = u[i] * m, left = (g[i] + (e[i] + before) * scale) / scale;
      const bool finite = is_finite(left);
      e[i] = finite ? left : e[i];
      u[i] = finite ? g[i] / scale + before : u[i];
    }
  else if (scale == 1)
    for (int64_t i = 0; i < n; ++i) {
      const float left = g[i] + e[i];
      e[i] = is_finite(left) ? left : e[i];
    }
  else
    for (int64_t i = 0; i < n; ++i) {
      const float left = (g[i] + e[i] * scale) / scale;
      e[i] = is_finite(left) ? left : e[i];
    }
}

// The same where `scale` is 1 and x, what was encoded, is all finite.
void keep_finite(const float* x, const float* g, float* e, float* u, int64_t n, float m) {
  std::memcpy(e, x, n * sizeof(float));
  if (u)
    for (int64_t i = 0; i < n; ++i) u[i] = g[i] + u[i] * m;
}

// Of the elements of a block that are sent: their places, values and, of before and after, state.
struct Sent {
  std::vector<uint16_t> at;
  std::vector<float> value, left, residual, velocity;
  explicit Sent(int64_t k) : at(k), value(k), left(k), residual(k), velocity(k) {}
};

// The new state of a block, of which `own` says something.
template <class Codec>
void commit(const Call& c, const Planes& own, int64_t b, Sent& sent, const Loaded* loaded) {
  const int64_t n = c.block, k = c.k, from = b * n;
  const float scale = *c.scale;
  float *e = c.residual + from, *u = c.velocity ? c.velocity + from : nullptr;
  Codec::decode(c, own, b, sent.at.data(), sent.value.data());
  if (Codec::is_lost(sent.value[0])) return;
  for (int64_t i = 0; i < k; ++i) {
    const int64_t place = sent.at[i];
    sent.value[i] *= c.own_factor;
    sent.left[i] = (compensated(c, from + place, scale) - sent.value[i]) / scale;
    sent.residual[i] = e[place];
    if (u) sent.velocity[i] = u[place];
  }
  if (loaded && loaded->whole && scale == 1 && c.encode_factor == 1)
    keep_finite(loaded->x, c.grad + from, e, u, n, c.momentum);
  else
    keep_any(c.grad + from, e, u, n, c.momentum, scale);
  for (int64_t i = 0; i < k; ++i) {
    const int64_t place = sent.at[i];
    const bool finite = is_finite(sent.left[i]);
    e[place] = finite ? sent.left[i] : sent.residual[i];
    if (u && !finite) u[place] = sent.velocity[i];
    if (u && finite && sent.value[i] != 0) u[place] = 0;
  }
}

template <class Codec>
void encode_all(const Call& c, const Planes& own) {
  Loaded loaded;
  for (int64_t b = 0; b < c.blocks; ++b) Codec::encode(c, own, b, loaded);
}

template <class Codec>
void encode_and_commit_all(const Call& c, const Planes& own) {
  Sent sent(c.k);
  Loaded loaded;
  for (int64_t b = 0; b < c.blocks; ++b) {
    Codec::encode(c, own, b, loaded);
    if (c.residual) commit<Codec>(c, own, b, sent, &loaded);
  }
}

template <class Codec>
void decode_all(const Call& c, const Planes& own, const Planes* received) {
  const int64_t n = c.block, k = c.k;
  Sent sent(k);
  for (int64_t b = 0; b < c.blocks; ++b) {
    float* g = c.grad + b * n;
    if (c.residual) commit<Codec>(c, own, b, sent, nullptr);
    std::memset(g, 0, n * sizeof(float));
    for (int64_t r = 0; r < c.received; ++r) {
      const uint16_t* at = sent.at.data();
      const float* value = sent.value.data();
      Codec::decode(c, received[r], b, sent.at.data(), sent.value.data());
      if (Codec::is_lost(value[0])) std::fill_n(g, n, value[0]);
      if (r == 0)
        for (int64_t i = 0; i < k; ++i) g[at[i]] = value[i] * c.weight;
      else
        for (int64_t i = 0; i < k; ++i) g[at[i]] += value[i] * c.weight;
    }
  }
}

float value_at(const void* values, int64_t i, int64_t type) {
  return type == kBFloat16 ? from_bfloat16(static_cast<const uint16_t*>(values)[i])
                           : static_cast<const float*>(values)[i];
}

}  // namespace

extern "C" {

void topk_encode(const Call* c, const Planes* own) { encode_all<TopK>(*c, *own); }

void topk_encode_and_commit(const Call* c, const Planes* own) {
  encode_and_commit_all<TopK>(*c, *own);
}

void topk_decode_and_commit(const Call* c, const Planes* own, const Planes* received) {
  decode_all<TopK>(*c, *own, received);
}

void randomk_encode(const Call* c, const Planes* own) { encode_all<RandomK>(*c, *own); }

void randomk_encode_and_commit(const Call* c, const Planes* own) {
  encode_and_commit_all<RandomK>(*c, *own);
}

void randomk_decode_and_commit(const Call* c, const Planes* own, const Planes* received) {
  decode_all<RandomK>(*c, *own, received);
}

// x += residual * scale, if there is a residual. Then the elements of x that are not finite or above
// tau times the root mean square of x, or times the scale; their number. `places` count from
// `offset`, and both have room for all n.
int64_t threshold_select(float* x, const float* residual, const float* scale, int64_t n, float tau,
                         int64_t of_rms, int64_t offset, int64_t type, int32_t* places,
                         void* values) {
  const float by = *scale;
  double squares[kRows] = {};  // their sum differs from torch's in the order of its terms
  int64_t summed = 0;
  const auto compensate = [&](int64_t i) {
    if (residual) x[i] += residual[i] * by;
    const double wide = x[i];
    return wide * wide;
  };
  for (; of_rms && summed + kRows <= n; summed += kRows)
    for (int lane = 0; lane < kRows; ++lane) squares[lane] += compensate(summed + lane);
  for (; summed < n; ++summed) squares[0] += compensate(summed);
  double sum = 0;
  for (const double each : squares) sum += each;
  const double count_of_all = static_cast<double>(n > 1 ? n : 1);
  const float rms = static_cast<float>(std::sqrt(sum) / std::sqrt(count_of_all));
  const float most = tau * (of_rms ? rms : by);
  int64_t count = 0;
  for (int64_t from = 0; from < n; from += kLargestBlock) {
    uint8_t large[kLargestBlock] = {};
    const int size = static_cast<int>(std::min<int64_t>(n - from, kLargestBlock));
    const float* part = x + from;
    for (int i = 0; i < size; ++i)
      large[i] = !(std::fabs(part[i]) <= most) | (size_of(part[i]) >= kInfinity);
    for (int i = 0; i < size; i += 8) {
      uint64_t eight;
      std::memcpy(&eight, large + i, sizeof eight);
      if (!eight) continue;
      for (int j = i; j < i + 8; ++j) {
        if (!large[j]) continue;
        places[count] = static_cast<int32_t>(offset + from + j);
        if (type == kBFloat16)
          static_cast<uint16_t*>(values)[count] = to_bfloat16(part[j]);
        else
          static_cast<float*>(values)[count] = part[j];
        ++count;
      }
    }
  }
  return count;
}

// x[places] += values * weight
void threshold_scatter(float* x, const int32_t* places, const void* values, int64_t n, int64_t type,
                       float weight) {
  for (int64_t i = 0; i < n; ++i) x[places[i]] += value_at(values, i, type) * weight;
}

// residual = x / scale where that is finite; x = 0
void threshold_keep(float* x, float* residual, const float* scale, int64_t n) {
  const float by = *scale;
  if (residual) {
    for (int64_t i = 0; i < n; ++i) {
      const float left = by == 1 ? x[i] : x[i] / by;
      residual[i] = is_finite(left) ? left : residual[i];
      x[i] = 0;
    }
  } else {
    std::memset(x, 0, n * sizeof(float));
  }
}

}  // extern "C"
