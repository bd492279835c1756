// Every set of kernels that this processor has against plain loops: INT8 and INT4 layers to the bit, what sums floats to a tolerance.
//
// Prints a line for each set and "N passed, N failed"; the exit status is 1 if one failed.
#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#ifdef __x86_64__
namespace dlm {
extern const Kernels kAvxVnniStandIn;
}
#endif

namespace {

using Floats = std::vector<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInfinity = std::numeric_limits<float>::infinity();

struct Tally {
  int passed = 0, failed = 0;
  std::string about;  // what is tested now
  void note(bool holds, int line, const char* what) {
    ++(holds ? passed : failed);
    if (!holds) std::printf("%s:%d: failed: %s (%s)\n", __FILE__, line, what, about.c_str());
  }
};
#define CHECK(condition) tally.note((condition), __LINE__, #condition)

// ---- Who runs the tasks ----

class InOrder final : public dlm::Parallel {
  void run(size_t count, void (*task)(void*, size_t), void* user) override {
    for (size_t i = 0; i < count; ++i) task(user, i);
  }
};

class Reversed final : public dlm::Parallel {
  void run(size_t count, void (*task)(void*, size_t), void* user) override {
    for (size_t i = count; i-- > 0;) task(user, i);
  }
};

class Threaded final : public dlm::Parallel {
  void run(size_t count, void (*task)(void*, size_t), void* user) override {
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i = next++; i < count; i = next++) task(user, i);
    };
    std::thread others[] = {std::thread(work), std::thread(work), std::thread(work)};
    work();
    for (std::thread& other : others) other.join();
  }
};

// ---- Numbers ----

class Numbers {
 public:
  explicit Numbers(unsigned seed) : source_(seed) {}
  float normal() { return normal_(source_); }
  int64_t below(int64_t count) { return static_cast<int64_t>(source_() % static_cast<uint64_t>(count)); }
  Floats normals(int64_t count) {
    Floats all(static_cast<size_t>(count));
    for (float& one : all) one = normal();
    return all;
  }

 private:
  std::mt19937_64 source_;
  std::normal_distribution<float> normal_;
};

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// The greatest distance, as a part of `scale`; infinite where one is not finite and the other is.
double distance(const Floats& got, const std::vector<double>& expected, double scale) {
  double worst = got.size() == expected.size() ? 0 : std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    if (std::isnan(got[i]) && std::isnan(expected[i])) continue;
    const double apart = std::abs(got[i] - expected[i]) / scale;
    worst = std::isnan(apart) ? std::numeric_limits<double>::infinity() : std::max(worst, apart);
  }
  return worst;
}

// ---- INT8 and INT4 linear layers ----

// The bits of a positive number that fp16 holds exactly.
uint16_t half_of(float x) {
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);
  return static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(mantissa * 2048) - 1024));
}

struct Weight {
  int64_t inputs, columns, group_size;  // 0: INT8
  std::vector<uint8_t> plain;   // [K, N], 128 too large, in INT4 8
  std::vector<uint8_t> panels;  // as kernels want them
  Floats scales;
  std::vector<uint16_t> halves;  // the scales of INT4, as kernels want them

  Weight(int64_t K, int64_t N, int64_t size)
      : inputs(K), columns(N), group_size(size), plain(static_cast<size_t>(K * N)), scales(width() * groups()) {}
  size_t width() const { return static_cast<size_t>(dlm::padded_columns(columns)); }
  size_t groups() const { return group_size == 0 ? 1 : static_cast<size_t>(dlm::groups_of(inputs, group_size)); }
  int offset() const { return group_size == 0 ? 128 : 8; }
  uint8_t& at(int64_t k, int64_t n) { return plain[static_cast<size_t>(k * columns + n)]; }
  float scale(int64_t k, int64_t n) const {
    const int64_t all = static_cast<int64_t>(groups()), group = group_size == 0 ? 0 : k / group_size;
    return scales[static_cast<size_t>((n / 32 * all + group) * 32 + n % 32)];
  }

  const void* stored_scales() const { return group_size == 0 ? static_cast<const void*>(scales.data()) : halves.data(); }

  // What fills up the last panel must not matter, so it is not zero here.
  Weight& pack() {
    halves.clear();
    for (const float scale : scales) halves.push_back(half_of(scale));
    const int64_t parts = group_size == 0 ? 1 : 2;
    panels.assign(static_cast<size_t>(inputs / parts) * width(), 77);
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t n = 0; n < columns; ++n) {
        const int64_t together = 4 * parts, row = n / 32 * (inputs / together) + k / together;
        uint8_t& byte = panels[static_cast<size_t>((row * 32 + n % 32) * 4 + k % 4)];
        if (parts == 1) byte = at(k, n);
        else if (k % 8 < 4) byte = static_cast<uint8_t>((byte & 0xf0) | at(k, n));
        else byte = static_cast<uint8_t>((byte & 0x0f) | at(k, n) << 4);
      }
    return *this;
  }
};

Weight make_weight(Numbers& numbers, int64_t K, int64_t N, int64_t group_size = 0) {
  Weight weight(K, N, group_size);
  for (uint8_t& code : weight.plain) code = static_cast<uint8_t>(numbers.below(2 * weight.offset()));
  for (float& scale : weight.scales) scale = std::ldexp(static_cast<float>(1024 + numbers.below(1024)), -17);
  weight.pack();
  return weight;
}

// Results of a layer of one kernel or of the plain loops, one for each output.
std::vector<Floats> run_linear(const dlm::Kernels& kernels, dlm::Parallel& parallel, const Floats& x, int64_t rows,
                               const std::vector<Weight>& weights, bool is_gated) {
  std::vector<dlm::LinearWeight> given;
  std::vector<Floats> results;
  std::vector<float*> outputs;
  for (const Weight& weight : weights) {
    given.push_back({weight.panels.data(), weight.stored_scales(), weight.columns});
    if (results.empty() || !is_gated) results.emplace_back(static_cast<size_t>(rows * weight.columns), 12345.0f);
  }
  for (Floats& result : results) outputs.push_back(result.data());
  const dlm::Linear layer{x.data(),       rows,         weights[0].inputs, given.data(),
                          outputs.data(), given.size(), is_gated,          weights[0].group_size};
  void* scratch = nullptr;
  if (posix_memalign(&scratch, 64, layer.scratch_bytes()) != 0) std::abort();
  kernels.linear(layer, scratch, parallel);
  std::free(scratch);
  return results;
}

// One product in the arithmetic that the exporter's functions.py defines: any other order of the sums gives the same.
Floats multiply(const Floats& x, int64_t rows, const Weight& weight) {
  const int64_t K = weight.inputs, N = weight.columns;
  Floats y;
  for (int64_t r = 0; r < rows; ++r) {
    const float* const row = x.data() + r * K;
    float amax = 1e-30f;
    bool is_finite = true;
    for (int64_t k = 0; k < K; ++k) amax = std::max(amax, std::abs(row[k])), is_finite &= std::isfinite(row[k]);
    const float inverse = 127.0f / amax, scale = amax / 127.0f;
    for (int64_t n = 0; n < N; ++n) {
      const int64_t together = weight.group_size == 0 ? K : weight.group_size;
      float total = 0;
      for (int64_t from = 0; from < K && is_finite; from += together) {
        int64_t sum = 0;
        for (int64_t k = from; k < std::min(from + together, K); ++k)
          sum += std::lrintf(row[k] * inverse) * (weight.plain[static_cast<size_t>(k * N + n)] - weight.offset());
        const float whole = static_cast<float>(sum), step = weight.scale(from, n);
        total = weight.group_size == 0 ? whole * scale * step : std::fma(whole, step, total);
      }
      y.push_back(!is_finite ? kNan : weight.group_size == 0 ? total : total * scale);
    }
  }
  return y;
}

bool same_numbers(const Floats& got, const Floats& expected) {
  for (size_t i = 0; i < got.size(); ++i)
    if (std::isnan(got[i]) != std::isnan(expected[i]) || (!std::isnan(got[i]) && got[i] != expected[i])) return false;
  return got.size() == expected.size();
}

void check_linear(Tally& tally, const dlm::Kernels& kernels, const Floats& x, int64_t rows,
                  const std::vector<Weight>& weights) {
  InOrder in_order;
  const std::vector<Floats> y = run_linear(kernels, in_order, x, rows, weights, false);
  for (size_t i = 0; i < weights.size(); ++i) CHECK(same_numbers(y[i], multiply(x, rows, weights[i])));
}

void test_linear(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(1);
  for (int64_t rows = 1; rows <= 40; ++rows) {
    for (const int64_t K : {4, 12, 16, 20, 68, 132}) {
      std::vector<Weight> weights;
      for (int64_t i = 0; i < 1 + rows % 3; ++i) weights.push_back(make_weight(numbers, K, 1 + numbers.below(100)));
      tally.about = std::string(kernels.name) + ", " + std::to_string(rows) + " rows of " + std::to_string(K);
      check_linear(tally, kernels, numbers.normals(rows * K), rows, weights);
    }
  }
  for (int64_t columns = 1; columns <= 100; ++columns) {
    tally.about = std::string(kernels.name) + ", " + std::to_string(columns) + " columns";
    check_linear(tally, kernels, numbers.normals(3 * 20), 3, {make_weight(numbers, 20, columns)});
  }
  tally.about = std::string(kernels.name) + ", rows that are quantised by tasks";
  check_linear(tally, kernels, numbers.normals(300 * 340), 300, {make_weight(numbers, 340, 70)});
  tally.about = std::string(kernels.name) + ", no rows";
  check_linear(tally, kernels, {}, 0, {make_weight(numbers, 20, 33)});
}

constexpr int64_t kGroupSizes[] = {8, 24, 32, 40, 128};

void test_int4_linear(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(13);
  for (const int64_t size : kGroupSizes) {
    const std::string about = std::string(kernels.name) + ", groups of " + std::to_string(size) + ", ";
    for (int64_t rows = 1; rows <= 40; ++rows) {
      for (const int64_t K : {8, 32, 40, 136, 264}) {  // some with a last group that is short
        std::vector<Weight> weights;
        for (int64_t i = 0; i < 1 + rows % 3; ++i) weights.push_back(make_weight(numbers, K, 1 + numbers.below(100), size));
        tally.about = about + std::to_string(rows) + " rows of " + std::to_string(K);
        check_linear(tally, kernels, numbers.normals(rows * K), rows, weights);
      }
    }
    for (int64_t columns = 1; columns <= 100; ++columns) {
      tally.about = about + std::to_string(columns) + " columns";
      check_linear(tally, kernels, numbers.normals(3 * 48), 3, {make_weight(numbers, 48, columns, size)});
    }
    tally.about = about + "rows that are quantised by tasks";
    check_linear(tally, kernels, numbers.normals(300 * 344), 300, {make_weight(numbers, 344, 70, size)});
    tally.about = about + "no rows";
    check_linear(tally, kernels, {}, 0, {make_weight(numbers, 24, 33, size)});
  }
}

// Sums of the largest codes in 16 bits come within 7% of their end.
void test_int4_linear_extremes(Tally& tally, const dlm::Kernels& kernels) {
  constexpr int64_t K = 1032, N = 40;
  for (const int64_t size : kGroupSizes) {
    tally.about = std::string(kernels.name) + ", groups of " + std::to_string(size);
    for (const uint8_t code : {0, 1, 15}) {
      Weight weight(K, N, size);
      std::fill(weight.plain.begin(), weight.plain.end(), code);
      std::fill(weight.scales.begin(), weight.scales.end(), 1.0f);
      Floats x(3 * K, 127.0f);
      std::fill(x.begin() + K, x.begin() + 2 * K, -127.0f);
      for (int64_t k = 0; k < K; k += 2) x[static_cast<size_t>(2 * K + k)] = -127.0f;
      check_linear(tally, kernels, x, 3, {weight.pack()});
    }
  }
}

// Products of the largest codes overflow 16 bits in pairs: kernels must not add them up there.
void test_linear_extremes(Tally& tally, const dlm::Kernels& kernels) {
  constexpr int64_t K = 1028, N = 40;
  tally.about = kernels.name;
  for (const uint8_t code : {0, 1, 255}) {
    Weight weight(K, N, 0);
    std::fill(weight.plain.begin(), weight.plain.end(), code);
    std::fill(weight.scales.begin(), weight.scales.end(), 1.0f);
    Floats x(3 * K, 127.0f);
    std::fill(x.begin() + K, x.begin() + 2 * K, -127.0f);
    for (int64_t k = 0; k < K; k += 2) x[static_cast<size_t>(2 * K + k)] = -127.0f;
    check_linear(tally, kernels, x, 3, {weight.pack()});
  }
  Numbers numbers(2);
  const Weight weight = make_weight(numbers, 20, 40);
  for (const float magnitude : {0.0f, 1e-38f, 1e-30f, 1e-20f, 1e30f, 3e38f}) {
    Floats x = numbers.normals(5 * 20);
    for (float& one : x) one = std::clamp(one, -1.0f, 1.0f) * magnitude;
    check_linear(tally, kernels, x, 5, {weight});
  }
}

void test_linear_keeps_what_is_not_finite_in_its_row(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(3);
  for (const int64_t size : {0, 32}) {
    const int64_t K = size == 0 ? 36 : 40;
    tally.about = std::string(kernels.name) + ", groups of " + std::to_string(size);
    for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
      for (const int64_t k : {0, 5, 31, 32, 35}) {
        Floats x = numbers.normals(15 * K);
        x[static_cast<size_t>(13 * K + k)] = bad;
        const std::vector<Weight> weights = {make_weight(numbers, K, 40, size), make_weight(numbers, K, 40, size)};
        check_linear(tally, kernels, x, 15, weights);
        InOrder in_order;
        const Floats gated = run_linear(kernels, in_order, x, 15, weights, true)[0];
        for (int64_t i = 0; i < 15 * 40; ++i) CHECK(std::isfinite(gated[static_cast<size_t>(i)]) == (i / 40 != 13));
      }
    }
  }
}

void test_gated_linear(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(4);
  InOrder in_order;
  for (const int64_t rows : {1, 2, 7, 12, 13, 40}) {
    for (const int64_t columns : {1, 31, 32, 33, 100}) {
      const int64_t size = rows % 2 * 16, K = 40;
      tally.about = std::string(kernels.name) + ", " + std::to_string(rows) + " rows, " + std::to_string(columns) + " columns";
      const std::vector<Weight> weights = {make_weight(numbers, K, columns, size), make_weight(numbers, K, columns, size)};
      Floats x = numbers.normals(rows * K);
      for (int64_t k = 0; k < K; ++k) x[static_cast<size_t>(k)] *= 1000;  // far into both ends of the sigmoid
      const Floats gate = multiply(x, rows, weights[0]), up = multiply(x, rows, weights[1]);
      const Floats y = run_linear(kernels, in_order, x, rows, weights, true)[0];
      // Exponentials are within 2e-7 and rounding their exponent's share, and what follows rounds three times, 6e-8 each.
      // Below 2 ^ -126 of the other factor they end.
      for (size_t i = 0; i < y.size(); ++i) {
        const double expected = static_cast<double>(gate[i]) / (1 + std::exp(-static_cast<double>(gate[i]))) * up[i];
        const double relative = 5e-7 + 1e-7 * std::abs(gate[i]);
        CHECK(std::abs(y[i] - expected) <= relative * std::abs(expected) + 1e-36 * std::abs(double{gate[i]} * up[i]));
      }
    }
  }
}

// ---- Attention ----

struct Attention {
  int64_t B, T, S, H, G, D;  // G: heads of keys and values
  int64_t table_rows = 50;
  Floats q, k, v, past_keys, past_values, cos, sin;
  std::vector<int64_t> positions;
  Floats y, present_keys, present_values;

  Attention(Numbers& numbers, int64_t b, int64_t t, int64_t s, int64_t h, int64_t g, int64_t d)
      : B(b), T(t), S(s), H(h), G(g), D(d) {
    q = numbers.normals(B * T * H * D), k = numbers.normals(B * T * G * D), v = numbers.normals(B * T * G * D);
    past_keys = numbers.normals(B * G * S * D), past_values = numbers.normals(B * G * S * D);
    for (int64_t i = 0; i < table_rows * D / 2; ++i) {
      const float angle = numbers.normal() * 3;
      cos.push_back(std::cos(angle)), sin.push_back(std::sin(angle));
    }
    for (int64_t i = 0; i < B * T; ++i) positions.push_back(numbers.below(table_rows));
    // A softmax far from even: some keys have nearly all the weight.
    for (float& one : q) one *= 2;
  }

  dlm::CachedAttention pass() {
    y.assign(q.size(), 12345.0f), present_keys.assign(k.size(), 12345.0f), present_values.assign(v.size(), 12345.0f);
    return {q.data(),   k.data(),   v.data(), past_keys.data(), past_values.data(), positions.data(), cos.data(),
            sin.data(), B,          T,        S,                H,                  G,                D,
            table_rows, y.data(),   present_keys.data(),        present_values.data()};
  }
  void run(const dlm::Kernels& kernels, dlm::Parallel& parallel) { kernels.attention(pass(), parallel); }

  // x [B, T, heads, D] turned, at [b, t, head].
  std::vector<double> turned(const Floats& x, int64_t heads, int64_t b, int64_t t, int64_t head) const {
    const float* const row = x.data() + ((b * T + t) * heads + head) * D;
    const int64_t half = D / 2, at = positions[static_cast<size_t>(b * T + t)] * half;
    std::vector<double> out(static_cast<size_t>(D));
    for (int64_t d = 0; d < half; ++d) {
      const double c = cos[static_cast<size_t>(at + d)], s = sin[static_cast<size_t>(at + d)];
      out[static_cast<size_t>(d)] = row[d] * c - row[half + d] * s;
      out[static_cast<size_t>(half + d)] = row[half + d] * c + row[d] * s;
    }
    return out;
  }

  std::vector<double> expected() const {
    std::vector<double> all;
    for (int64_t b = 0; b < B; ++b)
      for (int64_t t = 0; t < T; ++t)
        for (int64_t h = 0; h < H; ++h) {
          const std::vector<double> one = attend(b, t, h);
          all.insert(all.end(), one.begin(), one.end());
        }
    return all;
  }

 private:
  std::vector<double> attend(int64_t b, int64_t t, int64_t h) const {
    const int64_t g = h / (H / G), cache = (b * G + g) * S * D;
    const std::vector<double> query = turned(q, H, b, t, h);
    std::vector<double> weights;
    for (int64_t j = 0; j < S + T; ++j) {
      const float* const past = past_keys.data() + cache + j * D;
      const std::vector<double> key = j < S ? std::vector<double>(past, past + D) : turned(k, G, b, j - S, g);
      double score = 0;
      for (size_t d = 0; d < key.size(); ++d) score += query[d] * key[d];
      weights.push_back(score / std::sqrt(static_cast<double>(D)));
    }
    double largest = weights[0], total = 0;
    for (const double weight : weights) largest = std::max(largest, weight);
    for (double& weight : weights) total += weight = std::exp(weight - largest);
    std::vector<double> out(static_cast<size_t>(D));
    for (int64_t j = 0; j < S + T; ++j) {
      const float* const value = j < S ? past_values.data() + cache + j * D : v.data() + ((b * T + j - S) * G + g) * D;
      for (int64_t d = 0; d < D; ++d) out[static_cast<size_t>(d)] += weights[static_cast<size_t>(j)] / total * value[d];
    }
    return out;
  }
};

// Scores of D products are off by about sqrt(D) * 2^-24 of their size, at most 100 here, and weights by as much; the rest is
// less.
constexpr double kAttentionTolerance = 5e-5;

void test_attention(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(5);
  InOrder in_order;
  const auto check = [&](int64_t B, int64_t T, int64_t S, int64_t H, int64_t G, int64_t D) {
    tally.about = kernels.name;
    for (const int64_t one : {B, T, S, H, G, D}) tally.about += " " + std::to_string(one);
    Attention attention(numbers, B, T, S, H, G, D);
    attention.run(kernels, in_order);
    CHECK(distance(attention.y, attention.expected(), 1) < kAttentionTolerance);
    for (int64_t b = 0; b < B; ++b)
      for (int64_t g = 0; g < G; ++g)
        for (int64_t t = 0; t < T; ++t) {
          const int64_t from = ((b * T + t) * G + g) * D, to = ((b * G + g) * T + t) * D;
          const auto cut = [D](const Floats& all, int64_t at) { return Floats(all.data() + at, all.data() + at + D); };
          CHECK(same_bits(cut(attention.present_values, to), cut(attention.v, from)));
          CHECK(distance(cut(attention.present_keys, to), attention.turned(attention.k, G, b, t, g), 1) < 2e-6);
        }
  };
  for (const int64_t T : {1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 65})
    for (const int64_t S : {0, 1, 7, 64, 131}) check(1, T, S, 2, 1, 20);
  for (const int64_t D : {2, 4, 6, 10, 16, 32, 36, 64, 80, 96, 126, 128, 512}) check(1, 5, 9, 2, 2, D);
  for (const int64_t G : {1, 2, 3, 6}) check(3, 9, 5, 6, G, 12);
  check(2, 33, 70, 4, 2, 64);
}

void test_attention_keeps_nan_where_it_belongs(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(6);
  InOrder in_order;
  for (const int64_t T : {1, 3, 40}) {
    const int64_t B = 2, S = 70, H = 4, G = 2, D = 12;
    tally.about = std::string(kernels.name) + ", " + std::to_string(T) + " tokens";
    const auto check = [&](Attention& attention, auto is_bad) {
      attention.run(kernels, in_order);
      const std::vector<double> expected = attention.expected();
      for (int64_t i = 0; i < B * T * H * D; ++i) {
        const auto at = static_cast<size_t>(i);
        CHECK(std::isnan(attention.y[at]) == is_bad(i / D / H / T, i / D / H % T, i / D % H, i % D));
        CHECK(std::isnan(attention.y[at]) || std::abs(attention.y[at] - expected[at]) < kAttentionTolerance);
      }
    };
    Attention query(numbers, B, T, S, H, G, D), key = query, cached = query, value = query;
    query.q[static_cast<size_t>(((B - 1) * T * H + (T - 1) * H + 1) * D)] = kNan;
    check(query, [&](int64_t b, int64_t t, int64_t h, int64_t) { return b == B - 1 && t == T - 1 && h == 1; });
    key.k[static_cast<size_t>((T - 1) * G * D)] = kNan;
    check(key, [&](int64_t b, int64_t, int64_t h, int64_t) { return b == 0 && h / 2 == 0; });
    cached.past_keys[static_cast<size_t>((G + 1) * S * D + 66 * D + 3)] = kNan;
    check(cached, [&](int64_t b, int64_t, int64_t h, int64_t) { return b == 1 && h / 2 == 1; });
    value.past_values[static_cast<size_t>(G * S * D + 3 * D + 7)] = kNan;
    check(value, [&](int64_t b, int64_t, int64_t h, int64_t d) { return b == 1 && h / 2 == 0 && d == 7; });
  }
}

void test_positions_outside_the_tables_are_seen(Tally& tally) {
  Numbers numbers(7);
  tally.about = "tables";
  Attention attention(numbers, 2, 3, 0, 1, 1, 2);
  CHECK(attention.pass().is_in_table());
  for (const int64_t position : {int64_t{-1}, attention.table_rows, INT64_MIN, INT64_MAX}) {
    Attention other = attention;
    other.positions.back() = position;
    CHECK(!other.pass().is_in_table());
  }
}

// ---- Candidates ----

struct Rows {
  int64_t rows, vocab_size;
  Floats logits, bias;
  std::vector<int32_t> tokens;
  Floats probs, entropy;

  Rows(Numbers& numbers, int64_t r, int64_t v)
      : rows(r), vocab_size(v), logits(numbers.normals(r * v)), bias(static_cast<size_t>(v)) {
    for (float& logit : logits) logit *= 4;
  }
  float& at(int64_t row, int64_t token) { return logits[static_cast<size_t>(row * vocab_size + token)]; }

  void run(const dlm::Kernels& kernels, dlm::Parallel& parallel) {
    tokens.assign(static_cast<size_t>(2 * rows), -1), probs.assign(tokens.size(), kNan);
    entropy.assign(static_cast<size_t>(rows), kNan);
    kernels.candidates({logits.data(), bias.data(), rows, vocab_size, tokens.data(), probs.data(), entropy.data()}, parallel);
  }
};

void check_candidates(Tally& tally, const dlm::Kernels& kernels, Rows& rows) {
  InOrder in_order;
  rows.run(kernels, in_order);
  for (int64_t row = 0; row < rows.rows; ++row) {
    std::vector<int32_t> order;
    Floats masked;
    for (int32_t i = 0; i < rows.vocab_size; ++i)
      order.push_back(i), masked.push_back(rows.at(row, i) + rows.bias[static_cast<size_t>(i)]);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return masked[static_cast<size_t>(a)] > masked[static_cast<size_t>(b)];
    });
    double total = 0, weighed = 0;
    const double largest = masked[static_cast<size_t>(order[0])];
    for (int32_t i = 0; i < rows.vocab_size; ++i) {
      const double weight = std::exp(masked[static_cast<size_t>(i)] - largest);
      total += weight;
      if (weight > 0) weighed += weight * (masked[static_cast<size_t>(i)] - largest);
    }
    const auto r = static_cast<size_t>(row);
    for (size_t rank = 0; rank < 2; ++rank) {
      CHECK(rows.tokens[2 * r + rank] == order[rank]);
      const double behind = masked[static_cast<size_t>(order[rank])] - largest, prob = std::exp(behind) / total;
      // Exponentials as in test_gated_linear, and a sum of V of them.
      CHECK(std::abs(rows.probs[2 * r + rank] - prob) <= (1e-6 - 1e-7 * behind) * prob + 1e-37);
    }
    CHECK(std::abs(rows.entropy[r] - (weighed / total - std::log(total))) <= 1e-5);
  }
}

void test_candidates(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(8);
  for (const int64_t V : {2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 50, 160, 1003}) {
    tally.about = std::string(kernels.name) + ", vocabulary of " + std::to_string(V);
    Rows rows(numbers, 5, V);
    check_candidates(tally, kernels, rows);
    for (const int64_t masked : {int64_t{0}, V / 2, V - 1}) {  // even the best one must not win
      if (V < 3) continue;
      Rows other = rows;
      other.bias[static_cast<size_t>(masked)] = -kInfinity;
      for (int64_t row = 0; row < other.rows; ++row) other.at(row, masked) = 30;
      check_candidates(tally, kernels, other);
    }
    for (float& logit : rows.logits) logit = static_cast<float>(numbers.below(3));  // many are equal
    check_candidates(tally, kernels, rows);
    std::fill(rows.logits.begin(), rows.logits.end(), 1.5f);
    check_candidates(tally, kernels, rows);
    for (const float far : {-200.0f, 3e4f}) {  // one token has all the weight
      rows.at(1, V - 1) = far, rows.at(3, 0) = far;
      check_candidates(tally, kernels, rows);
    }
  }
  tally.about = std::string(kernels.name) + ", a large vocabulary";
  Rows rows(numbers, 2, 151'669);
  check_candidates(tally, kernels, rows);
}

void test_candidates_of_a_row_with_nan_are_not_finite(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(9);
  InOrder in_order;
  const int64_t V = 39;
  for (const float bad : {kNan, -kNan, kInfinity})
    for (int64_t token = 0; token < V; ++token) {
      tally.about = std::string(kernels.name) + ", token " + std::to_string(token);
      Rows rows(numbers, 3, V);
      rows.at(1, token) = bad;
      rows.run(kernels, in_order);
      for (size_t i = 0; i < 6; ++i) CHECK(std::isfinite(rows.probs[i]) == (i / 2 != 1));
      for (const int32_t one : rows.tokens) CHECK(one >= 0 && one < V);
    }
}

// ---- NVFP4 linear layers ----

// A weight with its codes and scales as kernels want them; what fills up the last panel must not matter.
struct Nvfp4 {
  int64_t inputs, columns;
  std::vector<uint8_t> panels, scales;
  float global_scale = 0.0123f;

  Nvfp4(Numbers& numbers, int64_t K, int64_t N) : inputs(K), columns(N) {
    const auto width = static_cast<size_t>(dlm::padded_columns(N));
    panels.resize(width / 2 * static_cast<size_t>(K));
    scales.resize(width * static_cast<size_t>(K / 16));
    for (uint8_t& two : panels) two = static_cast<uint8_t>(numbers.below(256));
    for (uint8_t& scale : scales) scale = static_cast<uint8_t>(numbers.below(0x7f));  // every finite one, subnormal ones too
  }

  double at(int64_t k, int64_t n) const {
    static constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int64_t panel = n / 32, column = n % 32;
    const int two = panels[static_cast<size_t>((panel * inputs + k) * 16 + column % 16)];
    const int code = column < 16 ? two & 15 : two >> 4;
    const int scale = scales[static_cast<size_t>((panel * (inputs / 16) + k / 16) * 32 + column)];
    const int exponent = scale >> 3, fraction = scale & 7;
    const double step = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    return (code < 8 ? 1 : -1) * kValues[code & 7] * step * global_scale;
  }

  Floats run(const dlm::Kernels& kernels, dlm::Parallel& parallel, const Floats& x, int64_t rows) const {
    Floats y(static_cast<size_t>(rows * columns), 12345.0f);
    kernels.nvfp4_linear({x.data(), rows, inputs, columns, panels.data(), scales.data(), global_scale, y.data()}, parallel);
    return y;
  }
};

void check_nvfp4(Tally& tally, const dlm::Kernels& kernels, const Nvfp4& weight, const Floats& x, int64_t rows) {
  InOrder in_order;
  const Floats y = weight.run(kernels, in_order, x, rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < weight.columns; ++n) {
      double sum = 0, size = 1e-30;
      for (int64_t k = 0; k < weight.inputs; ++k) {
        const double product = static_cast<double>(x[static_cast<size_t>(r * weight.inputs + k)]) * weight.at(k, n);
        sum += product, size += std::abs(product);
      }
      CHECK(std::abs(y[static_cast<size_t>(r * weight.columns + n)] - sum) <= 1e-6 * size);
    }
}

void test_nvfp4_linear(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(11);
  for (int64_t rows = 0; rows <= 40; ++rows)
    for (const int64_t K : {16, 112, 144}) {
      tally.about = std::string(kernels.name) + ", " + std::to_string(rows) + " rows of " + std::to_string(K);
      check_nvfp4(tally, kernels, Nvfp4(numbers, K, 1 + numbers.below(100)), numbers.normals(rows * K), rows);
    }
  for (int64_t columns = 1; columns <= 70; ++columns) {
    tally.about = std::string(kernels.name) + ", " + std::to_string(columns) + " columns";
    check_nvfp4(tally, kernels, Nvfp4(numbers, 32, columns), numbers.normals(3 * 32), 3);
  }
  tally.about = std::string(kernels.name) + ", more rows than go together";
  check_nvfp4(tally, kernels, Nvfp4(numbers, 272, 40), numbers.normals(500 * 272), 500);
}

void test_nvfp4_linear_keeps_what_is_not_finite_in_its_row(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(12);
  InOrder in_order;
  const Nvfp4 weight(numbers, 48, 40);
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    Floats x = numbers.normals(15 * 48);
    x[13 * 48 + 17] = bad;
    const Floats y = weight.run(kernels, in_order, x, 15);
    for (int64_t i = 0; i < 15 * 40; ++i) CHECK(std::isfinite(y[static_cast<size_t>(i)]) == (i / 40 != 13));
  }
}

// ---- Threads ----

void test_order_of_tasks_does_not_change_a_bit(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  InOrder in_order;
  Reversed reversed;
  Threaded threaded;
  Numbers numbers(10);
  const Floats x = numbers.normals(300 * 344);
  const std::vector<Weight> weights = {make_weight(numbers, 344, 170), make_weight(numbers, 344, 170)};
  const std::vector<Weight> int4 = {make_weight(numbers, 344, 170, 32), make_weight(numbers, 344, 170, 32)};
  Attention attention(numbers, 2, 40, 33, 4, 2, 20);
  Rows rows(numbers, 9, 160);
  const Nvfp4 nvfp4(numbers, 336, 170);
  const Floats z = nvfp4.run(kernels, in_order, x, 300);
  const std::vector<Floats> y = run_linear(kernels, in_order, x, 300, weights, false);
  const std::vector<Floats> gated = run_linear(kernels, in_order, x, 300, weights, true);
  const std::vector<Floats> by_int4 = run_linear(kernels, in_order, x, 300, int4, false);
  attention.run(kernels, in_order), rows.run(kernels, in_order);
  for (dlm::Parallel* const other : {static_cast<dlm::Parallel*>(&reversed), static_cast<dlm::Parallel*>(&threaded)}) {
    CHECK(same_bits(nvfp4.run(kernels, *other, x, 300), z));
    CHECK(run_linear(kernels, *other, x, 300, weights, false) == y);
    CHECK(run_linear(kernels, *other, x, 300, weights, true) == gated);
    CHECK(run_linear(kernels, *other, x, 300, int4, false) == by_int4);
    Attention again = attention;
    again.run(kernels, *other);
    CHECK(same_bits(again.y, attention.y) && same_bits(again.present_keys, attention.present_keys));
    Rows same = rows;
    same.run(kernels, *other);
    CHECK(same.tokens == rows.tokens && same_bits(same.probs, rows.probs) && same_bits(same.entropy, rows.entropy));
  }
}

}  // namespace

int main() {
  Tally tally;
  std::vector<const dlm::Kernels*> all = dlm::list_kernels();
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) all.push_back(&dlm::kAvxVnniStandIn);
#endif
  test_positions_outside_the_tables_are_seen(tally);
  for (const dlm::Kernels* const kernels : all) {
    std::printf("%s\n", kernels->name);
    test_linear(tally, *kernels);
    test_linear_extremes(tally, *kernels);
    test_int4_linear(tally, *kernels);
    test_int4_linear_extremes(tally, *kernels);
    test_linear_keeps_what_is_not_finite_in_its_row(tally, *kernels);
    test_gated_linear(tally, *kernels);
    test_nvfp4_linear(tally, *kernels);
    test_nvfp4_linear_keeps_what_is_not_finite_in_its_row(tally, *kernels);
    test_attention(tally, *kernels);
    test_attention_keeps_nan_where_it_belongs(tally, *kernels);
    test_candidates(tally, *kernels);
    test_candidates_of_a_row_with_nan_are_not_finite(tally, *kernels);
    test_order_of_tasks_does_not_change_a_bit(tally, *kernels);
  }
  std::printf("%d passed, %d failed\n", tally.passed, tally.failed);
  return tally.failed == 0 ? 0 : 1;
}
