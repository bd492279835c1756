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
  order_.clear();
  bool is_finite = true;
  for (int32_t token = 0; token < denoiser.vocab_size; ++token) {
    if (token == denoiser.mask_token_id) continue;
    order_.push_back(token);
    is_finite = is_finite && std::isfinite(logits[token]);
  }
  const size_t count = std::min(top_k, order_.size());
  const auto is_before = [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
  if (is_finite) std::partial_sort(order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(count), order_.end(), is_before);
  double total = 0, entropy = 0;
  const auto weight = [&](int32_t token) { return std::exp(static_cast<double>(logits[token]) - logits[order_[0]]); };
  for (const int32_t token : order_) total += weight(token);
  for (const int32_t token : order_) entropy += weight(token) / total * std::log(weight(token) / total + 1e-10);
  for (size_t i = 0; i < count; ++i) {
    tokens_[row * top_k + i] = order_[i];
    probs_[row * top_k + i] =
        is_finite ? static_cast<float>(weight(order_[i]) / total) : std::numeric_limits<float>::quiet_NaN();
  }
  entropy_[row] = static_cast<float>(entropy);
}

}  // namespace dlm
