// Tests of RMSNorm of the sum of two rows. Results must equal those of plain loops within a
// tolerance.
#include "kernels_test.h"

namespace kernels_test {
namespace {

struct AddNorm {
  int64_t rows, width;
  Floats x, y, weight, sum, normed;
  float epsilon = 1e-6f;

  AddNorm(Numbers& numbers, int64_t its_rows, int64_t its_width)
      : rows(its_rows),
        width(its_width),
        x(numbers.normals(rows * width)),
        y(numbers.normals(rows * width)),
        weight(numbers.normals(width)),
        sum(x.size(), 12345.0f),
        normed(x.size(), 12345.0f) {}

  void run(const dlm::Kernels& kernels, dlm::Parallel& parallel) {
    kernels.add_norm(
        {x.data(), y.data(), weight.data(), rows, width, epsilon, sum.data(), normed.data()},
        parallel);
  }

  std::vector<double> expected() const {
    std::vector<double> all;
    for (int64_t r = 0; r < rows; ++r) {
      double squares = 0;
      const float* const row = sum.data() + r * width;
      for (int64_t i = 0; i < width; ++i) squares += double{row[i]} * row[i];
      for (int64_t i = 0; i < width; ++i)
        all.push_back(row[i] / std::sqrt(squares / static_cast<double>(width) + epsilon) *
                      weight[static_cast<size_t>(i)]);
    }
    return all;
  }
};

void test_sums_and_norms(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(31);
  InOrder in_order;
  for (const int64_t width : {1, 2, 7, 8, 15, 16, 17, 33, 64, 65, 127, 2048, 2050})
    for (const int64_t rows : {0, 1, 2, 5, 70})
      for (const float size : {1.0f, 1e-4f, 1e15f}) {
        tally.about = std::string(kernels.name) + ", " + std::to_string(rows) + " rows of " +
                      std::to_string(width) + " around " + std::to_string(size);
        AddNorm norm(numbers, rows, width);
        for (Floats* const part : {&norm.x, &norm.y})
          for (float& one : *part) one *= size;
        norm.run(kernels, in_order);
        bool are_sums = true;
        for (size_t i = 0; i < norm.x.size(); ++i) are_sums &= norm.sum[i] == norm.x[i] + norm.y[i];
        CHECK(are_sums);
        CHECK(distance(norm.normed, norm.expected(), 1) < 1e-5);  // absolute error of numbers up to
                                                                  // 200
      }
}

void test_nan_stays_in_its_row(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(32);
  InOrder in_order;
  for (const int64_t width : {5, 40})
    for (const float bad : {kNan, kInfinity}) {
      tally.about = std::string(kernels.name) + ", rows of " + std::to_string(width);
      AddNorm norm(numbers, 3, width);
      norm.y[static_cast<size_t>(2 * width - 1)] = bad;
      norm.run(kernels, in_order);
      for (int64_t i = 0; i < 3 * width; ++i)
        CHECK(i / width == 1 || std::isfinite(norm.normed[static_cast<size_t>(i)]));
      CHECK(std::isnan(norm.normed[static_cast<size_t>(2 * width - 1)]));
    }
}

void test_order_of_tasks_does_not_change_a_bit(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  Numbers numbers(33);
  AddNorm norm(numbers, 90, 2048);
  check_order_of_tasks(tally, [&](dlm::Parallel& parallel) {
    norm.run(kernels, parallel);
    return std::vector<Floats>{norm.sum, norm.normed};
  });
}

}  // namespace

void test_add_norm(Tally& tally, const dlm::Kernels& kernels) {
  test_sums_and_norms(tally, kernels);
  test_nan_stays_in_its_row(tally, kernels);
  test_order_of_tasks_does_not_change_a_bit(tally, kernels);
}

}  // namespace kernels_test
