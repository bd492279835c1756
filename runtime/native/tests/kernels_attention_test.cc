// Attention over a cache, to a tolerance.
#include "kernels_test.h"

namespace kernels_test {
namespace {

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

void test_shapes(Tally& tally, const dlm::Kernels& kernels) {
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

void test_nan_stays_where_it_belongs(Tally& tally, const dlm::Kernels& kernels) {
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

void test_order_of_tasks_does_not_change_a_bit(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  Numbers numbers(10);
  Attention attention(numbers, 2, 40, 33, 4, 2, 20);
  check_order_of_tasks(tally, [&](dlm::Parallel& parallel) {
    attention.run(kernels, parallel);
    return std::vector<Floats>{attention.y, attention.present_keys, attention.present_values};
  });
}

}  // namespace

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
void test_attention(Tally& tally, const dlm::Kernels& kernels) {
  test_shapes(tally, kernels);
  test_nan_stays_where_it_belongs(tally, kernels);
  test_order_of_tasks_does_not_change_a_bit(tally, kernels);
}

}  // namespace kernels_test
