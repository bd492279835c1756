// Tests of the candidates kernel. The ids of the candidates must be exact, and their probabilities
// must be right within a tolerance.
#include "kernels_test.h"

namespace kernels_test {
namespace {

struct Rows {
  int64_t rows, vocab_size;
  Floats logits, bias;
  std::vector<int32_t> tokens;
  Floats probs, log_odds, entropy;

  Rows(Numbers& numbers, int64_t r, int64_t v)
      : rows(r), vocab_size(v), logits(numbers.normals(r * v)), bias(static_cast<size_t>(v)) {
    for (float& logit : logits) logit *= 4;
  }
  float& at(int64_t row, int64_t token) {
    return logits[static_cast<size_t>(row * vocab_size + token)];
  }

  void run(const dlm::Kernels& kernels, dlm::Parallel& parallel) {
    tokens.assign(static_cast<size_t>(2 * rows), -1), probs.assign(tokens.size(), kNan);
    log_odds.assign(tokens.size(), kNan);
    entropy.assign(static_cast<size_t>(rows), kNan);
    kernels.candidates({logits.data(), bias.data(), rows, vocab_size, tokens.data(), probs.data(),
                        log_odds.data(), entropy.data()},
                       parallel);
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
    double others = 0, weighed = 0;  // sums over all tokens but the most likely one
    const double largest = masked[static_cast<size_t>(order[0])];
    for (size_t i = 1; i < order.size(); ++i) {
      const double behind = masked[static_cast<size_t>(order[i])] - largest;
      others += std::exp(behind);
      if (std::exp(behind) > 0) weighed += std::exp(behind) * behind;
    }
    const double total = 1 + others;
    const auto r = static_cast<size_t>(row);
    for (size_t rank = 0; rank < 2; ++rank) {
      CHECK(rows.tokens[2 * r + rank] == order[rank]);
      const double behind = masked[static_cast<size_t>(order[rank])] - largest,
                   prob = std::exp(behind) / total;
      // The tolerance covers the error of an exponential (see test_gated_linear), and the error of
      // a sum of V exponentials.
      CHECK(std::abs(rows.probs[2 * r + rank] - prob) <= (1e-6 - 1e-7 * behind) * prob + 1e-37);
      // A double cannot hold the sum of the exponentials if all of them are below 1e-308.
      const double log_odds =
          rank == 0 ? -std::log(others) : behind - std::log1p(others - std::exp(behind));
      if (others > 0)
        CHECK(std::abs(rows.log_odds[2 * r + rank] - log_odds) <=
              2e-6 - 2e-7 * behind + 2e-7 * std::abs(log_odds));
      CHECK(std::isfinite(rows.log_odds[2 * r + rank]));
    }
    // The relative error matters where an entropy is near 0, because it ranks positions.
    const double entropy = weighed / total - std::log1p(others);
    CHECK(std::abs(rows.entropy[r] - entropy) <= 1e-5 * std::min(1.0, 1e-30 - entropy));
  }
}

void test_shapes(Tally& tally, const dlm::Kernels& kernels) {
  Numbers numbers(8);
  for (const int64_t V : {2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 50, 160, 1003}) {
    tally.about = std::string(kernels.name) + ", vocabulary of " + std::to_string(V);
    Rows rows(numbers, 5, V);
    check_candidates(tally, kernels, rows);
    // The mask token must not be a candidate, even if it has the highest logit.
    for (const int64_t masked : {int64_t{0}, V / 2, V - 1}) {
      if (V < 3) continue;
      Rows other = rows;
      other.bias[static_cast<size_t>(masked)] = -kInfinity;
      for (int64_t row = 0; row < other.rows; ++row) other.at(row, masked) = 30;
      check_candidates(tally, kernels, other);
    }
    for (float& logit : rows.logits)
      logit = static_cast<float>(numbers.below(3));  // many logits are equal
    check_candidates(tally, kernels, rows);
    std::fill(rows.logits.begin(), rows.logits.end(), 1.5f);
    check_candidates(tally, kernels, rows);
    for (const float far : {-200.0f, 20.0f, 35.0f, 120.0f, 3e4f}) {  // one token has all the weight
      rows.at(1, V - 1) = far, rows.at(3, 0) = far;
      check_candidates(tally, kernels, rows);
    }
  }
  tally.about = std::string(kernels.name) + ", a large vocabulary";
  Rows rows(numbers, 2, 151'669);
  check_candidates(tally, kernels, rows);
}

void test_a_row_with_nan_is_not_finite(Tally& tally, const dlm::Kernels& kernels) {
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

void test_order_of_tasks_does_not_change_a_bit(Tally& tally, const dlm::Kernels& kernels) {
  tally.about = kernels.name;
  Numbers numbers(10);
  Rows rows(numbers, 9, 160);
  check_order_of_tasks(tally, [&](dlm::Parallel& parallel) {
    rows.run(kernels, parallel);
    return std::vector<Floats>{Floats(rows.tokens.begin(), rows.tokens.end()), rows.probs,
                               rows.log_odds, rows.entropy};
  });
}

}  // namespace

void test_candidates(Tally& tally, const dlm::Kernels& kernels) {
  test_shapes(tally, kernels);
  test_a_row_with_nan_is_not_finite(tally, kernels);
  test_order_of_tasks_does_not_change_a_bit(tally, kernels);
}

}  // namespace kernels_test
