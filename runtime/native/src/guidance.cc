#include "guidance.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "loop.h"

namespace dlm {

Predictions Guided::guide(const Denoiser& denoiser, double scale, const Predictions& conditional, const float* unconditional,
                          size_t rows) {
  const auto width = static_cast<size_t>(denoiser.vocab_size), top_k = static_cast<size_t>(denoiser.top_k);
  logits_.resize(rows * width);
  tokens_.assign(rows * top_k, 0);
  probs_.assign(rows * top_k, 0);
  entropy_.assign(rows, 0);
  for (size_t i = 0; i < logits_.size(); ++i) {
    const double without = unconditional[i];
    logits_[i] = static_cast<float>(without + (scale + 1) * (conditional.logits[i] - without));
  }
  for (size_t row = 0; row < rows; ++row) rank(denoiser, row);
  return {tokens_.data(), probs_.data(), entropy_.data(), logits_.data()};
}

void Guided::rank(const Denoiser& denoiser, size_t row) {
  const auto width = static_cast<size_t>(denoiser.vocab_size), top_k = static_cast<size_t>(denoiser.top_k);
  const float* const logits = logits_.data() + row * width;
  int32_t* const best = tokens_.data() + row * top_k;
  size_t count = 0;  // of the best so far; the lowest id first among equals, as ids come in order
  bool is_finite = true;
  for (int32_t token = 0; token < denoiser.vocab_size; ++token) {
    if (token == denoiser.mask_token_id) continue;
    is_finite = is_finite && std::isfinite(logits[token]);
    if (count == top_k && !(logits[token] > logits[best[top_k - 1]])) continue;
    size_t rank = count < top_k ? count++ : top_k - 1;
    for (; rank > 0 && logits[token] > logits[best[rank - 1]]; --rank) best[rank] = best[rank - 1];
    best[rank] = token;
  }
  if (!is_finite) {
    std::fill_n(probs_.data() + row * top_k, top_k, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  const auto behind = [&](int32_t token) { return static_cast<double>(logits[token]) - static_cast<double>(logits[best[0]]); };
  double total = 0, product = 0;
  for (int32_t token = 0; token < denoiser.vocab_size; ++token) {
    if (token == denoiser.mask_token_id) continue;
    const double weight = std::exp(behind(token));
    total += weight;
    product += weight * behind(token);
  }
  for (size_t i = 0; i < count; ++i) probs_[row * top_k + i] = static_cast<float>(std::exp(behind(best[i])) / total);
  entropy_[row] = static_cast<float>(product / total - std::log(total));
}

}  // namespace dlm
