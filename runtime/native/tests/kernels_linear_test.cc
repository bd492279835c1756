// Tests of INT8 and INT4 linear layers. Except for gated layers, kernels must give the same bits as
// plain loops.
#include <cstdlib>

#include "kernels_test.h"

namespace kernels_test {
namespace {

// Returns the fp16 bits of a positive number that fp16 represents exactly.
uint16_t half_of(float x) {
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);
  return static_cast<uint16_t>((exponent + 14) << 10 | (static_cast<int>(mantissa * 2048) - 1024));
}

struct Weight {
  int64_t inputs, columns, group_size;  // 0: INT8
  std::vector<uint8_t> plain;           // codes [K, N], plus 128 for INT8, or plus 8 for INT4
  std::vector<uint8_t> panels;          // in the kernels' layout
  Floats scales;
  std::vector<uint16_t> halves;  // the scales of INT4, in the kernels' layout

  Weight(int64_t K, int64_t N, int64_t size)
      : inputs(K),
        columns(N),
        group_size(size),
        plain(static_cast<size_t>(K * N)),
        scales(width() * groups()) {}
  size_t width() const { return static_cast<size_t>(dlm::padded_columns(columns)); }
  size_t groups() const {
    return group_size == 0 ? 1 : static_cast<size_t>(dlm::groups_of(inputs, group_size));
  }
  int offset() const { return group_size == 0 ? 128 : 8; }
  uint8_t& at(int64_t k, int64_t n) { return plain[static_cast<size_t>(k * columns + n)]; }
  float scale(int64_t k, int64_t n) const {
    const int64_t all = static_cast<int64_t>(groups()),
                  group = group_size == 0 ? 0 : k / group_size;
    return scales[static_cast<size_t>((n / 32 * all + group) * 32 + n % 32)];
  }

  const void* stored_scales() const {
    return group_size == 0 ? static_cast<const void*>(scales.data()) : halves.data();
  }

  // The padding of the last panel must not affect results, so this function fills it with numbers
  // other than zero.
  Weight& pack() {
    halves.clear();
    for (const float scale : scales) halves.push_back(half_of(scale));
    const int64_t parts = group_size == 0 ? 1 : 2;
    panels.assign(static_cast<size_t>(inputs / parts) * width(), 77);
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t n = 0; n < columns; ++n) {
        const int64_t together = 4 * parts, row = n / 32 * (inputs / together) + k / together;
        uint8_t& byte = panels[static_cast<size_t>((row * 32 + n % 32) * 4 + k % 4)];
        if (parts == 1)
          byte = at(k, n);
        else if (k % 8 < 4)
          byte = static_cast<uint8_t>((byte & 0xf0) | at(k, n));
        else
          byte = static_cast<uint8_t>((byte & 0x0f) | at(k, n) << 4);
      }
    return *this;
  }
};

Weight make_weight(Numbers& numbers, int64_t K, int64_t N, int64_t group_size = 0) {
  Weight weight(K, N, group_size);
  for (uint8_t& code : weight.plain)
    code = static_cast<uint8_t>(numbers.below(2 * weight.offset()));
  for (float& scale : weight.scales)
    scale = std::ldexp(static_cast<float>(1024 + numbers.below(1024)), -17);
  weight.pack();
  return weight;
}

// Computes a layer with `kernels`. Returns one result per weight matrix, or a single result if the
// layer is gated.
std::vector<Floats> run_linear(const dlm::Kernels& kernels, dlm::Parallel& parallel,
                               const Floats& x, int64_t rows, const std::vector<Weight>& weights,
                               dlm::Activation activation) {
  std::vector<dlm::LinearWeight> given;
  std::vector<Floats> results;
  std::vector<float*> outputs;
  for (const Weight& weight : weights) {
    given.push_back({weight.panels.data(), weight.stored_scales(), weight.columns});
    if (results.empty() || activation == dlm::Activation::none)
      results.emplace_back(static_cast<size_t>(rows * weight.columns), 12345.0f);
  }
  for (Floats& result : results) outputs.push_back(result.data());
  const dlm::Linear layer{x.data(),       rows,         weights[0].inputs, given.data(),
                          outputs.data(), given.size(), activation,        weights[0].group_size};
  void* scratch = nullptr;
  if (posix_memalign(&scratch, 64, layer.scratch_bytes()) != 0) std::abort();
  kernels.linear(layer, scratch, parallel);
  std::free(scratch);
  return results;
}

// Multiplies x by a weight matrix with the arithmetic of the exporter's operators.py. The order of
// the additions does not change the result.
Floats multiply(const Floats& x, int64_t rows, const Weight& weight) {
  const int64_t K = weight.inputs, N = weight.columns;
  Floats y;
  for (int64_t r = 0; r < rows; ++r) {
    const float* const row = x.data() + r * K;
    float amax = 1e-30f;
    bool is_finite = true;
    for (int64_t k = 0; k < K; ++k)
      amax = std::max(amax, std::abs(row[k])), is_finite &= std::isfinite(row[k]);
    const float inverse = 127.0f / amax, scale = amax / 127.0f;
    std::vector<int64_t> codes(static_cast<size_t>(K));
    for (int64_t k = 0; k < K && is_finite; ++k)
      codes[static_cast<size_t>(k)] = std::lrintf(row[k] * inverse);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t together = weight.group_size == 0 ? K : weight.group_size;
      float total = 0;
      for (int64_t from = 0; from < K && is_finite; from += together) {
        int64_t sum = 0;
        for (int64_t k = from; k < std::min(from + together, K); ++k)
          sum += codes[static_cast<size_t>(k)] *
                 (weight.plain[static_cast<size_t>(k * N + n)] - weight.offset());
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
    if (std::isnan(got[i]) != std::isnan(expected[i]) ||
        (!std::isnan(got[i]) && got[i] != expected[i]))
      return false;
  return got.size() == expected.size();
}

void check_linear(Tally& tally, const dlm::Kernels& kernels, const Floats& x, int64_t rows,
                  const std::vector<Weight>& weights) {
  InOrder in_order;
  const std::vector<Floats> y =
      run_linear(kernels, in_order, x, rows, weights, dlm::Activation::none);
  for (size_t i = 0; i < weights.size(); ++i)
    CHECK(same_numbers(y[i], multiply(x, rows, weights[i])));
}

// Returns all numbers from 1 to `last`, or only those around the sizes of the kernels' tiles.
std::vector<int64_t> counts_up_to(int64_t last, bool all) {
  std::vector<int64_t> found;
  for (int64_t count = 1; count <= last; ++count)
    if (all || count <= 5 || count % 6 <= 1 || count % 16 <= 1 || count == last)
      found.push_back(count);
  return found;
}

void test_int8(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(1);
  for (const int64_t rows : counts_up_to(40, tally.all)) {
    for (const int64_t K : {4, 12, 16, 20, 68, 132}) {
      std::vector<Weight> weights;
      for (int64_t i = 0; i < 1 + rows % 3; ++i)
        weights.push_back(make_weight(numbers, K, 1 + numbers.below(100)));
      tally.about =
          std::string(kernels.name) + ", " + std::to_string(rows) + " rows of " + std::to_string(K);
      check_linear(tally, kernels, numbers.normals(rows * K), rows, weights);
    }
  }
  for (const int64_t columns : counts_up_to(100, tally.all)) {
    tally.about = std::string(kernels.name) + ", " + std::to_string(columns) + " columns";
    for (const int64_t rows : {3, 18})
      check_linear(tally, kernels, numbers.normals(rows * 20), rows,
                   {make_weight(numbers, 20, columns)});
  }
  tally.about = std::string(kernels.name) + ", rows that are quantised by tasks";
  check_linear(tally, kernels, numbers.normals(300 * 340), 300, {make_weight(numbers, 340, 70)});
  tally.about = std::string(kernels.name) + ", no rows";
  check_linear(tally, kernels, {}, 0, {make_weight(numbers, 20, 33)});
}

constexpr int64_t kGroupSizes[] = {8, 32, 40, 128, 288};

void test_int4(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(13);
  for (const int64_t size : kGroupSizes) {
    const std::string about =
        std::string(kernels.name) + ", groups of " + std::to_string(size) + ", ";
    for (const int64_t rows : counts_up_to(40, tally.all)) {
      // Some of these numbers of inputs are not multiples of the group size.
      for (const int64_t K : {8, 32, 40, 136, 264}) {
        std::vector<Weight> weights;
        for (int64_t i = 0; i < 1 + rows % 3; ++i)
          weights.push_back(make_weight(numbers, K, 1 + numbers.below(100), size));
        tally.about = about + std::to_string(rows) + " rows of " + std::to_string(K);
        check_linear(tally, kernels, numbers.normals(rows * K), rows, weights);
      }
    }
    for (const int64_t columns : counts_up_to(100, tally.all)) {
      tally.about = about + std::to_string(columns) + " columns";
      for (const int64_t rows : {3, 18})
        check_linear(tally, kernels, numbers.normals(rows * 48), rows,
                     {make_weight(numbers, 48, columns, size)});
    }
    tally.about = about + "rows that are quantised by tasks";
    check_linear(tally, kernels, numbers.normals(300 * 344), 300,
                 {make_weight(numbers, 344, 70, size)});
    tally.about = about + "no rows";
    check_linear(tally, kernels, {}, 0, {make_weight(numbers, 24, 33, size)});
  }
}

// Makes three kinds of rows: with the largest codes, with the smallest codes, and with both.
Floats make_extreme_rows(int64_t rows, int64_t K) {
  Floats x;
  for (int64_t i = 0; i < rows * K; ++i)
    x.push_back(i / K % 3 == 0 || (i / K % 3 == 2 && i % 2 == 1) ? 127.0f : -127.0f);
  return x;
}

// With the largest codes, the 16-bit sums of the kernels come within 7% of an overflow.
void test_int4_extremes(Tally& tally, const dlm::Kernels& kernels) {
  constexpr int64_t K = 1032, N = 40;
  for (const int64_t size : kGroupSizes) {
    tally.about = std::string(kernels.name) + ", groups of " + std::to_string(size);
    for (const uint8_t code : {0, 1, 15}) {
      Weight weight(K, N, size);
      std::fill(weight.plain.begin(), weight.plain.end(), code);
      std::fill(weight.scales.begin(), weight.scales.end(), 1.0f);
      weight.pack();
      for (const int64_t rows : {3, 18})
        check_linear(tally, kernels, make_extreme_rows(rows, K), rows, {weight});
    }
  }
}

// With the largest codes, the sum of two products overflows 16 bits. So kernels must not add
// products in 16 bits.
void test_int8_extremes(Tally& tally, const dlm::Kernels& kernels) {
  constexpr int64_t K = 1028, N = 40;
  tally.about = kernels.name;
  for (const uint8_t code : {0, 1, 255}) {
    Weight weight(K, N, 0);
    std::fill(weight.plain.begin(), weight.plain.end(), code);
    std::fill(weight.scales.begin(), weight.scales.end(), 1.0f);
    weight.pack();
    for (const int64_t rows : {3, 18})
      check_linear(tally, kernels, make_extreme_rows(rows, K), rows, {weight});
  }
  Numbers numbers(2);
  const Weight weight = make_weight(numbers, 20, 40);
  for (const float magnitude : {0.0f, 1e-38f, 1e-30f, 1e-20f, 1e30f, 3e38f}) {
    Floats x = numbers.normals(20 * 20);
    for (float& one : x) one = std::clamp(one, -1.0f, 1.0f) * magnitude;
    for (const int64_t rows : {5, 20})
      check_linear(tally, kernels, Floats(x.data(), x.data() + rows * 20), rows, {weight});
  }
}

void test_what_is_not_finite_stays_in_its_row(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(3);
  for (const int64_t size : {0, 32, 64}) {
    const int64_t K = size == 0 ? 36 : 40;
    tally.about = std::string(kernels.name) + ", groups of " + std::to_string(size);
    for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
      for (const int64_t k : {0, 5, 31, 32, 35}) {
        const int64_t rows = k % 2 == 0 ? 15 : 33;
        Floats x = numbers.normals(rows * K);
        x[static_cast<size_t>(13 * K + k)] = bad;
        const std::vector<Weight> weights = {make_weight(numbers, K, 40, size),
                                             make_weight(numbers, K, 40, size)};
        check_linear(tally, kernels, x, rows, weights);
        InOrder in_order;
        const Floats gated =
            run_linear(kernels, in_order, x, rows, weights, dlm::Activation::silu)[0];
        for (int64_t i = 0; i < rows * 40; ++i)
          CHECK(std::isfinite(gated[static_cast<size_t>(i)]) == (i / 40 != 13));
      }
    }
  }
}

void test_gated(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(4);
  InOrder in_order;
  for (const int64_t rows : {1, 2, 7, 12, 13, 17, 18, 40, 65}) {
    for (const int64_t columns : {1, 31, 32, 33, 100}) {
      const int64_t size = rows % 4 * 32, K = 40;
      tally.about = std::string(kernels.name) + ", " + std::to_string(rows) + " rows, " +
                    std::to_string(columns) + " columns";
      const std::vector<Weight> weights = {make_weight(numbers, K, columns, size),
                                           make_weight(numbers, K, columns, size)};
      Floats x = numbers.normals(rows * K);
      for (int64_t k = 0; k < K; ++k)
        x[static_cast<size_t>(k)] *= 1000;  // far outside the range in which the sigmoid changes,
                                            // at both ends
      const Floats gate = multiply(x, rows, weights[0]), up = multiply(x, rows, weights[1]);
      const auto gated_by = [&](dlm::Activation activation) {
        return run_linear(kernels, in_order, x, rows, weights, activation)[0];
      };
      const Floats silu = gated_by(dlm::Activation::silu), gelu = gated_by(dlm::Activation::gelu);
      // Exponentials have a relative error of 2e-7, plus the rounding error of the exponent. Three
      // more operations have rounding errors of 6e-8 each. Exponentials below 2 ^ -126 become 2 ^
      // -126.
      for (size_t i = 0; i < gate.size(); ++i) {
        const double x0 = gate[i];
        const double twice_u = 2 * 0.79788456080286536 * (x0 + 0.044715 * x0 * x0 * x0);
        for (const auto& [found, power] : {std::pair{silu[i], x0}, std::pair{gelu[i], twice_u}}) {
          const double expected = x0 / (1 + std::exp(-power)) * up[i];
          const double relative = 6e-7 + 2e-7 * std::abs(power);
          CHECK(std::abs(found - expected) <=
                relative * std::abs(expected) + 1e-36 * std::abs(x0 * up[i]));
        }
      }
    }
  }
}

void test_order_of_tasks_does_not_change_a_bit(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  Numbers numbers(10);
  const Floats x = numbers.normals(300 * 104);
  for (const int64_t size : {0, 32, 64}) {
    const std::vector<Weight> weights = {make_weight(numbers, 104, 170, size),
                                         make_weight(numbers, 104, 170, size)};
    for (const auto activation :
         {dlm::Activation::none, dlm::Activation::silu, dlm::Activation::gelu})
      check_order_of_tasks(tally, [&](dlm::Parallel& parallel) {
        return run_linear(kernels, parallel, x, 300, weights, activation);
      });
  }
}

}  // namespace

void test_linear(Tally& tally, const dlm::Kernels& kernels) {
  test_int8(tally, kernels);
  test_int8_extremes(tally, kernels);
  test_int4(tally, kernels);
  test_int4_extremes(tally, kernels);
  test_what_is_not_finite_stays_in_its_row(tally, kernels);
  test_gated(tally, kernels);
  test_order_of_tasks_does_not_change_a_bit(tally, kernels);
}

}  // namespace kernels_test
