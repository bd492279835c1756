// Tests of low-rank updates. Results must equal those of plain loops within a tolerance.
#include "kernels_test.h"

namespace kernels_test {
namespace {

struct Updates {
  int64_t rows, inputs;
  Floats x, gated;
  std::vector<uint8_t> is_updated;
  struct Matrix {
    int64_t rank, columns;
    Floats a, b, y, out;
  };
  std::vector<Matrix> matrices;

  Updates(Numbers& numbers, int64_t its_rows, int64_t its_inputs, int64_t rank,
          const std::vector<int64_t>& columns, bool is_gated)
      : rows(its_rows), inputs(its_inputs), x(numbers.normals(rows * inputs)) {
    for (int64_t row = 0; row < rows; ++row)
      is_updated.push_back(static_cast<uint8_t>(numbers.below(2)));
    for (const int64_t count : columns)
      matrices.push_back({rank, count, numbers.normals(inputs * rank),
                          numbers.normals(rank * count), numbers.normals(rows * count),
                          Floats(static_cast<size_t>(rows * count), 12345.0f)});
    if (is_gated) gated.assign(static_cast<size_t>(rows * columns[0]), 12345.0f);
  }

  void run(const dlm::Kernels& kernels, dlm::Parallel& parallel) {
    std::vector<dlm::LowRankMatrix> given;
    for (Matrix& m : matrices)
      given.push_back({m.a.data(), m.b.data(), m.rank, m.columns, m.y.data(), m.out.data()});
    kernels.low_rank_updates({x.data(), rows, inputs, is_updated.data(), given.data(), given.size(),
                              gated.empty() ? nullptr : gated.data()},
                             parallel);
  }

  std::vector<double> expected(const Matrix& m) const {
    std::vector<double> all(m.y.begin(), m.y.end());
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t j = 0; is_updated[row] != 0 && j < m.rank; ++j) {
        double product = 0;
        for (int64_t k = 0; k < inputs; ++k)
          product += double{x[row * inputs + k]} * m.a[k * m.rank + j];
        for (int64_t n = 0; n < m.columns; ++n)
          all[row * m.columns + n] += product * m.b[j * m.columns + n];
      }
    return all;
  }
};

void test_updates(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(71);
  InOrder in_order;
  for (const int64_t inputs : {1, 2, 5, 40, 96})
    for (const int64_t rank : {1, 3, 8, 12, 16, 33, 65, 128, 300})
      for (const int64_t rows : {0, 1, 4, 33}) {
        tally.about = std::string(kernels.name) + ", " + std::to_string(rows) + " rows of " +
                      std::to_string(inputs) + ", rank " + std::to_string(rank);
        Updates updates(numbers, rows, inputs, rank, {1, 17, 64}, false);
        updates.run(kernels, in_order);
        const double size = std::sqrt(static_cast<double>(inputs * rank));
        for (const Updates::Matrix& m : updates.matrices) {
          CHECK(distance(m.out, updates.expected(m), size) < 1e-5);
          for (int64_t row = 0; row < rows; ++row)  // other rows are copied
            CHECK(updates.is_updated[row] != 0 ||
                  std::equal(m.y.begin() + row * m.columns, m.y.begin() + (row + 1) * m.columns,
                             m.out.begin() + row * m.columns));
        }
      }
}

void test_gated_updates(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(72);
  InOrder in_order;
  for (const int64_t columns : {1, 15, 16, 50, 96}) {
    tally.about = std::string(kernels.name) + ", " + std::to_string(columns) + " columns";
    Updates updates(numbers, 7, 20, 4, {columns, columns}, true);
    updates.run(kernels, in_order);
    const std::vector<double> gate = updates.expected(updates.matrices[0]),
                              up = updates.expected(updates.matrices[1]);
    std::vector<double> wanted;
    for (size_t i = 0; i < gate.size(); ++i)
      wanted.push_back(gate[i] / (1 + std::exp(-gate[i])) * up[i]);
    CHECK(distance(updates.gated, wanted, 80) < 1e-5);
  }
}

void test_order_of_tasks(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  Numbers numbers(73);
  Updates updates(numbers, 90, 64, 12, {96, 96}, true);
  check_order_of_tasks(tally, [&](dlm::Parallel& parallel) {
    updates.run(kernels, parallel);
    return std::vector<Floats>{updates.matrices[0].out, updates.matrices[1].out, updates.gated};
  });
}

}  // namespace

void test_low_rank_updates(Tally& tally, const dlm::Kernels& kernels) {
  test_updates(tally, kernels);
  test_gated_updates(tally, kernels);
  test_order_of_tasks(tally, kernels);
}

}  // namespace kernels_test
