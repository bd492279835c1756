// Tests of NVFP4 linear layers. Results must equal those of plain loops within a tolerance.
#include "kernels_test.h"

namespace kernels_test {
namespace {

// A weight matrix with its codes and scales in the kernels' layout. The padding of the last panel
// must not affect results.
struct Nvfp4 {
  int64_t inputs, columns;
  std::vector<uint8_t> panels, scales;
  float global_scale = 0.0123f;

  Nvfp4(Numbers& numbers, int64_t K, int64_t N) : inputs(K), columns(N) {
    const auto width = static_cast<size_t>(dlm::padded_columns(N));
    panels.resize(width / 2 * static_cast<size_t>(K));
    scales.resize(width * static_cast<size_t>(K / 16));
    for (uint8_t& two : panels) two = static_cast<uint8_t>(numbers.below(256));
    for (uint8_t& scale : scales)
      scale = static_cast<uint8_t>(numbers.below(0x7f));  // any finite scale
  }

  double at(int64_t k, int64_t n) const {
    static constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int64_t panel = n / 32, column = n % 32;
    const int two = panels[static_cast<size_t>((panel * inputs + k) * 16 + column % 16)];
    const int code = column < 16 ? two & 15 : two >> 4;
    const int scale = scales[static_cast<size_t>((panel * (inputs / 16) + k / 16) * 32 + column)];
    const int exponent = scale >> 3, fraction = scale & 7;
    const double step =
        exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
    return (code < 8 ? 1 : -1) * kValues[code & 7] * step * global_scale;
  }

  Floats run(const dlm::Kernels& kernels, dlm::Parallel& parallel, const Floats& x,
             int64_t rows) const {
    Floats y(static_cast<size_t>(rows * columns), 12345.0f);
    kernels.nvfp4_linear(
        {x.data(), rows, inputs, columns, panels.data(), scales.data(), global_scale, y.data()},
        parallel);
    return y;
  }
};

void check_nvfp4(Tally& tally, const dlm::Kernels& kernels, const Nvfp4& weight, const Floats& x,
                 int64_t rows) {
  InOrder in_order;
  const Floats y = weight.run(kernels, in_order, x, rows);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < weight.columns; ++n) {
      double sum = 0, size = 1e-30;
      for (int64_t k = 0; k < weight.inputs; ++k) {
        const double product =
            static_cast<double>(x[static_cast<size_t>(r * weight.inputs + k)]) * weight.at(k, n);
        sum += product, size += std::abs(product);
      }
      CHECK(std::abs(y[static_cast<size_t>(r * weight.columns + n)] - sum) <= 1e-6 * size);
    }
}

void test_shapes(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(11);
  for (int64_t rows = 0; rows <= 40; ++rows)
    for (const int64_t K : {16, 112, 144}) {
      tally.about =
          std::string(kernels.name) + ", " + std::to_string(rows) + " rows of " + std::to_string(K);
      check_nvfp4(tally, kernels, Nvfp4(numbers, K, 1 + numbers.below(100)),
                  numbers.normals(rows * K), rows);
    }
  for (int64_t columns = 1; columns <= 70; ++columns) {
    tally.about = std::string(kernels.name) + ", " + std::to_string(columns) + " columns";
    check_nvfp4(tally, kernels, Nvfp4(numbers, 32, columns), numbers.normals(3 * 32), 3);
  }
  tally.about = std::string(kernels.name) + ", more rows than go together";
  check_nvfp4(tally, kernels, Nvfp4(numbers, 272, 40), numbers.normals(500 * 272), 500);
}

void test_what_is_not_finite_stays_in_its_row(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(12);
  InOrder in_order;
  const Nvfp4 weight(numbers, 48, 40);
  for (const float bad : {kNan, kInfinity, -kInfinity}) {
    Floats x = numbers.normals(15 * 48);
    x[13 * 48 + 17] = bad;
    const Floats y = weight.run(kernels, in_order, x, 15);
    for (int64_t i = 0; i < 15 * 40; ++i)
      CHECK(std::isfinite(y[static_cast<size_t>(i)]) == (i / 40 != 13));
  }
}

void test_order_of_tasks_does_not_change_a_bit(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  Numbers numbers(10);
  const Nvfp4 weight(numbers, 336, 170);
  const Floats x = numbers.normals(300 * 336);
  check_order_of_tasks(tally, [&](dlm::Parallel& parallel) {
    return std::vector<Floats>{weight.run(kernels, parallel, x, 300)};
  });
}

}  // namespace

void test_nvfp4_linear(Tally& tally, const dlm::Kernels& kernels) {
  test_shapes(tally, kernels);
  test_what_is_not_finite_stays_in_its_row(tally, kernels);
  test_order_of_tasks_does_not_change_a_bit(tally, kernels);
}

}  // namespace kernels_test
